"""DFT and STFT as products with matrices of cosines and sines that the host makes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..graph.tensor import contiguous_strides
from .elementwise import operands
from .matmul import product
from .move import slices, strided
from .registry import NoKernel, Operator, op
from .window import bad

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Array, Tensor

__all__ = ["transform"]

LARGEST = 1 << 24
"""Elements that a matrix may have."""


def transform(length: int, used: int, parts: int, inverse: bool, onesided: bool) -> Array:
    """The matrix of a discrete Fourier transform: float32 [used * parts, bins * 2].

    Args:
        length: of the transform.
        used: elements that go in, the first of `length`; the others are 0.
        parts: 1 = they are real, 2 = real and imaginary parts by turns.
        inverse: back, and divided by the length.
        onesided: only bins 0 to length / 2: of what comes out, or (inverse) of what goes in; then what comes
            out is real, [used * parts, length].
    """
    half = length // 2 + 1
    bins = half if onesided and not inverse else length
    turns = np.arange(used)[:, None] * np.arange(bins) % length
    angle = 2 * np.pi / length * turns
    cos, sin = np.cos(angle), np.sin(angle)
    if not inverse:
        sin = -sin
    if inverse and onesided:
        weight = np.where((np.arange(used) == 0) | (2 * np.arange(used) == length), 1.0, 2.0)[:, None] / length
        table = np.stack([cos * weight, -sin * weight][:parts], axis=1)
        return table.reshape(used * parts, bins).astype(np.float32)
    rows = np.stack([np.stack([cos, sin], -1), np.stack([-sin, cos], -1)][:parts], axis=1)
    return (rows / (length if inverse else 1)).reshape(used * parts, bins * 2).astype(np.float32)


def _checked(plan: Lowering, used: int, parts: int, length: int) -> None:
    if length < 1:
        raise bad(plan, "a length of at least 1", length)
    if used * parts * length * 2 > LARGEST:
        raise NoKernel(f"a transform of length {length}")


def _dft(plan: Lowering, x: Tensor, axis: int, length: int | None, inverse: bool, onesided: bool) -> Tensor:
    if x.rank < 2 or x.shape[-1] not in (1, 2) or axis == x.rank - 1:
        raise bad(plan, "real or complex numbers along another axis", list(x.shape))
    if x.type != "f32":
        raise NoKernel(f"no kernel for {x.dtype.name}")
    size, parts = x.shape[axis], x.shape[-1]
    if length is None:
        length = 2 * (size - 1) if inverse and onesided else size
    used = min(size, length // 2 + 1 if inverse and onesided else length)
    _checked(plan, used, parts, length)
    matrix = plan.constant(transform(length, used, parts, inverse, onesided))
    made = 1 if inverse and onesided else 2
    bins = matrix.shape[1] // made
    x = slices(plan, x, {axis: slice(0, used)})
    outer, inner = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 : -1])
    shape = (*x.shape[:axis], bins, *x.shape[axis + 1 : -1], made)
    if inner == 1:
        return product(plan, plan.view(x, (outer, used * parts)), matrix, shape)
    steps = contiguous_strides((outer, used, inner, parts))
    order = (outer, inner, used, parts)
    x = strided(plan, x, (outer * inner, used * parts), order, [steps[a] for a in (0, 2, 1, 3)], 0)
    y = product(plan, x, matrix, (outer, inner, bins, made))
    steps = contiguous_strides((outer, inner, bins, made))
    return strided(plan, y, shape, (outer, bins, inner, made), [steps[a] for a in (0, 2, 1, 3)], 0)


def _one(plan: Lowering, t: Tensor | None) -> int | None:
    if t is None:
        return None
    if t.size != 1:
        raise bad(plan, "one number", list(t.shape))
    return plan.ints(t)[0]


@op("DFT", since=17)
class DFT17(Operator):
    """DFT with the axis as an attribute."""

    axis: int = 1
    inverse: int = 0
    onesided: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the product; it may be fused onto."""
        (x,) = operands(plan, inputs, 1)
        length = _one(plan, inputs[1] if len(inputs) > 1 else None)
        return _dft(plan, x, plan.axis(self.axis, x.rank), length, bool(self.inverse), bool(self.onesided))


@op("DFT", since=20)
class DFT(Operator):
    """y = the discrete Fourier transform of x along an axis.

    x: [..., n, ..., 1 or 2] f32, real or complex; dft_length, axis: one int64 each -> y: [..., bins, ..., 2].
    """

    inverse: int = 0
    onesided: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the product; it may be fused onto."""
        x, lengths, axes = (*inputs, None, None)[:3]
        (x,) = operands(plan, (x,), 1)
        length, axis = _one(plan, lengths), _one(plan, axes)
        return _dft(plan, x, plan.axis(-2 if axis is None else axis, x.rank), length, bool(self.inverse),
                    bool(self.onesided))


@op("STFT", since=17)
class STFT(Operator):
    """y = the discrete Fourier transform of each frame of a signal, times a window.

    signal: [batch, n] or [batch, n, 1 or 2] f32; frame_step: one int64; window: [frame_length]
    -> y: [batch, frames, bins, 2].
    """

    onesided: int = 1

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Lay the frames out, multiply; the product may be fused onto."""
        x, steps = operands(plan, inputs, 2)
        window, lengths = (*inputs[2:], None, None)[:2]
        step, length = _one(plan, steps), _one(plan, lengths)
        x = plan.view(x, (*x.shape, 1)) if x.rank == 2 else x
        if length is None:
            length = x.shape[1] if window is None else window.size
        if x.rank != 3 or x.shape[2] not in (1, 2) or not step or step < 0:
            raise bad(plan, "a signal and a positive frame_step", f"{list(x.shape)} and {step}")
        if x.type != "f32" or (window is not None and window.shape != (length,)):
            raise NoKernel(f"a window of another length, or {x.dtype.name}")
        batch, size, parts = x.shape
        if length > size:
            raise bad(plan, f"frames of at most {size} elements", length)
        _checked(plan, length, parts, length)
        matrix = transform(length, length, parts, False, bool(self.onesided))
        known = None if window is None else plan.known_value(window)
        if known is not None:
            matrix *= np.repeat(known.astype(np.float32), parts)[:, None]
        frames = 1 + (size - length) // step
        shape = (batch, frames, matrix.shape[1] // 2, 2)
        order = (batch, frames, length, parts)
        laid = strided(plan, x, order, order, (size * parts, step * parts, parts, 1), 0)
        if window is not None and known is None:
            laid = plan.map("x * w", {"x": laid, "w": plan.view(window, (length, 1))})
        return product(plan, plan.view(laid, (batch * frames, length * parts)), plan.constant(matrix), shape)
