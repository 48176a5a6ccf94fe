"""Operators that read between elements: GridSample, RoiAlign; and Col2Im, which adds windows up."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from .elementwise import operands
from .indices import in_range
from .kernel import Binding, Kernel
from .registry import NoKernel, Operator, op
from .window import bad, spread

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Tensor

__all__: list[str] = []

CHANNELS = 8
"""Channels that one invocation samples at the same place."""

_REFLECT = """fn reflect(v: f32, low: f32, high: f32) -> f32 {
    let range = max(high - low, 1e-30);
    let away = select(select(0.0, v - high, v > high), low - v, v < low);
    let times = trunc(away / range);
    let rest = away - times * range;
    let odd = (u32(times) & 1u) == 1u;
    let back = select(low + rest, high - rest, (v > high) != odd);
    return select(v, back, (v < low) | (v > high));
}
"""
# Where tap i of an axis lies, -1 = outside.
_PLACE = {
    "zeros": "select(-1, i32(i), (i >= 0.0) & (i < f32(size)))",
    "border": "clamp(i32(i), 0, size - 1)",
    "reflection": "clamp(i32(reflect(i, low, high)), 0, size - 1)",
}
_CUBIC = """fn cubic(t: f32) -> vec4f {
    let a = -0.75;
    let d = vec4f(t + 1.0, t, 1.0 - t, 2.0 - t);
    let near = ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0;
    let far = ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a;
    return vec4f(far.x, near.y, near.z, far.w);
}
"""


@lru_cache
def _grid_kernel(mode: str, padding: str, corners: bool, rank: int) -> Kernel:
    """One lane samples up to CHANNELS channels at one place."""
    lines = [f"""let t = group * 64u + lane;
if (t >= params.total) {{ return; }}
let o = t % params.places;
let block = t / params.places % params.blocks;
let n = t / params.places / params.blocks;
let first = block * {CHANNELS}u;
let last = min(first + {CHANNELS}u, params.channels);
let plane = {" * ".join(f"params.size{a}" for a in range(rank))};"""]
    offsets = {"nearest": [0], "linear": [0, 1], "cubic": [-1, 0, 1, 2]}[mode]
    for a in range(rank):
        size = f"f32(params.size{a})"
        low, high = ("0.0", f"{size} - 1.0") if corners else ("-0.5", f"{size} - 0.5")
        lines.append(f"let g{a} = G[(n * params.places + o) * {rank}u + {rank - 1 - a}u];\nlet low{a} = {low};\n"
                     f"let high{a} = {high};")
        value = f"(g{a} + 1.0) / 2.0 * ({size} - 1.0)" if corners else f"((g{a} + 1.0) * {size} - 1.0) / 2.0"
        lines.append(f"var c{a} = {f'round({value})' if mode == 'nearest' else value};")
        # With cubic weights it is the taps that stay within the border, as PyTorch has it.
        if padding == "border" and mode != "cubic":
            lines.append(f"c{a} = select(c{a}, clamp(c{a}, 0.0, {size} - 1.0), (c{a} < low{a}) | (c{a} > high{a}));")
        elif padding == "reflection":
            lines.append(f"c{a} = reflect(c{a}, low{a}, high{a});")
        if mode == "nearest":
            lines.append(f"let f{a} = trunc(c{a});")
        else:
            lines.append(f"let f{a} = floor(c{a});\nlet t{a} = c{a} - f{a};")
            lines.append(f"let w{a} = {f'vec2f(1.0 - t{a}, t{a})' if mode == 'linear' else f'cubic(t{a})'};")
        lines += [f"let p{a}_{k} = place(f{a} + f32({d}), i32(params.size{a}), low{a}, high{a});"
                  for k, d in enumerate(offsets)]
    count = len(offsets)
    lines.append("for (var c = first; c < last; c++) {\nlet base = (n * params.channels + c) * plane;")
    lines.append("var value = 0.0;")
    for taps in itertools.product(range(count), repeat=rank):
        at = "0"
        for a, k in enumerate(taps):
            at = f"({at} * i32(params.size{a}) + p{a}_{k})"
        inside = " & ".join(f"(p{a}_{k} >= 0)" for a, k in enumerate(taps))
        weight = "" if mode == "nearest" else " * ".join(f"w{a}.{'xyzw'[k]}" for a, k in enumerate(taps)) + " * "
        read = f"X[base + u32(max({at}, 0))]"
        lines.append(f"value += {weight}select(0.0, {read}, {inside});" if padding == "zeros" else
                     f"value += {weight}{read};")
    lines.append("store((n * params.channels + c) * params.places + o, value);\n}")
    functions = (_REFLECT if padding == "reflection" else "") + (_CUBIC if mode == "cubic" else "")
    functions += f"fn place(i: f32, size: i32, low: f32, high: f32) -> i32 {{ return {_PLACE[padding]}; }}\n"
    names = ("total", "places", "blocks", "channels", *(f"size{a}" for a in range(rank)))
    return Kernel(f"grid_sample_{mode}", "\n".join(lines), (Binding("X"), Binding("G")),
                  params=tuple((n, "u32") for n in names), functions=functions)


@op("GridSample", since=16)
class GridSample(Operator):
    """y = x read at the places in the grid, -1 to 1 over each axis, last axis first.

    X: [N, C, spatial...] f32, 1 to 3 spatial axes; grid: [N, out..., axes] -> Y: [N, C, out...].
    """

    mode: str = "linear"
    padding_mode: str = "zeros"
    align_corners: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernel; it may be fused onto."""
        x, grid = operands(plan, inputs, 2)
        mode = {"bilinear": "linear", "bicubic": "cubic"}.get(self.mode, self.mode)
        rank = x.rank - 2
        if mode not in ("linear", "nearest", "cubic") or self.padding_mode not in _PLACE:
            raise bad(plan, "a mode and a padding_mode that ONNX has", f"{self.mode} and {self.padding_mode}")
        if rank < 1 or grid.rank != x.rank or grid.shape[0] != x.shape[0] or grid.shape[-1] != rank:
            raise bad(plan, f"a grid that fits {list(x.shape)}", list(grid.shape))
        if x.type != "f32" or grid.type != "f32" or rank > 3:
            raise NoKernel(f"no kernel for {rank} axes of {x.dtype.name} at {grid.dtype.name}")
        batch, channels = x.shape[:2]
        shape = (batch, channels, *grid.shape[1:-1])
        places = math.prod(grid.shape[1:-1])
        if not math.prod(shape) or not x.size:
            return plan.new(x.dtype, shape)
        blocks = -(-channels // CHANNELS)
        params: dict[str, int | float] = {"total": batch * blocks * places, "places": places, "blocks": blocks,
                                          "channels": channels}
        params |= {f"size{a}": n for a, n in enumerate(x.shape[2:])}
        kernel = _grid_kernel(mode, self.padding_mode, bool(self.align_corners), rank)
        taps = {"nearest": 1, "linear": 2, "cubic": 4}[mode] ** rank
        return plan.pending(kernel, [plan.storage(x), plan.storage(grid)], params, -(-int(params["total"]) // 64),
                            x.dtype, shape, flops=2.0 * taps * math.prod(shape))


# The four neighbours of (y, x) and their weights, nothing outside of a border of one element.
_CORNERS = """    let out = (py < -1.0) | (py > f32(params.height)) | (px < -1.0) | (px > f32(params.width));
    var y = max(py, 0.0);
    var x = max(px, 0.0);
    let y0 = min(u32(y), params.height - 1u);
    let x0 = min(u32(x), params.width - 1u);
    let y1 = min(y0 + 1u, params.height - 1u);
    let x1 = min(x0 + 1u, params.width - 1u);
    let ly = select(y - f32(y0), 0.0, y0 == params.height - 1u);
    let lx = select(x - f32(x0), 0.0, x0 == params.width - 1u);
    let w = select(vec4f((1.0 - ly) * (1.0 - lx), (1.0 - ly) * lx, ly * (1.0 - lx), ly * lx), vec4f(), out);
    let v = w * vec4f(X[base + y0 * params.width + x0], X[base + y0 * params.width + x1],
                      X[base + y1 * params.width + x0], X[base + y1 * params.width + x1]);
"""


@lru_cache
def _roi_kernel(mode: str, half: bool) -> Kernel:
    if mode == "avg":
        step, end = "value += (v.x + v.y) + (v.z + v.w);", "value / f32(max(across * down, 1u))"
    else:
        step = "value = select(max(value, best), best, first);\nfirst = false;"
        step = "let best = max(max(v.x, v.y), max(v.z, v.w));\n" + step
        end = "value"
    wide, high = ("x1 - x0", "y1 - y0") if half else ("max(x1 - x0, 1.0)", "max(y1 - y0, 1.0)")
    body = f"""let i = group * 64u + lane;
if (i >= params.total) {{ return; }}
let pw = i % params.out_width;
let ph = i / params.out_width % params.out_height;
let plane = i / params.out_width / params.out_height;
let c = plane % params.channels;
let r = plane / params.channels;
let base = (u32(B[r]) * params.channels + c) * params.height * params.width;
let start = vec4f(R[r * 4u], R[r * 4u + 1u], R[r * 4u + 2u], R[r * 4u + 3u]) * params.scale{' - 0.5' if half else ''};
let bins = bin_size(start);
let across = select(u32(max(ceil(bins.x), 0.0)), params.ratio, params.ratio > 0u);
let down = select(u32(max(ceil(bins.y), 0.0)), params.ratio, params.ratio > 0u);
var value = 0.0;
var first = true;
for (var a = 0u; a < down; a++) {{
    let py = start.y + f32(ph) * bins.y + (f32(a) + 0.5) * bins.y / f32(down);
    for (var b = 0u; b < across; b++) {{
    let px = start.x + f32(pw) * bins.x + (f32(b) + 0.5) * bins.x / f32(across);
{_CORNERS}{step}
    }}
}}
store(i, {end});"""
    functions = f"""fn bin_size(s: vec4f) -> vec2f {{
    let x0 = s.x; let y0 = s.y; let x1 = s.z; let y1 = s.w;
    return vec2f(({wide}) / f32(params.out_width), ({high}) / f32(params.out_height));
}}
"""
    names = ("total", "channels", "height", "width", "out_height", "out_width", "ratio")
    return Kernel(f"roi_align_{mode}", body, (Binding("X"), Binding("R"), Binding("B", "i32")),
                  params=(*((n, "u32") for n in names), ("scale", "f32")), functions=functions)


@op("RoiAlign", since=16)
class RoiAlign(Operator):
    """y = each region of x, in bins, sampled and averaged (or its maximum).

    X: [N, C, H, W] f32; rois: [R, 4] x1, y1, x2, y2; batch_indices: int64 [R]
    -> Y: [R, C, output_height, output_width].
    """

    coordinate_transformation_mode: str = "half_pixel"
    mode: str = "avg"
    output_height: int = 1
    output_width: int = 1
    sampling_ratio: int = 0
    spatial_scale: float = 1.0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernel; it may be fused onto."""
        x, rois, batches = operands(plan, inputs, 3)
        if x.rank != 4 or rois.rank != 2 or rois.shape[1] != 4 or batches.shape != rois.shape[:1]:
            raise bad(plan, "4 dimensions, regions of 4 numbers and an index for each",
                      f"{list(x.shape)}, {list(rois.shape)} and {list(batches.shape)}")
        if self.mode not in ("avg", "max"):
            raise bad(plan, "mode avg or max", self.mode)
        if x.type != "f32" or rois.type != "f32":
            raise NoKernel(f"no kernel for {x.dtype.name}")
        shape = (rois.shape[0], x.shape[1], self.output_height, self.output_width)
        if not math.prod(shape):
            return plan.new(x.dtype, shape)
        where = in_range(plan, batches, x.shape[0])
        params: dict[str, int | float] = {
            "total": math.prod(shape), "channels": x.shape[1], "height": x.shape[2], "width": x.shape[3],
            "out_height": shape[2], "out_width": shape[3], "ratio": max(self.sampling_ratio, 0),
            "scale": self.spatial_scale,
        }
        kernel = _roi_kernel(self.mode, self.coordinate_transformation_mode == "half_pixel")
        reads = [plan.storage(t) for t in (x, rois, where)]
        return plan.pending(kernel, reads, params, -(-math.prod(shape) // 64), x.dtype, shape,
                            flops=32.0 * math.prod(shape))


@op("RoiAlign", since=10)
class RoiAlign10(RoiAlign):
    """RoiAlign before opset 16: no half pixels."""

    coordinate_transformation_mode: str = "output_half_pixel"


@lru_cache
def _col2im_kernel() -> Kernel:
    """One lane adds up the windows that cover one element, in three axes."""
    lines = ["let i = group * 64u + lane;\nif (i >= params.total) { return; }\nvar rest = i32(i);"]
    for a in (2, 1, 0):
        lines.append(f"let at{a} = rest % params.size{a} + params.pad{a};\nrest /= params.size{a};")
    lines.append("var value = 0.0;\nvar tap = rest * params.kernel0 * params.kernel1 * params.kernel2;")
    for a in range(3):
        lines.append(f"for (var k{a} = 0; k{a} < params.kernel{a}; k{a}++) {{\n"
                     f"let from{a} = at{a} - k{a} * params.dilation{a};\nlet block{a} = from{a} / params.stride{a};")
    inside = " & ".join(f"(from{a} >= 0) & (block{a} * params.stride{a} == from{a}) & (block{a} < params.blocks{a})"
                        for a in range(3))
    lines.append(f"""let place = ((tap * params.blocks0 + block0) * params.blocks1 + block1) * params.blocks2 + block2;
if ({inside}) {{ value += X[u32(place)]; }}
tap++;
}} }} }}
store(i, value);""")
    names = [f"{n}{a}" for a in range(3) for n in ("size", "pad", "kernel", "dilation", "stride", "blocks")]
    return Kernel("col2im", "\n".join(lines), (Binding("X"),), params=(("total", "u32"), *((n, "i32") for n in names)))


@op("Col2Im", since=18)
class Col2Im(Operator):
    """y = the sum of the windows that cover each element.

    X: [N, C * window, blocks] f32; image_shape, block_shape: int64, 1 to 3 numbers -> Y: [N, C, image...].
    """

    dilations: Sequence[int] = ()
    pads: Sequence[int] = ()
    strides: Sequence[int] = ()

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernel; it may be fused onto."""
        x, image, block = operands(plan, inputs, 3)
        sizes, kernel = plan.ints(image), plan.ints(block)
        rank = len(sizes)
        dilations = spread(plan, "dilations", self.dilations, rank)
        strides = spread(plan, "strides", self.strides, rank)
        pads = spread(plan, "pads", self.pads, 2 * rank, 0)
        if x.type != "f32" or rank > 3:
            raise NoKernel(f"no kernel for {rank} axes of {x.dtype.name}")
        blocks = [(n + pads[a] + pads[a + rank] - dilations[a] * (kernel[a] - 1) - 1) // strides[a] + 1
                  for a, n in enumerate(sizes)] if len(kernel) == rank else []
        if x.rank != 3 or not blocks or x.shape[1] % math.prod(kernel) or x.shape[2] != math.prod(blocks):
            raise bad(plan, f"windows of {kernel} that make up {sizes}", list(x.shape))
        shape = (x.shape[0], x.shape[1] // math.prod(kernel), *sizes)
        count = math.prod(shape)
        if not count:
            return plan.new(x.dtype, shape)
        params: dict[str, int | float] = {"total": count}
        for name, values, fill in (("size", sizes, 1), ("pad", pads[:rank], 0), ("kernel", kernel, 1),
                                   ("dilation", dilations, 1), ("stride", strides, 1), ("blocks", blocks, 1)):
            params |= {f"{name}{a}": v for a, v in enumerate([*[fill] * (3 - rank), *values])}
        return plan.pending(_col2im_kernel(), [plan.storage(x)], params, -(-count // 64), x.dtype, shape,
                            flops=float(count * math.prod(kernel)))
