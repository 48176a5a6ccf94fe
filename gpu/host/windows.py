"""Convolutions and pools: one tap of the window at a time, so that memory stays small."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..graph.model import Node
from .table import Array, Inputs, op

__all__: list[str] = []


class _Window(NamedTuple):
    """A window over the spatial dimensions: size, step, spacing, and padding before and after."""

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    before: list[int]
    after: list[int]

    def reach(self, i: int) -> int:
        return (self.kernel[i] - 1) * self.dilations[i] + 1

    def taps(self) -> Iterator[tuple[tuple[int, ...], list[int]]]:
        """Each place in the kernel, and how far it lies from the window's start."""
        for place in product(*map(range, self.kernel)):
            yield place, [p * d for p, d in zip(place, self.dilations, strict=True)]

    def at(self, starts: list[int], counts: list[int]) -> tuple[Any, ...]:
        """The index of where one tap of every window lies in the padded input."""
        rows = zip(starts, counts, self.strides, strict=True)
        return (..., *(slice(b, b + (n - 1) * step + 1 if n else b, step) for b, n, step in rows))


def _window(node: Node, shape: tuple[int, ...], kernel: list[int]) -> _Window:
    attrs, rank = node.attrs, len(shape)
    strides = list(attrs.get("strides") or [1] * rank)
    dilations = list(attrs.get("dilations") or [1] * rank)
    pads = list(attrs.get("pads") or [0] * 2 * rank)
    auto = attrs.get("auto_pad", "NOTSET")
    if len(kernel) != rank or len(strides) != rank or len(dilations) != rank or len(pads) != 2 * rank:
        raise ValueError(f"kernel, strides, dilations or pads do not have {rank} dimensions")
    made = _Window(kernel, strides, dilations, pads[:rank], pads[rank:])
    if auto not in ("SAME_UPPER", "SAME_LOWER"):
        return made._replace(before=[0] * rank, after=[0] * rank) if auto == "VALID" else made
    places = enumerate(zip(shape, strides, strict=True))
    totals = [max((-(-n // s) - 1) * s + made.reach(i) - n, 0) for i, (n, s) in places]
    small, large = [t // 2 for t in totals], [t - t // 2 for t in totals]
    before, after = (small, large) if auto == "SAME_UPPER" else (large, small)
    return made._replace(before=before, after=after)


def _counts(window: _Window, shape: tuple[int, ...], up: bool = False) -> list[int]:
    """How many windows fit; with `up` also those that reach over the end, if they start before it."""
    counts = []
    for i, n in enumerate(shape):
        room = n + window.before[i] + window.after[i] - window.reach(i)
        if room < 0:
            reach = window.reach(i)
            raise ValueError(f"a window of {reach} over {room + reach} elements of dimension {i + 2}")
        step = window.strides[i]
        count = (-(-room // step) if up else room // step) + 1
        counts.append(count - 1 if up and (count - 1) * step >= n + window.before[i] else count)
    return counts


def _padded(x: Array, window: _Window, counts: list[int], value: Any) -> Array:
    widths = [(0, 0), (0, 0)]
    for i, n in enumerate(x.shape[2:]):
        end = (counts[i] - 1) * window.strides[i] + window.reach(i)
        widths.append((window.before[i], max(end - n - window.before[i], 0)))
    return np.pad(x, widths, constant_values=value)


@op("Conv")
def _conv(node: Node, inputs: Inputs) -> list[Array] | None:
    x, weights = inputs[0], inputs[1]
    if x.dtype not in (np.float16, np.float32, np.float64) or x.ndim < 3:
        return None
    groups, wide = node.attrs.get("group", 1), np.promote_types(x.dtype, np.float32)
    batch, channels, *shape = x.shape
    made, per = weights.shape[0], weights.shape[1]
    if weights.ndim != x.ndim or per * groups != channels or made % groups:
        raise ValueError(f"weights {list(weights.shape)} in {groups} groups do not fit an input of {list(x.shape)}")
    window = _window(node, tuple(shape), list(weights.shape[2:]))
    counts = _counts(window, tuple(shape))
    padded = _padded(x.astype(wide, copy=False), window, counts, 0)
    kernel = weights.astype(wide, copy=False).reshape(groups, made // groups, per, *window.kernel)
    out = np.zeros((batch, groups, made // groups, prod(counts)), wide)
    for place, starts in window.taps():
        part = padded[window.at(starts, counts)].reshape(batch, groups, per, prod(counts))
        tap = kernel[(..., *place)]
        out += tap * part if per == 1 else tap @ part
    if len(inputs) > 2 and inputs[2] is not None:
        out += inputs[2].astype(wide).reshape(groups, -1, 1)
    return [out.reshape(batch, made, *counts).astype(x.dtype, copy=False)]


@op("ConvTranspose")
def _conv_transpose(node: Node, inputs: Inputs) -> list[Array] | None:
    x, weights = inputs[0], inputs[1]
    if x.dtype not in (np.float16, np.float32, np.float64) or x.ndim < 3:
        return None
    groups, wide = node.attrs.get("group", 1), np.promote_types(x.dtype, np.float32)
    batch, channels, *shape = x.shape
    per = weights.shape[1]
    if weights.ndim != x.ndim or weights.shape[0] != channels or channels % groups:
        raise ValueError(f"weights {list(weights.shape)} in {groups} groups do not fit an input of {list(x.shape)}")
    auto = node.attrs.get("auto_pad", "NOTSET")
    plain = Node(node.op, node.domain, node.opset, node.name, (), (), {**node.attrs, "auto_pad": "NOTSET"})
    window = _window(plain, tuple(shape), list(weights.shape[2:]))
    rank = len(shape)
    extra = list(node.attrs.get("output_padding") or [0] * rank)
    full = [(n - 1) * s + window.reach(i) for i, (n, s) in enumerate(zip(shape, window.strides, strict=True))]
    rows = zip(full, extra, window.before, window.after, strict=True)
    before, sizes = window.before, [f + e - b - a for f, e, b, a in rows]
    wanted = node.attrs.get("output_shape")
    if not wanted and auto in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [n * s for n, s in zip(shape, window.strides, strict=True)]
    if wanted:
        sizes = list(wanted[-rank:])
        totals = [max(f + e - n, 0) for f, e, n in zip(full, extra, sizes, strict=True)]
        before = [t // 2 if auto == "SAME_UPPER" else t - t // 2 for t in totals]
    elif auto == "VALID":
        before, sizes = [0] * rank, [f + e for f, e in zip(full, extra, strict=True)]
    room = [max(f, b + n) for f, b, n in zip(full, before, sizes, strict=True)]
    out = np.zeros((batch, groups, per, *room), wide)
    kernel = weights.astype(wide, copy=False).reshape(groups, channels // groups, per, *window.kernel)
    flat = x.astype(wide, copy=False).reshape(batch, groups, channels // groups, prod(shape))
    for place, starts in window.taps():
        tap = kernel[(..., *place)].swapaxes(1, 2)
        out[window.at(starts, list(shape))] += (tap @ flat).reshape(batch, groups, per, *shape)
    kept: tuple[Any, ...] = (..., *(slice(b, b + n) for b, n in zip(before, sizes, strict=True)))
    out = out[kept].reshape(batch, groups * per, *sizes)
    if len(inputs) > 2 and inputs[2] is not None:
        out = out + inputs[2].astype(wide).reshape(-1, *[1] * rank)
    return [out.astype(x.dtype, copy=False)]


@op("MaxPool", "AveragePool")
def _pool(node: Node, inputs: Inputs) -> list[Array] | None:
    x, most = inputs[0], node.op == "MaxPool"
    if x.dtype.isbuiltin != 1 or x.ndim < 3:
        return None
    shape, wide = x.shape[2:], x.dtype if most else np.promote_types(x.dtype, np.float32)
    window = _window(node, shape, list(node.attrs["kernel_shape"]))
    counts = _counts(window, shape, bool(node.attrs.get("ceil_mode")))
    lowest = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
    padded = _padded(x.astype(wide, copy=False), window, counts, lowest if most else 0)
    if any(v is not None for v in node.outputs[1:]):
        return _places(node, x, padded, window, counts)
    out = np.full((*x.shape[:2], *counts), lowest if most else 0, wide)
    for _, starts in window.taps():
        part = padded[window.at(starts, counts)]
        out = np.maximum(out, part) if most else out + part
    return [out if most else (out / _covered(node, window, shape, counts)).astype(x.dtype)]


def _places(node: Node, x: Array, padded: Array, window: _Window, counts: list[int]) -> list[Array]:
    """The maxima, and where in the whole input each lies (the first of equals)."""
    shape = x.shape[2:]
    own = np.arange(prod(shape), dtype=np.int64).reshape(shape, order="F" if node.attrs.get("storage_order") else "C")
    own = own + (np.arange(prod(x.shape[:2])) * prod(shape)).reshape(*x.shape[:2], *[1] * len(shape))
    numbers = _padded(own, window, counts, -1)
    out, at = None, None
    for _, starts in window.taps():
        part, there = padded[window.at(starts, counts)], numbers[window.at(starts, counts)]
        if out is None or at is None:
            out, at = part.copy(), there.copy()
            continue
        better = (there >= 0) & ((at < 0) | (part > out))
        out, at = np.where(better, part, out), np.where(better, there, at)
    assert out is not None
    assert at is not None
    return [out, at]


def _covered(node: Node, window: _Window, shape: tuple[int, ...], counts: list[int]) -> Array:
    """How many elements each window of an average counts."""
    total = np.ones((1,) * len(counts))
    padding = node.attrs.get("count_include_pad", 0)
    for i, (n, count) in enumerate(zip(shape, counts, strict=True)):
        starts = np.arange(count) * window.strides[i] - window.before[i]
        places = starts[:, None] + np.arange(window.kernel[i]) * window.dilations[i]
        low, high = (-window.before[i], n + window.after[i]) if padding else (0, n)
        inside = ((places >= low) & (places < high)).sum(1)
        total = total * inside.reshape([-1 if j == i else 1 for j in range(len(counts))])
    return total
