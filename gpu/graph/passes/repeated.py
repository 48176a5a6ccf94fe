"""Compute once what is computed twice."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from ..model import Graph, Node, Value
from .fold import RANDOM
from .uses import graphs_of, substitute

__all__ = ["merge_repeated"]

_SMALL = 64


def merge_repeated(graph: Graph, check: Callable[[], None] = lambda: None) -> int:
    """Merge nodes that compute the same from the same; returns how many were taken out.

    1. The same: operator, opset version, attributes, and inputs (the same values, or constants of
       at most 64 elements that are equal bit for bit).
    2. Only within one graph: what a branch computes is not computed when the branch is not taken.
    3. Not: random operators, Dropout in training, operators with nested graphs, results that are
       outputs of the graph, and nodes that have results the other lacks.
    """
    replaced: dict[Value, Value] = {}
    dropped = 0
    for inner in graphs_of(graph):
        outputs = set(inner.outputs)
        seen: dict[Hashable, Node] = {}
        kept: list[Node] = []
        for node in inner.nodes:
            check()
            key = _key(node, replaced)
            first = node if key is None else seen.setdefault(key, node)
            if first is node or any(
                b is not None and (a is None or b in outputs) for a, b in zip(first.outputs, node.outputs, strict=True)
            ):
                kept.append(node)
                continue
            for a, b in zip(first.outputs, node.outputs, strict=True):
                if a is not None and b is not None:
                    replaced[b] = a
            dropped += 1
        inner.nodes[:] = kept
    substitute(graph, replaced)
    return dropped


def _key(node: Node, replaced: dict[Value, Value]) -> Hashable | None:
    if node.op in RANDOM or (node.op == "Dropout" and len(node.inputs) > 2):
        return None
    inputs: list[Hashable] = []
    for value in node.inputs:
        if value is None:
            inputs.append(None)
            continue
        small = None if value.const is None else _bits(value.const)
        while value in replaced:
            value = replaced[value]
        inputs.append(id(value) if small is None else small)
    attrs = []
    for name in sorted(node.attrs):
        attribute = _attribute(node.attrs[name])
        if attribute is None:
            return None
        attrs.append((name, attribute))
    return node.domain, node.op, node.opset, len(node.outputs), tuple(inputs), tuple(attrs)


def _attribute(value: Any) -> Hashable | None:
    """Something equal for equal attributes; None where that is not cheap to say."""
    if isinstance(value, bool | int | float | str):
        return type(value), repr(value)
    if isinstance(value, list) and all(isinstance(v, int | float | str) for v in value):
        return tuple((type(v), repr(v)) for v in value)
    return _bits(value) if isinstance(value, np.ndarray) else None


def _bits(array: np.ndarray[Any, Any]) -> Hashable | None:
    if array.size > _SMALL or array.dtype.hasobject:
        return None
    return array.dtype.str, array.dtype.name, array.shape, array.tobytes()
