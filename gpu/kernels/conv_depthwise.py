"""Conv with one input channel per output: each lane holds a block of output rows in registers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from .conv_space import Space, kept, place
from .conv_weights import panels
from .kernel import Binding, Kernel
from .matmul_registers import NARROW

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Shape, Tensor

__all__ = ["Block", "choose_block", "lower_blocks"]

_MOST_PRODUCTS = 800
"""Multiplications that are unrolled, at most: more take too long to compile."""


@dataclass(frozen=True, slots=True)
class Block:
    """What one lane computes: rows x pixels (a multiple of 4)."""

    rows: int
    pixels: int


def choose_block(space: Space, cpu: bool, subgroup: int = 0) -> Block | None:
    """The block for a window, None where it is too large for this way.

    Args:
        space: where the input lies.
        cpu: a software adapter.
        subgroup: invocations in a subgroup, 0 = unknown. Narrow adapters want small shaders.
    """
    depth, height, width = space.axes
    taps = height.kernel * width.kernel
    if not depth.plain or depth.size != 1 or taps > _MOST_PRODUCTS // 2:
        return None
    if not cpu:
        return Block(1, 4)
    pixels = 4 if width.out <= 4 or subgroup == NARROW else 8 if width.out <= 8 else 16
    rows = 1 if height.out == 1 else 2 if height.out % 4 in (1, 2) and height.out < 8 else 4
    while rows > 1 and taps * rows * pixels // 4 > _MOST_PRODUCTS:
        rows //= 2
    while pixels > 4 and taps * rows * pixels // 4 > _MOST_PRODUCTS:
        pixels //= 2
    return Block(rows, pixels)


@dataclass(frozen=True, slots=True)
class _Form:
    """What the shader depends on: kernel, strides and dilations are (height, width)."""

    block: Block
    kernel: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    whole: bool
    lanes: int


@lru_cache
def _block_kernel(form: _Form) -> Kernel:
    block, (kh, kw) = form.block, form.kernel
    (sh, sw), (dh, dw) = form.strides, form.dilations
    vectors = block.pixels // 4
    lines = [f"""let i = group * {form.lanes}u + lane;
if (i >= params.count) {{ return; }}
let strip = i % params.across;
let n = i / params.across;
let y = n % params.down * {block.rows}u;
let map = n / params.down;
let at = map / params.multiplier * params.channel + y * params.width + strip * {vectors}u;
let at_w = map % params.maps * {kh * kw + 1}u;
let bias = W[at_w];"""]
    lines += [f"let w{t} = W[at_w + {t + 1}u];" for t in range(kh * kw)]
    lines += [f"var c{o}_{j} = vec4f(bias);" for o in range(block.rows) for j in range(vectors)]
    rows: dict[int, list[tuple[int, int]]] = {}
    for o in range(block.rows):
        for k in range(kh):
            rows.setdefault(o * sh + k * dh, []).append((o, k))
    for t in sorted(rows):
        lines.append(f"{{ let row = at + {t % sh * sw}u * params.plane + {t // sh}u * params.width;")
        loaded: set[str] = set()
        for tap in range(kw):
            phase, shift = tap * dw % sw, tap * dw // sw
            for v in range(shift // 4, (shift + block.pixels - 1) // 4 + 1):
                if (name := f"v{phase}_{v}") not in loaded:
                    loaded.add(name)
                    lines.append(f"let {name} = X[row + {phase}u * params.plane + {v}u];")
            for j in range(vectors):
                first, part = divmod(shift + 4 * j, 4)
                value = f"v{phase}_{first}"
                if part:
                    value = f"vec4f({value}.{'xyzw'[part:]}, v{phase}_{first + 1}.{'xyzw'[:part]})"
                lines.append(f"let x{tap}_{j} = {value};")
                lines += [f"c{o}_{j} = fma(vec4f(w{k * kw + tap}), x{tap}_{j}, c{o}_{j});" for o, k in rows[t]]
        lines.append("}")
    lines.append(f"let x = strip * {block.pixels}u;\nvar first = (map * params.out_h + y) * params.out_w + x;")
    lines += [f"let few{j} = min(max(params.out_w, x + {4 * j}u) - x - {4 * j}u, 4u);" for j in range(vectors)]
    lines.append(f"let filled = min(params.out_h - y, {block.rows}u);\nfor (var o = 0u; o < filled; o++) {{")
    lines += [kept(f"few{j}", f"(first + {4 * j}u)", f"c0_{j}", form.whole) for j in range(vectors)]
    lines += [f"c{o}_{j} = c{o + 1}_{j};" for o in range(block.rows - 1) for j in range(vectors)]
    lines.append("first += params.out_w; }")
    names = ("count", "across", "down", "multiplier", "maps", "channel", "plane", "width", "out_w", "out_h")
    return Kernel(f"conv_depthwise_{kh}x{kw}", "\n".join(lines), (Binding("X", "vec4f"), Binding("W")),
                  params=tuple((n, "u32") for n in names), width=4 if form.whole else 1, lanes=form.lanes)


def lower_blocks(
    plan: Lowering, x: Tensor, w: Tensor, b: Tensor | None, space: Space, shape: Shape, block: Block,
) -> Tensor:
    """Emit Conv whose groups have one input channel each; the result is pending."""
    images, channels, maps = x.shape[0], x.shape[1], w.shape[0]
    _, h, o = space.axes
    kernel = _block_kernel(_Form(block, (h.kernel, o.kernel), (h.stride, o.stride), (h.dilation, o.dilation),
                                 o.out % 4 == 0, 8 if plan.target.cpu else 64))
    source = place(plan, x, space, images * channels)
    weights = panels(plan, w, b, maps, 1)
    across, down = -(-o.out // block.pixels), -(-h.out // block.rows)
    count = images * maps * across * down
    params: dict[str, int | float] = {
        "count": count, "across": across, "down": down, "multiplier": maps // channels, "maps": maps,
        "channel": space.channel // 4, "plane": space.plane // 4, "width": space.width // 4,
        "out_w": o.out, "out_h": h.out,
    }
    flops = 2.0 * math.prod(shape) * h.kernel * o.kernel
    return plan.pending(kernel, [source, weights], params, -(-count // kernel.lanes), x.dtype, shape, flops=flops)
