"""Conv for software adapters: each lane holds a tile of output channels x output elements in registers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from .conv_space import Space, place
from .conv_weights import panels
from .kernel import Binding, Kernel

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Shape, Tensor

__all__ = ["Tile", "choose_tile", "lower_tiles"]

LANES = 8
UNROLL = 8
"""The widest row of taps that is unrolled."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one lane computes: channels (a multiple of 4) x pixels (4, 8 or 16)."""

    channels: int
    pixels: int


def choose_tile(outputs: int, space: Space, images: int) -> Tile:
    """The tile for so many output channels per group."""
    pixels = 16 if space.length > 64 else 8 if space.length > 16 else 4
    channels = 16 if outputs > 8 else 8 if outputs > 4 else 4
    return Tile(channels, pixels)


@dataclass(frozen=True, slots=True)
class _Form:
    """What the shader depends on."""

    tile: Tile
    kernel: tuple[int, int, int]
    strides: tuple[int, int, int]
    dilations: tuple[int, int, int]
    whole: bool
    """Four outputs that are computed together also lie together."""


def _row(form: _Form) -> str:
    """All taps of one row of the kernel, for one input channel."""
    tile, taps, stride, dilation = form.tile, form.kernel[2], form.strides[2], form.dilations[2]
    vectors, quads = tile.pixels // 4, tile.channels // 4
    lines: list[str] = []
    if taps > UNROLL:
        lines.append(f"for (var kw = 0u; kw < {taps}u; kw++) {{")
        lines.append(f"let t = kw * {dilation}u; let at = (row + t % {stride}u * params.plane) * 4u + t / {stride}u;")
        for j in range(vectors):
            lines.append(f"let x0_{j} = vec4f({', '.join(f'X[at + {4 * j + k}u]' for k in range(4))});")
        lines += _products(tile, 0)
        lines.append(f"at_w += {quads}u; }}")
        return "\n".join(lines)
    loaded: set[str] = set()
    for tap in range(taps):
        phase, shift = tap * dilation % stride, tap * dilation // stride
        for v in range(shift // 4, (shift + tile.pixels - 1) // 4 + 1):
            name = f"v{phase}_{v}"
            if name not in loaded:
                loaded.add(name)
                offset = f" + {phase}u * params.plane" if phase else ""
                lines.append(f"let {name} = X[row{offset} + {v}u];")
        for j in range(vectors):
            first, part = divmod(shift + 4 * j, 4)
            if part == 0:
                value = f"v{phase}_{first}"
            else:
                value = f"vec4f(v{phase}_{first}.{'xyzw'[part:]}, v{phase}_{first + 1}.{'xyzw'[:part]})"
            lines.append(f"let x{tap}_{j} = {value};")
        lines += _products(tile, tap)
    lines.append(f"at_w += {taps * quads}u;")
    return "\n".join(lines)


def _products(tile: Tile, tap: int) -> list[str]:
    quads = tile.channels // 4
    lines = [f"let w{tap}_{q} = W[at_w + {tap * quads + q}u];" for q in range(quads)]
    for i in range(tile.channels):
        for j in range(tile.pixels // 4):
            lines.append(f"c{i}_{j} = fma(vec4f(w{tap}_{i // 4}[{i % 4}]), x{tap}_{j}, c{i}_{j});")
    return lines


@lru_cache
def _tile_kernel(form: _Form) -> Kernel:
    tile = form.tile
    vectors, quads = tile.pixels // 4, tile.channels // 4
    kd, kh, _ = form.kernel
    (sd, sh, sw), (dd, dh, _) = form.strides, form.dilations
    lines = [f"""let strip = group % params.across * {LANES}u + lane;
let rest = group / params.across;
let panel = rest % params.panels;
let image = rest / params.panels;
let part = panel / params.panels_per_group;
let channel = panel % params.panels_per_group * {tile.channels}u;
if (strip * {tile.pixels}u >= params.length) {{ return; }}
var at_w = panel * params.panel_size;
var at_x = (image * params.parts + part) * params.inputs * params.channel + strip * {vectors}u;"""]
    lines += [f"let b{q} = W[at_w + {q}u];" for q in range(quads)]
    lines += [f"var c{i}_{j} = vec4f(b{i // 4}[{i % 4}]);" for i in range(tile.channels) for j in range(vectors)]
    lines.append(f"at_w += {quads}u;\nfor (var c = 0u; c < params.inputs; c++) {{")
    row = "at_x"
    if kd > 1:
        lines.append(f"for (var kd = 0u; kd < {kd}u; kd++) {{ let td = kd * {dd}u;")
        row += f" + td % {sd}u * {sh * sw}u * params.plane + td / {sd}u * params.slice"
    if kh > 1:
        lines.append(f"for (var kh = 0u; kh < {kh}u; kh++) {{ let th = kh * {dh}u;")
        row += f" + th % {sh}u * {sw}u * params.plane + th / {sh}u * params.width"
    lines += [f"{{ let row = {row};", _row(form), "}", "}" * ((kd > 1) + (kh > 1)), "at_x += params.channel;\n}"]
    lines.append("let first = (image * params.parts + part) * params.outputs + channel;")
    limit = "" if tile.channels == 4 else ""
    for j in range(vectors):
        lines.append(f"""{{
let p = strip * {vectors}u + {j}u;
let y = p / params.width;
let x = (p % params.width) * 4u;
let z = y / params.height;
let oy = y % params.height;
if (x < params.out_w && oy < params.out_h && z < params.out_d) {{
let at = first * params.out_size + (z * params.out_h + oy) * params.out_w + x;
{limit}""")
        for i in range(tile.channels):
            lines.append(f"if (channel + {i}u < params.outputs) {{ let o = at + {i}u * params.out_size;")
            if form.whole:
                lines.append(f"store4(o / 4u, c{i}_{j});")
            else:
                lines.append(f"store(o, c{i}_{j}.x);")
                lines += [f"if (x + {k}u < params.out_w) {{ store(o + {k}u, c{i}_{j}.{'xyzw'[k]}); }}" for k in (1, 2, 3)]
            lines.append("}")
        lines.append("}}")
    names = ("across", "panels", "panels_per_group", "length", "panel_size", "parts", "inputs", "outputs", "channel", "plane",
             "slice", "width", "height", "out_w", "out_h", "out_d", "out_size")
    loop = form.kernel[2] > UNROLL
    name = f"conv_{'x'.join(map(str, form.kernel))}_tile{tile.channels}x{tile.pixels}"
    return Kernel(name, "\n".join(lines), (Binding("X", "f32" if loop else "vec4f"), Binding("W", "vec4f")),
                  params=tuple((n, "u32") for n in names), width=4 if form.whole else 1, lanes=LANES)


def lower_tiles(
    plan: Lowering, x: Tensor, w: Tensor, b: Tensor | None, group: int, space: Space, shape: Shape, tile: Tile,
) -> Tensor:
    """Emit Conv in register tiles; the result is pending."""
    images, inputs, outputs = x.shape[0], w.shape[1], w.shape[0] // group
    d, h, o = space.axes
    kernel = _tile_kernel(_Form(
        tile, (d.kernel, h.kernel, o.kernel), (d.stride, h.stride, o.stride), (d.dilation, h.dilation, o.dilation),
        o.out % 4 == 0,
    ))
    source = place(plan, x, space, images * group * inputs)
    weights = panels(plan, w, b, group, tile.channels)
    per_group = -(-outputs // tile.channels)
    taps = d.kernel * h.kernel * o.kernel
    across = -(-space.length // (tile.pixels * LANES))
    params: dict[str, int | float] = {
        "across": across, "panels": per_group * group, "panels_per_group": per_group, "length": space.length,
        "panel_size": (inputs * taps + 1) * tile.channels // 4, "parts": group, "inputs": inputs, "outputs": outputs,
        "channel": space.channel // 4, "plane": space.plane // 4, "slice": space.height * space.width // 4,
        "width": space.width // 4, "height": space.height, "out_w": o.out, "out_h": h.out, "out_d": d.out,
        "out_size": d.out * h.out * o.out,
    }
    flops = 2.0 * images * group * outputs * inputs * taps * d.out * h.out * o.out
    groups = images * group * per_group * across
    return plan.pending(kernel, [source, weights], params, groups, x.dtype, shape, flops=flops)
