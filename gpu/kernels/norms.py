"""LpPool, GlobalLpPool, LpNormalization and LRN: what is divided by, or pooled, is a norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from .elementwise import operands
from .kernel import Binding, Kernel
from .pool import pooled
from .reduce import SUM, fold
from .registry import NoKernel, Operator, op
from .window import bad, windows

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Tensor

__all__: list[str] = []


def _power(p: float) -> str:
    """WGSL over v: |v| ** p."""
    return {1.0: "abs(v)", 2.0: "v * v", 3.0: "abs(v) * v * v"}.get(p, f"select(pow(abs(v), {p!r}), 0.0, v == 0.0)")


def _root(plan: Lowering, x: Tensor, p: float) -> Tensor:
    """X ** (1 / p)."""
    if p == 1.0:
        return x
    return plan.map("sqrt(v)" if p == 2.0 else f"select(pow(v, {1 / p!r}), 0.0, v == 0.0)", {"v": x})


def _floats(plan: Lowering, inputs: tuple[Tensor | None, ...], rank: int) -> Tensor:
    (x,) = operands(plan, inputs, 1)
    if x.rank < rank:
        raise bad(plan, f"at least {rank} dimensions", x.rank)
    if x.type != "f32":
        raise NoKernel(f"no kernel for {x.dtype.name}")
    return x


@op("LpPool", since=1)
class LpPool(Operator):
    """y = the p-norm of each window; padding is zero.  X: [N, C, spatial...] f32 -> Y: [N, C, out...]."""

    kernel_shape: Sequence[int] = ()
    strides: Sequence[int] = ()
    dilations: Sequence[int] = ()
    pads: Sequence[int] = ()
    auto_pad: str = "NOTSET"
    ceil_mode: int = 0
    p: float = 2.0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernels; the last may be fused onto."""
        x = _floats(plan, inputs, 3)
        if not self.kernel_shape:
            raise bad(plan, "an attribute kernel_shape", "none")
        if x.rank > 5:
            raise NoKernel(f"{x.rank - 2} spatial dimensions")
        axes = windows(plan, x.shape[2:], self.kernel_shape, self.strides, self.dilations, self.pads, self.auto_pad,
                       ceil=bool(self.ceil_mode), partial=True)
        powers = plan.map(_power(float(self.p)), {"v": x})
        return _root(plan, pooled(plan, powers, axes, "sum"), float(self.p))


@op("GlobalLpPool", since=1)
class GlobalLpPool(Operator):
    """y = the p-norm over all spatial dimensions.  X: [N, C, spatial...] f32 -> Y: [N, C, 1...]."""

    p: float = 2.0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernels; the last may be fused onto."""
        x = _floats(plan, inputs, 2)
        shape = x.shape[:2] + (1,) * (x.rank - 2)
        p = float(self.p)
        return _root(plan, fold(plan, x, math.prod(x.shape[:2]), math.prod(x.shape[2:]), 1, SUM, shape, _power(p)), p)


@op("LpNormalization", since=1)
class LpNormalization(Operator):
    """y = x divided by its p-norm along axis; 0 where that is 0.  X: any shape f32 -> Y: same shape."""

    axis: int = -1
    p: int = 2

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernels; the last may be fused onto."""
        x = _floats(plan, inputs, 1)
        axis = plan.axis(self.axis, x.rank)
        if self.p not in (1, 2):
            raise bad(plan, "p 1 or 2", self.p)
        shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
        outer, inner = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
        total = fold(plan, x, outer, x.shape[axis], inner, SUM, shape, _power(float(self.p)))
        norm = _root(plan, total, float(self.p))
        return plan.map("select(x / n, 0.0, n == 0.0)", {"x": x, "n": norm})


@lru_cache
def _lrn_kernel() -> Kernel:
    body = """let i = group * 64u + lane;
if (i >= params.total) { return; }
let c = i / params.inner % params.channels;
let first = c - min(c, params.before);
let last = min(c + params.after, params.channels - 1u);
var sum = 0.0;
var at = i - (c - first) * params.inner;
for (var k = first; k <= last; k++) { sum = fma(X[at], X[at], sum); at += params.inner; }
store(i, X[i] * pow(params.bias + params.alpha * sum, -params.beta));"""
    names = ("total", "inner", "channels", "before", "after")
    return Kernel("lrn", body, (Binding("X"),),
                  params=(*((n, "u32") for n in names), *((n, "f32") for n in ("bias", "alpha", "beta"))))


@op("LRN", since=1)
class LRN(Operator):
    """y = x / (bias + alpha / size * the sum of squares over `size` channels) ** beta.  X: [N, C, spatial...] f32."""

    size: int
    alpha: float = 0.0001
    beta: float = 0.75
    bias: float = 1.0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernel; it may be fused onto."""
        x = _floats(plan, inputs, 2)
        if self.size < 1:
            raise bad(plan, "a size of at least 1", self.size)
        if not x.size:
            return plan.new(x.dtype, x.shape)
        params: dict[str, int | float] = {
            "total": x.size, "inner": math.prod(x.shape[2:]), "channels": x.shape[1], "before": (self.size - 1) // 2,
            "after": self.size // 2, "bias": self.bias, "alpha": self.alpha / self.size, "beta": self.beta,
        }
        return plan.pending(_lrn_kernel(), [plan.storage(x)], params, -(-x.size // 64), x.dtype, x.shape,
                            flops=2.0 * x.size * self.size)
