"""Conv: the operator; how it is computed lies in conv_*.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .conv_depthwise import choose_block, lower_blocks
from .conv_gemm import choose_channels, lower_blocked
from .conv_space import flatten
from .conv_tile import choose_tile, lower_tiles, turns
from .registry import NoKernel, Operator, op
from .window import MOST_TURNS, bad, windows

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Tensor

__all__ = ["Conv"]


@op("Conv", since=1)
class Conv(Operator):
    """Y[n, m] = B[m] + sum over c, taps of W[m, c, tap] * X[n, c, window(tap)].

    X: [N, C, spatial...] f32, W: [M, C / group, kernel...], B: [M] -> Y: [N, M, out...]. One to three
    spatial dimensions.
    """

    kernel_shape: Sequence[int] = ()
    strides: Sequence[int] = ()
    dilations: Sequence[int] = ()
    pads: Sequence[int] = ()
    auto_pad: str = "NOTSET"
    group: int = 1

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernel that suits the shapes and the adapter; it may be fused onto."""
        x, w, b = (*inputs, None, None)[:3]
        if x is None or w is None:
            raise bad(plan, "the inputs X and W", "fewer")
        if x.rank < 3 or w.rank != x.rank:
            raise bad(plan, "X and W of one rank, 3 or more", f"{x.rank} and {w.rank}")
        if self.kernel_shape and tuple(self.kernel_shape) != w.shape[2:]:
            raise bad(plan, f"kernel_shape {list(w.shape[2:])} as in W", list(self.kernel_shape))
        if self.group < 1 or x.shape[1] != w.shape[1] * self.group or w.shape[0] % self.group:
            raise bad(plan, f"X with {w.shape[1]} x {self.group} channels as in W {list(w.shape)}", list(x.shape))
        if b is not None and b.shape != (w.shape[0],):
            raise bad(plan, f"a bias of {w.shape[0]} elements", list(b.shape))
        axes = windows(plan, x.shape[2:], w.shape[2:], self.strides, self.dilations, self.pads, self.auto_pad)
        if any(t.dtype != np.float32 for t in (x, w, b) if t is not None):
            raise NoKernel(f"no kernel for {x.dtype}")
        if x.rank > 5:
            raise NoKernel(f"{x.rank - 2} spatial dimensions")
        shape = (x.shape[0], w.shape[0], *(axis.out for axis in axes))
        space = flatten(axes)
        target = plan.target
        block = choose_block(space, target.cpu, target.subgroup) if w.shape[1] == 1 and self.group > 1 else None
        if block is not None:
            return lower_blocks(plan, x, w, b, space, shape, block)
        outputs = w.shape[0] // self.group
        if not target.cpu or turns(w.shape[1], space) > MOST_TURNS:
            return lower_blocked(plan, x, w, b, self.group, space, shape, choose_channels(outputs))
        return lower_tiles(plan, x, w, b, self.group, space, shape, choose_tile(outputs, space, target.subgroup))
