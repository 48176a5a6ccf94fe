"""Where Conv finds its input: one flat line per channel, so that every tap is a fixed distance away.

An input without padding and strides is read where it lies. Any other is copied once: padded, its
rows rounded up to four elements, and split into one plane for each phase of the strides. Output
element p of the flat line then reads p + distance(tap), whatever the stride, and all loads of
four elements are aligned. Elements of the line between rows are computed and not stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from .kernel import Binding, Kernel, Scalar
from .window import Axis

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Storage, Tensor

__all__ = ["PARAMS", "Space", "flatten", "kept", "place", "sizes", "stores"]


@dataclass(frozen=True, slots=True)
class Space:
    """The flat lines of all channels.

    Attributes:
        axes: three windows, depth, height, width.
        depth, height, width: elements of one plane; width is a multiple of 4.
        copied: whether the input must be copied for it.
    """

    axes: tuple[Axis, Axis, Axis]
    depth: int
    height: int
    width: int
    copied: bool

    @property
    def plane(self) -> int:
        """Elements of one phase of one channel."""
        return self.depth * self.height * self.width

    @property
    def channel(self) -> int:
        """Elements from one channel to the next."""
        return self.plane * math.prod(axis.stride for axis in self.axes)

    @property
    def length(self) -> int:
        """Elements of the flat line up to the last output element."""
        d, h, w = (axis.out for axis in self.axes)
        return ((d - 1) * self.height + h - 1) * self.width + w if d and h and w else 0


def flatten(axes: Sequence[Axis]) -> Space:
    """Bring one to three axes into the form that needs the least work."""
    axes = (*(Axis(1, 1) for _ in range(3 - len(axes))), *axes)
    if all(axis.plain for axis in axes):
        size = math.prod(axis.size for axis in axes)
        axes = (Axis(1, 1), Axis(1, 1), Axis(size, size))
    for _ in range(2):
        if axes[2].plain and axes[2].size == 1:
            axes = (Axis(1, 1), axes[0], axes[1])
    d, h, w = axes
    simple = all(a.stride == 1 and a.begin == 0 and a.end == 0 for a in axes)
    if simple and w.size % 4 == 0:
        return Space((d, h, w), d.size, h.size, w.size, False)
    extents = [a.out + (a.kernel - 1) * a.dilation // a.stride for a in axes]
    return Space((d, h, w), extents[0], extents[1], -(-extents[2] // 4) * 4, True)


_CHUNK = 16
"""Vectors of a row that one lane copies on a software adapter, where divisions are dear."""

_PARAMS: tuple[tuple[str, Scalar], ...] = (
    *((name, "u32") for name in ("count", "rows", "quads", "height", "depth")),
    *((f"{name}{a}", "i32") for a in range(3) for name in ("size", "stride", "begin")),
)


@lru_cache
def _copy_kernel(cpu: bool) -> Kernel:
    """Four elements at a time; the phases lie between channel and plane.

    Software adapter: a lane copies a piece of a row. Hardware: a lane copies four elements.
    """
    lanes = 8 if cpu else 64
    first = f"""let i = group * {lanes}u + lane;
if (i >= params.count) {{ return; }}
"""
    first += "var n = i % params.rows;\nlet row = n;\n" if cpu else "var n = i / params.quads;\nlet row = n;\n"
    body = first + """let y = i32(n % params.height); n = n / params.height;
let z = i32(n % params.depth); n = n / params.depth;
let px = i32(n % u32(params.stride2)); n = n / u32(params.stride2);
let py = i32(n % u32(params.stride1)); n = n / u32(params.stride1);
let pz = i32(n % u32(params.stride0)); n = n / u32(params.stride0);
let iz = z * params.stride0 + pz - params.begin0;
let iy = y * params.stride1 + py - params.begin1;
let inside = iz >= 0 && iz < params.size0 && iy >= 0 && iy < params.size1;
let source = ((i32(n) * params.size0 + iz) * params.size1 + iy) * params.size2;
let step = params.stride2;
"""
    copy = """let ix = i32(x) * 4 * step + px - params.begin2;
var v = vec4f();
if (inside && ix >= 0 && ix + 3 * step < params.size2) {
    let at = u32(source + ix);
    let s = u32(step);
    v = vec4f(X[at], X[at + s], X[at + 2u * s], X[at + 3u * s]);
} else if (inside && ix + 3 * step >= 0 && ix < params.size2) {
    for (var k = 0; k < 4; k++) {
        let at = ix + k * step;
        if (at >= 0 && at < params.size2) { v[k] = X[u32(source + at)]; }
    }
}
store4(row * params.quads + x, v);
"""
    if cpu:
        body += f"""let begin = i / params.rows * {_CHUNK}u;
for (var x = begin; x < min(begin + {_CHUNK}u, params.quads); x++) {{
{copy}}}"""
    else:
        body += f"let x = i % params.quads;\n{copy}"
    return Kernel("conv_space", body, (Binding("X"),), params=_PARAMS, width=4, lanes=lanes)


def place(plan: Lowering, x: Tensor, space: Space, channels: int) -> Storage:
    """Where the flat lines of so many channels (of all images) lie, copied if need be."""
    if not space.copied:
        return plan.storage(x)
    kernel = _copy_kernel(plan.target.cpu)
    quads = space.width // 4
    rows = channels * space.channel // space.width if quads else 0
    count = rows * (-(-quads // _CHUNK) if plan.target.cpu else quads)
    params: dict[str, int | float] = {
        "count": count, "rows": rows, "quads": quads, "height": space.height, "depth": space.depth,
    }
    for a, axis in enumerate(space.axes):
        params |= {f"size{a}": axis.size, f"stride{a}": axis.stride, f"begin{a}": axis.begin}
    made = plan.pending(kernel, [plan.storage(x)], params, -(-count // kernel.lanes), x.dtype,
                        (channels, space.channel), of=x)
    return plan.storage(made)


PARAMS: tuple[tuple[str, Scalar], ...] = tuple((name, "u32") for name in (
    "across", "panels", "panels_per_part", "length", "panel_size", "parts", "inputs", "outputs", "channel", "plane",
    "slice", "width", "height", "out_w", "out_h", "out_d", "out_size",
))
"""What the kernels that walk flat lines are told; `sizes` makes the values. Distances are in vectors of four."""


def sizes(
    space: Space, groups: int, panels_per_part: int, inputs: int, outputs: int, tile: int, across: int,
) -> dict[str, int | float]:
    """The values of PARAMS.

    Args:
        space: where the input lies.
        groups: of the Conv.
        panels_per_part: panels of one group.
        inputs: channels of one group.
        outputs: channels of one group.
        tile: output channels of a panel.
        across: workgroups along the flat line.
    """
    d, h, w = space.axes
    return {
        "across": across, "panels": panels_per_part * groups, "panels_per_part": panels_per_part,
        "length": space.length, "panel_size": (inputs * d.kernel * h.kernel * w.kernel + 1) * tile // 4,
        "parts": groups, "inputs": inputs, "outputs": outputs, "channel": space.channel // 4, "plane": space.plane // 4,
        "slice": space.height * space.width // 4, "width": space.width // 4, "height": space.height,
        "out_w": w.out, "out_h": h.out, "out_d": d.out, "out_size": d.out * h.out * w.out,
    }


def stores(vectors: Sequence[str], channels: int, whole: bool) -> str:
    """WGSL that stores the variables c{i}_{j}, vec4f: output channel i of the four neighbours number j.

    In scope: `image`, `part`, `channel` (the first one's number within its group). What is fused
    onto a store is compiled once for each place that stores, so four channels take turns.

    Args:
        vectors: for each j the number of the four on the flat line.
        channels: a multiple of 4.
        whole: rows of the output are multiples of four.
    """
    lines = ["let first = ((image * params.parts + part) * params.outputs + channel) * params.out_size;"]
    for j, vector in enumerate(vectors):
        lines.append(f"""let place{j} = {vector};
let y{j} = place{j} / params.width;
let x{j} = (place{j} % params.width) * 4u;
let z{j} = y{j} / params.height;
let row{j} = y{j} % params.height;
var at{j} = first + (z{j} * params.out_h + row{j}) * params.out_w + x{j};
let inside{j} = row{j} < params.out_h && z{j} < params.out_d && x{j} < params.out_w;
let few{j} = select(0u, min(params.out_w - x{j}, 4u), inside{j});""")
    lines.append(f"let filled = min(max(params.outputs, channel) - channel, {channels}u);")
    lines.append("for (var i = 0u; i < filled; i += 4u) {")
    for i in range(4):
        lines.append(f"if (i + {i}u < filled) {{")
        lines += [kept(f"few{j}", f"at{j}", f"c{i}_{j}", whole) for j in range(len(vectors))]
        lines.append("}")
        lines += [f"at{j} += params.out_size;" for j in range(len(vectors))]
    lines += [f"c{i}_{j} = c{i + 4}_{j};" for i in range(channels - 4) for j in range(len(vectors))]
    return "\n".join((*lines, "}"))


def kept(count: str, at: str, value: str, whole: bool) -> str:
    """WGSL that stores the first `count` of four elements from element `at` on; whole: an aligned four or none."""
    if whole:
        return f"if ({count} > 0u) {{ store4({at} / 4u, {value}); }}"
    return f"{{ var v = {value}; for (var k = 0u; k < {count}; k++) {{ store({at} + k, v.x); v = v.yzwx; }} }}"
