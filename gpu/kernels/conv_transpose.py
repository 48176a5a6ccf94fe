"""ConvTranspose: each lane gathers one output element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .kernel import Binding, Kernel, Scalar
from .registry import NoKernel, Operator, op
from .window import MOST_TURNS, Axis, bad, spread

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Tensor

__all__ = ["ConvTranspose"]

_NAMES = ("size", "out", "kernel", "stride", "dilation", "begin")


@lru_cache
def _gather_kernel(bias: bool, lanes: int) -> Kernel:
    """Tap k of output o reads input (o + begin - k * dilation) / stride where that is whole."""
    loops, ends = [], []
    for a in range(3):
        loops.append(f"""for (var k{a} = 0; k{a} < params.kernel{a}; k{a}++) {{
let t{a} = o{a} + params.begin{a} - k{a} * params.dilation{a};
if (t{a} >= 0 && t{a} % params.stride{a} == 0 && t{a} / params.stride{a} < params.size{a}) {{""")
        ends.append("}}")
    joined = "\n".join(loops)
    body = f"""let i = group * {lanes}u + lane;
if (i >= params.count) {{ return; }}
var n = i32(i);
let o2 = n % params.out2; n = n / params.out2;
let o1 = n % params.out1; n = n / params.out1;
let o0 = n % params.out0; n = n / params.out0;
let map = n % params.maps;
let image = n / params.maps;
let part = map / params.outputs;
let plane = params.size0 * params.size1 * params.size2;
let taps = params.kernel0 * params.kernel1 * params.kernel2;
var value = {"B[u32(map)]" if bias else "0.0"};
{joined}
let tap = (k0 * params.kernel1 + k1) * params.kernel2 + k2;
let place = (t0 / params.stride0 * params.size1 + t1 / params.stride1) * params.size2 + t2 / params.stride2;
var at = u32((image * params.parts + part) * params.inputs * plane + place);
var at_w = u32((part * params.inputs * params.outputs + map % params.outputs) * taps + tap);
for (var c = 0; c < params.inputs; c++) {{
    value = fma(X[at], W[at_w], value);
    at += u32(plane);
    at_w += u32(params.outputs * taps);
}}
{"".join(ends)}
store(i, value);"""
    names = ("maps", "parts", "inputs", "outputs", *(f"{name}{a}" for a in range(3) for name in _NAMES))
    params: list[tuple[str, Scalar]] = [("count", "u32")]
    params.extend((name, "i32") for name in names)
    reads = (Binding("X"), Binding("W"), Binding("B")) if bias else (Binding("X"), Binding("W"))
    return Kernel("conv_transpose", body, reads, params=tuple(params), lanes=lanes)


@op("ConvTranspose", since=1)
class ConvTranspose(Operator):
    """Y[n, m, o] = B[m] + sum of X[n, c, i] * W[c, m, t] over all c, i, t with i * stride + t * dilation - begin = o.

    X: [N, C, spatial...] f32, W: [C, M / group, kernel...], B: [M] -> Y: [N, M, out...].
    """

    kernel_shape: Sequence[int] = ()
    strides: Sequence[int] = ()
    dilations: Sequence[int] = ()
    pads: Sequence[int] = ()
    output_padding: Sequence[int] = ()
    output_shape: Sequence[int] = ()
    auto_pad: str = "NOTSET"
    group: int = 1

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernel; it may be fused onto."""
        x, w, b = (*inputs, None, None)[:3]
        if x is None or w is None:
            raise bad(plan, "the inputs X and W", "fewer")
        if x.rank < 3 or w.rank != x.rank:
            raise bad(plan, "X and W of one rank, 3 or more", f"{x.rank} and {w.rank}")
        if self.kernel_shape and tuple(self.kernel_shape) != w.shape[2:]:
            raise bad(plan, f"kernel_shape {list(w.shape[2:])} as in W", list(self.kernel_shape))
        if self.group < 1 or x.shape[1] != w.shape[0] or w.shape[0] % self.group:
            raise bad(plan, f"X with {w.shape[0]} channels in {self.group} groups as in W", list(x.shape))
        maps = w.shape[1] * self.group
        if b is not None and b.shape != (maps,):
            raise bad(plan, f"a bias of {maps} elements", list(b.shape))
        axes = self._axes(plan, x.shape[2:], w.shape[2:])
        if any(t.dtype != np.float32 for t in (x, w, b) if t is not None):
            raise NoKernel(f"no kernel for {x.dtype}")
        if x.rank > 5:
            raise NoKernel(f"{x.rank - 2} spatial dimensions")
        if plan.target.cpu and (w.shape[0] // self.group + 2) * math.prod(w.shape[2:]) > MOST_TURNS:
            raise NoKernel("no kernel for so many taps")
        shape = (x.shape[0], maps, *(axis.out for axis in axes))
        kernel = _gather_kernel(b is not None, 32 if plan.target.cpu else 64)
        count = math.prod(shape)
        inner = w.shape[0] // self.group
        params: dict[str, int | float] = {
            "count": count, "maps": maps, "parts": self.group, "inputs": inner, "outputs": w.shape[1],
        }
        for a, axis in enumerate((*(Axis(1, 1) for _ in range(3 - len(axes))), *axes)):
            params |= {f"{name}{a}": getattr(axis, name) for name in _NAMES}
        reads = [plan.storage(t) for t in (x, w, b) if t is not None]
        flops = 2.0 * x.size * math.prod(w.shape[1:])
        return plan.pending(kernel, reads, params, -(-count // kernel.lanes), x.dtype, shape, flops=flops,
                            effort=2)

    def _axes(self, plan: Lowering, spatial: Sequence[int], kernel: Sequence[int]) -> list[Axis]:
        rank = len(spatial)
        strides = spread(plan, "strides", self.strides, rank)
        dilations = spread(plan, "dilations", self.dilations, rank)
        extra = spread(plan, "output_padding", self.output_padding, rank, 0)
        pads = spread(plan, "pads", self.pads if self.auto_pad == "NOTSET" else (), 2 * rank, 0)
        wanted = [int(v) for v in self.output_shape[-rank:]]
        if self.auto_pad in ("SAME_UPPER", "SAME_LOWER") and not wanted:
            wanted = [size * stride for size, stride in zip(spatial, strides, strict=True)]
        axes = []
        for a, size in enumerate(spatial):
            full = strides[a] * (size - 1) + extra[a] + (kernel[a] - 1) * dilations[a] + 1
            begin, end = pads[a], pads[a + rank]
            if wanted:
                total = max(full - wanted[a], 0)
                begin = total // 2 if self.auto_pad == "SAME_UPPER" else total - total // 2
                end = full - wanted[a] - begin
            axes.append(Axis(size, max(full - begin - end, 0), kernel[a], strides[a], dilations[a], begin, end))
        return axes
