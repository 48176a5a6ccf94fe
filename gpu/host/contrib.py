"""Quantised operators of ONNX for which the reference evaluator lacks versions, and those of com.microsoft."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from onnx.helper import tensor_dtype_to_np_dtype

from ..graph.model import Node
from .table import Array, Inputs, axis_of, op

__all__: list[str] = []

_MS = "com.microsoft"
_RANGES = {np.dtype(t): (np.iinfo(t).min, np.iinfo(t).max) for t in (np.int8, np.uint8, np.int16, np.uint16)}
_RANGES |= {np.dtype(ml_dtypes.int4): (-8, 7), np.dtype(ml_dtypes.uint4): (0, 15)}


def _given(inputs: Inputs, index: int) -> Any:
    return inputs[index] if index < len(inputs) else None


def _spread(node: Node, t: Array, shape: tuple[int, ...]) -> Array:
    """Scales or zero points as they meet the elements of a tensor of `shape`."""
    block = node.attrs.get("block_size", 0)
    if t.size == 1 and not block:
        return t.reshape(())
    axis = axis_of(node.attrs.get("axis", 1), len(shape))
    if block:
        return np.repeat(t, block, axis)[(slice(None),) * axis + (slice(0, shape[axis]),)]
    return t.reshape(-1, *[1] * (len(shape) - axis - 1))


@op("DequantizeLinear")
@op("DequantizeLinear", domain=_MS)
def _dequantize(node: Node, inputs: Inputs) -> list[Array]:
    x, scale, zero = inputs[0], inputs[1], _given(inputs, 2)
    wide = x.astype(np.int64 if x.dtype == np.int32 else np.float32)
    if zero is not None:
        wide = wide - _spread(node, zero, x.shape).astype(wide.dtype)
    made = wide.astype(np.float32) * _spread(node, scale, x.shape).astype(np.float32)
    to = node.attrs.get("output_dtype", 0)
    return [made.astype(tensor_dtype_to_np_dtype(to) if to else scale.dtype)]


@op("QuantizeLinear")
@op("QuantizeLinear", domain=_MS)
def _quantize(node: Node, inputs: Inputs) -> list[Array] | None:
    x, scale, zero = inputs[0], inputs[1], _given(inputs, 2)
    to = node.attrs.get("output_dtype", 0)
    dtype = zero.dtype if zero is not None else np.dtype(tensor_dtype_to_np_dtype(to) if to else np.uint8)
    if dtype not in _RANGES:
        return None
    low, high = _RANGES[dtype]
    wide = np.float32 if x.dtype != np.float64 else np.float64
    made = np.rint(x.astype(wide) / _spread(node, scale, x.shape).astype(wide))
    if zero is not None:
        made = made.clip(-(2.0**24), 2.0**24) + _spread(node, zero, x.shape).astype(wide)
    return [made.clip(low, high).astype(dtype)]


@op("MatMulNBits", domain=_MS)
def _matmul_n_bits(node: Node, inputs: Inputs) -> list[Array] | None:
    a, b, scales, zeros, order, bias = (_given(inputs, index) for index in range(6))
    bits, k, n, block = node.attrs.get("bits", 4), node.attrs["K"], node.attrs["N"], node.attrs["block_size"]
    blocks = -(-k // block)
    if bits not in (4, 8) or order is not None:
        return None

    def elements(packed: Array) -> Array:
        rows = packed.reshape(n, -1)
        return rows if bits == 8 else np.stack([rows & 15, rows >> 4], -1).reshape(n, -1)

    if zeros is None:
        less = np.full((n, blocks), 1 << (bits - 1), np.float32)
    elif zeros.dtype == np.uint8:
        less = elements(zeros)[:, :blocks].astype(np.float32)
    else:
        less = zeros.reshape(n, blocks).astype(np.float32)
    weights = elements(b).reshape(n, blocks, block).astype(np.float32) - less[:, :, None]
    weights = (weights * scales.reshape(n, blocks, 1).astype(np.float32)).reshape(n, -1)[:, :k]
    made = a.astype(np.float32) @ weights.T
    if bias is not None:
        made = made + bias.astype(np.float32)
    return [made.astype(a.dtype)]


@op("GroupQueryAttention", domain=_MS)
def _group_query_attention(node: Node, inputs: Inputs) -> list[Array] | None:
    """Sequences of any length, written where each one's cache ends."""
    q, k, v, past_key, past_value, last, total, cos, sin, positions, added = (
        _given(inputs, index) for index in range(11)
    )
    attrs = node.attrs
    heads, kv_heads, softcap = attrs["num_heads"], attrs["kv_num_heads"], attrs.get("softcap", 0.0)
    window = attrs.get("local_window_size", -1)
    if attrs.get("smooth_softmax", 0) > 0 or _given(inputs, 11) is not None:
        return None
    batch, count, _ = q.shape
    if k is None:
        d = q.shape[2] // (heads + 2 * kv_heads)
        q, k, v = np.split(q, [heads * d, (heads + kv_heads) * d], 2)
    dtype = q.dtype
    q, k, v = (
        x.astype(np.float32).reshape(batch, count, h, -1).transpose(0, 2, 1, 3)
        for x, h in ((q, heads), (k, kv_heads), (v, kv_heads))
    )
    ends = last.reshape(-1).astype(np.int64) + 1
    room = 0 if past_key is None else past_key.shape[2]
    prompt = int(ends.max()) <= count and count > 1 if room == 0 else count == int(total.reshape(-1)[0])
    starts = np.zeros_like(ends) if prompt else ends - count
    size = max(room, int(total.reshape(-1)[0]))
    keys, values = (np.zeros((batch, kv_heads, size, x.shape[3]), np.float32) for x in (k, v))
    if past_key is not None and not prompt:
        keys[:, :, :room], values[:, :, :room] = past_key, past_value
    where = starts[:, None] + np.arange(count) if positions is None else positions.reshape(batch, count)
    if attrs.get("do_rotary", 0):
        turn = bool(attrs.get("rotary_interleaved", 0))
        angles = [t.astype(np.float32)[np.minimum(where, len(t) - 1)][:, None] for t in (cos, sin)]
        q, k = (_rotated(x, angles[0], angles[1], turn) for x in (q, k))
    scale = attrs.get("scale", 0.0) or 1 / np.sqrt(q.shape[3])
    out = np.zeros((batch, heads, count, v.shape[3]), np.float32)
    for b in range(batch):
        at = slice(int(starts[b]), int(starts[b]) + count)
        keys[b, :, at], values[b, :, at] = k[b], v[b]
        repeats = heads // kv_heads
        scores = q[b] @ np.repeat(keys[b], repeats, 0).transpose(0, 2, 1) * scale
        if softcap > 0:
            scores = softcap * np.tanh(scores / softcap)
        if added is not None:
            extra = added[b if added.shape[0] > 1 else 0].astype(np.float32)
            scores[..., : extra.shape[-1]] += extra[..., :size]
        i, j = starts[b] + np.arange(count)[:, None], np.arange(size)
        seen = (j <= i) if window <= 0 else (j <= i) & (j > i - window)
        scores = np.where(seen, scores, -np.inf)
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        out[b] = powers / powers.sum(-1, keepdims=True) @ np.repeat(values[b], repeats, 0)
    made = out.transpose(0, 2, 1, 3).reshape(batch, count, -1)
    return [x.astype(dtype) for x in (made, keys, values)]


def _rotated(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    half = cos.shape[-1]
    made = x.copy()
    parts = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    one, other = x[..., parts[0]], x[..., parts[1]]
    made[..., parts[0]], made[..., parts[1]] = one * cos - other * sin, one * sin + other * cos
    return made


@op("GatherBlockQuantized", domain=_MS)
def _gather_block_quantized(node: Node, inputs: Inputs) -> list[Array]:
    """Rows of a quantised table, dequantised in blocks along its last dimension."""
    data, indices, scales, zeros = (_given(inputs, index) for index in range(4))
    attrs = node.attrs
    axis, last = axis_of(attrs.get("gather_axis", 0), data.ndim), data.ndim - 1
    block, bits = attrs.get("block_size", 128), attrs.get("bits", 4)
    if axis == last or axis_of(attrs.get("quantize_axis", 1), data.ndim) != last:
        raise ValueError("expected to gather along one dimension and to dequantise along the last")

    def picked(t: Array) -> Array:
        rows = np.take(t, indices, axis)
        if t.dtype == np.uint8 and bits == 4:
            return np.stack([rows & 15, rows >> 4], -1).reshape(*rows.shape[:-1], -1).astype(np.float32)
        return np.asarray(rows.astype(np.float32))

    rows, factors = picked(data), np.take(scales, indices, axis)
    count = factors.shape[-1]
    less = (
        picked(zeros)[..., :count]
        if zeros is not None
        else np.float32(1 << (bits - 1) if data.dtype == np.uint8 else 0)
    )
    less, factors = (
        np.repeat(np.broadcast_to(t, factors.shape), block, -1) for t in (less, factors.astype(np.float32))
    )
    size = rows.shape[-1]
    return [((rows - less[..., :size]) * factors[..., :size]).astype(scales.dtype)]


@op("DynamicQuantizeLSTM", domain=_MS)
def _dynamic_quantize_lstm(node: Node, inputs: Inputs) -> list[Array] | None:
    """Inputs and states are quantised over their own range before each product."""
    x, w, r, bias, counts, h0, c0, peepholes, w_scale, w_zero, r_scale, r_zero = (_given(inputs, i) for i in range(12))
    attrs = node.attrs
    if peepholes is not None or attrs.get("activations") or attrs.get("clip") or attrs.get("input_forget"):
        return None
    steps, batch, _ = x.shape
    directions, size = r.shape[0], r.shape[1]
    counts = np.full(batch, steps) if counts is None else counts
    out = np.zeros((steps, directions, batch, size), np.float32)
    last_h, last_c = (np.zeros((directions, batch, size), np.float32) for _ in range(2))
    for d in range(directions):
        back = attrs.get("direction", "forward") == "reverse" or d == 1
        h, c = (np.zeros((batch, size), np.float32) if t is None else t[d] for t in (h0, c0))
        b = 0 if bias is None else bias[d, : 4 * size] + bias[d, 4 * size :]
        fixed = (
            _dynamic_product(x.reshape(steps * batch, -1), w[d], w_scale[d], w_zero[d]).reshape(steps, batch, -1) + b
        )
        for t in reversed(range(steps)) if back else range(steps):
            gates = fixed[t] + _dynamic_product(h, r[d], r_scale[d], r_zero[d])
            i, o, f, g = np.split(gates, 4, 1)
            new = _sigmoid(f) * c + _sigmoid(i) * np.tanh(g)
            lives = (t < counts)[:, None]
            c = np.where(lives, new, c)
            h = np.where(lives, _sigmoid(o) * np.tanh(new), h)
            out[t, d] = np.where(lives, h, 0)
        last_h[d], last_c[d] = h, c
    return [out, last_h, last_c]


def _dynamic_product(a: Array, b: Array, scale: Array, zero: Array) -> Array:
    """The product a @ ((b - zero) * scale) with a quantised to uint8 over its range and 0."""
    low, high = min(np.float32(0), a.min(initial=0)), max(np.float32(0), a.max(initial=0))
    step = np.float32((high - low) / 255 if high > low else 1)
    offset = np.rint(np.clip(-low / step, 0, 255))
    whole = np.clip(np.rint(a / step) + offset, 0, 255) - offset
    made = whole.astype(np.int32) @ (b.astype(np.int32) - zero.astype(np.int32))
    return np.asarray(made.astype(np.float32) * (step * scale))


def _sigmoid(x: Array) -> Array:
    return np.asarray(0.5 + 0.5 * np.tanh(0.5 * x))
