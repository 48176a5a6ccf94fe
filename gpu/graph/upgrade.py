"""Graphs of opsets 1 to 6 become graphs of opset 7, on reading: what the other files know begins there.

Rules, each for one difference:
1. Add, Sub, Mul, Div, Pow, And, Or, Xor, Equal, Greater, Less with `axis`: the second input gets
   dimensions of 1 behind its own, so that NumPy's broadcasting does the same.
2. PRelu's slope of one value per channel gets them likewise, as for axis 1.
3. BatchNormalization and Dropout lose `is_test` (training is refused), Gemm `broadcast`, RNN,
   LSTM and GRU `output_sequence`.
4. Cast's `to` is a name below opset 6, Reshape's `shape` an attribute below 5, Concat's axis 1
   below 4 where it is left out, Pad's `pads` are called `paddings` below 2.
5. What is another operator under the same name is refused: Upsample and Tile before 7 and 6,
   LpPool, GlobalLpPool of opset 1, Split with its sizes as an input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import TensorProto

from ..errors import UnsupportedOperator
from .model import Graph, Node, Value

__all__ = ["UPGRADED", "upgrade"]

UPGRADED = 7
"""The opset that older graphs become."""

_BROADCAST = frozenset(("Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Equal", "Greater", "Less"))
_DROPPED = {
    "BatchNormalization": "is_test",
    "Dropout": "is_test",
    "Gemm": "broadcast",
    "GRU": "output_sequence",
    "LSTM": "output_sequence",
    "RNN": "output_sequence",
}


_OTHERS = {"Upsample": 7, "Tile": 6, "LpPool": 2, "GlobalLpPool": 2}
_CONCAT_AXIS, _RESHAPE_SHAPE, _CAST_NAME = 4, 5, 6


def upgrade(graph: Graph, check: Callable[[], None] = lambda: None) -> None:
    """Turn a graph of opset 1 to 6, and those in it, into one of opset 7, in place.

    Args:
        graph: nodes of ai.onnx are of the opset that they say, others are left alone.
        check: called between nodes; what it raises leaves.

    Raises:
        UnsupportedOperator: a BatchNormalization that trains, or what rule 5 names.
    """
    nodes: list[Node] = []
    for node in graph.nodes:
        check()
        for nested in node.graphs():
            upgrade(nested, check)
        if not node.domain:
            nodes += _ahead(node)
            node.opset = UPGRADED
        nodes.append(node)
    graph.nodes[:] = nodes


def _ahead(node: Node) -> list[Node]:
    """Change a node; the nodes that it needs before it now."""
    attrs = node.attrs
    if node.op == "BatchNormalization" and not attrs.get("is_test") and any(v is not None for v in node.outputs[1:]):
        raise _refusal(node, "its training form is of opset 7 on")
    if node.opset < _OTHERS.get(node.op, 0) or (node.op == "Split" and node.opset < 2 and len(node.inputs) > 1):
        raise _refusal(node, "another operator of this name, of a later opset, is supported")
    if node.op == "Cast" and node.opset < _CAST_NAME and isinstance(attrs.get("to"), str):
        attrs["to"] = int(TensorProto.DataType.Value(attrs["to"]))
    if node.op == "Concat" and node.opset < _CONCAT_AXIS:
        attrs.setdefault("axis", 1)
    if node.op == "Pad" and "paddings" in attrs:
        attrs["pads"] = attrs.pop("paddings")
    if node.op == "Reshape" and node.opset < _RESHAPE_SHAPE:
        shape = np.array(attrs.pop("shape", []), np.int64)
        node.inputs = (*node.inputs[:1], Value(f"{node.name}/shape", shape.dtype, shape))
    attrs.pop(_DROPPED.get(node.op, ""), None)
    if node.op == "PRelu":
        return _spread(node, 1)
    if node.op in _BROADCAST:
        axis = attrs.pop("axis", None)
        if attrs.pop("broadcast", 0) and axis is not None:
            return _spread(node, axis)
    return []


def _refusal(node: Node, why: str) -> UnsupportedOperator:
    return UnsupportedOperator(node.op, "", node.opset, node.name, why)


def _spread(node: Node, axis: int) -> list[Node]:
    """Give the second input as many dimensions of 1 as the first has behind those that it is for.

    b' = Reshape(b, Concat(Shape(b), ConstantOfShape(rank(a) - axis - rank(b), 1))), computed when the ranks are known.
    """
    a, b = node.inputs
    assert a is not None
    assert b is not None
    made: list[Node] = []

    def add(op: str, *inputs: Value, **attrs: Any) -> Value:
        number = len(made)
        out = Value(f"{node.name}/{op}_{number}", b.dtype if op == "Reshape" else np.dtype(np.int64))
        made.append(Node(op, "", 9, f"{node.name}/{op}_{number}", inputs, (out,), attrs))
        return out

    def known(value: int) -> Value:
        array = np.array([value], np.int64)
        return Value(f"{node.name}/{value}", array.dtype, array)

    if b.const is not None and b.const.size == 1:
        return []
    sizes = add("Shape", b)
    rank = add("Shape", add("Shape", a))
    behind = known(-axis) if axis < 0 else add("Sub", rank, known(axis))
    count = add("Sub", behind, add("Shape", sizes))
    count = add("Mul", count, add("Cast", add("Greater", count, known(0)), to=7))
    ones = add("ConstantOfShape", count, value=np.ones(1, np.int64))
    node.inputs = (a, add("Reshape", b, add("Concat", sizes, ones, axis=0)))
    return made
