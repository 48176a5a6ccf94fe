"""Attention as com.microsoft has it: packed projections, padding masks, caches of keys and values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from .attention import Mask, Scores, attend, heads_first, heads_last, joined, lengths, only_floats, rotated
from .contrib import MS, like
from .elementwise import operands
from .integer import integer_product
from .matmul import product
from .move import slices
from .quantise import optional, scaled
from .registry import NoKernel, Operator, op
from .window import bad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..graph.lowering import Lowering
    from ..graph.tensor import Tensor

__all__: list[str] = []


def _parts(plan: Lowering, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Pieces along the last dimension. Raises InvalidModel where they do not make it up."""
    if not x.rank or sum(sizes) != x.shape[-1]:
        raise bad(plan, f"{sum(sizes)} elements in the last dimension", list(x.shape))
    made, first = [], 0
    for size in sizes:
        made.append(slices(plan, x, {x.rank - 1: slice(first, first + size)}))
        first += size
    return made


def _padding(plan: Lowering, mask: Tensor | None, b: int, s: int, t: int, low: float) -> Tensor | None:
    """A mask of whole numbers (1: seen), or lengths [b], as what is added to the scores: [b, 1, 1 or s, t]."""
    if mask is None:
        return None
    if mask.dtype != np.int32:
        raise NoKernel(f"masks of {mask.dtype.name}")
    if mask.shape == (b,):
        place = plan.constant(np.arange(t, dtype=np.int32))
        args = {"j": place, "n": lengths(plan, mask, b)}
        return plan.map("select(params.low, 0.0, j < n)", args, dtype=np.float32, params={"low": low})
    if mask.shape == (b, t):
        mask = plan.view(mask, (b, 1, 1, t))
    elif mask.shape == (b, s, t):
        mask = plan.view(mask, (b, 1, s, t))
    else:
        raise NoKernel(f"a mask of shape {list(mask.shape)}")
    return plan.map("select(params.low, 0.0, m > 0)", {"m": mask}, dtype=np.float32, params={"low": low})


def _both(plan: Lowering, one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return plan.map("x + y", {"x": one, "y": other})


@op("MultiHeadAttention", domain=MS)
class MultiHeadAttention(Operator):
    """y = softmax(q k' * scale + masks) v: q: [b, s, n * d], or all packed [b, s, n, 3, d]; -> y, keys, values."""

    num_heads: int
    mask_filter_value: float = -10000.0
    scale: float = 0.0
    unidirectional: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """Add the kernels."""
        (q,) = operands(plan, inputs, 1)
        k, v, bias, padding, added, past_key, past_value, shared = (optional(inputs, n) for n in range(1, 9))
        if shared is not None:
            raise NoKernel("a cache that is written in place")
        only_floats(plan, q, k, v, bias, added, past_key, past_value)
        if k is None:
            q, k, v = self._unpacked(plan, q, 3)
        elif k.rank == 5:
            k, v = self._unpacked(plan, k, 2)
        if v is None:
            raise bad(plan, "values", "none")
        if bias is not None:
            sizes = [x.shape[1] * x.shape[3] if x.rank == 4 else x.shape[-1] for x in (q, k, v)]
            biases = _parts(plan, bias, sizes)
            q, k, v = (self._biased(plan, x, b) for x, b in zip((q, k, v), biases, strict=True))
        q, k, v = (heads_first(plan, x, self.num_heads) for x in (q, k, v))
        past = 0
        if past_key is not None and past_value is not None:
            past = past_key.shape[2]
            k, v = joined(plan, [past_key, k], 2), joined(plan, [past_value, v], 2)
        low = self.mask_filter_value
        extra = _both(plan, _padding(plan, padding, q.shape[0], q.shape[2], k.shape[2], low), added)
        mask = Mask(extra, bool(self.unidirectional), past)
        scale = self.scale or 1 / math.sqrt(q.shape[3] or 1)
        scores = Scores(0 if plan.outputs > 3 else -1)
        y = attend(plan, q, k, v, scale, mask, scores=scores)
        return tuple(None if t is None else like(plan, t) for t in (heads_last(plan, y), k, v, scores.shown))[
            : plan.outputs
        ]

    def _unpacked(self, plan: Lowering, x: Tensor, count: int) -> list[Tensor]:
        if x.rank != 5 or x.shape[2:4] != (self.num_heads, count):
            raise bad(plan, f"[b, s, {self.num_heads}, {count}, d]", list(x.shape))
        b, s, heads, _, d = x.shape
        return [plan.view(slices(plan, x, {3: slice(n, n + 1)}), (b, s, heads * d)) for n in range(count)]

    def _biased(self, plan: Lowering, x: Tensor, bias: Tensor) -> Tensor:
        if x.rank == 4:
            return x  # keys and values that were projected before
        return plan.map("x + b", {"x": x, "b": bias}, shape=x.shape)


class _Projected(Operator):
    num_heads: int
    do_rotary: int
    mask_filter_value: float
    past_present_share_buffer: int
    scale: float
    unidirectional: int

    def attended(
        self,
        plan: Lowering,
        made: Tensor,
        sizes: Sequence[int],
        padding: Tensor | None,
        past: Tensor | None,
        added: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Attention over queries, keys and values side by side; also the keys and values: [2, b, heads, t, d]."""
        if self.do_rotary or self.past_present_share_buffer:
            raise NoKernel("rotary embeddings, or a cache that is written in place")
        q, k, v = (heads_first(plan, part, self.num_heads) for part in _parts(plan, made, sizes))
        before = 0
        if past is not None:
            before = past.shape[3]
            old = [plan.view(slices(plan, past, {0: slice(n, n + 1)}), past.shape[1:]) for n in range(2)]
            k, v = joined(plan, [old[0], k], 2), joined(plan, [old[1], v], 2)
        low = self.mask_filter_value
        extra = _both(plan, _padding(plan, padding, q.shape[0], q.shape[2], k.shape[2], low), added)
        scale = self.scale or 1 / math.sqrt(q.shape[3] or 1)
        y = heads_last(plan, attend(plan, q, k, v, scale, Mask(extra, bool(self.unidirectional), before)))
        if plan.outputs == 1:
            return y, y
        return y, joined(plan, [plan.view(t, (1, *t.shape)) for t in (k, v)], 0)


@op("Attention", domain=MS)
class Attention(_Projected):
    """y = attention over x W + bias, [b, s, c]: queries, keys and values side by side; outputs: y, keys and values."""

    num_heads: int
    do_rotary: int = 0
    mask_filter_value: float = -10000.0
    past_present_share_buffer: int = 0
    qkv_hidden_sizes: Sequence[int] = ()
    scale: float = 0.0
    unidirectional: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Add the kernels."""
        x, weights = operands(plan, inputs, 2)
        bias, padding, past, added = (optional(inputs, index) for index in range(2, 6))
        only_floats(plan, x, weights, bias, past, added)
        if x.rank != 3 or weights.rank != 2 or x.shape[2] != weights.shape[0]:
            raise bad(plan, "x [b, s, c] and weights [c, n]", f"{list(x.shape)} and {list(weights.shape)}")
        made = product(plan, x, weights, (*x.shape[:2], weights.shape[1]))
        if bias is not None:
            made = plan.map("x + b", {"x": made, "b": bias}, shape=made.shape)
        sizes = list(self.qkv_hidden_sizes) or [weights.shape[1] // 3] * 3
        outputs = self.attended(plan, made, sizes, padding, past, added)
        return tuple(like(plan, t) for t in outputs[: plan.outputs])


@op("QAttention", domain=MS)
class QAttention(_Projected):
    """y = attention over dequantised x W + bias, [b, s, c]; outputs: y, keys and values."""

    num_heads: int
    do_rotary: int = 0
    mask_filter_value: float = -10000.0
    past_present_share_buffer: int = 0
    scale: float = 0.0
    unidirectional: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Add the kernels."""
        x, weights, bias, x_scale, w_scale = operands(plan, inputs, 5)
        padding, x_zero, w_zero, past = (optional(inputs, index) for index in range(5, 9))
        only_floats(plan, bias, x_scale, w_scale, past)
        if x.rank != 3:
            raise bad(plan, "x [b, s, c]", list(x.shape))
        made = scaled(plan, integer_product(plan, x, weights, x_zero, w_zero, 1), x_scale, w_scale, bias)
        return self.attended(plan, made, [weights.shape[1] // 3] * 3, padding, past, None)[: plan.outputs]


@op("GroupQueryAttention", domain=MS)
class GroupQueryAttention(Operator):
    """y = causal attention of num_heads queries over kv_num_heads keys and values; outputs: y, keys, values.

    q: [b, s, n * d], or with keys and values behind it. All sequences are equally long, and fill
    the cache: [b, kv_num_heads, past, d].
    """

    num_heads: int
    kv_num_heads: int
    do_rotary: int = 0
    local_window_size: int = -1
    rotary_interleaved: int = 0
    scale: float = 0.0
    smooth_softmax: int = 0
    softcap: float = 0.0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Add the kernels."""
        (q,) = operands(plan, inputs, 1)
        k, v, past_key, past_value, last, total, cos, sin, positions, added, sink = (
            optional(inputs, index) for index in range(1, 12)
        )
        only_floats(plan, q, k, v, past_key, past_value, cos, sin, added)
        if self.smooth_softmax > 0 or sink is not None:
            raise NoKernel("smooth softmax")
        if q.rank != 3 or last is None or total is None:
            raise bad(plan, "queries [b, s, n * d] and lengths", list(q.shape))
        b, s, _ = q.shape
        before = 0 if past_key is None else past_key.shape[2]
        if plan.ints(last) != [before + s - 1] * b or plan.ints(total) != [before + s]:
            raise NoKernel("sequences that do not fill the cache")
        heads, kv_heads = self.num_heads, self.kv_num_heads
        if k is None or v is None:
            d = q.shape[2] // (heads + 2 * kv_heads)
            q, k, v = _parts(plan, q, [heads * d, kv_heads * d, kv_heads * d])
        if self.do_rotary:
            if cos is None or sin is None:
                raise bad(plan, "cosines and sines", "none")
            if positions is None:
                positions = plan.constant(np.tile(np.arange(before, before + s, dtype=np.int64), (b, 1)))
            turned, pairs = 2 * cos.shape[-1], bool(self.rotary_interleaved)
            q = rotated(plan, q, cos, sin, positions, heads, turned, pairs)
            k = rotated(plan, k, cos, sin, positions, kv_heads, turned, pairs)
        q, k, v = heads_first(plan, q, heads), heads_first(plan, k, kv_heads), heads_first(plan, v, kv_heads)
        if past_key is not None and past_value is not None:
            k, v = joined(plan, [past_key, k], 2), joined(plan, [past_value, v], 2)
        mask = Mask(added, True, before, left=self.local_window_size - 1 if self.local_window_size > 0 else -1)
        y = attend(plan, q, k, v, self.scale or 1 / math.sqrt(q.shape[3] or 1), mask, self.softcap)
        return tuple(like(plan, t) for t in (heads_last(plan, y), k, v))[: plan.outputs]


@op("RotaryEmbedding", domain=MS)
class RotaryEmbedding(Operator):
    """y = x with pairs of each head's elements rotated; position_ids: [b, s], or [1]: that of the first element."""

    interleaved: int = 0
    is_packed_batching: int = 0
    num_heads: int = 0
    rotary_embedding_dim: int = 0
    scale: float = 1.0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernel; it may be fused onto."""
        x, positions, cos, sin = operands(plan, inputs, 4)
        if self.is_packed_batching or self.scale != 1.0:
            raise NoKernel("packed batches, or a scale")
        turned, heads = self.rotary_embedding_dim, self.num_heads
        if x.rank == 3 and not heads:
            heads = x.shape[2] // ((turned or 2 * cos.shape[-1]) or 1)
        return like(plan, rotated(plan, x, cos, sin, positions, heads, turned, bool(self.interleaved)))
