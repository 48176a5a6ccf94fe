"""Operators that read or write by index."""

from __future__ import annotations

import numpy as np

from ..graph.model import Node
from .table import Array, Inputs, axis_of, op

__all__: list[str] = []

_REDUCTIONS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _checked(indices: Array, n: int, axis: int) -> Array:
    if indices.size and (indices.min() < -n or indices.max() >= n):
        bad = indices[(indices < -n) | (indices >= n)].reshape(-1)[0]
        raise IndexError(f"index {bad} is out of range for axis {axis} of {n} elements")
    return indices


@op("Gather", strings=True)
def _gather(node: Node, inputs: Inputs) -> list[Array]:
    x, indices = inputs
    axis = axis_of(node.attrs.get("axis", 0), x.ndim)
    return [x.take(_checked(indices, x.shape[axis], axis), axis)]


@op("GatherElements", strings=True)
def _gather_elements(node: Node, inputs: Inputs) -> list[Array]:
    x, indices = inputs
    axis = axis_of(node.attrs.get("axis", 0), x.ndim)
    _checked(indices, x.shape[axis], axis)
    return [x[_grid(indices, axis, x.shape)]]


def _grid(indices: Array, axis: int, shape: tuple[int, ...]) -> tuple[Array, ...]:
    """For each element of `indices` the position in another array that it stands for along `axis`."""
    if indices.ndim != len(shape):
        raise ValueError(f"indices of {indices.ndim} dimensions for {len(shape)}")
    for i, (n, limit) in enumerate(zip(indices.shape, shape, strict=True)):
        if i != axis and n > limit:
            raise IndexError(f"dimension {i} of the indices has {n} elements, the data have {limit}")
    grid = list(np.ogrid[tuple(slice(0, n) for n in indices.shape)])
    grid[axis] = indices
    return tuple(grid)


def _tuples(indices: Array, shape: tuple[int, ...], first: int) -> tuple[Array, ...]:
    """The last dimension of `indices` as a tuple of index arrays, checked."""
    depth = indices.shape[-1]
    if first + depth > len(shape):
        raise ValueError(f"index tuples of {depth} for {len(shape) - first} dimensions")
    return tuple(_checked(indices[..., i], shape[first + i], first + i) for i in range(depth))


@op("GatherND", strings=True)
def _gather_nd(node: Node, inputs: Inputs) -> list[Array]:
    x, indices = inputs
    batch = node.attrs.get("batch_dims", 0)
    if not batch:
        return [x[_tuples(indices, x.shape, 0)]]
    lead = x.shape[:batch]
    if indices.shape[:batch] != lead:
        raise ValueError(f"batch dimensions {list(lead)} and {list(indices.shape[:batch])} differ")
    places = _tuples(indices, x.shape, batch)
    rank = indices.ndim - 1
    grid = [np.arange(n).reshape([-1 if j == i else 1 for j in range(rank)]) for i, n in enumerate(lead)]
    return [x[(*grid, *places)]]


@op("ScatterElements", "Scatter", strings=True)
def _scatter_elements(node: Node, inputs: Inputs) -> list[Array] | None:
    x, indices, updates = inputs
    axis = axis_of(node.attrs.get("axis", 0), x.ndim)
    _checked(indices, x.shape[axis], axis)
    if indices.shape != updates.shape:
        raise ValueError(f"indices of shape {list(indices.shape)}, updates of shape {list(updates.shape)}")
    return _scatter(x, _grid(indices, axis, x.shape), updates, node.attrs.get("reduction", "none"))


@op("ScatterND", strings=True)
def _scatter_nd(node: Node, inputs: Inputs) -> list[Array] | None:
    x, indices, updates = inputs
    return _scatter(x, _tuples(indices, x.shape, 0), updates, node.attrs.get("reduction", "none"))


def _scatter(x: Array, places: tuple[Array, ...], updates: Array, reduction: str) -> list[Array] | None:
    out = x.copy()
    if reduction in ("none", ""):
        out[places] = updates
        return [out]
    ufunc = _REDUCTIONS.get(reduction)
    if ufunc is None:
        return None
    ufunc.at(out, places, updates)
    return [out]


@op("NonZero")
def _non_zero(node: Node, inputs: Inputs) -> list[Array]:
    x = inputs[0]
    if x.ndim == 0:
        return [np.zeros((0, int(bool(x))), np.int64)]
    return [np.array(np.nonzero(x), np.int64).reshape(x.ndim, -1)]


@op("Unique")
def _unique(node: Node, inputs: Inputs) -> list[Array]:
    """Values (or slices along an axis) without repeats; where each first was, which each is, how often it was."""
    x, axis = inputs[0], node.attrs.get("axis")
    axis = None if axis is None else axis_of(axis, x.ndim)
    made, first, which, counts = np.unique(x, True, True, True, axis=axis)
    which = which.reshape(-1)
    if not node.attrs.get("sorted", 1):
        order = np.argsort(first, kind="stable")
        made, first, counts = made.take(order, axis or 0), first[order], counts[order]
        which = np.argsort(order, kind="stable")[which]
    whole = [np.asarray(part, np.int64) for part in (first, which, counts)]
    return [made, *whole][: len(node.outputs)]


@op("OneHot")
def _one_hot(node: Node, inputs: Inputs) -> list[Array]:
    indices, depth, values = inputs
    n = int(depth.reshape(-1)[0])
    axis = axis_of(node.attrs.get("axis", -1), indices.ndim + 1)
    whole = indices.astype(np.int64)
    whole = np.expand_dims(np.where(whole < 0, whole + n, whole), axis)
    places = np.arange(n).reshape([-1 if i == axis else 1 for i in range(whole.ndim)])
    return [np.where(whole == places, values[1], values[0])]


@op("TopK")
def _top_k(node: Node, inputs: Inputs) -> list[Array]:
    x = inputs[0]
    k = int(inputs[1].reshape(-1)[0]) if node.opset >= 10 else node.attrs["k"]
    axis = axis_of(node.attrs.get("axis", -1), x.ndim)
    if not 0 <= k <= x.shape[axis]:
        raise ValueError(f"k = {k} of {x.shape[axis]} elements")
    if not node.attrs.get("largest", 1):
        order = np.argsort(x, axis, kind="stable")
    else:
        order = np.flip(x.shape[axis] - 1 - np.argsort(np.flip(x, axis), axis, kind="stable"), axis)
    order = order.take(np.arange(k), axis)
    return [np.take_along_axis(x, order, axis), order.astype(np.int64)]


@op("Compress", strings=True)
def _compress(node: Node, inputs: Inputs) -> list[Array]:
    x, condition = inputs
    axis = node.attrs.get("axis")
    if axis is not None:
        axis = axis_of(axis, x.ndim)
    return [np.compress(condition[: x.size if axis is None else x.shape[axis]], x, axis)]


@op("ArrayFeatureExtractor", domain="ai.onnx.ml")
def _array_feature_extractor(node: Node, inputs: Inputs) -> list[Array]:
    x, indices = inputs
    made = x.take(_checked(indices.reshape(-1), x.shape[-1], x.ndim - 1), -1)
    return [made.reshape(1, -1) if x.ndim == 1 else made]
