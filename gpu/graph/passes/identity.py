"""Take out nodes that hand their input on unchanged."""

from __future__ import annotations

from collections.abc import Callable

from ..model import Graph, Node, Value
from .uses import count_uses, graphs_of, substitute

__all__ = ["drop_identities"]


def drop_identities(graph: Graph, check: Callable[[], None] = lambda: None) -> int:
    """Take out Identity, and Dropout in inference form; returns how many.

    1. A Dropout counts if nobody reads its mask and its third input is left out or a constant
       false.
    2. If the node's result is no output of its graph, whoever reads it reads its input instead,
       in nested graphs too.
    3. If it is an output, the node that makes the input makes the output instead (so that the
       output keeps its name), and all who read the input read the output. Only if that node is
       of the same graph and its result is no output itself. Otherwise the node stays: an input, a
       constant or a value of a graph around it cannot be renamed.
    """
    uses = count_uses(graph)
    replaced: dict[Value, Value] = {}
    dropped = 0
    for inner in graphs_of(graph):
        outputs = set(inner.outputs)
        makers: dict[Value, tuple[Node, int]] = {}
        kept: list[Node] = []
        for node in inner.nodes:
            check()
            source = _source(node, uses)
            target = node.outputs[0] if node.outputs else None
            if source is None or target is None:
                pass
            else:
                while source in replaced:
                    source = replaced[source]
                if target not in outputs:
                    replaced[target] = source
                    dropped += 1
                    continue
                maker = makers.get(source)
                if maker is not None and source not in outputs:
                    other, i = maker
                    other.outputs = (*other.outputs[:i], target, *other.outputs[i + 1 :])
                    target.dtype = target.dtype or source.dtype
                    makers[target] = maker
                    replaced[source] = target
                    dropped += 1
                    continue
            kept.append(node)
            makers.update((v, (node, i)) for i, v in enumerate(node.outputs) if v is not None)
        inner.nodes[:] = kept
    substitute(graph, replaced)
    return dropped


def _source(node: Node, uses: dict[Value, int]) -> Value | None:
    """What a node hands on; None if it does more than that."""
    if node.domain or len(node.inputs) == 0:
        return None
    if node.op == "Identity":
        return node.inputs[0]
    if node.op != "Dropout" or any(v is not None and uses.get(v) for v in node.outputs[1:]):
        return None
    training = node.inputs[2] if len(node.inputs) > 2 else None
    if training is not None and (training.const is None or training.const.any()):
        return None
    return node.inputs[0]
