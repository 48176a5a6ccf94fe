"""Operators for which the reference evaluator is wrong or missing."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..graph.model import Node
from .table import Array, Inputs, axis_of, op

__all__: list[str] = []

_ALONG_ONE_AXIS = 13


def _per_channel(x: Array, rank: int, axis: int) -> Array:
    return x.reshape([-1 if i == axis else 1 for i in range(rank)])


@op("BatchNormalization")
def _batch_normalization(node: Node, inputs: Inputs) -> list[Array] | None:
    """The inference form, computed in float64; `momentum` has no meaning there."""
    if node.attrs.get("training_mode") or node.attrs.get("spatial", 1) != 1:
        return None
    if node.opset < 14 and any(o is not None for o in node.outputs[1:]):
        return None
    x = inputs[0]
    scale, bias, mean, var = (_per_channel(p.astype(np.float64), x.ndim, min(1, x.ndim - 1)) for p in inputs[1:5])
    factor = scale / np.sqrt(var + node.attrs.get("epsilon", 1e-5))
    return [(x * factor + (bias - mean * factor)).astype(x.dtype)]


@op("Softmax", "LogSoftmax", "Hardmax")
def _softmax(node: Node, inputs: Inputs) -> list[Array]:
    """Along one axis; before opset 13 over all dimensions from the axis on."""
    x = inputs[0]
    if node.opset >= _ALONG_ONE_AXIS:
        rows, axis = x, axis_of(node.attrs.get("axis", -1), x.ndim)
    else:
        first = node.attrs.get("axis", 1)
        first = first if first == x.ndim else axis_of(first, x.ndim)
        rows, axis = x.reshape(int(np.prod(x.shape[:first], dtype=np.int64)), -1) if x.size else x, 1
    if not x.size:
        return [x]
    if node.op == "Hardmax":
        made = np.zeros(rows.shape, x.dtype)
        np.put_along_axis(made, np.expand_dims(rows.argmax(axis), axis), np.ones((), x.dtype), axis)
        return [made.reshape(x.shape)]
    wide = rows.astype(np.float64 if x.dtype == np.float64 else np.float32)
    low = wide - wide.max(axis, keepdims=True)
    powers = np.exp(low)
    total = powers.sum(axis, keepdims=True)
    made = powers / total if node.op == "Softmax" else low - np.log(total)
    return [made.astype(x.dtype).reshape(x.shape)]


@op("LpNormalization")
def _lp_normalization(node: Node, inputs: Inputs) -> list[Array]:
    """Each x over its norm along the axis; 0 where that is 0."""
    x = inputs[0]
    wide, axis = x.astype(np.promote_types(x.dtype, np.float32)), axis_of(node.attrs.get("axis", -1), x.ndim)
    if node.attrs.get("p", 2) == 1:
        norm = np.abs(wide).sum(axis, keepdims=True)
    else:
        norm = np.sqrt((wide * wide).sum(axis, keepdims=True))
    return [np.where(norm == 0, 0, wide / np.where(norm == 0, 1, norm)).astype(x.dtype)]


@op("GlobalMaxPool", "GlobalAveragePool")
def _global_pool(node: Node, inputs: Inputs) -> list[Array]:
    x = inputs[0]
    axes = tuple(range(2, x.ndim))
    if node.op == "GlobalMaxPool":
        return [x.max(axes, keepdims=True)]
    return [x.mean(axes, np.float64, keepdims=True).astype(x.dtype)]


@op("GlobalLpPool")
def _global_lp_pool(node: Node, inputs: Inputs) -> list[Array]:
    """(sum of |x| ** p) ** (1 / p) over all but the first two dimensions."""
    x, p = inputs[0], node.attrs.get("p", 2)
    total = (np.abs(x.astype(np.float64)) ** p).sum(tuple(range(2, x.ndim)), keepdims=True)
    return [(total ** (1 / p)).astype(x.dtype)]


@op("MaxRoiPool")
def _max_roi_pool(node: Node, inputs: Inputs) -> list[Array]:
    """The maximum of each part of each region: x [n, c, h, w], regions [r, (n, x1, y1, x2, y2)] -> [r, c, *pooled]."""
    x, regions = inputs
    rows, columns = node.attrs["pooled_shape"]
    out = np.zeros((len(regions), x.shape[1], rows, columns), x.dtype)
    for r, (image, *corners) in enumerate(regions.astype(np.float64)):
        if not 0 <= image < len(x):
            raise ValueError(f"a region of image {int(image)}, there are {len(x)}")
        left, top, right, bottom = (np.floor(c * node.attrs.get("spatial_scale", 1.0) + 0.5) for c in corners)
        height, width = max(bottom - top + 1, 1) / rows, max(right - left + 1, 1) / columns
        for i in range(rows):
            y = [int(np.clip(v, 0, x.shape[2])) for v in (np.floor(i * height) + top, np.ceil((i + 1) * height) + top)]
            for j in range(columns):
                ends = (np.floor(j * width) + left, np.ceil((j + 1) * width) + left)
                z = [int(np.clip(v, 0, x.shape[3])) for v in ends]
                part = x[int(image), :, y[0] : y[1], z[0] : z[1]]
                if part.size:
                    out[r, :, i, j] = part.max((1, 2))
    return [out]


@op("DequantizeLinear")
def _dequantize(node: Node, inputs: Inputs) -> list[Array] | None:
    x, scale = inputs[0], inputs[1]
    zero = inputs[2] if len(inputs) > 2 else None
    if node.attrs.get("block_size") or x.dtype.kind not in "iu" or x.dtype.isbuiltin != 1:
        return None
    scale, zero = _along(node, x, scale), None if zero is None else _along(node, x, zero)
    whole = x.astype(np.int64)
    if zero is not None:
        whole = whole - zero.astype(np.int64)
    return [whole.astype(scale.dtype) * scale]


@op("QuantizeLinear")
def _quantize(node: Node, inputs: Inputs) -> list[Array] | None:
    x, scale = inputs[0], inputs[1]
    zero = inputs[2] if len(inputs) > 2 and inputs[2] is not None else np.zeros((), np.uint8)
    plain = zero.dtype.kind in "iu" and zero.dtype.isbuiltin == 1
    if node.attrs.get("block_size") or node.attrs.get("output_dtype") or not plain or x.dtype.kind not in "fi":
        return None
    limits: Any = np.iinfo(zero.dtype)
    whole = np.rint(x / _along(node, x, scale)) + _along(node, x, zero).astype(np.float64)
    return [np.clip(whole, limits.min, limits.max).astype(zero.dtype)]


def _along(node: Node, x: Array, parameter: Array) -> Array:
    if parameter.size == 1 and parameter.ndim <= 1:
        return parameter.reshape(())
    return _per_channel(parameter, x.ndim, axis_of(node.attrs.get("axis", 1), x.ndim))
