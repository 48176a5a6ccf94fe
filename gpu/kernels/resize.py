"""Resize and Upsample, from tables of taps per axis.

Which input elements an output element takes, and with what weights, is worked out on the CPU
for each axis by itself; the kernels only follow the tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .kernel import Binding, Kernel, Scalar
from .registry import NoKernel, Operator, op
from .window import bad

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Array, Tensor

__all__ = ["Resize", "Resize10", "Upsample"]


@lru_cache
def _gather_kernel(rank: int, kind: str, lanes: int) -> Kernel:
    """Nearest: y[o0, o1, ...] = x[table0[o0] + table1[o1] + ...]; a negative sum = outside."""
    body = [f"let i = group * {lanes}u + lane;\nif (i >= params.count) {{ return; }}\nvar n = i;\nvar at = 0;\n"]
    for a in range(rank - 1, -1, -1):
        body.append(f"at += T[params.start{a} + n % params.dim{a}];\nn = n / params.dim{a};\n")
    zero = {"f32": "params.outside", "bool": "false"}.get(kind, f"{kind}(params.outside)")
    value = "X[u32(max(at, 0))]" + (" != 0u" if kind == "bool" else "")
    body.append(f"store(i, select({value}, {zero}, at < 0));")
    params: list[tuple[str, Scalar]] = [("count", "u32"), ("outside", "f32")]
    for a in range(rank):
        params.extend(((f"dim{a}", "u32"), (f"start{a}", "u32")))
    reads = (Binding("X", "u32" if kind == "bool" else kind), Binding("T", "i32"))
    return Kernel("resize_nearest", "".join(body), reads, params=tuple(params), result=kind, lanes=lanes)


@lru_cache
def _blend_kernel(taps: int, lanes: int) -> Kernel:
    """One axis: y[before, o, after] = sum of weight[o, t] * x[before, tap[o, t], after]; a tap < 0 = outside."""
    terms = "\n".join(
        f"value += bitcast<f32>(T[o + {2 * t + 1}u]) * X[first + u32(T[o + {2 * t}u]) * params.after];"
        for t in range(taps)
    )
    body = f"""let i = group * {lanes}u + lane;
if (i >= params.count) {{ return; }}
let n = i / params.after;
let first = n / params.out * params.size * params.after + i % params.after;
let o = n % params.out * {2 * taps}u;
var value = 0.0;
if (T[o] >= 0) {{
{terms}
}} else {{ value = params.outside; }}
store(i, value);"""
    params: tuple[tuple[str, Scalar], ...] = (
        ("count", "u32"), ("size", "u32"), ("out", "u32"), ("after", "u32"), ("outside", "f32"),
    )
    return Kernel(f"resize_{taps}", body, (Binding("X"), Binding("T", "i32")), params=params, lanes=lanes)


def coordinates(transform: str, size: int, out: int, scale: float, start: float, end: float) -> Array:
    """Where each output element lies in the input, in float32 as ONNX Runtime works it out."""
    o = np.arange(out, dtype=np.float32)
    f, one, half = np.float32(scale), np.float32(1), np.float32(0.5)
    match transform:
        case "half_pixel":
            return (o + half) / f - half
        case "pytorch_half_pixel":
            return (o + half) / f - half if out > 1 else np.zeros_like(o)
        case "tf_half_pixel_for_nn":
            return (o + half) / f
        case "align_corners":
            # With scales given, the corner that is aligned may lie in the middle of an element.
            length = out if abs(scale * size - out) < 1e-3 else scale * size
            return o * np.float32(size - 1) / np.float32(length - 1) if length != 1 else np.zeros_like(o)
        case "asymmetric":
            return o / f
        case "half_pixel_symmetric":
            adjust = np.float32(out) / np.float32(f * np.float32(size))
            offset = np.float32(size) / 2 * (one - adjust)
            return np.float32(offset) + (o + half) / f - half
        case "tf_crop_and_resize":
            if out > 1:
                step = np.float32(end - start) * np.float32(size - 1) / np.float32(out - 1)
                return np.float32(start) * np.float32(size - 1) + o * step
            return np.full_like(o, 0.5 * (start + end) * (size - 1))
    raise NoKernel(f"coordinate_transformation_mode {transform}")


def nearest(mode: str, x: Array, scale: float) -> Array:
    """Round coordinates. "simple" is what opset 10 and older mean."""
    if mode == "simple":
        mode = "ceil" if scale < 1.0 else "floor"
    match mode:
        case "round_prefer_floor":
            return np.ceil(x - np.float32(0.5))
        case "round_prefer_ceil":
            return np.floor(x + np.float32(0.5))
        case "floor":
            return np.floor(x)
        case "ceil":
            return np.ceil(x)
    raise NoKernel(f"nearest_mode {mode}")


def cubic_taps(x: Array, size: int, coefficient: float, exclude_outside: bool) -> tuple[Array, Array]:
    """Indices and weights of the four neighbours."""
    base = np.floor(x)
    t = (x - base).astype(np.float64)[:, None]
    a = coefficient
    d = np.abs(t - np.arange(-1, 3))
    weight = np.where(d <= 1, ((a + 2) * d - (a + 3)) * d * d + 1, ((a * d - 5 * a) * d + 8 * a) * d - 4 * a)
    index = base.astype(np.int64)[:, None] + np.arange(-1, 3)
    if exclude_outside:
        weight = np.where((index < 0) | (index >= size), 0.0, weight)
        weight /= weight.sum(axis=1, keepdims=True)
    return index.clip(0, size - 1), weight


def antialias_taps(mode: str, x: Array, size: int, scale: float, coefficient: float,
                   exclude_outside: bool) -> tuple[Array, Array]:
    """Indices and weights of all neighbours under a kernel stretched by 1 / scale, scale < 1."""
    reach = 1 if mode == "linear" else 2
    first = math.floor(-reach / scale) + 1
    offsets = np.arange(first, 2 - first)
    base = np.ceil(x).astype(np.int64) - 1  # the left neighbour, also of a whole number
    d = np.abs(scale * (offsets - (x - base)[:, None])).astype(np.float64)
    if mode == "linear":
        weight = np.clip(1 - d, 0, 1)
    else:
        a = coefficient
        far = np.where(d < 2, ((a * d - 5 * a) * d + 8 * a) * d - 4 * a, 0.0)
        weight = np.where(d <= 1, ((a + 2) * d - (a + 3)) * d * d + 1, far)
    index = base[:, None] + offsets
    if exclude_outside:
        weight = np.where((index < 0) | (index >= size), 0.0, weight)
    return index.clip(0, size - 1), weight / weight.sum(axis=1, keepdims=True)


@op("Resize", since=11)
class Resize(Operator):
    """Y = X sampled on another grid.  X: any shape, f32 (nearest: i32, u32, bool too) -> Y: same dtype.

    Inputs: X, roi, scales, sizes (one of the last two).
    """

    mode: str = "nearest"
    coordinate_transformation_mode: str = "half_pixel"
    nearest_mode: str = "round_prefer_floor"
    cubic_coeff_a: float = -0.75
    exclude_outside: int = 0
    extrapolation_value: float = 0.0
    antialias: int = 0
    axes: Sequence[int] = ()
    keep_aspect_ratio_policy: str = "stretch"

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add a kernel for each axis that changes (nearest: one for all); the last may be fused onto."""
        if self.mode not in ("nearest", "linear", "cubic"):
            raise bad(plan, "mode nearest, linear or cubic", self.mode)
        x, roi, scales, sizes = (*inputs, None, None, None, None)[:4]
        if x is None:
            raise bad(plan, "an input", "none")
        axes = [plan.axis(int(a), x.rank) for a in self.axes] or list(range(x.rank))
        factors = [float(v) for v in plan.value(scales).reshape(-1)] if scales is not None and scales.size else []
        wanted = plan.ints(sizes) if sizes is not None and sizes.size and not factors else []
        given = factors or wanted
        if len(given) != len(axes):
            raise bad(plan, f"{len(axes)} scales or sizes", len(given))
        region: tuple[float, ...] = ()
        if self.coordinate_transformation_mode == "tf_crop_and_resize":
            region = tuple(float(v) for v in plan.value(roi).reshape(-1)) if roi is not None and roi.size else ()
            if len(region) != 2 * len(axes):
                raise bad(plan, f"{2 * len(axes)} numbers in roi", len(region))
        shape, factor = list(x.shape), [1.0] * x.rank
        starts, ends = [0.0] * x.rank, [1.0] * x.rank
        if wanted and self.keep_aspect_ratio_policy != "stretch":
            ratios = [w / x.shape[a] for w, a in zip(wanted, axes, strict=True) if x.shape[a]]
            factors = [(min if self.keep_aspect_ratio_policy == "not_larger" else max)(ratios, default=1.0)] * len(axes)
            wanted = [math.floor(factors[0] * x.shape[a] + 0.5) for a in axes]
        for n, a in enumerate(axes):
            shape[a] = wanted[n] if wanted else int(np.floor(np.float32(factors[n]) * np.float32(x.shape[a])))
            factor[a] = factors[n] if factors else (wanted[n] / x.shape[a] if x.shape[a] else 1.0)
            if region:
                starts[a], ends[a] = region[n], region[n + len(axes)]
            if shape[a] < 0 or (x.size and not factor[a] > 0.0):
                raise bad(plan, "positive scales or sizes", list(given))
        return self._resize(plan, x, shape, factor, starts, ends)

    def _resize(
        self, plan: Lowering, x: Tensor, shape: Sequence[int], factor: Sequence[float], starts: Sequence[float],
        ends: Sequence[float],
    ) -> Tensor:
        changed = [a for a in range(x.rank)
                   if shape[a] != x.shape[a] or factor[a] != 1.0 or (starts[a], ends[a]) != (0.0, 1.0)]
        if not changed:
            return plan.view(x, x.shape)
        transform = self.coordinate_transformation_mode
        places = {a: coordinates(transform, x.shape[a], shape[a], factor[a], starts[a], ends[a]) for a in changed}
        crop = transform == "tf_crop_and_resize"
        outside = {a: crop & ((p < 0) | (p > x.shape[a] - 1)) for a, p in places.items()}
        if self.mode == "nearest":
            taps = {}
            for a, p in places.items():
                rounded = nearest(self.nearest_mode, p, factor[a]).clip(0, max(x.shape[a] - 1, 0))
                taps[a] = np.where(outside[a], -1, rounded)
            return self._nearest(plan, x, shape, taps)
        if self.mode not in ("linear", "cubic") or x.dtype != np.float32:
            raise NoKernel(f"mode {self.mode} for {x.dtype}")
        # The axis that shrinks most goes first: less is left to do for the others.
        for a in sorted(changed, key=lambda a: shape[a] / max(x.shape[a], 1)):
            if self.antialias and factor[a] < 1.0:
                index, weight = antialias_taps(self.mode, places[a], x.shape[a], factor[a], self.cubic_coeff_a,
                                               bool(self.exclude_outside))
            elif self.mode == "cubic":
                index, weight = cubic_taps(places[a], x.shape[a], self.cubic_coeff_a, bool(self.exclude_outside))
            else:
                place = places[a].clip(0, max(x.shape[a] - 1, 0))
                base = np.floor(place).astype(np.int64)
                index = np.stack([base, (base + 1).clip(0, max(x.shape[a] - 1, 0))], axis=1)
                part = (place - base).astype(np.float32)
                weight = np.stack([1 - part, part], axis=1)
            index = np.where(outside[a][:, None], -1, index)
            x = self._blend(plan, x, a, index, weight)
        return x

    def _nearest(self, plan: Lowering, x: Tensor, shape: Sequence[int], taps: dict[int, Array]) -> Tensor:
        kind = x.type
        if kind is None:
            raise NoKernel(f"no GPU type for {x.dtype}")
        # Neighbouring axes that stay as they are count as one.
        dims: list[int] = []
        tables: list[Array] = []
        stride = 1
        merging = False
        for a in range(x.rank - 1, -1, -1):
            if a in taps:
                dims.insert(0, shape[a])
                tables.insert(0, np.where(taps[a] < 0, -(1 << 30), taps[a] * stride))
                merging = False
            elif merging:
                dims[0] *= shape[a]
                tables[0] = np.arange(dims[0]) * (stride // (dims[0] // max(shape[a], 1)) if dims[0] else 1)
            else:
                dims.insert(0, shape[a])
                tables.insert(0, np.arange(shape[a]) * stride)
                merging = True
            stride *= x.shape[a]
        kernel = _gather_kernel(len(dims), kind, 32 if plan.target.cpu else 64)
        table = plan.constant(np.concatenate(tables).astype(np.int32))
        count = math.prod(shape)
        params: dict[str, int | float] = {"count": count, "outside": self.extrapolation_value}
        start = 0
        for a, dim in enumerate(dims):
            params |= {f"dim{a}": dim, f"start{a}": start}
            start += dim
        if count == 0 or x.size == 0:
            table = plan.constant(np.zeros(1, np.int32))
        return plan.pending(kernel, [plan.storage(x), plan.storage(table)], params, -(-count // kernel.lanes), x.dtype,
                            tuple(shape), flops=8.0 * count)

    def _blend(self, plan: Lowering, x: Tensor, axis: int, index: Array, weight: Array) -> Tensor:
        out, taps = index.shape
        kernel = _blend_kernel(taps, 32 if plan.target.cpu else 64)
        table = np.stack([index.astype(np.int32), weight.astype(np.float32).view(np.int32)], axis=-1)
        shape = (*x.shape[:axis], out, *x.shape[axis + 1 :])
        count = math.prod(shape)
        params: dict[str, int | float] = {
            "count": count, "size": x.shape[axis], "out": out, "after": math.prod(x.shape[axis + 1 :]),
            "outside": self.extrapolation_value,
        }
        placed = plan.storage(plan.constant(table.reshape(-1)))
        return plan.pending(kernel, [plan.storage(x), placed], params, -(-count // kernel.lanes), x.dtype, shape,
                            flops=8.0 * count)


@op("Resize", since=10)
class Resize10(Operator):
    """Resize of opset 10: inputs X and scales; nearest rounds down (up where it shrinks), no half pixels."""

    mode: str = "nearest"

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add a kernel for each axis that changes (nearest: one for all); the last may be fused onto."""
        if len(inputs) != 2:
            raise bad(plan, "the inputs X and scales", f"{len(inputs)} inputs")
        resize = Resize(mode=self.mode, coordinate_transformation_mode="asymmetric", nearest_mode="simple")
        return resize.lower(plan, inputs[0], None, inputs[1])


@op("Upsample", since=9)
class Upsample(Resize10):
    """Resize of opset 7 to 9.  X: any shape; scales: an input (before opset 9 an attribute)."""


@op("Upsample", since=7)
class Upsample7(Operator):
    """Upsample with scales as an attribute."""

    scales: Sequence[float]
    mode: str = "nearest"

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add a kernel for each axis that changes (nearest: one for all); the last may be fused onto."""
        scales = plan.constant(np.array(self.scales, np.float32))
        return Resize10(mode=self.mode).lower(plan, inputs[0], scales)
