"""Products and convolutions of bytes, exact.

Bytes come as i32 or u32, as the device holds them. Sums of their products are formed in f32 while
they stay below 2 ** 24, else in pieces, and added up as i32.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from .conv import Conv
from .matmul import product
from .matmul_packed import EXACT, Packed, packed_product
from .move import slices
from .registry import NoKernel
from .window import bad

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Array, Tensor

__all__ = ["centred", "integer_convolution", "integer_product", "only_bytes"]


def only_bytes(*tensors: Tensor | None) -> None:
    """Raises NoKernel unless all are whole numbers that the device holds, or left out."""
    for tensor in tensors:
        if tensor is not None and tensor.type not in ("i32", "u32"):
            raise NoKernel(f"no kernel for {tensor.dtype.name}")


def integer_product(
    plan: Lowering, a: Tensor, b: Tensor, a_zero: Tensor | None, b_zero: Tensor | None, b_at: int
) -> Tensor:
    """(a - zero point) @ (b - zero point), exact, i32, wrapping: a: [..., m, k] or [k], b: [..., k, n] or [k].

    Args:
        plan: takes the kernels.
        a: i32 or u32, bytes.
        b: the same; input number `b_at` of the node. Where known, it stays packed.
        a_zero: one number, or one for each row: [m] or [..., m, 1].
        b_zero: one number, or one for each column: [n] or [..., 1, n].
        b_at: which input b is.

    Raises:
        NoKernel: a dtype has no kernel. InvalidModel: the shapes do not fit.
    """
    only_bytes(a, b, a_zero, b_zero)
    if not a.rank or not b.rank or a.shape[-1] != b.shape[-2 if b.rank > 1 else 0]:
        raise bad(plan, "matrices that multiply", f"shapes {list(a.shape)} and {list(b.shape)}")
    leading = plan.broadcast(a.shape[:-2], b.shape[:-2])
    shape = (*leading, *a.shape[-2:-1], *(b.shape[-1:] if b.rank > 1 else ()))
    raw = plan.raw[b_at]
    values = None if raw is None else plan.known_value(raw)
    zeros = None if b_zero is None else plan.known_value(b_zero)
    settled = b.rank == 2 and (b_zero is None or zeros is not None) and (a_zero is None or a_zero.size == 1)
    if settled and raw is not None and values is not None and values.dtype.itemsize == 1:
        return packed_product(plan, a, a_zero, _packed_bytes(raw, values, zeros), shape)
    left = a if a.rank > 1 else plan.view(a, (1, a.size))
    right = b if b.rank > 1 else plan.view(b, (b.size, 1))
    if a_zero is not None and a_zero.rank == 1 and a_zero.size > 1:
        a_zero = plan.view(a_zero, (a_zero.size, 1))
    return product(plan, centred(plan, left, a_zero), centred(plan, right, b_zero), shape)


def centred(plan: Lowering, x: Tensor, zero: Tensor | None, dtype: Any = np.int32) -> Tensor:
    """X - zero point, as i32 or f32."""
    kind = "i32" if dtype == np.int32 else "f32"
    if zero is None:
        return x if x.dtype == dtype else plan.map(f"{kind}(x)", {"x": x}, dtype=dtype)
    zero = plan.view(zero, ()) if zero.size == 1 else zero
    return plan.map(f"{kind}(i32(x) - i32(z))", {"x": x, "z": zero}, dtype=dtype, shape=x.shape)


def _packed_bytes(raw: Tensor, values: Array, zeros: Array | None) -> Packed:
    k, n = values.shape
    plain = zeros is None or not zeros.any()
    row = None if zeros is None or plain else np.broadcast_to(zeros.astype(np.float32).reshape(1, -1), (1, n))
    return Packed(
        raw,
        ("bytes", None if row is None else row.tobytes()),
        k,
        n,
        8,
        values.dtype == np.int8,
        EXACT,
        lambda: values,
        None if row is None else lambda: row,
        shared=True,
    )


def integer_convolution(
    plan: Lowering, conv: Conv, x: Tensor, w: Tensor, x_zero: Tensor | None, w_zero: Tensor | None, w_at: int
) -> Tensor:
    """The convolution of (x - zero point) with (w - zero point), exact, i32; padded with 0 after the subtraction.

    Args:
        plan: takes the kernels.
        conv: its attributes.
        x: [n, c, spatial...], i32 or u32, bytes.
        w: [m, c / group, kernel...], the same; input number `w_at` of the node.
        x_zero: one number.
        w_zero: one number, or one for each output channel.
        w_at: which input w is.
    """
    only_bytes(x, w, x_zero, w_zero)
    raw = plan.raw[w_at]
    values = None if raw is None else plan.known_value(raw)
    zeros = None if w_zero is None else plan.known_value(w_zero)
    ones = (-1, *[1] * (w.rank - 1))
    if raw is not None and values is not None and (w_zero is None or zeros is not None):
        less = np.zeros((1,), np.float32) if zeros is None else zeros.astype(np.float32)
        key = ("centred", less.tobytes())
        weights = plan.derive(raw, key, lambda array: array.astype(np.float32) - less.reshape(ones))
        known = plan.value(weights)
        sums = np.abs(known).reshape(*known.shape[:2], -1).sum(2).max(0, initial=0) if known.size else np.zeros(0)
    else:
        shown = w_zero if w_zero is None or w_zero.size == 1 else plan.view(w_zero, (w_zero.size, *[1] * (w.rank - 1)))
        weights = centred(plan, w, shown, np.float32)
        sums = np.full(w.shape[1], 255.0 * math.prod(w.shape[2:]))
    cuts = _cuts(255.0 * sums, 2.0**24)
    inputs = centred(plan, x, x_zero, np.float32)
    total: Tensor | None = None
    for first, last in pairwise(cuts):
        some, part = inputs, weights
        if len(cuts) > 2:
            if plan.known_value(weights) is None:
                part = slices(plan, weights, {1: slice(first, last)})
            else:
                part = plan.derive(weights, (first, last), partial(_channels, first=first, last=last))
            each = (x.shape[0], conv.group, w.shape[1], *x.shape[2:])
            some = slices(plan, plan.view(inputs, each), {2: slice(first, last)})
            some = plan.view(some, (x.shape[0], conv.group * (last - first), *x.shape[2:]))
        made = conv.lower(plan, some, part)
        if total is None:
            total = plan.map("i32(y)", {"y": made}, dtype=np.int32)
        else:
            total = plan.map("t + i32(y)", {"t": total, "y": made}, dtype=np.int32)
    assert total is not None
    return total


def _channels(array: Array, first: int, last: int) -> Array:
    return np.ascontiguousarray(array[:, first:last])


def _cuts(sums: Array, most: float) -> list[int]:
    """Where to cut a list so that no piece's sum is over `most`. Raises NoKernel where one number is."""
    cuts, total = [0], 0.0
    for index, value in enumerate(sums):
        if value > most:
            raise NoKernel("a window too large for exact sums")
        total += float(value)
        if total > most:
            cuts.append(index)
            total = float(value)
    return [*cuts, len(sums)]
