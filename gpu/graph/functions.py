"""A model's own functions: how large the graph is that they stand for, before they are put in its place.

A function may call another one twice, and that one another one: 40 of them in 4 KiB are 2 ** 40 nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onnx import ModelProto, NodeProto

__all__ = ["MOST_BYTES", "MOST_NODES", "expanded"]

MOST_NODES = 1 << 18
"""Nodes that a model may have once its functions are in their places."""

MOST_BYTES = 256 << 20
"""Bytes that it may have then, large data apart."""

MOST_CALLS = 100
"""How deep functions may call one another."""

Key = tuple[str, str, str]


def expanded(model: ModelProto) -> tuple[int, int]:
    """Nodes and bytes of a model's graph once its functions are in their places.

    Raises:
        ValueError: a function calls itself, by way of others or not, or they call one another too deeply; the text
            names one.
    """
    functions = {(_domain(f.domain), f.name, f.overload): f for f in model.functions}
    sizes: dict[Key, tuple[int, int]] = {}

    def of(nodes: Iterable[NodeProto], own: int) -> tuple[int, int]:
        count, nbytes = 0, own
        for node in _nested(nodes):
            inner = sizes.get(_key(node))
            count += 1 if inner is None else inner[0]
            nbytes += 0 if inner is None else inner[1]
        return count, nbytes

    under_way: set[Key] = set()
    stack = list(functions)
    while stack:
        key = stack[-1]
        if key in sizes:
            stack.pop()
            continue
        called = {_key(node) for node in _nested(functions[key].node)} & functions.keys()
        wanted = called - sizes.keys()
        if not wanted:
            sizes[key] = of(functions[key].node, functions[key].ByteSize())
            under_way.discard(key)
            continue
        if len(under_way) == MOST_CALLS:
            raise ValueError(f"function {key[1]!r} is called more than {MOST_CALLS} calls deep")
        under_way.add(key)
        again = wanted & under_way
        if again:
            raise ValueError(f"function {min(again)[1]!r} calls itself")
        stack += wanted
    return of(model.graph.node, model.graph.ByteSize())


def _key(node: NodeProto) -> Key:
    return _domain(node.domain), node.op_type, node.overload


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _nested(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Nodes, and those of the graphs that they hold."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
                yield from _nested(graph.node)
