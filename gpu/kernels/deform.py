"""DeformConv: columns of samples between elements, then a matrix product."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from .elementwise import operands
from .kernel import Binding, Kernel
from .matmul import product
from .registry import NoKernel, Operator, op
from .window import bad, spread

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Tensor

__all__: list[str] = []


@lru_cache
def _deform_kernel(masked: bool) -> Kernel:
    """columns[n, channel, tap, out] = mask * x between elements, zeros outside."""
    body = f"""let i = group * 64u + lane;
if (i >= params.total) {{ return; }}
let o = i % params.places;
let row = i / params.places;
let tap = row % params.taps;
let c = row / params.taps % params.channels;
let n = row / params.taps / params.channels;
let base = (n * params.channels + c) * params.height * params.width;
let g = n * params.offsets + c / (params.channels / params.offsets);
let at = (g * params.taps + tap) * 2u * params.places + o;
let ky = i32(tap / params.kernel_width) * params.dilation_y;
let kx = i32(tap % params.kernel_width) * params.dilation_x;
let py = f32(i32(o / params.out_width) * params.stride_y - params.pad_y + ky) + O[at];
let px = f32(i32(o % params.out_width) * params.stride_x - params.pad_x + kx) + O[at + params.places];
let fy = floor(py);
let fx = floor(px);
let ly = py - fy;
let lx = px - fx;
var value = (1.0 - ly) * (1.0 - lx) * pixel(base, fy, fx) + (1.0 - ly) * lx * pixel(base, fy, fx + 1.0);
value += ly * (1.0 - lx) * pixel(base, fy + 1.0, fx) + ly * lx * pixel(base, fy + 1.0, fx + 1.0);
store(i, value{" * M[(g * params.taps + tap) * params.places + o]" if masked else ""});"""
    functions = """fn pixel(base: u32, y: f32, x: f32) -> f32 {
    let inside = (y >= 0.0) & (y < f32(params.height)) & (x >= 0.0) & (x < f32(params.width));
    let at = u32(clamp(y, 0.0, f32(params.height))) * params.width + u32(clamp(x, 0.0, f32(params.width)));
    return select(0.0, X[base + at], inside);
}
"""
    names = ("total", "places", "taps", "channels", "height", "width", "offsets", "kernel_width", "out_width")
    signed = ("dilation_y", "dilation_x", "stride_y", "stride_x", "pad_y", "pad_x")
    reads = (Binding("X"), Binding("O"), *((Binding("M"),) if masked else ()))
    return Kernel("deform_columns", body, reads, params=(*((n, "u32") for n in names), *((n, "i32") for n in signed)),
                  functions=functions)


@op("DeformConv", since=19)
class DeformConv(Operator):
    """Conv whose taps lie where the offsets say, weighted by a mask: columns of samples, then a product.

    X: [N, C, H, W] f32, W: [M, C / group, kh, kw], offset: [N, offset_group * kh * kw * 2, oh, ow], B: [M],
    mask: [N, offset_group * kh * kw, oh, ow] -> Y: [N, M, oh, ow].
    """

    dilations: Sequence[int] = ()
    strides: Sequence[int] = ()
    pads: Sequence[int] = ()
    kernel_shape: Sequence[int] = ()
    group: int = 1
    offset_group: int = 1

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernels; the product may be fused onto."""
        x, w, offset = operands(plan, inputs, 3)
        b, mask = (*inputs[3:], None, None)[:2]
        if x.rank != 4 or w.rank != 4:
            raise NoKernel(f"{x.rank - 2} spatial dimensions")
        if any(t is not None and t.type != "f32" for t in (x, w, offset, b, mask)):
            raise NoKernel(f"no kernel for {x.dtype.name}")
        batch, channels, height, width = x.shape
        taps = w.shape[2] * w.shape[3]
        places = offset.shape[2:]
        group, offsets = self.group, self.offset_group
        wanted = (batch, offsets * taps * 2, *places)
        if offset.shape != wanted or w.shape[1] * group != channels or w.shape[0] % group or channels % offsets:
            raise bad(plan, f"weights, groups and offsets that fit {list(x.shape)}",
                      f"{list(w.shape)}, {group}, {offsets} and {list(offset.shape)}")
        if mask is not None and mask.shape != (batch, offsets * taps, *places):
            raise bad(plan, f"a mask of shape {[batch, offsets * taps, *places]}", list(mask.shape))
        dilations, strides = spread(plan, "dilations", self.dilations, 2), spread(plan, "strides", self.strides, 2)
        pads = spread(plan, "pads", self.pads, 4, 0)
        shape = (batch, w.shape[0], *places)
        count = math.prod(places)
        if not math.prod(shape) or not x.size:
            return plan.new(x.dtype, shape)
        total = batch * channels * taps * count
        params: dict[str, int | float] = {
            "total": total, "places": count, "taps": taps, "channels": channels, "height": height, "width": width,
            "offsets": offsets, "kernel_width": w.shape[3], "out_width": places[1], "dilation_y": dilations[0],
            "dilation_x": dilations[1], "stride_y": strides[0], "stride_x": strides[1], "pad_y": pads[0],
            "pad_x": pads[1],
        }
        depth = channels // group * taps
        reads = [plan.storage(t) for t in (x, offset, mask) if t is not None]
        columns = plan.pending(_deform_kernel(mask is not None), reads, params, -(-total // 64), x.dtype,
                               (batch, group, depth, count), flops=16.0 * total)
        plan.storage(columns)
        weights = plan.view(w, (1, group, w.shape[0] // group, depth))
        made = product(plan, weights, columns, shape)
        if b is None:
            return made
        return plan.map("y + b", {"y": made, "b": plan.view(b, (1, b.size, 1, 1))})
