"""Conv for hardware: a matrix product whose right side is gathered from the flat lines into workgroup memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from .conv_space import PARAMS, Space, place, sizes, stores
from .conv_weights import panels
from .kernel import Binding, Kernel

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Shape, Tensor

__all__ = ["choose_channels", "lower_blocked"]

LANES = 256
DEPTH = 16
"""Products that are summed up between two barriers."""


def choose_channels(outputs: int) -> int:
    """Output channels of one workgroup: 16, 32 or 64. Each lane computes four channels x four pixels."""
    return 64 if outputs > 32 else 32 if outputs > 16 else 16


@dataclass(frozen=True, slots=True)
class _Form:
    """What the shader depends on."""

    channels: int
    kernel: tuple[int, int, int]
    strides: tuple[int, int, int]
    dilations: tuple[int, int, int]
    whole: bool


def _distance(form: _Form) -> str:
    """WGSL: how far tap number `tap` of a channel lies from the output's place on the flat line, in elements."""
    (_, kh, kw), (sd, sh, sw), (dd, dh, dw) = form.kernel, form.strides, form.dilations
    return f"""fn distance(tap: u32) -> u32 {{
let x = tap % {kw}u * {dw}u;
let y = tap / {kw}u % {kh}u * {dh}u;
let z = tap / {kw * kh}u * {dd}u;
let phase = (z % {sd}u * {sh}u + y % {sh}u) * {sw}u + x % {sw}u;
return (phase * params.plane + z / {sd}u * params.slice + y / {sh}u * params.width) * 4u + x / {sw}u;
}}
"""


@lru_cache
def _gemm_kernel(form: _Form) -> Kernel:
    quads = form.channels // 4
    vectors = LANES // quads
    taps = form.kernel[0] * form.kernel[1] * form.kernel[2]
    loads_w, loads_x = -(-DEPTH * quads // LANES), DEPTH * vectors // LANES
    functions = _distance(form) + (
        f"var<workgroup> left: array<vec4f, {DEPTH * quads}>;\nvar<workgroup> right: array<vec4f, {DEPTH * vectors}>;\n"
    )
    fill = []
    for n in range(loads_w):
        fill.append(f"""{{ let e = lane + {n * LANES}u;
if (e < {DEPTH * quads}u) {{
    let row = k + e / {quads}u;
    left[e] = select(vec4f(), W[at_w + min(row, depth - 1u) * {quads}u + e % {quads}u], row < depth);
}} }}""")
    for n in range(loads_x):
        fill.append(f"""{{ let e = lane + {n * LANES}u;
let wanted = k + e / {vectors}u;
let row = min(wanted, depth - 1u);
let at = at_x + row / {taps}u * params.channel * 4u + distance(row % {taps}u) + (begin + e % {vectors}u) * 4u;
right[e] = select(vec4f(), vec4f(X[at], X[at + 1u], X[at + 2u], X[at + 3u]), wanted < depth); }}""")
    products = "\n".join(
        f"let a{n} = left[{n * quads}u + quad];\nlet b{n} = right[{n * vectors}u + vector];\n"
        + "\n".join(f"c{i}_0 = fma(vec4f(a{n}[{i}]), b{n}, c{i}_0);" for i in range(4))
        for n in range(DEPTH)
    )
    joined = "\n".join(fill)
    body = f"""let begin = group % params.across * {vectors}u;
let rest = group / params.across;
let panel = rest % params.panels;
let image = rest / params.panels;
let part = panel / params.panels_per_part;
let quad = lane / {vectors}u;
let vector = lane % {vectors}u;
let channel = panel % params.panels_per_part * {form.channels}u + quad * 4u;
let depth = params.inputs * {taps}u;
let at_w = panel * params.panel_size + {quads}u;
let at_x = (image * params.parts + part) * params.inputs * params.channel * 4u;
let bias = W[panel * params.panel_size + quad];
var c0_0 = vec4f(bias.x); var c1_0 = vec4f(bias.y); var c2_0 = vec4f(bias.z); var c3_0 = vec4f(bias.w);
for (var k = 0u; k < depth; k += {DEPTH}u) {{
{joined}
workgroupBarrier();
{products}
workgroupBarrier();
}}
{stores(["begin + vector"], 4, form.whole)}"""
    name = f"conv_{'x'.join(map(str, form.kernel))}_gemm{form.channels}"
    return Kernel(name, body, (Binding("X"), Binding("W", "vec4f")), params=PARAMS, width=4 if form.whole else 1,
                  lanes=LANES, functions=functions)


def lower_blocked(
    plan: Lowering, x: Tensor, w: Tensor, b: Tensor | None, group: int, space: Space, shape: Shape, channels: int,
) -> Tensor:
    """Emit Conv as a blocked matrix product; the result is pending."""
    images, inputs, outputs = x.shape[0], w.shape[1], w.shape[0] // group
    d, h, o = space.axes
    kernel = _gemm_kernel(_Form(
        channels, (d.kernel, h.kernel, o.kernel), (d.stride, h.stride, o.stride), (d.dilation, h.dilation, o.dilation),
        o.out % 4 == 0,
    ))
    source = place(plan, x, space, images * group * inputs)
    weights = panels(plan, w, b, group, channels)
    per_group = -(-outputs // channels)
    across = -(-space.length // (LANES // (channels // 4) * 4))
    params = sizes(space, group, per_group, inputs, outputs, channels, across)
    flops = 2.0 * images * w.size * d.out * h.out * o.out
    groups = images * group * per_group * across
    return plan.pending(kernel, [source, weights], params, groups, x.dtype, shape, flops=flops)
