"""Operators that move elements or ask for shapes."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ..graph.model import Node
from ..graph.tensors import element_type
from .table import Array, Inputs, axes_of, axis_of, op

__all__: list[str] = []


@op("Shape", strings=True)
def _shape(node: Node, inputs: Inputs) -> list[Array]:
    shape = inputs[0].shape
    if node.attrs:
        shape = shape[node.attrs.get("start", 0) : node.attrs.get("end", len(shape))]
    return [np.array(shape, np.int64)]


@op("Size", strings=True)
def _size(node: Node, inputs: Inputs) -> list[Array]:
    return [np.array(inputs[0].size, np.int64)]


@op("Identity", anything=True)
def _identity(node: Node, inputs: Inputs) -> list[Array]:
    return [inputs[0]]


@op("Concat", strings=True)
def _concat(node: Node, inputs: Inputs) -> list[Array]:
    return [np.concatenate(inputs, axis_of(node.attrs["axis"], inputs[0].ndim))]


@op("Slice", strings=True)
def _slice(node: Node, inputs: Inputs) -> list[Array]:
    x = inputs[0]
    if node.opset < 10:
        starts, ends = node.attrs["starts"], node.attrs["ends"]
        axes, steps = node.attrs.get("axes"), None
    else:
        starts, ends = inputs[1].tolist(), inputs[2].tolist()
        axes = inputs[3].tolist() if len(inputs) > 3 and inputs[3] is not None else None
        steps = inputs[4].tolist() if len(inputs) > 4 and inputs[4] is not None else None
    axes = range(len(starts)) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    index = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step == 0:
            raise ValueError("a step of 0")
        axis = axis_of(axis, x.ndim)
        n = x.shape[axis]
        if end < 0:
            end = max(end + n, -1 if step < 0 else 0)
            if end < 0:
                end = None
        if start < 0:
            start += n
            if start < 0:
                start = 0
        index[axis] = slice(start, end, step)
    return [x[tuple(index)]]


@op("Split", strings=True)
def _split(node: Node, inputs: Inputs) -> list[Array]:
    x = inputs[0]
    axis = axis_of(node.attrs.get("axis", 0), x.ndim)
    n = x.shape[axis]
    sizes = inputs[1].tolist() if len(inputs) > 1 and inputs[1] is not None else node.attrs.get("split")
    if sizes is None:
        count = node.attrs.get("num_outputs", len(node.outputs))
        if node.opset < 18 and n % count:
            raise ValueError(f"{n} elements do not split into {count} equal parts")
        size = -(-n // count)
        sizes = [max(0, min(size, n - size * i)) for i in range(count)]
    if sum(sizes) != n or min(sizes, default=0) < 0:
        raise ValueError(f"parts of {sizes} do not add up to {n}")
    ends = np.cumsum(sizes)[:-1].tolist()
    return np.split(x, ends, axis)


@op("Unsqueeze", strings=True)
def _unsqueeze(node: Node, inputs: Inputs) -> list[Array]:
    x, axes = inputs[0], axes_of(node, inputs, 1)
    if axes is None:
        raise KeyError("axes")
    rank = x.ndim + len(axes)
    new = {axis_of(a, rank) for a in axes}
    if len(new) != len(axes):
        raise ValueError(f"axes {axes} name a dimension twice")
    old = iter(x.shape)
    return [x.reshape([1 if i in new else next(old) for i in range(rank)])]


@op("Squeeze", strings=True)
def _squeeze(node: Node, inputs: Inputs) -> list[Array]:
    x, axes = inputs[0], axes_of(node, inputs, 1)
    gone = {i for i, d in enumerate(x.shape) if d == 1} if axes is None else {axis_of(a, x.ndim) for a in axes}
    for axis in gone:
        if x.shape[axis] != 1:
            raise ValueError(f"dimension {axis} of shape {list(x.shape)} is not 1")
    return [x.reshape([d for i, d in enumerate(x.shape) if i not in gone])]


@op("Reshape", strings=True)
def _reshape(node: Node, inputs: Inputs) -> list[Array]:
    x, target = inputs[0], inputs[1].reshape(-1).tolist()
    shape = list(target)
    if not node.attrs.get("allowzero"):
        shape = [x.shape[i] if d == 0 else d for i, d in enumerate(target)]
    if -1 in shape:
        known = prod(d for d in shape if d != -1)
        if shape.count(-1) > 1 or known <= 0 or x.size % known:
            raise ValueError(f"shape {list(x.shape)} cannot become {target}")
        shape[shape.index(-1)] = x.size // known
    if prod(shape) != x.size or min(shape, default=0) < 0:
        raise ValueError(f"shape {list(x.shape)} cannot become {target}")
    return [x.reshape(shape)]


@op("Flatten", strings=True)
def _flatten(node: Node, inputs: Inputs) -> list[Array]:
    x, axis = inputs[0], node.attrs.get("axis", 1)
    if not -x.ndim <= axis <= x.ndim:
        raise ValueError(f"axis {axis} is out of range for {x.ndim} dimensions")
    axis += x.ndim if axis < 0 else 0
    return [x.reshape(prod(x.shape[:axis]), prod(x.shape[axis:]))]


@op("Transpose", strings=True)
def _transpose(node: Node, inputs: Inputs) -> list[Array]:
    return [inputs[0].transpose(node.attrs.get("perm"))]


@op("Expand", strings=True)
def _expand(node: Node, inputs: Inputs) -> list[Array]:
    x = inputs[0]
    return [np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(inputs[1].tolist())))]


@op("Tile", strings=True)
def _tile(node: Node, inputs: Inputs) -> list[Array]:
    repeats = inputs[1].tolist()
    if len(repeats) != inputs[0].ndim:
        raise ValueError(f"{len(repeats)} repeats for {inputs[0].ndim} dimensions")
    return [np.tile(inputs[0], repeats)]


@op("ConstantOfShape")
def _constant_of_shape(node: Node, inputs: Inputs) -> list[Array]:
    value = node.attrs.get("value")
    value = np.zeros(1, np.float32) if value is None else value
    return [np.full(inputs[0].tolist(), value.reshape(-1)[0], value.dtype)]


@op("Range")
def _range(node: Node, inputs: Inputs) -> list[Array]:
    start, limit, delta = (x.reshape(()) for x in inputs)
    if delta == 0:
        raise ValueError("a delta of 0")
    if start.dtype.kind in "iu":
        count = max(-(-(int(limit) - int(start)) // int(delta)), 0)
        return [start + delta * np.arange(count).astype(start.dtype)]
    count = max(int(np.ceil((limit - start) / delta)), 0)
    return [(start + delta * np.arange(count).astype(start.dtype)).astype(start.dtype)]


@op("Cast", "CastLike")
def _cast(node: Node, inputs: Inputs) -> list[Array] | None:
    x = inputs[0]
    dtype = inputs[1].dtype if node.op == "CastLike" else element_type(node.attrs["to"])
    if dtype is None or dtype.hasobject:
        return None
    if dtype == x.dtype:
        return [x]
    if dtype.isbuiltin != 1 and (dtype.itemsize == 1 or x.dtype.itemsize == 1):
        return None
    if dtype.kind in "iu" and dtype.itemsize < 4 and x.dtype.kind == "f":
        return [x.astype(np.int64).astype(dtype)]
    return [x.astype(dtype)]


@op("Where", strings=True)
def _where(node: Node, inputs: Inputs) -> list[Any]:
    condition, x, y = inputs
    return [np.where(condition, x, y)]


@op("Trilu")
def _trilu(node: Node, inputs: Inputs) -> list[Array]:
    k = int(inputs[1].reshape(())) if len(inputs) > 1 and inputs[1] is not None else 0
    return [(np.triu if node.attrs.get("upper", 1) else np.tril)(inputs[0], k)]


@op("EyeLike")
def _eye_like(node: Node, inputs: Inputs) -> list[Array]:
    x = inputs[0]
    dtype = element_type(node.attrs["dtype"]) if "dtype" in node.attrs else x.dtype
    rows, columns = x.shape
    return [np.eye(rows, columns, node.attrs.get("k", 0)).astype(dtype)]


@op("Pad")
def _pad(node: Node, inputs: Inputs) -> list[Array] | None:
    x, mode = inputs[0], node.attrs.get("mode", "constant")
    value = np.zeros((), x.dtype)
    axes: list[int] | None = None
    if node.opset < 11:
        pads = node.attrs["pads"]
        value = np.array(node.attrs.get("value", 0.0), x.dtype)
    else:
        pads = inputs[1].tolist()
        if len(inputs) > 2 and inputs[2] is not None:
            value = inputs[2].reshape(()).astype(x.dtype)
        if len(inputs) > 3 and inputs[3] is not None:
            axes = inputs[3].tolist()
    places = list(range(x.ndim)) if axes is None else [axis_of(a, x.ndim) for a in axes]
    if len(pads) != 2 * len(places):
        raise ValueError(f"{len(pads)} pads for {len(places)} dimensions")
    widths = [(0, 0)] * x.ndim
    for i, axis in enumerate(places):
        widths[axis] = pads[i], pads[i + len(places)]
    cut = tuple(slice(max(-b, 0), max(n - max(-e, 0), 0)) for n, (b, e) in zip(x.shape, widths, strict=True))
    x, grow = x[cut], [(max(b, 0), max(e, 0)) for b, e in widths]
    if mode == "constant":
        return [np.pad(x, grow, constant_values=value)]
    names = {"reflect": "reflect", "edge": "edge", "wrap": "wrap"}
    return [np.pad(x, grow, names[mode])] if mode in names else None  # type: ignore[call-overload]
