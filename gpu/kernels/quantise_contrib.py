"""Quantised operators of com.microsoft."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .attention import only_floats
from .contrib import MS, like
from .elementwise import operands
from .functions import IS_NAN
from .integer import integer_product
from .matmul_packed import Packed, packed_product
from .move import Concat
from .quantise import (
    dequantised,
    digest,
    dynamic_range,
    optional,
    quantised,
    quantised_dtype,
    scaled,
)
from .reduce import SUM, fold
from .registry import NoKernel, Operator, op
from .window import bad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..graph.lowering import Lowering
    from ..graph.tensor import Array, Tensor

__all__: list[str] = []


@op("MatMulNBits", domain=MS)
class MatMulNBits(Operator):
    """y = a @ b' + bias: a: [..., k] f32; b: [n, blocks, bytes] of 4 or 8 bits, scales and zero points per block."""

    K: int
    N: int
    bits: int = 4
    block_size: int = 32
    accuracy_level: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernel; it may be fused onto."""
        a, _, scale_tensor = operands(plan, inputs, 3)
        zero_tensor, order, bias = (optional(inputs, index) for index in range(3, 6))
        only_floats(plan, a, bias)
        if self.bits not in (4, 8) or order is not None:
            raise NoKernel(f"{self.bits} bits, or groups in another order")
        if not a.rank or a.shape[-1] != self.K or self.block_size < 16 or self.block_size % 16:
            raise bad(plan, f"[..., {self.K}] and blocks of 16 or more", f"{list(a.shape)} and {self.block_size}")
        owner = plan.raw[1]
        values = None if owner is None else plan.known_value(owner)
        scales = plan.known_value(scale_tensor)
        zeros = None if zero_tensor is None else plan.known_value(zero_tensor)
        if owner is None or values is None or scales is None or (zero_tensor is not None and zeros is None):
            raise NoKernel("weights that only the run knows")
        k, n, blocks = self.K, self.N, -(-self.K // self.block_size)
        if values.size * 8 != n * blocks * self.block_size * self.bits or scales.size != n * blocks:
            raise bad(plan, f"{n} x {blocks} blocks of weights", f"{list(values.shape)} and {list(scales.shape)}")
        raw = None if zero_tensor is None else plan.given[3]
        packed = Packed(
            owner,
            (self.bits, self.block_size, digest(scales, zeros)),
            k,
            n,
            self.bits,
            False,
            self.block_size,
            lambda: np.ascontiguousarray(self._elements(values, n)[:, :k].T),
            lambda: self._zeros(zeros, raw, n, blocks),
            lambda: np.ascontiguousarray(scales.astype(np.float32).reshape(n, blocks).T),
        )
        made = packed_product(plan, a, None, packed, (*a.shape[:-1], n))
        if bias is not None:
            made = plan.map("x + b", {"x": made, "b": bias}, shape=made.shape)
        return like(plan, made)

    def _elements(self, values: Array, rows: int) -> Array:
        """One byte for each element: [rows, elements]."""
        values = values.reshape(rows, -1).astype(np.uint8)
        if self.bits == 8:
            return values
        return np.stack([values & 15, values >> 4], -1).reshape(rows, -1)

    def _zeros(self, zeros: Array | None, dtype: Any, n: int, blocks: int) -> Array:
        if zeros is None:
            return np.full((blocks, n), 1 << (self.bits - 1), np.float32)
        if dtype is not None and np.dtype(dtype).kind not in "iu":
            return zeros.astype(np.float32).reshape(n, blocks).T
        return self._elements(zeros, n)[:, :blocks].T.astype(np.float32)


@op("MatMulIntegerToFloat", domain=MS)
class MatMulIntegerToFloat(Operator):
    """y = (a - a_zero) @ (b - b_zero) * a_scale * b_scale + bias: bytes -> f32."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernel; it may be fused onto."""
        a, b, a_scale, b_scale = operands(plan, inputs, 4)
        bias = optional(inputs, 6)
        only_floats(plan, a_scale, b_scale, bias)
        made = integer_product(plan, a, b, optional(inputs, 4), optional(inputs, 5), 1)
        return like(plan, scaled(plan, made, a_scale, b_scale, bias), 2)


@op("DynamicQuantizeMatMul", domain=MS)
class DynamicQuantizeMatMul(Operator):
    """y = dequantised(quantised(a) @ b) + bias: a: f32, quantised over its own range; b: bytes."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernels; the last one may be fused onto."""
        a, b, b_scale = operands(plan, inputs, 3)
        b_zero, bias = optional(inputs, 3), optional(inputs, 4)
        only_floats(plan, a, b_scale, bias)
        scale, zero = dynamic_range(plan, a)
        shown = quantised(plan, a, scale, zero, np.dtype(np.uint8), a.shape)
        made = integer_product(plan, plan.held(shown), b, plan.held(zero), b_zero, 1)
        return like(plan, scaled(plan, made, scale, b_scale, bias))


class _Wide(Operator):
    """An operator on quantised tensors that is computed on floats."""

    def number(self, plan: Lowering, inputs: Sequence[Tensor | None], at: int) -> Tensor:
        """Inputs at, at + 1, at + 2 (elements, scale, zero point) as f32."""
        x, scale = inputs[at], inputs[at + 1]
        zero = optional(inputs, at + 2)
        if x is None or scale is None or scale.size != 1 or (zero is not None and zero.size != 1):
            raise bad(plan, "elements with one scale and one zero point", "others")
        zero = None if zero is None else plan.view(zero, ())
        return dequantised(plan, x, plan.view(scale, ()), zero)

    def back(self, plan: Lowering, value: Tensor, inputs: Sequence[Tensor | None], at: int) -> Tensor:
        """A result with the scale and zero point of inputs at, at + 1, in the dtype of the first input."""
        scale, zero = inputs[at], optional(inputs, at + 1)
        if scale is None or scale.size != 1 or (zero is not None and zero.size != 1):
            raise bad(plan, "one scale and one zero point of the result", "others")
        zero = None if zero is None else plan.view(zero, ())
        dtype = quantised_dtype(plan, at + 1) if zero is not None else quantised_dtype(plan, 0)
        return quantised(plan, value, plan.view(scale, ()), zero, dtype, value.shape)


class _Binary(_Wide):
    sign = ""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the expressions to the plan."""
        operands(plan, (*inputs[:2], *inputs[3:5], inputs[6]) if len(inputs) > 6 else (), 5)
        a, b = self.number(plan, inputs, 0), self.number(plan, inputs, 3)
        return self.back(plan, plan.map(f"a {self.sign} b", {"a": a, "b": b}), inputs, 6)


@op("QLinearAdd", domain=MS)
class QLinearAdd(_Binary):
    """y = a + b, all quantised."""

    sign = "+"


@op("QLinearMul", domain=MS)
class QLinearMul(_Binary):
    """y = a * b, all quantised."""

    sign = "*"


class _Unary(_Wide):
    def value(self, plan: Lowering, x: Tensor) -> Tensor:
        raise NotImplementedError

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the expressions to the plan."""
        operands(plan, (*inputs[:2], inputs[3]) if len(inputs) > 3 else (), 3)
        return self.back(plan, self.value(plan, self.number(plan, inputs, 0)), inputs, 3)


@op("QLinearSigmoid", domain=MS)
class QLinearSigmoid(_Unary):
    """y = 1 / (1 + e ** -x), quantised."""

    def value(self, plan: Lowering, x: Tensor) -> Tensor:
        """The expression."""
        return plan.map(f"select(1.0 / (1.0 + exp(-x)), x, {IS_NAN})", {"x": x})


@op("QLinearLeakyRelu", domain=MS)
class QLinearLeakyRelu(_Unary):
    """y = x where x >= 0, else alpha * x; quantised."""

    alpha: float = 0.01

    def value(self, plan: Lowering, x: Tensor) -> Tensor:
        """The expression."""
        return plan.map("select(x, params.alpha * x, x < 0.0)", {"x": x}, params={"alpha": self.alpha})


@op("QLinearGlobalAveragePool", domain=MS)
class QLinearGlobalAveragePool(_Unary):
    """y = the mean over all but the first two dimensions, quantised: [n, c, ...] -> [n, c, 1, ...]."""

    channels_last: int = 0

    def value(self, plan: Lowering, x: Tensor) -> Tensor:
        """The sums of whole numbers below 2 ** 24 and their expression."""
        if self.channels_last or x.rank < 3:
            raise NoKernel("channels last")
        rows, size = x.shape[0] * x.shape[1], math.prod(x.shape[2:])
        total = fold(plan, x, rows, size, 1, SUM, (*x.shape[:2], *[1] * (x.rank - 2)))
        return plan.map("x / params.size", {"x": total}, params={"size": size})


@op("QLinearConcat", domain=MS)
class QLinearConcat(_Wide):
    """y = the inputs one after another along an axis, all quantised: scale, zero, then x, scale, zero of each."""

    axis: int

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Copy, and the expressions."""
        parts = [self.number(plan, inputs, at) for at in range(2, len(inputs) - 2, 3)]
        if not parts:
            raise bad(plan, "tensors", "none")
        value = Concat(axis=self.axis).lower(plan, *parts)
        scale, zero = inputs[0], inputs[1]
        if scale is None or zero is None:
            raise bad(plan, "a scale and a zero point", "none")
        return quantised(plan, value, plan.view(scale, ()), plan.view(zero, ()), quantised_dtype(plan, 1), value.shape)


@op("QGemm", domain=MS)
class QGemm(_Wide):
    """y = alpha * a' @ b' + c, quantised where an output scale is given, else f32; c: i32."""

    alpha: float = 1.0
    transA: int = 0
    transB: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernel; the rest is fused onto it."""
        a, a_scale, a_zero, b, b_scale, b_zero = operands(plan, inputs, 6)
        c, y_scale, y_zero = (optional(inputs, index) for index in range(6, 9))
        if self.transA or self.transB:
            raise NoKernel("transposed operands")
        made = integer_product(plan, a, b, a_zero, b_zero, 3)
        if c is not None:
            made = plan.map("x + c", {"x": made, "c": c}, shape=made.shape)
        value = scaled(plan, made, a_scale, b_scale, None)
        if self.alpha != 1.0:
            value = plan.map("x * params.alpha", {"x": value}, params={"alpha": self.alpha})
        if y_scale is None:
            return value
        zero = None if y_zero is None else plan.view(y_zero, ())
        return quantised(plan, value, plan.view(y_scale, ()), zero, quantised_dtype(plan, 8), value.shape)
