"""Comparisons, logic, bits, choice and change of dtype, element by element."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from onnx import helper

from ..errors import InvalidModel
from ..graph.tensor import HELD, NARROW, gpu_type
from .elementwise import Binary, Elementwise, one_dtype, operands
from .functions import IS_NAN
from .registry import NoKernel, Operator, op

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Tensor

__all__ = ["cast"]

_CASTS = {
    ("f32", "i32"): "select(-2147483647 - 1, i32(x), x >= -2147483648.0 && x < 2147483648.0)",
    ("f32", "u32"): "select(u32(x), bitcast<u32>(i32(x)), x < 0.0)",
    ("f32", "bool"): "x != 0.0",
    ("i32", "f32"): "f32(x)",
    ("i32", "u32"): "bitcast<u32>(x)",
    ("i32", "bool"): "x != 0",
    ("u32", "f32"): "f32(x)",
    ("u32", "i32"): "bitcast<i32>(x)",
    ("u32", "bool"): "x != 0u",
    ("bool", "f32"): "select(0.0, 1.0, x)",
    ("bool", "i32"): "select(0, 1, x)",
    ("bool", "u32"): "select(0u, 1u, x)",
}


def cast(plan: Lowering, x: Tensor, dtype: np.dtype[np.generic]) -> Tensor:
    """A tensor in another dtype, as NumPy converts. Raises NoKernel."""
    if x.dtype == dtype:
        return x
    if dtype in HELD:
        return plan.map(NARROW[dtype], {"x": cast(plan, x, HELD[dtype])}, dtype=dtype, label=dtype.name)
    kind = gpu_type(np.dtype(dtype))
    wgsl = "x" if kind == x.type else _CASTS.get((x.type or "", kind or ""))
    if wgsl is None:
        raise NoKernel(f"no cast from {x.dtype.name} to {dtype.name}")
    return plan.map(wgsl, {"x": x}, dtype=dtype)


def _converted(plan: Lowering, x: Tensor, dtype: np.dtype[np.generic]) -> Tensor:
    """The node's input in another dtype; between the device's dtypes and int64 where an int32 holds it."""
    raw, narrow = plan.raw[0] or x, plan.narrowed(x)
    if narrow is not None and dtype != np.int64:
        return cast(plan, narrow, dtype)
    here = plan.host_key(raw) is None and plan.known_value(raw) is None
    if dtype == np.int64 and here and raw.type and raw.dtype.kind in "iub" and raw.dtype != np.uint32:
        return plan.widen(cast(plan, x, np.dtype(np.int32)))
    return cast(plan, x, dtype)


@op("Cast", since=6)
class Cast(Operator):
    """y = x in another dtype: between floats, 8 to 32-bit integers and bool; floats truncate."""

    to: int

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the expression to the plan."""
        (x,) = operands(plan, inputs, 1)
        return _converted(plan, x, helper.tensor_dtype_to_np_dtype(self.to))


@op("CastLike", since=15)
class CastLike(Operator):
    """y = x in the dtype of the second input."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the expression to the plan."""
        x, like = operands(plan, inputs, 2)
        return _converted(plan, x, plan.given[1] or like.dtype)


@op("BitCast", since=26)
class BitCast(Operator):
    """y = the bits of x as another dtype of 32 bits."""

    to: int

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the expression to the plan."""
        (x,) = operands(plan, inputs, 1)
        wanted = helper.tensor_dtype_to_np_dtype(self.to)
        given = plan.given[0] or x.dtype
        if given == wanted:
            return x
        if any(np.dtype(d) not in (np.float32, np.int32, np.uint32) for d in (given, wanted)):
            raise NoKernel(f"no kernel for {np.dtype(given).name} as {np.dtype(wanted).name}")
        return plan.map(f"bitcast<{np.dtype(wanted).kind}32>(x)", {"x": x}, dtype=wanted)


@op("Identity", since=1)
class Identity(Operator):
    """y = x."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Hand the input on."""
        return operands(plan, inputs, 1)[0]


@op("Where", since=9)
class Where(Operator):
    """w = y if x else z: x: bool; y, z: one dtype; shapes that broadcast -> w: dtype of y."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the expression to the plan."""
        choice, x, y = operands(plan, inputs, 3)
        if choice.dtype != np.bool_:
            raise InvalidModel(f"node {plan.node!r} (Where): expected a bool condition, got {choice.dtype.name}")
        one_dtype(plan, [x, y])
        return plan.map("select(y, x, c)", {"c": choice, "x": x, "y": y}, dtype=x.dtype)


class Comparison(Binary):
    """z = x ? y: shapes that broadcast -> z: bool."""

    types = "f32 i32 u32"
    result = np.bool_


@op("Equal", since=7)
class Equal(Comparison):
    """z = x == y."""

    wgsl = "x == y"
    types = "f32 i32 u32 bool"


@op("Greater", since=7)
class Greater(Comparison):
    """z = x > y."""

    wgsl = "x > y"


@op("Less", since=7)
class Less(Comparison):
    """z = x < y."""

    wgsl = "x < y"


@op("GreaterOrEqual", since=12)
class GreaterOrEqual(Comparison):
    """z = x >= y."""

    wgsl = "x >= y"


@op("LessOrEqual", since=12)
class LessOrEqual(Comparison):
    """z = x <= y."""

    wgsl = "x <= y"


@op("And", since=7)
class And(Binary):
    """z = x and y: bool."""

    wgsl = "x && y"
    types = "bool"


@op("Or", since=7)
class Or(Binary):
    """z = x or y: bool."""

    wgsl = "x || y"
    types = "bool"


@op("Xor", since=7)
class Xor(Binary):
    """z = x != y: bool."""

    wgsl = "x != y"
    types = "bool"


@op("Not", since=1)
class Not(Elementwise):
    """y = not x: bool."""

    wgsl = "!x"
    types = "bool"


@op("BitwiseAnd", since=18)
class BitwiseAnd(Binary):
    """z = x & y."""

    wgsl = "x & y"
    types = "i32 u32"


@op("BitwiseOr", since=18)
class BitwiseOr(Binary):
    """z = x | y."""

    wgsl = "x | y"
    types = "i32 u32"


@op("BitwiseXor", since=18)
class BitwiseXor(Binary):
    """z = x ^ y."""

    wgsl = "x ^ y"
    types = "i32 u32"


@op("BitwiseNot", since=18)
class BitwiseNot(Elementwise):
    """y = ~x."""

    wgsl = "~x"
    types = "i32 u32"


@op("BitShift", since=11)
class BitShift(Binary):
    """z = x << y or x >> y; 0 (-1 for a negative x to the right) where y < 0 or y > 31."""

    direction: str
    types = "i32 u32"

    def pick(self, tensor: Tensor) -> str:
        """The expression for a tensor's dtype. Raises NoKernel, InvalidModel."""
        if tensor.type not in ("i32", "u32"):
            raise NoKernel(f"no kernel for {tensor.dtype.name}")
        if self.direction not in ("LEFT", "RIGHT"):
            raise InvalidModel(f"BitShift: expected direction LEFT or RIGHT, got {self.direction!r}")
        sign = "<<" if self.direction == "LEFT" else ">>"
        beyond = "x >> 31u" if tensor.type == "i32" and sign == ">>" else "x - x"
        return f"select(x {sign} (u32(y) & 31u), {beyond}, u32(y) > 31u)"


@op("IsNaN", since=9)
class IsNaN(Elementwise):
    """y = whether x is NaN: f32 -> bool."""

    wgsl = IS_NAN
    result = np.bool_


@op("IsInf", since=10)
class IsInf(Elementwise):
    """y = whether x is infinite, of the signs asked for: f32 -> bool."""

    detect_negative: int = 1
    detect_positive: int = 1
    result = np.bool_

    def pick(self, tensor: Tensor) -> str:
        """The expression for a tensor's dtype. Raises NoKernel."""
        if tensor.type != "f32":
            raise NoKernel(f"no kernel for {tensor.dtype.name}")
        signs = {0: "0x7f800000u", 1: "0xff800000u"}
        wanted = [signs[0]] * bool(self.detect_positive) + [signs[1]] * bool(self.detect_negative)
        return " || ".join(f"bitcast<u32>(x) == {bits}" for bits in wanted) or "false && x == 0.0"


@op("Expand", since=8)
class Expand(Operator):
    """y = x broadcast with a shape: x: any shape -> y: the broadcast of both shapes."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the expression to the plan."""
        x, shape = operands(plan, inputs, 2)
        made = plan.broadcast(x.shape, tuple(plan.ints(shape)))
        return x if made == x.shape else plan.map("x", {"x": x}, shape=made)
