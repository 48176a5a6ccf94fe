"""Operators that reduce or accumulate along axes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..graph.model import Node
from .table import Array, Inputs, axes_of, axis_of, op

__all__: list[str] = []


_SUMS = ("ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp")


@op("ReduceSum", "ReduceProd", "ReduceMin", "ReduceMax", "ReduceMean", *_SUMS)
def _reduce(node: Node, inputs: Inputs) -> list[Array] | None:
    x, axes = inputs[0], axes_of(node, inputs, 1)
    if not axes:
        if node.attrs.get("noop_with_empty_axes"):
            return [_sum_of(node.op, x, {"axis": (), "keepdims": True}) if node.op in _SUMS else x]
        axes = list(range(x.ndim))
    over = tuple(sorted({axis_of(a, x.ndim) for a in axes}))
    keep = bool(node.attrs.get("keepdims", 1))
    kind: dict[str, Any] = {"axis": over, "keepdims": keep}
    if node.op in _SUMS:
        return [_sum_of(node.op, x, kind)]
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


def _sum_of(name: str, x: Array, kind: dict[str, Any]) -> Array:
    """The reductions that are a function of a sum; integers are computed in float64 but for plain sums."""
    plain = x.dtype.kind in "iu" and name in ("ReduceSumSquare", "ReduceL1")
    exact = x.dtype.kind in "iu" or x.dtype == np.float64
    wide: Any = x if plain else x.astype(np.float64 if exact else np.float32)
    match name:
        case "ReduceSumSquare":
            made = np.sum(wide * wide, dtype=wide.dtype, **kind)
        case "ReduceL1":
            made = np.sum(np.abs(wide), dtype=wide.dtype, **kind)
        case "ReduceL2":
            made = np.sqrt(np.sum(wide * wide, **kind))
        case "ReduceLogSum":
            made = np.log(np.sum(wide, **kind))
        case _:
            most = np.max(wide, initial=-np.inf, axis=kind["axis"], keepdims=True)
            most = np.where(np.isfinite(most), most, 0)
            made = np.log(np.sum(np.exp(wide - most), **kind))
            made = made + (most if kind["keepdims"] else most.squeeze(kind["axis"]))
    return np.asarray(made).astype(x.dtype)


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
