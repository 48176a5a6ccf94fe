"""Attention, and rotary position embeddings: composed of matrix products, a masked softmax and copies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ..graph.tensor import contiguous_strides
from .elementwise import operands
from .functions import TANH
from .hosted import hosted, iota
from .indices import in_range
from .kernel import Binding, Kernel
from .matmul import product
from .move import Concat, slices, strided
from .pad import pad
from .quantise import optional
from .registry import NoKernel, Operator, op
from .softmax import softmax
from .window import bad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..graph.lowering import Lowering
    from ..graph.tensor import Tensor

__all__ = ["Mask", "Scores", "attend", "heads_first", "heads_last", "joined", "lengths", "only_floats", "rotated"]


def only_floats(plan: Lowering, *tensors: Tensor | None) -> None:
    """Raises NoKernel unless all are f32, or left out."""
    for tensor in tensors:
        if tensor is not None and tensor.type != "f32":
            raise NoKernel(f"no kernel for {tensor.dtype.name}")


def heads_first(plan: Lowering, x: Tensor, heads: int) -> Tensor:
    """[b, s, heads * d] as [b, heads, s, d]; what has four dimensions is that already. Raises InvalidModel."""
    if x.rank == 4:
        return x
    if x.rank != 3 or heads < 1 or x.shape[2] % heads:
        raise bad(plan, f"[b, s, {heads} heads]", list(x.shape))
    b, s, width = x.shape
    shape = (b, heads, s, width // heads)
    return strided(plan, x, shape, shape, (s * width, width // heads, width, 1), 0)


def heads_last(plan: Lowering, x: Tensor) -> Tensor:
    """[b, heads, s, d] as [b, s, heads * d]."""
    b, heads, s, d = x.shape
    return strided(plan, x, (b, s, heads * d), (b, s, heads, d), (heads * s * d, d, s * d, 1), 0)


def joined(plan: Lowering, parts: Sequence[Tensor], axis: int) -> Tensor:
    """Tensors one after another along an axis."""
    return Concat(axis=axis).lower(plan, *parts)


def lengths(plan: Lowering, counts: Tensor, batch: int, add: int = 0) -> Tensor:
    """Small integers, one for each of the batch, as i32 [batch, 1, 1, 1] with something added. Raises InvalidModel."""
    if counts.size != batch or counts.dtype.kind not in "iu":
        raise bad(plan, f"{batch} whole numbers", f"{counts.dtype.name}{list(counts.shape)}")
    return hosted(plan, lambda array: array.reshape(-1) + add, [counts], np.int32, (batch, 1, 1, 1))


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees.

    Attributes:
        added: bool (True: seen) or f32 (added to the scores), broadcasts to [b, heads, s, t or less]
            (or more: the rest is cut off); what it lacks is not seen.
        causal: key j is seen by query i only if j <= i + offset.
        offset: keys before the first query: a number, or i32 [b, 1, 1, 1].
        lengths: key j is seen only if j < lengths: i32 [b, 1, 1, 1].
        left: how many keys before its own a query sees, -1 = all. right: how many after it.
    """

    added: Tensor | None = None
    causal: bool = False
    offset: int | Tensor = 0
    lengths: Tensor | None = None
    left: int = -1
    right: int = -1

    def apply(self, plan: Lowering, scores: Tensor) -> Tensor:
        """The scores, -inf where a key is not seen: [b, heads, s, t]."""
        s, t = scores.shape[2:]
        added = None if self.added is None else self._whole(plan, self.added, t)
        args = {"x": scores}
        value, seen = "x", []
        if added is not None:
            args["m"] = added
            if added.type == "bool":
                seen.append("m")
            else:
                value = "x + m"
        right = 0 if self.causal else self.right
        if right >= 0 or self.left >= 0:
            args |= {"i": iota(plan, s, 4, 2), "j": iota(plan, t, 4, 3)}
            offset = self.offset
            args["o"] = plan.constant(np.array(offset, np.int32)) if isinstance(offset, int) else offset
        if right >= 0:
            args["r"] = plan.constant(np.array(right, np.int32))
            seen.append("j <= i + o + r")
        if self.left >= 0:
            args["l"] = plan.constant(np.array(self.left, np.int32))
            seen.append("j >= i + o - l")
        if self.lengths is not None:
            args |= {"j": iota(plan, t, 4, 3), "n": self.lengths}
            seen.append("j < n")
        if not seen:
            return scores if value == "x" else plan.map(value, args, shape=scores.shape)
        wgsl = f"select(-params.inf, {value}, {' && '.join(f'({part})' for part in seen)})"
        return plan.map(wgsl, args, dtype=np.float32, shape=scores.shape, params={"inf": math.inf})

    def _whole(self, plan: Lowering, added: Tensor, t: int) -> Tensor:
        if added.type not in ("f32", "bool"):
            raise NoKernel(f"masks of {added.dtype.name}")
        given = added.shape[-1] if added.rank else 1
        if given > t:
            return slices(plan, added, {added.rank - 1: slice(0, t)})
        if given == t or not added.rank:
            return added
        value = 0 if added.type == "bool" else -math.inf
        return pad(plan, added, [0] * added.rank, [0] * (added.rank - 1) + [t - given], "constant", value)


@dataclass
class Scores:
    """What attention shows of its inner values, where `mode` asks for it.

    Attributes:
        mode: 0: the scaled products; 1: after the soft cap; 2: after the mask; 3: after the softmax.
        shown: set by `attend`.
    """

    mode: int = -1
    shown: Tensor | None = None


def attend(
    plan: Lowering,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Mask,
    softcap: float = 0.0,
    scores: Scores | None = None,
) -> Tensor:
    """softmax(q k' * scale + mask) v; a query that sees no key gets 0.

    Args:
        plan: takes the kernels.
        q: [b, heads, s, d].
        k: [b, kv_heads, t, d]; kv_heads divides heads: neighbouring heads share one.
        v: [b, kv_heads, t, d_v].
        scale: of the products.
        mask: which keys are seen.
        softcap: scores become softcap * tanh(scores / softcap), 0 = not.
        scores: gets the inner values that it asks for.

    Returns:
        [b, heads, s, d_v].

    Raises:
        InvalidModel: the shapes do not fit. NoKernel: a dtype has no kernel.
    """
    only_floats(plan, q, k, v)
    if not (q.rank == k.rank == v.rank == 4 and q.shape[3] == k.shape[3] and k.shape[:3] == v.shape[:3]):
        raise bad(plan, "queries, keys and values that fit", f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}")
    b, heads, s, d = q.shape
    kv_heads, t = k.shape[1:3]
    if k.shape[0] != b or not kv_heads or heads % kv_heads:
        raise bad(plan, f"keys for {heads} heads of {b} sequences", list(k.shape))
    folded = heads // kv_heads * s
    strides = contiguous_strides(k.shape)
    turned = strided(plan, k, (b, kv_heads, d, t), (b, kv_heads, d, t), (strides[0], strides[1], 1, d), 0)
    made = product(plan, plan.view(q, (b, kv_heads, folded, d)), turned, (b, heads, s, t))
    made = plan.map("x * params.scale", {"x": made}, params={"scale": scale})
    scores = scores or Scores()
    if scores.mode == 0:
        scores.shown = made
    if softcap > 0:
        capped = TANH.format(x="x")
        made = plan.map("x / params.cap", {"x": made}, params={"cap": softcap})
        made = plan.map(f"{capped} * params.cap", {"x": made}, params={"cap": softcap})
    if scores.mode == 1:
        scores.shown = made
    made = mask.apply(plan, made)
    if scores.mode == 2:
        scores.shown = made
    made = softmax(plan, made, b * heads * s, t, 1, False, masked=True)
    if scores.mode == 3:
        scores.shown = made
    shape = (b, kv_heads, folded, v.shape[3])
    return plan.view(product(plan, plan.view(made, (b, kv_heads, folded, t)), v, shape), (b, heads, s, v.shape[3]))


@op("Attention", since=23)
class Attention(Operator):
    """Y = softmax(Q K' * scale + mask) V: Q: [b, s, heads * d] or [b, heads, s, d]; -> Y, keys, values, scores."""

    is_causal: int = 0
    kv_num_heads: int = 0
    q_num_heads: int = 0
    qk_matmul_output_mode: int = 0
    scale: float | None = None
    softcap: float = 0.0
    left_window_size: int = -1
    right_window_size: int = -1

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """Add the kernels."""
        q, k, v = operands(plan, inputs, 3)
        added, past_key, past_value, counts = (optional(inputs, index) for index in range(3, 7))
        only_floats(plan, q, k, v, past_key, past_value)
        if (past_key is None) != (past_value is None):
            raise bad(plan, "past keys and past values", "one of them")
        flat = q.rank == 3
        q, k, v = (
            heads_first(plan, x, n) for x, n in ((q, self.q_num_heads), (k, self.kv_num_heads), (v, self.kv_num_heads))
        )
        offset: int | Tensor = 0
        if past_key is not None and past_value is not None:
            offset = past_key.shape[2] if past_key.rank == 4 else 0
            k, v = joined(plan, [past_key, k], 2), joined(plan, [past_value, v], 2)
        limits = None
        if counts is not None:
            limits = lengths(plan, counts, q.shape[0])
            if past_key is None:
                offset = lengths(plan, counts, q.shape[0], -q.shape[2])
        mask = Mask(added, bool(self.is_causal), offset, limits, self.left_window_size, self.right_window_size)
        scale = 1 / math.sqrt(q.shape[3] or 1) if self.scale is None else self.scale
        scores = Scores(self.qk_matmul_output_mode if plan.outputs > 3 else -1)
        y = attend(plan, q, k, v, scale, mask, self.softcap, scores)
        return (heads_last(plan, y) if flat else y, k, v, scores.shown)[: plan.outputs]


def rotated(
    plan: Lowering,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    heads: int,
    turned: int = 0,
    interleaved: bool = False,
) -> Tensor:
    """Rotate pairs of each head's elements by angles of its position; the result is pending.

    Args:
        plan: takes the kernel.
        x: [b, s, heads * d] or [b, heads, s, d], f32.
        cos: [positions, turned / 2], or [b, s, turned / 2] without `positions`.
        sin: as cos.
        positions: whole numbers [b, s], or one number: that of the first element. None: see cos.
        heads: number of heads, only needed for three dimensions.
        turned: how many of a head's elements are rotated, 0 = all.
        interleaved: pairs are neighbours, not of the first and the second half.
    """
    only_floats(plan, x, cos, sin)
    if x.rank == 3:
        if heads < 1 or x.shape[2] % heads:
            raise bad(plan, f"[b, s, {heads} heads]", list(x.shape))
        b, s, d = x.shape[0], x.shape[1], x.shape[2] // heads
    elif x.rank == 4:
        b, heads, s, d = x.shape
    else:
        raise bad(plan, "3 or 4 dimensions", list(x.shape))
    half = (turned or d) // 2
    rows = cos.shape[0] if positions is not None else b * s
    if cos.shape != sin.shape or cos.size != rows * half or half * 2 > d or (positions is not None and cos.rank != 2):
        raise bad(plan, f"[..., {half}] cosines and sines", f"{list(cos.shape)} and {list(sin.shape)}")
    if x.size == 0:
        return x
    reads = [plan.storage(t) for t in (x, cos, sin)]
    if positions is not None:
        where = in_range(plan, positions, rows)
        if where.size not in (1, b * s):
            raise bad(plan, f"{b * s} positions or one", list(positions.shape))
        reads.append(plan.storage(where))
    params: dict[str, int | float] = {"count": x.size, "d": d, "half": half, "s": s, "heads": heads}
    one = positions is not None and positions.size == 1 and b * s > 1
    kernel = _rotary_kernel(x.rank == 4, "" if positions is None else "one" if one else "each", interleaved)
    return plan.pending(kernel, reads, params, -(-x.size // 64), x.dtype, x.shape, flops=3.0 * x.size)


@lru_cache
def _rotary_kernel(heads_first: bool, positions: str, interleaved: bool) -> Kernel:
    token = "i / (params.d * params.s * params.heads) * params.s + i / params.d % params.s"
    if not heads_first:
        token = "i / (params.d * params.heads)"
    row = {"": "token", "one": "u32(where_[0]) + token % params.s", "each": "u32(where_[token])"}[positions]
    if interleaved:
        pair = "let p = e / 2u; let second = e % 2u == 1u; let other = select(i + 1u, i - 1u, second);"
    else:
        pair = """let second = e >= params.half; let p = select(e, e - params.half, second);
let other = select(i + params.half, i - params.half, second);"""
    body = f"""let i = group * 64u + lane;
if (i < params.count) {{
    let e = i % params.d;
    var y = x[i];
    if (e < 2u * params.half) {{
        {pair}
        let token = {token};
        let at = ({row}) * params.half + p;
        let z = x[other] * sin_[at];
        y = y * cos_[at] + select(-z, z, second);
    }}
    store(i, y);
}}"""
    reads = [Binding("x"), Binding("cos_"), Binding("sin_")] + ([Binding("where_", "i32")] if positions else [])
    names = ("count", "d", "half", "s", "heads")
    return Kernel("rotary", body, reads=tuple(reads), params=tuple((name, "u32") for name in names))


@op("RotaryEmbedding", since=23)
class RotaryEmbedding(Operator):
    """Y = X with pairs of each head's elements rotated: X: [b, s, heads * d] or [b, heads, s, d]."""

    interleaved: int = 0
    num_heads: int = 0
    rotary_embedding_dim: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernel; it may be fused onto."""
        x, cos, sin = operands(plan, inputs, 3)
        turned, interleaved = self.rotary_embedding_dim, bool(self.interleaved)
        return rotated(plan, x, cos, sin, optional(inputs, 3), self.num_heads, turned, interleaved)
