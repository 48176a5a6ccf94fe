"""Elementwise operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from ..graph.model import Node
from .table import Array, Inputs, op

__all__: list[str] = []

_UNARY: dict[str, Callable[[Any], Any]] = {
    "Neg": np.negative,
    "Abs": np.abs,
    "Sign": np.sign,
    "Sqrt": np.sqrt,
    "Exp": np.exp,
    "Log": np.log,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Round": np.rint,
    "Not": np.logical_not,
    "BitwiseNot": np.invert,
    "IsNaN": np.isnan,
    "Reciprocal": np.reciprocal,
    "Tanh": np.tanh,
    "Sin": np.sin,
    "Cos": np.cos,
}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Equal": np.equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Xor": np.logical_xor,
    "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor,
}
_VARIADIC: dict[str, Callable[[Any, Any], Any]] = {"Min": np.minimum, "Max": np.maximum, "Sum": np.add}


@op(*_UNARY)
def _unary(node: Node, inputs: Inputs) -> list[Array]:
    return [_UNARY[node.op](inputs[0])]


@op(*_BINARY)
def _binary(node: Node, inputs: Inputs) -> list[Array]:
    a, b = inputs
    return [_BINARY[node.op](a, b)]


@op(*_VARIADIC)
def _variadic(node: Node, inputs: Inputs) -> list[Array]:
    return [reduce(_VARIADIC[node.op], inputs)]


@op("Mean")
def _mean(node: Node, inputs: Inputs) -> list[Array]:
    return [(reduce(np.add, inputs) / len(inputs)).astype(inputs[0].dtype)]


@op("Div")
def _div(node: Node, inputs: Inputs) -> list[Array]:
    a, b = inputs
    if a.dtype.kind not in "iu":
        return [np.divide(a, b)]
    if not b.all():
        raise ValueError("an integer divided by zero")
    quotient = np.floor_divide(a, b)
    if a.dtype.kind == "u":
        return [quotient]
    inexact = (np.multiply(quotient, b) != a) & ((a < 0) != (b < 0))
    return [np.add(quotient, inexact.astype(a.dtype))]


@op("Mod")
def _mod(node: Node, inputs: Inputs) -> list[Array]:
    a, b = inputs
    if a.dtype.kind in "iu" and not b.all():
        raise ValueError("an integer divided by zero")
    return [(np.fmod if node.attrs.get("fmod") else np.mod)(a, b)]


@op("Pow")
def _pow(node: Node, inputs: Inputs) -> list[Array]:
    a, b = inputs
    if a.dtype.kind in "iu":
        if b.dtype.kind in "iu" and (b.dtype.kind == "u" or (b >= 0).all()):
            return [np.power(a, b, dtype=a.dtype, casting="unsafe")]
        return [np.power(a.astype(np.float64), b.astype(np.float64)).astype(a.dtype)]
    return [np.power(a, b).astype(a.dtype)]


@op("BitShift")
def _bit_shift(node: Node, inputs: Inputs) -> list[Array]:
    """A shift by all bits or more gives 0; of a negative number to the right, -1."""
    a, b = inputs
    bits = a.dtype.itemsize * 8
    far = (b >= bits) | (b < 0)
    within = np.where(far, np.zeros((), b.dtype), b)
    if node.attrs["direction"] == "LEFT":
        return [np.where(far, np.zeros((), a.dtype), np.left_shift(a, within))]
    return [np.where(far, np.where(a < 0, -1, 0).astype(a.dtype), np.right_shift(a, within))]


@op("Clip")
def _clip(node: Node, inputs: Inputs) -> list[Array]:
    x = inputs[0]
    if node.opset < 11:
        low, high = node.attrs.get("min"), node.attrs.get("max")
    else:
        low = inputs[1] if len(inputs) > 1 else None
        high = inputs[2] if len(inputs) > 2 else None
    if low is not None:
        x = np.maximum(x, np.asarray(low, x.dtype))
    if high is not None:
        x = np.minimum(x, np.asarray(high, x.dtype))
    return [x]


@op("IsInf")
def _is_inf(node: Node, inputs: Inputs) -> list[Array]:
    x, out = inputs[0], np.isinf(inputs[0])
    if not node.attrs.get("detect_negative", 1):
        out = out & (x > 0)
    if not node.attrs.get("detect_positive", 1):
        out = out & (x < 0)
    return [out]


@op("Relu")
def _relu(node: Node, inputs: Inputs) -> list[Array]:
    return [np.maximum(inputs[0], np.zeros((), inputs[0].dtype))]


@op("Sigmoid")
def _sigmoid(node: Node, inputs: Inputs) -> list[Array]:
    x = inputs[0]
    one = np.ones((), x.dtype)
    small = np.exp(-np.abs(x))
    return [np.where(x >= 0, one / (one + small), small / (one + small)).astype(x.dtype)]
