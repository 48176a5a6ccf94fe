"""Take out what nobody reads."""

from __future__ import annotations

from collections.abc import Callable

from ..model import Graph, Node, Value

__all__ = ["drop_unused"]


def drop_unused(graph: Graph, check: Callable[[], None] = lambda: None) -> int:
    """Take out nodes that nobody reads, and mark results that nobody reads; returns how many nodes.

    1. The outputs of a graph are read, and so is what a nested graph captures.
    2. A result that nobody reads becomes None in its node's outputs; the others keep their place.
    3. A nested graph keeps all of its inputs and outputs.
    """
    return _prune(graph, set(), check)


def _prune(graph: Graph, read: set[Value], check: Callable[[], None]) -> int:
    read.update(graph.outputs)
    dropped = 0
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        check()
        if not any(v in read for v in node.outputs if v is not None):
            dropped += 1
            continue
        if any(v is not None and v not in read for v in node.outputs):
            node.outputs = tuple(v if v in read else None for v in node.outputs)
        for nested in node.graphs():
            dropped += _prune(nested, read, check)
        read.update(v for v in node.inputs if v is not None)
        kept.append(node)
    graph.nodes[:] = reversed(kept)
    return dropped
