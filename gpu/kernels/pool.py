"""MaxPool, MaxUnpool, AveragePool, GlobalAveragePool, GlobalMaxPool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ..graph.tensor import contiguous_strides
from .gather import flat_indices
from .kernel import Binding, Kernel, Scalar
from .registry import NoKernel, Operator, op
from .scatter import scattered
from .window import MOST_TURNS, Axis, bad, spread, windows

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.model import Node
    from ..graph.tensor import Array, Tensor

__all__ = ["AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool", "MaxUnpool", "pooled"]

_NAMES = ("size", "out", "kernel", "stride", "dilation", "begin", "end")
_PARAMS: tuple[tuple[str, Scalar], ...] = tuple((f"{name}{a}", "i32") for a in range(3) for name in _NAMES)


_ARGMAX_START = (
    "bitcast<f32>(params.lowest); var place = ((plane + s0 + t0 * d0) * params.size1 + s1 + t1 * d1) * params.size2"
    " + s2 + t2 * d2",
    "let x = X[u32(at)]; let wins = (x > value) | is_nan(x); value = select(value, x, wins);"
    " place = select(place, at, wins);",
)
_COLUMNS = (
    "plane * params.size1 * params.size2 + place / params.size2 / params.size1 % params.size0"
    " + (place / params.size2 % params.size1 + place % params.size2 * params.size1) * params.size0"
)

_IS_NAN = "fn is_nan(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }\n"


@lru_cache
def _pool_kernel(kind: str, lanes: int) -> Kernel:
    """One lane works out one output; along every axis only the taps that hit the input are walked."""
    ranges = "\n".join(
        f"""let s{a} = o{a} * params.stride{a} - params.begin{a};
let d{a} = params.dilation{a};
let t{a} = (max(-s{a}, 0) + d{a} - 1) / d{a};
let e{a} = min(params.kernel{a}, (max(params.size{a} - s{a}, 0) + d{a} - 1) / d{a});"""
        for a in range(3)
    )
    # Padding that counts: all taps that lie in front of the end of the padded input.
    counted = " * ".join(
        f"min(params.kernel{a}, (params.size{a} + params.end{a} - s{a} + d{a} - 1) / d{a})" for a in range(3)
    )
    real = " * ".join(f"max(e{a} - t{a}, 0)" for a in range(3))
    start, step, end = {
        "max": ("bitcast<f32>(params.lowest)", "let x = X[u32(at)]; value = select(value, x, (x > value) | is_nan(x));",
                "value"),
        "avg": ("0.0", "value += X[u32(at)];", f"value / f32({real})"),
        "padded": ("0.0", "value += X[u32(at)];", f"value / f32({counted})"),
        "sum": ("0.0", "value += X[u32(at)];", "value"),
        "rows": (*_ARGMAX_START, "place"),
        "columns": (*_ARGMAX_START, _COLUMNS),
    }[kind]
    body = f"""let i = group * {lanes}u + lane;
if (i >= params.count) {{ return; }}
let n = i32(i);
let o2 = n % params.out2;
let n2 = n / params.out2;
let o1 = n2 % params.out1;
let n1 = n2 / params.out1;
let o0 = n1 % params.out0;
let plane = n1 / params.out0 * params.size0;
{ranges}
var value = {start};
for (var a = t0; a < e0; a++) {{
    for (var b = t1; b < e1; b++) {{
        var at = ((plane + s0 + a * d0) * params.size1 + s1 + b * d1) * params.size2 + s2 + t2 * d2;
        for (var c = t2; c < e2; c++) {{ {step} at += d2; }}
    }}
}}
store(i, {end});"""
    params: tuple[tuple[str, Scalar], ...] = (("count", "u32"), ("lowest", "u32"), *_PARAMS)
    result = "i32" if kind in ("rows", "columns") else "f32"
    return Kernel(f"pool_{kind}", body, (Binding("X"),), params=params, result=result, lanes=lanes, functions=_IS_NAN)


def pooled(plan: Lowering, x: Tensor, axes: Sequence[Axis], kind: str) -> Tensor:
    """What is made of each window.

    Args:
        plan: takes the kernel.
        x: [N, C, spatial...], 1 to 3 spatial dimensions, f32.
        axes: the window along each.
        kind: "max", "sum", "avg" (the mean), "padded" (the mean, padding counted), or the place of the
            maximum in x as int32, counted in "rows" or, within a plane, in "columns".
    """
    axes = (Axis(1, 1),) * (3 - len(axes)) + tuple(axes)
    kernel = _pool_kernel(kind, 32 if plan.target.cpu else 64)
    shape = x.shape[:2] + tuple(axis.out for axis in axes[5 - x.rank :])
    count = math.prod(shape)
    params: dict[str, int | float] = {"count": count, "lowest": 0xFF800000}
    for a, axis in enumerate(axes):
        params |= {f"{name}{a}": getattr(axis, name) for name in _NAMES}
    flops = float(count * math.prod(axis.kernel for axis in axes))
    dtype = np.dtype(np.int32) if kind in ("rows", "columns") else x.dtype
    return plan.pending(kernel, [plan.storage(x)], params, -(-count // kernel.lanes), dtype, shape, flops=flops,
                        effort=8)


def _floats(plan: Lowering, x: Tensor | None, lowest: int) -> Tensor:
    if x is None or not x.rank >= lowest:
        raise bad(plan, f"an input of at least {lowest} dimensions", x)
    if x.dtype != np.float32:
        raise NoKernel(f"no kernel for {x.dtype}")
    return x


def _windows(plan: Lowering, x: Tensor, pool: MaxPool | AveragePool) -> tuple[Axis, ...]:
    if not pool.kernel_shape:
        raise bad(plan, "an attribute kernel_shape", "none")
    if x.rank > 5:
        raise NoKernel(f"{x.rank - 2} spatial dimensions")
    return windows(plan, x.shape[2:], pool.kernel_shape, pool.strides, pool.dilations, pool.pads, pool.auto_pad,
                   ceil=bool(pool.ceil_mode), partial=True)


@op("MaxPool", since=1)
class MaxPool(Operator):
    """Y = the largest element of each window; padding never wins.  X: [N, C, spatial...] f32 -> Y: [N, C, out...].

    The second output is where in X it lies, int64.
    """

    kernel_shape: Sequence[int] = ()
    strides: Sequence[int] = ()
    dilations: Sequence[int] = ()
    pads: Sequence[int] = ()
    auto_pad: str = "NOTSET"
    ceil_mode: int = 0

    storage_order: int = 0
    places: bool = False

    @classmethod
    def of(cls, node: Node) -> Operator:
        """Note whether the second output is wanted."""
        made = super().of(node)
        assert isinstance(made, MaxPool)
        made.places = len(node.outputs) > 1 and node.outputs[1] is not None
        return made

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """Add the kernel; it may be fused onto."""
        x = _floats(plan, inputs[0], 3)
        axes = _windows(plan, x, self)
        if self.places:
            where = pooled(plan, x, axes, "columns" if self.storage_order else "rows")
            return (pooled(plan, x, axes, "max"), plan.widen(where))
        if len(axes) > 1 and math.prod(axis.kernel for axis in axes) > 6 * len(axes):
            for a in range(len(axes)):
                one = [Axis(size, size) for size in x.shape[2:]]
                one[a] = axes[a]
                x = pooled(plan, x, one, "max")
            return (x,)
        return (pooled(plan, x, axes, "max"),)


@op("MaxUnpool", since=9)
class MaxUnpool(Operator):
    """Y = zeros, but the elements of X where the second input says.

    X: [N, C, spatial...] f32; I: int64, places in a tensor of the size that MaxPool came from; output_shape: larger.
    """

    kernel_shape: Sequence[int] = ()
    strides: Sequence[int] = ()
    pads: Sequence[int] = ()

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Put the elements into zeros."""
        x = _floats(plan, inputs[0], 3)
        where, wanted = (*inputs[1:], None, None)[:2]
        if where is None or where.shape != x.shape:
            raise bad(plan, f"places of shape {list(x.shape)}", where)
        rank = x.rank - 2
        kernel, strides = (spread(plan, n, v, rank) for n, v in (("kernel_shape", self.kernel_shape),
                                                                 ("strides", self.strides)))
        pads = spread(plan, "pads", self.pads, 2 * rank, 0)
        sizes = tuple((n - 1) * strides[a] - pads[a] - pads[a + rank] + kernel[a] for a, n in enumerate(x.shape[2:]))
        source = x.shape[:2] + sizes
        shape = source if wanted is None else tuple(plan.ints(wanted))
        if len(shape) != x.rank or any(n < m for n, m in zip(shape, source, strict=True)):
            raise bad(plan, f"an output_shape of at least {list(source)}", list(shape))
        if not x.size:
            return plan.map("x", {"x": plan.constant(np.zeros((), np.float32))}, shape=shape)
        node, steps = plan.node, contiguous_strides(shape)

        def place(array: Array) -> Array:
            flat = flat_indices(node, array.reshape(-1, 1), (math.prod(source),))
            parts = np.unravel_index(flat, source)
            return sum((p * s for p, s in zip(parts, steps, strict=True)), np.zeros_like(flat))

        zeros = plan.map("x", {"x": plan.constant(np.zeros((), np.float32))}, shape=shape)
        return scattered(plan, zeros, (where,), place, x, 1, x.size, "none")


@op("AveragePool", since=1)
class AveragePool(Operator):
    """Y = the mean of each window.  X: [N, C, spatial...] f32 -> Y: [N, C, out...].

    Padding counts as zeros only with `count_include_pad`.
    """

    kernel_shape: Sequence[int] = ()
    strides: Sequence[int] = ()
    dilations: Sequence[int] = ()
    pads: Sequence[int] = ()
    auto_pad: str = "NOTSET"
    ceil_mode: int = 0
    count_include_pad: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernel; it may be fused onto."""
        x = _floats(plan, inputs[0], 3)
        axes = _windows(plan, x, self)
        if plan.target.cpu and math.prod(axis.kernel for axis in axes) > MOST_TURNS:
            raise NoKernel("no kernel for so large a window")
        if all(axis.out == 1 and axis.kernel == axis.size and not axis.begin and not axis.end for axis in axes):
            return _rows(plan, x, "avg")
        return pooled(plan, x, axes, "padded" if self.count_include_pad else "avg")


_PART = 16384
"""Loads that one lane makes on a software adapter."""


@lru_cache
def _rows_kernel(kind: str, wide: bool, cpu: bool) -> Kernel:
    """The scaled sum or the maximum of each row of contiguous elements, or of each part of a row.

    Software adapter: one lane per part. Hardware: one workgroup per row. Sums are taken over 64
    terms, and those sums are added up with compensation.
    """
    lanes = 8 if cpu else 64
    kind4 = "vec4f" if wide else "f32"
    first, step = ("begin", "1u") if cpu else ("lane", f"{lanes}u")
    if kind == "max":
        loop = f"""var value = {kind4}(bitcast<f32>(params.lowest));
for (var k = {first}; k < end; k += {step}) {{ value = join{4 if wide else 1}(value, X[row + k]); }}
"""
        join = "select(a, b, (b > a) | is_nan(b))"
    else:
        loop = f"""var value = {kind4}();
var lost = {kind4}();
for (var k = {first}; k < end; k += 64u * {step}) {{
    var block = {kind4}();
    for (var j = k; j < min(k + 64u * {step}, end); j += {step}) {{ block += X[row + j]; }}
    let y = block - lost;
    let total = value + y;
    lost = (total - value) - y;
    value = total;
}}
"""
        join = "a + b"
    parts = ", ".join(f"join1(a.{c}, b.{c})" for c in "xyzw")
    functions = _IS_NAN + f"fn join1(a: f32, b: f32) -> f32 {{ return {join}; }}\n"
    functions += f"fn join4(a: vec4f, b: vec4f) -> vec4f {{ return vec4f({parts}); }}\n"
    whole = "join1(join1(value.x, value.y), join1(value.z, value.w))" if wide else "value"
    scale = " * params.scale" if kind == "avg" else ""
    if cpu:
        body = f"""let i = group * {lanes}u + lane;
if (i >= params.count) {{ return; }}
let row = i / params.parts * params.size;
let begin = i % params.parts * {_PART}u;
let end = min(begin + {_PART}u, params.size);
{loop}store(i, {whole}{scale});"""
    else:
        functions += f"var<workgroup> part: array<f32, {lanes}>;\n"
        body = f"""let row = group * params.size;
let end = params.size;
{loop}part[lane] = {whole};
workgroupBarrier();
for (var half = {lanes // 2}u; half > 0u; half /= 2u) {{
    if (lane < half) {{ part[lane] = join1(part[lane], part[lane + half]); }}
    workgroupBarrier();
}}
if (lane == 0u) {{ store(group, part[0]{scale}); }}"""
    params: tuple[tuple[str, Scalar], ...] = (
        ("count", "u32"), ("size", "u32"), ("parts", "u32"), ("scale", "f32"), ("lowest", "u32"),
    )
    return Kernel(f"row_{kind}", body, (Binding("X", "vec4f" if wide else "f32"),), params=params, lanes=lanes,
                  functions=functions)


def _rows(plan: Lowering, x: Tensor, kind: str) -> Tensor:
    """Reduce the spatial dimensions of [N, C, spatial...] to size 1."""
    shape = x.shape[:2] + (1,) * (x.rank - 2)
    rows, size = math.prod(x.shape[:2]), math.prod(x.shape[2:])
    total = size
    while True:
        wide = size % 4 == 0
        kernel = _rows_kernel(kind, wide, plan.target.cpu)
        loads = size // 4 if wide else size
        parts = max(-(-loads // _PART), 1) if plan.target.cpu else 1
        scale = 1.0 if parts > 1 else 1.0 / total if total else math.nan
        params: dict[str, int | float] = {
            "count": rows * parts, "size": loads, "parts": parts, "scale": scale, "lowest": 0xFF800000,
        }
        groups = -(-rows * parts // kernel.lanes) if plan.target.cpu else rows
        made = plan.pending(kernel, [plan.storage(x)], params, groups, x.dtype, shape if parts == 1 else (rows, parts),
                            flops=float(rows * size))
        if parts == 1:
            return made
        x, size = made, parts


@op("GlobalAveragePool", since=1)
class GlobalAveragePool(Operator):
    """Y = the mean over all spatial dimensions.  X: [N, C, spatial...] f32 -> Y: [N, C, 1...]."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernel; it may be fused onto."""
        return _rows(plan, _floats(plan, inputs[0], 2), "avg")


@op("GlobalMaxPool", since=1)
class GlobalMaxPool(Operator):
    """Y = the maximum over all spatial dimensions.  X: [N, C, spatial...] f32 -> Y: [N, C, 1...]."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernel; it may be fused onto."""
        return _rows(plan, _floats(plan, inputs[0], 2), "max")
