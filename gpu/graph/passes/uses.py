"""Who reads what, over a graph and all graphs nested in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from ..model import Graph, Value

__all__ = ["count_uses", "graphs_of", "substitute"]


def graphs_of(graph: Graph) -> Iterator[Graph]:
    """A graph and all graphs nested in it, outer ones first."""
    yield graph
    for node in graph.nodes:
        for nested in node.graphs():
            yield from graphs_of(nested)


def count_uses(graph: Graph) -> Counter[Value]:
    """How often each value is read, by nodes and as an output, nested graphs included."""
    uses: Counter[Value] = Counter()
    for inner in graphs_of(graph):
        uses.update(inner.outputs)
        for node in inner.nodes:
            uses.update(v for v in node.inputs if v is not None)
    return uses


def substitute(graph: Graph, replaced: Mapping[Value, Value]) -> None:
    """Read other values instead, everywhere; what replaces a value may be replaced itself."""
    if not replaced:
        return

    def last(value: Value) -> Value:
        while value in replaced:
            value = replaced[value]
        return value

    for inner in graphs_of(graph):
        inner.outputs[:] = [last(v) for v in inner.outputs]
        for node in inner.nodes:
            if any(v in replaced for v in node.inputs if v is not None):
                node.inputs = tuple(None if v is None else last(v) for v in node.inputs)
