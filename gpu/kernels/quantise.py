"""Quantised numbers: whole numbers q that stand for (q - zero point) * scale."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ..graph.tensor import HELD, contiguous_strides
from .conv import Conv
from .elementwise import operands
from .integer import integer_convolution, integer_product, only_bytes
from .kernel import Binding, Kernel
from .move import slices, strided
from .registry import NoKernel, Operator, op
from .window import bad

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Array, Shape, Tensor

__all__ = [
    "dequantised",
    "digest",
    "dynamic_range",
    "optional",
    "quantised",
    "quantised_dtype",
    "scaled",
    "spread",
]

RANGES = {np.dtype(t): (np.iinfo(t).min, np.iinfo(t).max) for t in (np.int8, np.uint8, np.int16, np.uint16)}


def optional(inputs: Sequence[Tensor | None], index: int) -> Tensor | None:
    """An input that may be left out."""
    return inputs[index] if index < len(inputs) else None


def spread(plan: Lowering, t: Tensor, shape: Shape, axis: int, block: int = 0) -> Tensor:
    """Scales or zero points as they meet the elements of a tensor of `shape`.

    Args:
        plan: takes the steps.
        t: one number; one for each element of the axis; or with `block` one for each block along it.
        shape: of what they belong to.
        axis: may be negative.
        block: elements of a block, 0 = none.

    Raises:
        InvalidModel: the shapes do not fit.
    """
    if t.size == 1 and not block:
        return plan.view(t, ())
    axis = plan.axis(axis, len(shape))
    size = shape[axis] if shape else 1
    if not block:
        if t.shape != (size,):
            raise bad(plan, f"[{size}] scales or zero points", list(t.shape))
        return plan.view(t, (size, *[1] * (len(shape) - axis - 1)))
    blocks = -(-size // block)
    if t.shape != (*shape[:axis], blocks, *shape[axis + 1 :]):
        raise bad(plan, f"scales or zero points for {blocks} blocks on axis {axis}", list(t.shape))
    outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    strides = contiguous_strides((outer, blocks, inner))
    dims = (outer, blocks, block, inner)
    repeated = strided(plan, t, (outer, blocks * block, inner), dims, [*strides[:2], 0, 1], 0)
    return plan.view(slices(plan, repeated, {1: slice(0, size)}), shape)


def digest(*arrays: Array | None) -> object:
    """What stands for the contents of arrays in the key of something that is made of them."""
    return tuple(None if t is None else hashlib.sha256(t.tobytes()).digest() for t in arrays)


def quantised_dtype(plan: Lowering, zero_at: int, output: int = 0) -> np.dtype[Any]:
    """The dtype of a quantised output: as declared, else that of its zero point, else uint8."""
    declared = plan.dtypes[output] if output < len(plan.dtypes) else None
    zero = plan.given[zero_at] if zero_at < len(plan.given) else None
    dtype = declared or zero or np.dtype(np.uint8)
    if dtype not in RANGES:
        raise NoKernel(f"no kernel for {dtype.name}")
    return dtype


def quantised(
    plan: Lowering, x: Tensor, scale: Tensor | None, zero: Tensor | None, dtype: np.dtype[Any], shape: Shape
) -> Tensor:
    """round(x / scale) + zero point, saturated: x: f32, scale and zero point broadcast to its shape."""
    low, high = RANGES[dtype]
    value = "round(x / s)" if scale is not None else "round(x)"
    args = {"x": x} | ({} if scale is None else {"s": scale})
    if zero is not None:
        value += " + f32(z)"
        args["z"] = zero
    kind = "u32" if HELD[dtype] == np.uint32 else "i32"
    return plan.map(
        f"{kind}(clamp({value}, params.low, params.high))",
        args,
        dtype=dtype,
        shape=shape,
        params={"low": low, "high": high},
    )


def dequantised(plan: Lowering, x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """(x - zero point) * scale: x: i32 or u32."""
    if zero is None:
        return plan.map("f32(x) * s", {"x": x, "s": scale}, dtype=np.float32, shape=x.shape)
    return plan.map("f32(i32(x) - i32(z)) * s", {"x": x, "s": scale, "z": zero}, dtype=np.float32, shape=x.shape)


def dynamic_range(plan: Lowering, x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale (f32) and zero point (u32) with which uint8 covers the elements of x and 0."""
    if x.type != "f32" or not x.size:
        raise NoKernel(f"no kernel for {x.dtype.name}{list(x.shape)}")
    quads = -(-x.size // 4)
    parts = min(256, -(-quads // 32) * 4)
    low, high = (plan.new(x.dtype, (parts,)) for _ in range(2))
    scale, zero = plan.new(x.dtype, ()), plan.new(np.dtype(np.uint8), ())
    params: dict[str, int | float] = {"quads": quads, "size": x.size, "parts": parts}
    plan.dispatch(
        _extremes(),
        [plan.storage(x)],
        [plan.storage(t) for t in (low, high)],
        params,
        -(-parts // 8),
        flops=2.0 * x.size,
    )
    reads, writes = ([plan.storage(t) for t in pair] for pair in ((low, high), (scale, zero)))
    plan.dispatch(_range(), reads, writes, {"parts": parts}, 1)
    return scale, zero


@lru_cache
def _extremes() -> Kernel:
    """The least and the greatest of 0 and the elements that each invocation looks at."""
    body = """let t = group * 8u + lane;
if (t < params.parts) {
    var l = vec4f(); var h = vec4f();
    for (var q = t; q < params.quads; q += params.parts) {
        let at = vec4u(q * 4u) + vec4u(0u, 1u, 2u, 3u);
        let v = select(vec4f(), x[q], at < vec4u(params.size));
        l = min(l, v); h = max(h, v);
    }
    low[t] = min(min(l.x, l.y), min(l.z, l.w));
    high[t] = max(max(h.x, h.y), max(h.z, h.w));
}"""
    return Kernel(
        "extremes",
        body,
        reads=(Binding("x", "vec4f"),),
        writes=(Binding("low"), Binding("high")),
        params=(("quads", "u32"), ("size", "u32"), ("parts", "u32")),
        result=None,
        lanes=8,
    )


@lru_cache
def _range() -> Kernel:
    body = """var l4 = vec4f(); var h4 = vec4f();
for (var i = 0u; i < params.parts / 4u; i++) { l4 = min(l4, low[i]); h4 = max(h4, high[i]); }
let l = min(min(l4.x, l4.y), min(l4.z, l4.w));
let h = max(max(h4.x, h4.y), max(h4.z, h4.w));
let s = select(h - l, 1.0, h == l) / 255.0;
scale[0] = s;
zero[0] = u32(round(clamp(0.0 - l / s, 0.0, 255.0)));"""
    return Kernel(
        "dynamic_range",
        body,
        reads=(Binding("low", "vec4f"), Binding("high", "vec4f")),
        writes=(Binding("scale"), Binding("zero", "u32")),
        params=(("parts", "u32"),),
        result=None,
        lanes=1,
    )


def scaled(plan: Lowering, made: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Whole numbers times both scales, and a bias added."""
    a_scale, b_scale = (plan.view(t, ()) if t.size == 1 else t for t in (a_scale, b_scale))
    factor = plan.map("a * b", {"a": a_scale, "b": b_scale})
    value = plan.map("f32(x) * f", {"x": made, "f": factor}, dtype=np.float32, shape=made.shape)
    return value if bias is None else plan.map("x + b", {"x": value, "b": bias}, shape=made.shape)


@op("QuantizeLinear", since=10)
@op("QuantizeLinear", since=1, domain="com.microsoft")
class QuantizeLinear(Operator):
    """y = saturate(round(x / y_scale) + y_zero_point): x: f32 | i32 -> y: 8 or 16 bits."""

    axis: int = 1
    block_size: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the expression to the plan."""
        x, scale = operands(plan, inputs, 2)
        zero = optional(inputs, 2)
        dtype = quantised_dtype(plan, 2)
        if x.type not in ("f32", "i32") or scale.type != "f32":
            raise NoKernel(f"no kernel for {x.dtype.name} and {scale.dtype.name}")
        only_bytes(zero)
        scale = spread(plan, scale, x.shape, self.axis, self.block_size)
        zero = None if zero is None else spread(plan, zero, x.shape, self.axis, self.block_size)
        x = x if x.type == "f32" else plan.map("f32(x)", {"x": x}, dtype=np.float32)
        return quantised(plan, x, scale, zero, dtype, x.shape)


@op("DequantizeLinear", since=10)
@op("DequantizeLinear", since=1, domain="com.microsoft")
class DequantizeLinear(Operator):
    """y = (x - x_zero_point) * x_scale: x: 8, 16 or 32 bits -> y: f32."""

    axis: int = 1
    block_size: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the expression to the plan."""
        x, scale = operands(plan, inputs, 2)
        zero = optional(inputs, 2)
        if scale.type != "f32":
            raise NoKernel(f"no kernel for {scale.dtype.name}")
        known = [None if t is None else plan.known_value(t) for t in (x, scale, zero)]
        if known[0] is not None and known[1] is not None and (zero is None or known[2] is not None):
            return self.once(plan, x, known[1], known[2])
        only_bytes(x, zero)
        scale = spread(plan, scale, x.shape, self.axis, self.block_size)
        zero = None if zero is None else spread(plan, zero, x.shape, self.axis, self.block_size)
        return dequantised(plan, x, scale, zero)

    def once(self, plan: Lowering, x: Tensor, scale: Array, zero: Array | None) -> Tensor:
        """Known weights, of any quantised dtype: done while planning, so that kernels can pack them."""
        axis = plan.axis(self.axis, x.rank) if x.rank and scale.size > 1 else 0
        for t in (scale, zero):
            if t is not None:
                spread(plan, plan.constant(t), x.shape, axis, self.block_size)

        def repeated(t: Array) -> Array:
            if self.block_size:
                size = x.shape[axis]
                return np.repeat(t, self.block_size, axis)[(slice(None),) * axis + (slice(0, size),)]
            return t.reshape(()) if t.size == 1 else t.reshape(-1, *[1] * (x.rank - axis - 1))

        def make(array: Array) -> Array:
            whole = array.dtype.kind in "iu" and array.dtype.itemsize > 2
            wide = array.astype(np.int64 if whole else np.float32)
            if zero is not None:
                wide = wide - repeated(zero).astype(wide.dtype)
            return wide.astype(np.float32) * repeated(scale).astype(np.float32)

        key = ("dequantised", self.axis, self.block_size, digest(scale, zero))
        return plan.derive(plan.raw[0] or x, key, make)


@op("DynamicQuantizeLinear", since=11)
class DynamicQuantizeLinear(Operator):
    """y = saturate(round(x / y_scale) + y_zero_point), uint8 over the range of x and 0: f32 -> all three."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Add the kernels and the expression."""
        (x,) = operands(plan, inputs, 1)
        scale, zero = dynamic_range(plan, x)
        return quantised(plan, x, scale, zero, np.dtype(np.uint8), x.shape), scale, zero


@op("MatMulInteger", since=10)
class MatMulInteger(Operator):
    """y = (a - a_zero_point) @ (b - b_zero_point): bytes -> i32."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernel; it may be fused onto."""
        a, b = operands(plan, inputs, 2)
        return integer_product(plan, a, b, optional(inputs, 2), optional(inputs, 3), 1)


@op("QLinearMatMul", since=10)
class QLinearMatMul(Operator):
    """y = saturate(round(a @ b / y_scale) + y_zero_point), all three quantised."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernel; the rest is fused onto it."""
        a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = operands(plan, inputs, 8)
        dtype = quantised_dtype(plan, 7)
        made = integer_product(plan, a, b, a_zero, b_zero, 3)
        if a_scale.rank == 1 and a_scale.size > 1:
            a_scale = plan.view(a_scale, (a_scale.size, 1))
        return requantised(plan, made, (a_scale, b_scale, y_scale), y_zero, dtype)


def requantised(
    plan: Lowering, x: Tensor, scales: tuple[Tensor, Tensor, Tensor], zero: Tensor | None, dtype: np.dtype[Any]
) -> Tensor:
    """round(x * (scales[0] * scales[1] / scales[2])) + zero point, saturated: x: i32."""
    a, b, y = (plan.view(t, ()) if t.size == 1 else t for t in scales)
    if not (a.type == b.type == y.type == "f32"):
        raise NoKernel(f"no kernel for scales of {a.dtype.name}")
    factor = plan.map("a * b / y", {"a": a, "b": b, "y": y})
    value = plan.map("f32(x) * f", {"x": x, "f": factor}, dtype=np.float32, shape=x.shape)
    return quantised(plan, value, None, zero and (plan.view(zero, ()) if zero.size == 1 else zero), dtype, x.shape)


@op("ConvInteger", since=10)
class ConvInteger(Conv):
    """Y = the convolution of (X - x_zero_point) with (W - w_zero_point): bytes -> i32."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernels; the last one may be fused onto."""
        x, w = operands(plan, inputs, 2)
        return integer_convolution(plan, self.plain(), x, w, optional(inputs, 2), optional(inputs, 3), 1)

    def plain(self) -> Conv:
        """The convolution of floats with the same attributes."""
        return Conv(
            kernel_shape=self.kernel_shape,
            strides=self.strides,
            dilations=self.dilations,
            pads=self.pads,
            auto_pad=self.auto_pad,
            group=self.group,
        )


@op("QLinearConv", since=10)
class QLinearConv(ConvInteger):
    """Y = saturate(round((conv(X, W) + B) / y_scale) + y_zero_point), all quantised; B: i32."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernels; the rest is fused onto the last one."""
        x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero = operands(plan, inputs, 8)
        bias = optional(inputs, 8)
        dtype = quantised_dtype(plan, 7)
        made = integer_convolution(plan, self.plain(), x, w, x_zero, w_zero, 3)
        ones = [1] * (w.rank - 2)
        if bias is not None:
            made = plan.map("x + b", {"x": made, "b": plan.view(bias, (bias.size, *ones))})
        if w_scale.size > 1:
            w_scale = plan.view(w_scale, (w_scale.size, *ones))
        return requantised(plan, made, (x_scale, w_scale, y_scale), y_zero, dtype)
