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

import numpy as np

from .kernel import Binding, Kernel
from .window import Axis

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Storage, Tensor

__all__ = ["Space", "flatten", "place"]


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


@lru_cache
def _copy_kernel(lanes: int) -> Kernel:
    """One lane writes four elements; the phases lie between channel and plane."""
    body = f"""let i = group * {lanes}u + lane;
if (i >= params.count) {{ return; }}
var n = i;
let x = i32(n % params.quads) * 4; n = n / params.quads;
let y = i32(n % params.height); n = n / params.height;
let z = i32(n % params.depth); n = n / params.depth;
let px = i32(n % u32(params.stride2)); n = n / u32(params.stride2);
let py = i32(n % u32(params.stride1)); n = n / u32(params.stride1);
let pz = i32(n % u32(params.stride0)); n = n / u32(params.stride0);
let iz = z * params.stride0 + pz - params.begin0;
let iy = y * params.stride1 + py - params.begin1;
let ix = x * params.stride2 + px - params.begin2;
var v = vec4f();
if (iz >= 0 && iz < params.size0 && iy >= 0 && iy < params.size1) {{
    let row = ((i32(n) * params.size0 + iz) * params.size1 + iy) * params.size2;
    for (var k = 0; k < 4; k++) {{
        let at = ix + k * params.stride2;
        if (at >= 0 && at < params.size2) {{ v[k] = X[u32(row + at)]; }}
    }}
}}
store4(i, v);"""
    params = [("count", "u32"), ("quads", "u32"), ("height", "u32"), ("depth", "u32")]
    params += [(f"{name}{a}", "i32") for a in range(3) for name in ("size", "stride", "begin")]
    return Kernel("conv_space", body, (Binding("X"),), params=tuple(params), width=4, lanes=lanes)  # type: ignore[arg-type]


def place(plan: Lowering, x: Tensor, space: Space, channels: int) -> Storage:
    """Where the flat lines lie, copied if need be. Args: channels: all of them, of all images."""
    if not space.copied:
        return plan.storage(x)
    kernel = _copy_kernel(32 if plan.target.cpu else 64)
    count = channels * space.channel // 4
    params: dict[str, int | float] = {
        "count": count, "quads": space.width // 4, "height": space.height, "depth": space.depth,
    }
    for a, axis in enumerate(space.axes):
        params |= {f"size{a}": axis.size, f"stride{a}": axis.stride, f"begin{a}": axis.begin}
    made = plan.pending(kernel, [plan.storage(x)], params, -(-count // kernel.lanes), np.float32, (channels, space.channel),
                        flops=8.0 * count)
    return plan.storage(made)
