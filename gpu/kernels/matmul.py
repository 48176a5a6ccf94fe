"""Matrix products: each element is summed in one fixed order, whatever the variant."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvalidModel
from ..graph.fuse import broadcast_strides, collapse
from .batch import Batch
from .elementwise import one_dtype, operands
from .matmul_registers import lower_registers
from .matmul_shared import lower_shared
from .move import slices, strided
from .registry import NoKernel, Operator, op
from .window import MOST_TURNS

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Shape, Tensor

__all__ = ["product"]

MOST_TERMS = 2 * MOST_TURNS
"""Terms that one invocation adds up, at most."""


def product(plan: Lowering, a: Tensor, b: Tensor, shape: Shape, *, b_transposed: bool = False) -> Tensor:
    """Multiply matrices, a @ b, broadcast over leading dimensions.

    Args:
        plan: takes the kernel.
        a: [..., m, k].
        b: [..., k, n].
        b_transposed: b is [n, k].
        shape: of the result; its elements are those of [..., m, n].
    """
    if a.type not in ("f32", "i32", "u32"):
        raise NoKernel(f"no kernel for {a.dtype.name}")
    m, k = a.shape[-2:]
    n = b.shape[-2] if b_transposed else b.shape[-1]
    leading = plan.broadcast(a.shape[:-2], b.shape[:-2])
    if math.prod(b.shape[:-2]) == 1:
        m, leading = m * math.prod(leading), ()
        dims, steps = [1], [[0], [0]]
    else:
        dims, steps = collapse(leading, [broadcast_strides(t.shape[:-2], leading) for t in (a, b)])
    batch = Batch(tuple(dims), tuple(steps[0]), tuple(steps[1]))
    if 0 in shape:
        return plan.new(a.dtype, shape)
    if k == 0:
        return plan.map("x", {"x": plan.constant(np.zeros((), a.dtype))}, shape=shape)
    if plan.target.cpu and k > MOST_TERMS:
        return _product_in_steps(plan, a, b, shape, b_transposed)
    if b_transposed and plan.known_value(b) is None:
        b = strided(plan, b, (k, n), (k, n), (1, k), 0)
        b_transposed = False
    if not plan.target.cpu:
        return lower_shared(plan, a, b, batch, m, k, n, b_transposed, shape)
    return lower_registers(plan, a, b, batch, m, k, n, b_transposed, shape)


def _product_in_steps(plan: Lowering, a: Tensor, b: Tensor, shape: Shape, b_transposed: bool) -> Tensor:
    """A product over very many terms as a sum of products over fewer."""
    k, along = a.shape[-1], b.rank - 1 if b_transposed else b.rank - 2
    total: Tensor | None = None
    for first in range(0, k, MOST_TERMS):
        some = slice(first, min(k, first + MOST_TERMS))
        left, right = slices(plan, a, {a.rank - 1: some}), slices(plan, b, {along: some})
        part = product(plan, left, right, shape, b_transposed=b_transposed)
        total = part if total is None else plan.map("x + y", {"x": total, "y": part})
    assert total is not None
    return total


@op("MatMul", since=1)
class MatMul(Operator):
    """y = a @ b as NumPy does it: a: [..., m, k] or [k], b: [..., k, n] or [k], f32 | i32 | u32."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernel; it may be fused onto."""
        a, b = operands(plan, inputs, 2)
        one_dtype(plan, [a, b])
        if not a.rank or not b.rank or a.shape[-1] != b.shape[-2 if b.rank > 1 else 0]:
            raise InvalidModel(
                f"node {plan.node!r} (MatMul): shapes {list(a.shape)} and {list(b.shape)} do not multiply"
            )
        leading = plan.broadcast(a.shape[:-2], b.shape[:-2])
        shape = (*leading, *a.shape[-2:-1], *(b.shape[-1:] if b.rank > 1 else ()))
        left = a if a.rank > 1 else plan.view(a, (1, a.size))
        return product(plan, left, b if b.rank > 1 else plan.view(b, (b.size, 1)), shape)


@op("Gemm", since=7)
class Gemm(Operator):
    """y = alpha * a' @ b' + beta * c: a': [m, k], b': [k, n], transposed if asked for; c broadcasts to [m, n]."""

    alpha: float = 1.0
    beta: float = 1.0
    transA: int = 0
    transB: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernel; it may be fused onto."""
        a, b = operands(plan, inputs, 2)
        c = inputs[2] if len(inputs) > 2 else None
        one_dtype(plan, [t for t in (a, b, c) if t is not None])
        self._check(plan, a, b)
        if a.type != "f32" and (self.alpha != 1.0 or self.beta != 1.0):
            raise NoKernel(f"alpha and beta for {a.dtype.name}")
        if self.transA:
            k, m = a.shape
            a = strided(plan, a, (m, k), (m, k), (1, m), 0)
        shape = (a.shape[0], b.shape[0 if self.transB else 1])
        if c is not None and plan.broadcast(c.shape, shape) != shape:
            raise InvalidModel(
                f"node {plan.node!r} (Gemm): c of shape {list(c.shape)} does not broadcast to {list(shape)}"
            )
        made = product(plan, a, b, shape, b_transposed=bool(self.transB))
        factors = {"alpha": self.alpha, "beta": self.beta}
        terms = ["params.alpha * y" if self.alpha != 1.0 else "y"]
        if c is not None and self.beta != 0.0:
            terms.append("params.beta * c" if self.beta != 1.0 else "c")
        if terms == ["y"]:
            return made
        used = {name: factors[name] for name in factors if any(name in term for term in terms)}
        args = {"y": made, "c": c} if len(terms) > 1 and c is not None else {"y": made}
        return plan.map(" + ".join(terms), args, params=used, shape=shape)

    def _check(self, plan: Lowering, a: Tensor, b: Tensor) -> None:
        if a.rank == b.rank == 2 and a.shape[0 if self.transA else 1] == b.shape[1 if self.transB else 0]:
            return
        left = f"{list(a.shape)}{' transposed' * bool(self.transA)}"
        right = f"{list(b.shape)}{' transposed' * bool(self.transB)}"
        raise InvalidModel(f"node {plan.node!r} (Gemm): shapes {left} and {right} do not multiply")
