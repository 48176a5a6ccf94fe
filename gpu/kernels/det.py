"""Determinants."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from .elementwise import operands
from .kernel import Binding, Kernel, Scalar
from .registry import NoKernel, Operator, op
from .window import MOST_TURNS, bad

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Tensor

__all__: list[str] = []


@lru_cache
def _kernel() -> Kernel:
    """One lane eliminates one matrix in place, the largest element of a column first."""
    body = """let m = group * 32u + lane;
if (m < params.total) {
    let n = params.n;
    let base = m * n * n;
    var value = 1.0;
    for (var k = 0u; k < n; k++) {
        var best = k;
        for (var r = k + 1u; r < n; r++) {
            if (abs(A[base + r * n + k]) > abs(A[base + best * n + k])) { best = r; }
        }
        let pivot = A[base + best * n + k];
        value *= select(-pivot, pivot, best == k);
        for (var c = k; c < n; c++) {
            let other = A[base + k * n + c];
            A[base + k * n + c] = A[base + best * n + c];
            A[base + best * n + c] = other;
        }
        let scale = select(1.0 / pivot, 0.0, pivot == 0.0);
        for (var r = k + 1u; r < n; r++) {
            let factor = A[base + r * n + k] * scale;
            for (var c = k; c < n; c++) { A[base + r * n + c] -= factor * A[base + k * n + c]; }
        }
    }
    y[m] = value;
}"""
    params: tuple[tuple[str, Scalar], ...] = (("total", "u32"), ("n", "u32"))
    return Kernel("det", body, (), (Binding("A"), Binding("y")), params, result=None, lanes=32)


@op("Det", since=11)
class Det(Operator):
    """y = the determinant of each matrix.  X: [..., n, n] f32 -> Y: [...]."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Eliminate in a copy."""
        (x,) = operands(plan, inputs, 1)
        if x.rank < 2 or x.shape[-1] != x.shape[-2]:
            raise bad(plan, "square matrices", list(x.shape))
        n = x.shape[-1]
        if x.type != "f32" or (plan.target.cpu and n**3 > MOST_TURNS):
            raise NoKernel(f"no kernel for {n} by {n} of {x.dtype.name}")
        shape = x.shape[:-2]
        source, made, work = plan.storage(x), plan.new(x.dtype, shape), plan.new(x.dtype, x.shape)
        plan.copy(source, 0, plan.storage(work), 0, x.size)
        count = math.prod(shape)
        params = {"total": count, "n": n}
        writes = [plan.storage(work), plan.storage(made)]
        plan.dispatch(_kernel(), [], writes, params, -(-count // 32), flops=float(count * n**3))
        return made
