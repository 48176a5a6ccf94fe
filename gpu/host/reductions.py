"""Operators that reduce or accumulate along axes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..graph.model import Node
from .table import Array, Inputs, axes_of, axis_of, op

__all__: list[str] = []


@op("ReduceSum", "ReduceProd", "ReduceMin", "ReduceMax", "ReduceMean")
def _reduce(node: Node, inputs: Inputs) -> list[Array] | None:
    x, axes = inputs[0], axes_of(node, inputs, 1)
    if not axes:
        if node.attrs.get("noop_with_empty_axes"):
            return [x]
        axes = list(range(x.ndim))
    over = tuple(sorted({axis_of(a, x.ndim) for a in axes}))
    keep = bool(node.attrs.get("keepdims", 1))
    kind: dict[str, Any] = {"axis": over, "keepdims": keep}
    wide = np.float32 if x.dtype == np.float16 or (x.dtype.isbuiltin != 1 and x.dtype.kind == "V") else x.dtype
    match node.op:
        case "ReduceSum":
            return [np.sum(x, dtype=wide, **kind).astype(x.dtype)]
        case "ReduceProd":
            return [np.prod(x, dtype=wide, **kind).astype(x.dtype)]
        case "ReduceMean":
            count = int(np.prod([x.shape[a] for a in over], dtype=np.int64))
            if x.dtype.kind in "iu":
                total = np.sum(x, dtype=x.dtype, **kind)
                if not count:
                    raise ValueError("the mean of no elements")
                return [(np.abs(total) // count * np.sign(total)).astype(x.dtype)]
            return [(np.sum(x, dtype=wide, **kind) / np.asarray(count, wide)).astype(x.dtype)]
    if not all(x.shape[a] for a in over):
        return None
    return [(np.min if node.op == "ReduceMin" else np.max)(x, **kind)]


@op("ArgMax", "ArgMin")
def _arg(node: Node, inputs: Inputs) -> list[Array]:
    x = inputs[0]
    axis = axis_of(node.attrs.get("axis", 0), x.ndim)
    find = np.argmax if node.op == "ArgMax" else np.argmin
    last = node.attrs.get("select_last_index")
    out = np.asarray(x.shape[axis] - 1 - find(np.flip(x, axis), axis) if last else find(x, axis), np.int64)
    return [np.expand_dims(out, axis) if node.attrs.get("keepdims", 1) else out]


@op("CumSum")
def _cum_sum(node: Node, inputs: Inputs) -> list[Array]:
    x = inputs[0]
    axis = axis_of(int(inputs[1].reshape(-1)[0]), x.ndim)
    if node.attrs.get("reverse"):
        x = np.flip(x, axis)
    out = np.cumsum(x, axis, dtype=x.dtype)
    if node.attrs.get("exclusive"):
        out = np.roll(out, 1, axis)
        out[(slice(None),) * axis + (slice(0, 1),)] = 0
    if node.attrs.get("reverse"):
        out = np.flip(out, axis)
    return [out]
