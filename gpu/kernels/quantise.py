"""Quantised numbers: whole numbers q that stand for (q - zero point) * scale.

Bytes come as i32 or u32, as the device holds them. Sums of their products are exact: they are
formed in f32 while they stay below 2 ** 24, else in pieces, and added up as i32.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InvalidModel
from ..graph.tensor import HELD, contiguous_strides
from .conv import Conv
from .elementwise import operands
from .kernel import Binding, Kernel
from .matmul import product
from .matmul_packed import EXACT, Packed, packed_product
from .move import slices, strided
from .registry import NoKernel, Operator, op

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Array, Shape, Tensor

__all__ = [
    "dequantised",
    "digest",
    "dynamic_range",
    "integer_convolution",
    "integer_product",
    "optional",
    "quantised",
    "quantised_dtype",
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
            raise _bad(plan, f"[{size}] scales or zero points", list(t.shape))
        return plan.view(t, (size, *[1] * (len(shape) - axis - 1)))
    blocks = -(-size // block)
    if t.shape != (*shape[:axis], blocks, *shape[axis + 1 :]):
        raise _bad(plan, f"scales or zero points for {blocks} blocks on axis {axis}", list(t.shape))
    outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    strides = contiguous_strides((outer, blocks, inner))
    dims = (outer, blocks, block, inner)
    repeated = strided(plan, t, (outer, blocks * block, inner), dims, [*strides[:2], 0, 1], 0)
    return plan.view(slices(plan, repeated, {1: slice(0, size)}), shape)


def _bad(plan: Lowering, expected: str, got: object) -> InvalidModel:
    return InvalidModel(f"node {plan.node!r} ({plan.op}): expected {expected}, got {got}")


def digest(*arrays: Array | None) -> object:
    """What stands for the contents of arrays in the key of something that is made of them."""
    return tuple(None if t is None else hashlib.sha256(t.tobytes()).digest() for t in arrays)


def _whole(plan: Lowering, *tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and tensor.type not in ("i32", "u32"):
            raise NoKernel(f"no kernel for {tensor.dtype.name}")


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


def integer_product(
    plan: Lowering, a: Tensor, b: Tensor, a_zero: Tensor | None, b_zero: Tensor | None, b_at: int
) -> Tensor:
    """(a - zero point) @ (b - zero point), exact, i32, wrapping: a: [..., m, k] or [k], b: [..., k, n] or [k].

    Args:
        plan: takes the kernels.
        a: i32 or u32, bytes.
        b: the same; input number `b_at` of the node. Where known, it stays packed.
        a_zero: one number, or one for each row: [m] or [..., m, 1].
        b_zero: one number, or one for each column: [n] or [..., 1, n].
        b_at: which input b is.

    Raises:
        NoKernel: a dtype has no kernel. InvalidModel: the shapes do not fit.
    """
    _whole(plan, a, b, a_zero, b_zero)
    if not a.rank or not b.rank or a.shape[-1] != b.shape[-2 if b.rank > 1 else 0]:
        raise _bad(plan, "matrices that multiply", f"shapes {list(a.shape)} and {list(b.shape)}")
    leading = plan.broadcast(a.shape[:-2], b.shape[:-2])
    shape = (*leading, *a.shape[-2:-1], *(b.shape[-1:] if b.rank > 1 else ()))
    raw = plan.raw[b_at]
    values = None if raw is None else plan.known_value(raw)
    zeros = None if b_zero is None else plan.known_value(b_zero)
    settled = b.rank == 2 and (b_zero is None or zeros is not None) and (a_zero is None or a_zero.size == 1)
    if settled and raw is not None and values is not None and values.dtype.itemsize == 1:
        return packed_product(plan, a, a_zero, _packed_bytes(raw, values, zeros), shape)
    left = a if a.rank > 1 else plan.view(a, (1, a.size))
    right = b if b.rank > 1 else plan.view(b, (b.size, 1))
    if a_zero is not None and a_zero.rank == 1 and a_zero.size > 1:
        a_zero = plan.view(a_zero, (a_zero.size, 1))
    return product(plan, centred(plan, left, a_zero), centred(plan, right, b_zero), shape)


def centred(plan: Lowering, x: Tensor, zero: Tensor | None, dtype: Any = np.int32) -> Tensor:
    """X - zero point, as i32 or f32."""
    kind = "i32" if dtype == np.int32 else "f32"
    if zero is None:
        return x if x.dtype == dtype else plan.map(f"{kind}(x)", {"x": x}, dtype=dtype)
    zero = plan.view(zero, ()) if zero.size == 1 else zero
    return plan.map(f"{kind}(i32(x) - i32(z))", {"x": x, "z": zero}, dtype=dtype, shape=x.shape)


def _packed_bytes(raw: Tensor, values: Array, zeros: Array | None) -> Packed:
    k, n = values.shape
    plain = zeros is None or not zeros.any()
    row = None if zeros is None or plain else np.broadcast_to(zeros.astype(np.float32).reshape(1, -1), (1, n))
    return Packed(
        raw,
        ("bytes", None if row is None else row.tobytes()),
        k,
        n,
        8,
        values.dtype == np.int8,
        EXACT,
        lambda: values,
        None if row is None else lambda: row,
        shared=True,
    )


def integer_convolution(
    plan: Lowering, conv: Conv, x: Tensor, w: Tensor, x_zero: Tensor | None, w_zero: Tensor | None, w_at: int
) -> Tensor:
    """The convolution of (x - zero point) with (w - zero point), exact, i32; padded with 0 after the subtraction.

    Args:
        plan: takes the kernels.
        conv: its attributes.
        x: [n, c, spatial...], i32 or u32, bytes.
        w: [m, c / group, kernel...], the same; input number `w_at` of the node.
        x_zero: one number.
        w_zero: one number, or one for each output channel.
        w_at: which input w is.
    """
    _whole(plan, x, w, x_zero, w_zero)
    raw = plan.raw[w_at]
    values = None if raw is None else plan.known_value(raw)
    zeros = None if w_zero is None else plan.known_value(w_zero)
    ones = (-1, *[1] * (w.rank - 1))
    if raw is not None and values is not None and (w_zero is None or zeros is not None):
        less = np.zeros((1,), np.float32) if zeros is None else zeros.astype(np.float32)
        key = ("centred", less.tobytes())
        weights = plan.derive(raw, key, lambda array: array.astype(np.float32) - less.reshape(ones))
        known = plan.value(weights)
        sums = np.abs(known).reshape(*known.shape[:2], -1).sum(2).max(0, initial=0) if known.size else np.zeros(0)
    else:
        shown = w_zero if w_zero is None or w_zero.size == 1 else plan.view(w_zero, (w_zero.size, *[1] * (w.rank - 1)))
        weights = centred(plan, w, shown, np.float32)
        sums = np.full(w.shape[1], 255.0 * math.prod(w.shape[2:]))
    cuts = _cuts(255.0 * sums, 2.0**24)
    inputs = centred(plan, x, x_zero, np.float32)
    total: Tensor | None = None
    for first, last in pairwise(cuts):
        some, part = inputs, weights
        if len(cuts) > 2:
            if plan.known_value(weights) is None:
                part = slices(plan, weights, {1: slice(first, last)})
            else:
                part = plan.derive(weights, (first, last), partial(_channels, first=first, last=last))
            each = (x.shape[0], conv.group, w.shape[1], *x.shape[2:])
            some = slices(plan, plan.view(inputs, each), {2: slice(first, last)})
            some = plan.view(some, (x.shape[0], conv.group * (last - first), *x.shape[2:]))
        made = conv.lower(plan, some, part)
        if total is None:
            total = plan.map("i32(y)", {"y": made}, dtype=np.int32)
        else:
            total = plan.map("t + i32(y)", {"t": total, "y": made}, dtype=np.int32)
    assert total is not None
    return total


def _channels(array: Array, first: int, last: int) -> Array:
    return np.ascontiguousarray(array[:, first:last])


def _cuts(sums: Array, most: float) -> list[int]:
    """Where to cut a list so that no piece's sum is over `most`. Raises NoKernel where one number is."""
    cuts, total = [0], 0.0
    for index, value in enumerate(sums):
        if value > most:
            raise NoKernel("a window too large for exact sums")
        total += float(value)
        if total > most:
            cuts.append(index)
            total = float(value)
    return [*cuts, len(sums)]


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
        _whole(plan, zero)
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
        _whole(plan, x, zero)
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
