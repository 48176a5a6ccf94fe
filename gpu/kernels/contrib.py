"""Operators of com.microsoft that ONNX Runtime's optimiser and exporters put in the place of several of ONNX's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..graph.tensor import HELD, NARROW, contiguous_strides
from .activation import Gelu
from .attention import only_floats
from .conv import Conv
from .elementwise import operands
from .gather import picked_rows
from .hosted import hosted
from .indices import in_range
from .matmul import Gemm, product
from .move import slices, strided
from .normalise import moments
from .quantise import optional
from .registry import NoKernel, Operator, op
from .window import bad

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Tensor

__all__ = ["like", "transposed"]

MS = "com.microsoft"


def like(plan: Lowering, made: Tensor, index: int = 0) -> Tensor:
    """A result in the dtype of one of the node's inputs, for operators that ONNX has no schema for."""
    dtype = plan.given[index]
    if dtype is None or made.dtype == dtype or HELD.get(dtype) != made.dtype:
        return made
    return plan.map(NARROW[dtype], {"x": made}, dtype=dtype, label=dtype.name)


def transposed(plan: Lowering, x: Tensor) -> Tensor:
    """A tensor with its last two dimensions swapped."""
    strides = list(contiguous_strides(x.shape))
    shape = (*x.shape[:-2], x.shape[-1], x.shape[-2])
    return strided(plan, x, shape, shape, [*strides[:-2], 1, strides[-2]], 0)


@op("FusedMatMul", domain=MS)
@op("TransposeMatMul", domain=MS)
class FusedMatMul(Operator):
    """y = alpha * a' @ b': a': [..., m, k], b': [..., k, n], transposed if asked for."""

    alpha: float = 1.0
    transA: int = 0
    transB: int = 0
    transBatchA: int = 0
    transBatchB: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernel; it may be fused onto."""
        a, b = operands(plan, inputs, 2)
        only_floats(plan, a, b)
        if self.transBatchA or self.transBatchB or a.rank < 2 or b.rank < 2:
            raise NoKernel("transposed batches, or vectors")
        a = transposed(plan, a) if self.transA else a
        turned = bool(self.transB) and b.rank == 2
        b = transposed(plan, b) if self.transB and not turned else b
        k, n = b.shape[-2:][:: -1 if turned else 1]
        if a.shape[-1] != k:
            raise bad(plan, "matrices that multiply", f"shapes {list(a.shape)} and {list(b.shape)}")
        shape = (*plan.broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], n)
        made = product(plan, a, b, shape, b_transposed=turned)
        if self.alpha != 1.0:
            made = plan.map("x * params.alpha", {"x": made}, params={"alpha": self.alpha})
        return like(plan, made)


class _Biased(Operator):
    def biased(self, plan: Lowering, inputs: Sequence[Tensor | None]) -> Tensor:
        (x,), b = operands(plan, tuple(inputs), 1), optional(inputs, 1)
        only_floats(plan, x, b)
        return x if b is None else plan.map("x + b", {"x": x, "b": b}, shape=x.shape)


@op("Gelu", domain=MS)
@op("BiasGelu", domain=MS)
class BiasGelu(_Biased):
    """y = Gelu(x + b); b may be left out."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the expressions to the plan."""
        return like(plan, Gelu().lower(plan, self.biased(plan, inputs)))


@op("FastGelu", domain=MS)
class FastGelu(_Biased):
    """y = Gelu(x + b) in its tanh form; b may be left out."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the expressions to the plan."""
        return like(plan, Gelu(approximate="tanh").lower(plan, self.biased(plan, inputs)))


@op("QuickGelu", domain=MS)
class QuickGelu(_Biased):
    """y = x * sigmoid(alpha * x)."""

    alpha: float = 1.702

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the expression to the plan."""
        x = self.biased(plan, inputs[:1])
        return like(plan, plan.map("x / (1.0 + exp(-params.alpha * x))", {"x": x}, params={"alpha": self.alpha}))


_ACTIVATIONS = {
    "Relu": "max(x, 0.0)",
    "Sigmoid": "1.0 / (1.0 + exp(-x))",
    "Tanh": "tanh(clamp(x, -15.0, 15.0))",
    "LeakyRelu": "select(x, params.p0 * x, x < 0.0)",
    "Clip": "clamp(x, params.p0, params.p1)",
    "HardSigmoid": "clamp(params.p0 * x + params.p1, 0.0, 1.0)",
}


@op("FusedConv", domain=MS)
class FusedConv(Conv):
    """Y = activation(Conv(X, W, B) + Z); B and Z may be left out."""

    activation: str = ""
    activation_params: Sequence[float] = ()

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernel and the expression."""
        made = super().lower(plan, *inputs[:3])
        z = optional(inputs, 3)
        if z is not None:
            made = plan.map("x + z", {"x": made, "z": z}, shape=made.shape)
        if self.activation:
            made = _activated(plan, made, self.activation, self.activation_params)
        return like(plan, made)


def _activated(plan: Lowering, x: Tensor, activation: str, numbers: Sequence[float]) -> Tensor:
    wgsl = _ACTIVATIONS.get(activation)
    params = {f"p{k}": v for k, v in enumerate(numbers) if f"p{k}" in (wgsl or "")}
    if wgsl is None or ("p0" in wgsl) != ("p0" in params) or ("p1" in wgsl) != ("p1" in params):
        raise NoKernel(f"activation {activation} with {len(numbers)} parameters")
    return plan.map(wgsl, {"x": x}, params=params)


@op("FusedGemm", domain=MS)
class FusedGemm(Gemm):
    """y = activation(alpha * a' @ b' + beta * c)."""

    activation: str = ""
    activation_alpha: float | None = None
    activation_beta: float | None = None

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernel; the rest is fused onto it."""
        made = super().lower(plan, *inputs)
        if self.activation:
            numbers = [n for n in (self.activation_alpha, self.activation_beta) if n is not None]
            made = _activated(plan, made, self.activation, numbers)
        return like(plan, made)


def _normalised(
    plan: Lowering, x: Tensor, gamma: Tensor, beta: Tensor | None, epsilon: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Over the last dimension; also the means and 1 / sqrt(variance + epsilon)."""
    only_floats(plan, x, gamma, beta)
    width = x.shape[-1] if x.rank else 0
    if gamma.size != width or (beta is not None and beta.size != width):
        raise bad(plan, f"{width} scales", list(gamma.shape))
    shape = (*x.shape[:-1], 1)
    mean, inverse = moments(plan, x, math.prod(shape), epsilon, shape, centred)
    args = {"x": x, "i": inverse, "g": gamma} | ({"m": mean} if centred else {}) | ({} if beta is None else {"b": beta})
    value = f"{'(x - m)' if centred else 'x'} * i * g{'' if beta is None else ' + b'}"
    return plan.map(value, args, shape=x.shape), mean, inverse


class _SkipNormalization(Operator):
    epsilon: float = 1e-12
    centred = True

    def over(
        self, plan: Lowering, inputs: Sequence[Tensor | None], beta: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, ...]:
        x, skip, gamma = operands(plan, tuple(inputs), 3)
        only_floats(plan, x, skip, bias)
        if plan.broadcast(x.shape, skip.shape) != x.shape:
            raise bad(plan, f"a skip that broadcasts to {list(x.shape)}", list(skip.shape))
        total = plan.map("x + s", {"x": x, "s": skip}, shape=x.shape)
        if bias is not None:
            total = plan.map("x + b", {"x": total, "b": bias}, shape=x.shape)
        plan.storage(total)
        y, mean, inverse = _normalised(plan, total, gamma, beta, self.epsilon, self.centred)
        return (like(plan, y), mean, inverse, like(plan, total))[: plan.outputs]


@op("SkipLayerNormalization", domain=MS)
class SkipLayerNormalization(_SkipNormalization):
    """y = LayerNormalization(x + skip + bias); outputs: y, mean, 1 / sqrt(var + epsilon), x + skip + bias."""

    epsilon: float = 1e-12

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Add the statistics' kernel and the expressions."""
        return self.over(plan, inputs, optional(inputs, 3), optional(inputs, 4))


@op("SkipSimplifiedLayerNormalization", domain=MS)
class SkipSimplifiedLayerNormalization(_SkipNormalization):
    """y = RMSNormalization(x + skip + bias); outputs as of SkipLayerNormalization."""

    epsilon: float = 1e-12
    centred = False

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Add the statistics' kernel and the expressions."""
        return self.over(plan, inputs, None, optional(inputs, 3))


@op("SimplifiedLayerNormalization")
@op("SimplifiedLayerNormalization", domain=MS)
class SimplifiedLayerNormalization(Operator):
    """y = x / sqrt(mean(x * x) + epsilon) * scale over the last dimensions; outputs: y, 1 / sqrt(...)."""

    axis: int = -1
    epsilon: float = 1e-5

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Add the statistics' kernel and the expression."""
        x, scale = operands(plan, inputs, 2)
        only_floats(plan, x, scale)
        axis = plan.axis(self.axis, x.rank)
        shape = (*x.shape[:axis], *[1] * (x.rank - axis))
        _, inverse = moments(plan, x, math.prod(shape), self.epsilon, shape, False)
        made = plan.map("x * i * s", {"x": x, "i": inverse, "s": scale}, shape=x.shape)
        return (like(plan, made), inverse)[: plan.outputs]


@op("EmbedLayerNormalization", domain=MS)
class EmbedLayerNormalization(Operator):
    """y = LayerNormalization(word + position + segment): ids: [b, s]; outputs: y, lengths of masks, the sum."""

    epsilon: float = 1e-12
    mask_index_type: int = 1

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Add the kernels."""
        ids, segments, word, position, segment, gamma, beta, mask, positions = (*inputs, *[None] * 9)[:9]
        if ids is None or word is None or position is None or gamma is None or beta is None or ids.rank != 2:
            raise bad(plan, "ids [b, s], embeddings, gamma and beta", "others")
        only_floats(plan, word, position, segment)
        (b, s), width = ids.shape, word.shape[-1]
        rows = picked_rows(plan, word, in_range(plan, ids, word.shape[0]), 0, (b, s, width))
        if positions is None:
            if s > position.shape[0]:
                raise bad(plan, f"at most {position.shape[0]} positions", s)
            at = slices(plan, position, {0: slice(0, s)})
        else:
            where = in_range(plan, positions, position.shape[0])
            at = picked_rows(plan, position, where, 0, (*positions.shape, width))
        total = plan.map("x + p", {"x": rows, "p": at}, shape=(b, s, width))
        if segments is not None and segment is not None:
            kind = picked_rows(plan, segment, in_range(plan, segments, segment.shape[0]), 0, (b, s, width))
            total = plan.map("x + p", {"x": total, "p": kind})
        plan.storage(total)
        y, _, _ = _normalised(plan, total, gamma, beta, self.epsilon, True)
        if mask is None:
            counts = plan.constant(np.zeros(b, np.int32))
        else:
            counts = hosted(plan, lambda array: (array == 1).sum(1), [mask], np.int32, (b,))
        return (like(plan, y, 2), counts, like(plan, total, 2))[: plan.outputs]
