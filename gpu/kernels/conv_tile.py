"""Conv for software adapters: each lane holds a tile of output channels x output elements in registers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from .conv_space import PARAMS, Space, place, sizes, stores
from .conv_weights import panels
from .kernel import Binding, Kernel
from .matmul_registers import NARROW

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Shape, Tensor

__all__ = ["Tile", "choose_tile", "lower_tiles", "turns"]

LANES = 8
UNROLL = 8
"""The widest row of taps that is unrolled."""
COLUMN = 3
"""The highest kernel of width 1 that one turn of a narrow adapter's loop takes."""
PAIR = 2
"""Input channels of a 1x1 kernel that one turn of a narrow adapter's loop takes."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one lane computes: channels (a multiple of 4) x pixels (4, 8 or 16). A workgroup has so many lanes."""

    channels: int
    pixels: int
    lanes: int = LANES


def choose_tile(outputs: int, space: Space, subgroup: int) -> Tile:
    """The tile for so many output channels per group: large, but where too many lanes would idle.

    Args:
        outputs: channels of one group.
        space: where the input lies.
        subgroup: invocations in a subgroup, 0 = unknown. Where lanes can share weights, more
            channels than pixels pay; where each loads all of them, as many of both. Narrow
            adapters want small shaders.
    """
    if subgroup == NARROW:
        few = outputs <= 4 or space.axes[1].kernel * space.axes[2].kernel > 1
        return Tile(4 if few else 8, 8 if space.length > 4 * NARROW else 4, NARROW)
    channels = 16 if outputs > 8 else 8 if outputs > 4 else 4
    price = {16: 0.8, 8: 1.2, 4: 1.8}
    if subgroup >= LANES:
        price = {8: 1.0, 4: 1.5}
        if outputs > 16 and -(-outputs // 16) % 2 == 0:
            channels = 32

    def cost(pixels: int) -> float:
        return -(-space.length // (LANES * pixels)) * pixels * price[pixels]

    return Tile(channels, min(price, key=cost))


@dataclass(frozen=True, slots=True)
class _Form:
    """What the shader depends on."""

    tile: Tile
    kernel: tuple[int, int, int]
    strides: tuple[int, int, int]
    dilations: tuple[int, int, int]
    whole: bool
    """Four outputs that are computed together also lie together."""
    shared: bool
    """The lanes of a workgroup, one subgroup, load the weights together and hand them to each other."""
    together: int = 1
    """Input channels that one turn of the loop takes."""

    @property
    def narrow(self) -> bool:
        """Four lanes, each of which loads one element of four weights."""
        return self.tile.lanes == NARROW

    @property
    def column(self) -> bool:
        """The kernel is one short column, which one turn of a narrow adapter's loop takes."""
        return self.narrow and self.kernel[2] == 1 and 1 < self.kernel[1] <= COLUMN


def _row(form: _Form) -> str:
    """All taps of one row of the kernel, for one input channel."""
    tile, taps, stride, dilation = form.tile, form.kernel[2], form.strides[2], form.dilations[2]
    vectors, quads = tile.pixels // 4, tile.channels // 4
    lines: list[str] = []
    if taps > UNROLL:
        lines.append(f"for (var kw = 0u; kw < {taps}u; kw += 4u) {{")
        for n in range(4):
            lines.append(f"{{ let t = (kw + {n}u) * {dilation}u;")
            if n:
                lines[-1] = f"if (kw + {n}u < {taps}u) " + lines[-1]
            lines.append(f"let at = (row + t % {stride}u * params.plane) * 4u + t / {stride}u;")
            lines += _shared(form, 1)
            for j in range(vectors):
                lines.append(f"let x0_{j} = vec4f({', '.join(f'X[at + {4 * j + k}u]' for k in range(4))});")
            lines += _products(form, 0)
            lines.append(f"at_w += {quads}u; }}")
        lines.append("}")
        return "\n".join(lines)
    loaded: set[str] = set()
    lines += _shared(form, taps)
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
        lines += _products(form, tap)
    lines.append(f"at_w += {taps * quads}u;")
    return "\n".join(lines)


def _shared(form: _Form, taps: int) -> list[str]:
    """The lanes load the weights of so many taps, each a part of them."""
    quads = taps * form.tile.channels // 4
    if form.narrow:
        return [f"let l{n} = W[(at_w + {n}u) * 4u + lane];" for n in range(quads)]
    return [f"let l{n} = W[at_w + {n * LANES}u + lane];" for n in range(-(-quads // LANES))] if form.shared else []


def _products(form: _Form, tap: int) -> list[str]:
    tile = form.tile
    quads = tile.channels // 4
    numbers = range(tap * quads, (tap + 1) * quads)
    if form.narrow:
        weights = [f"vec4f({', '.join(f'subgroupBroadcast(l{n}, {k}u)' for k in range(4))})" for n in numbers]
    elif form.shared:
        weights = [f"subgroupBroadcast(l{n // LANES}, {n % LANES}u)" for n in numbers]
    else:
        weights = [f"W[at_w + {n}u]" for n in numbers]
    lines = [f"let w{tap}_{q} = {weight};" for q, weight in enumerate(weights)]
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
    lines = [f"""let strip = group % params.across * {tile.lanes}u + lane;
let rest = group / params.across;
let panel = rest % params.panels;
let image = rest / params.panels;
let part = panel / params.panels_per_part;
let channel = panel % params.panels_per_part * {tile.channels}u;
var at_w = panel * params.panel_size;
var at_x = (image * params.parts + part) * params.inputs * params.channel + strip * {vectors}u;"""]
    if form.narrow:
        for q in range(quads):
            lines.append(f"let b{q} = vec4f({', '.join(f'W[(at_w + {q}u) * 4u + {k}u]' for k in range(4))});")
    else:
        lines += [f"let b{q} = W[at_w + {q}u];" for q in range(quads)]
    lines += [f"var c{i}_{j} = vec4f(b{i // 4}[{i % 4}]);" for i in range(tile.channels) for j in range(vectors)]
    lines.append(f"at_w += {quads}u;\nfor (var c = 0u; c < params.inputs; c += {form.together}u) {{")
    row = "at_x"
    if kd > 1:
        lines.append(f"for (var kd = 0u; kd < {kd}u; kd++) {{ let td = kd * {dd}u;")
        row += f" + td % {sd}u * {sh * sw}u * params.plane + td / {sd}u * params.slice"
    if kh > 1:
        if not form.column:
            lines.append(f"for (var kh = 0u; kh < {kh}u; kh++) {{ let th = kh * {dh}u;")
        row += f" + th % {sh}u * {sw}u * params.plane + th / {sh}u * params.width"
    turn = [f"{{ let row = {row};", _row(form), "}"]
    if form.column:
        turn = [line for k in range(kh) for line in (f"{{ let th = {k * dh}u;", *turn, "}")]
    turn += ["}" * ((kd > 1) + (kh > 1 and not form.column)), "at_x += params.channel;"]
    lines += [*turn * form.together, "}"]
    lines.append(stores([f"strip * {vectors}u + {j}u" for j in range(vectors)], tile.channels, form.whole))
    loop = form.kernel[2] > UNROLL
    name = f"conv_{'x'.join(map(str, form.kernel))}_tile{tile.channels}x{tile.pixels}"
    return Kernel(name, "\n".join(lines), (Binding("X", "f32" if loop else "vec4f"),
                  Binding("W", "f32" if form.narrow else "vec4f")), params=PARAMS, width=4 if form.whole else 1,
                  lanes=tile.lanes)


def turns(inputs: int, space: Space) -> int:
    """How often the loops of one lane turn, all together; see MOST_TURNS."""
    d, h, w = (axis.kernel for axis in space.axes)
    return inputs * (1 + d * (1 + h * (1 + (-(-w // 4) if w > UNROLL else 0))))


def lower_tiles(
    plan: Lowering, x: Tensor, w: Tensor, b: Tensor | None, group: int, space: Space, shape: Shape, tile: Tile,
) -> Tensor:
    """Emit Conv in register tiles; the result is pending."""
    images, inputs, outputs = x.shape[0], w.shape[1], w.shape[0] // group
    d, h, o = space.axes
    taps = d.kernel * h.kernel * o.kernel
    kernel = _tile_kernel(_Form(
        tile, (d.kernel, h.kernel, o.kernel), (d.stride, h.stride, o.stride), (d.dilation, h.dilation, o.dilation),
        o.out % 4 == 0, plan.target.subgroup >= LANES or tile.lanes == NARROW,
        PAIR if tile.lanes == NARROW and taps == 1 and inputs % PAIR == 0 else 1,
    ))
    source = place(plan, x, space, images * group * inputs)
    weights = panels(plan, w, b, group, tile.channels)
    per_group = -(-outputs // tile.channels)
    across = -(-space.length // (tile.pixels * tile.lanes))
    params = sizes(space, group, per_group, inputs, outputs, tile.channels, across)
    flops = 2.0 * images * group * outputs * inputs * taps * d.out * h.out * o.out
    groups = images * group * per_group * across
    return plan.pending(kernel, [source, weights], params, groups, x.dtype, shape, flops=flops)
