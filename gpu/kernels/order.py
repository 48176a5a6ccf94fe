"""ArgMax, ArgMin, Hardmax and TopK. NaN counts as larger than all else, -0 and 0 as the same."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .elementwise import operands
from .hosted import iota
from .kernel import Binding, Kernel, Scalar
from .reduce import choose_chunk, kept_shape
from .registry import NoKernel, Operator, op
from .window import bad

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Storage, Tensor

__all__: list[str] = []

SORTED = 256
"""Elements that are sorted by counting; longer rows are merged from such pieces."""
_I32 = np.dtype(np.int32)

# Integers that compare as the values do.
_KEYS = {
    "f32": """fn key(v: f32) -> i32 {
    let b = bitcast<i32>(v);
    let k = b ^ ((b >> 31u) & 0x7fffffff);
    return select(select(k, 0, b == i32(-2147483647 - 1)), 0x7fffffff, (b & 0x7fffffff) > 0x7f800000);
}
""",
    "i32": "fn key(v: i32) -> i32 { return v; }\n",
    "u32": "fn key(v: u32) -> u32 { return v; }\n",
}


def _axes(plan: Lowering, x: Tensor, axis: int) -> tuple[int, int, int]:
    if x.type not in _KEYS:
        raise NoKernel(f"no kernel for {x.dtype.name}")
    return math.prod(x.shape[:axis]), x.shape[axis] if x.rank else 1, math.prod(x.shape[axis + 1 :])


def _best(plan: Lowering, x: Tensor, axis: int, smallest: bool, last: bool) -> Tensor:
    """Where the best element along an axis is: int32 [outer, inner]."""
    outer, size, inner = _axes(plan, x, axis)
    if size == 0 and outer * inner:
        raise bad(plan, "a dimension that is not empty", list(x.shape))
    if not outer * inner:
        return plan.new(_I32, (outer, inner))
    found: Tensor | None = None
    left = size
    while True:
        chunk = choose_chunk(outer * inner, left, plan.target.cpu)
        pieces = -(-left // chunk)
        kernel = _best_kernel(x.type or "", smallest, last, found is not None)
        params = {"rows": outer * pieces * inner, "size": size, "left": left, "chunk": chunk, "pieces": pieces,
                  "inner": inner}
        reads: list[Storage] = [plan.storage(x), *([] if found is None else [plan.storage(found)])]
        shape = (outer, inner) if pieces == 1 else (outer, pieces, inner)
        found = plan.pending(kernel, reads, params, -(-params["rows"] // 32), _I32, shape, flops=x.size)
        if pieces == 1:
            return found
        left = pieces


@lru_cache
def _best_kernel(kind: str, smallest: bool, last: bool, among: bool) -> Kernel:
    better = ("<" if smallest else ">") + ("=" if last else "")
    place = "u32(found[(o * params.left + r) * params.inner + j])" if among else "r"
    body = f"""let t = group * 32u + lane;
if (t < params.rows) {{
    let j = t % params.inner;
    let s = t / params.inner % params.pieces;
    let base = t / params.inner / params.pieces * params.size;
    let o = t / params.inner / params.pieces;
    let first = s * params.chunk;
    let end = min(first + params.chunk, params.left);
    var r = first;
    var at = {place};
    var best = key(x[(base + at) * params.inner + j]);
    for (r = first + 1u; r < end; r++) {{
        let i = {place};
        let k = key(x[(base + i) * params.inner + j]);
        let wins = k {better} best;
        best = select(best, k, wins);
        at = select(at, i, wins);
    }}
    store(t, i32(at));
}}"""
    reads = (Binding("x", kind), *((Binding("found", "i32"),) if among else ()))
    return Kernel(f"arg_{'min' if smallest else 'max'}", body, reads,
                  params=tuple((n, "u32") for n in ("rows", "size", "left", "chunk", "pieces", "inner")),
                  result="i32", lanes=32, functions=_KEYS[kind])


@op("ArgMax", since=1)
class ArgMax(Operator):
    """y = the place of the largest element along axis, the first of equals (or the last): f32 | i32 | u32 -> int64."""

    smallest = False
    axis: int = 0
    keepdims: int = 1
    select_last_index: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernels; the result is int64, so it goes to the host."""
        (x,) = operands(plan, inputs, 1)
        axis = plan.axis(self.axis, x.rank)
        found = _best(plan, x, axis, self.smallest, bool(self.select_last_index))
        return plan.widen(plan.view(found, kept_shape(x.shape, [axis], bool(self.keepdims))))


@op("ArgMin", since=1)
class ArgMin(ArgMax):
    """y = the place of the smallest element along axis, the first of equals (or the last)."""

    smallest = True


@op("Hardmax", since=13)
class Hardmax(Operator):
    """y = 1 where x is largest along axis (the first of equals), 0 elsewhere: f32."""

    axis: int = -1

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Find the place, then compare places."""
        (x,) = operands(plan, inputs, 1)
        axis = plan.axis(self.axis, x.rank)
        if x.type != "f32":
            raise NoKernel(f"no kernel for {x.dtype.name}")
        if 0 in x.shape:
            return plan.new(x.dtype, x.shape)
        shape = (math.prod(x.shape[:axis]), x.shape[axis] if x.rank else 1, math.prod(x.shape[axis + 1 :]))
        return self._compared(plan, x, shape)

    def _compared(self, plan: Lowering, x: Tensor, shape: tuple[int, int, int]) -> Tensor:
        found = _best(plan, plan.view(x, shape), 1, False, False)
        plan.storage(found)
        made = plan.map(
            "select(0.0, 1.0, i == j)",
            {"i": plan.view(found, (shape[0], 1, shape[2])), "j": iota(plan, shape[1], 3, 1)},
            dtype=x.dtype,
        )
        return plan.view(made, x.shape)


@op("Hardmax", since=1)
class Hardmax1(Hardmax):
    """Hardmax before opset 13: over all dimensions from axis on."""

    axis: int = 1

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Find the place, then compare places."""
        (x,) = operands(plan, inputs, 1)
        axis = x.rank if self.axis == x.rank else plan.axis(self.axis, x.rank)
        if x.type != "f32":
            raise NoKernel(f"no kernel for {x.dtype.name}")
        if 0 in x.shape:
            return plan.new(x.dtype, x.shape)
        return self._compared(plan, x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:]), 1))


def _top(plan: Lowering, x: Tensor, axis: int, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    outer, size, inner = _axes(plan, x, axis)
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])
    if not math.prod(shape):
        return plan.new(x.dtype, shape), plan.widen(plan.new(_I32, shape))
    kind, source = x.type or "", plan.storage(x)
    # Pieces of a row, each with its best `kept` elements' places in order; then pairs of pieces as one.
    span = min(size, SORTED)
    pieces = -(-size // span)
    kept = min(k, span)
    params: dict[str, int | float] = {"rows": outer, "size": size, "inner": inner, "span": span, "pieces": pieces,
                                      "kept": kept, "total": outer * pieces * inner * span}
    found = plan.new(_I32, (outer, pieces, inner, kept))
    plan.dispatch(_sort_kernel(kind, largest), [source], [plan.storage(found)], params,
                  -(-int(params["total"]) // 64), flops=float(x.size * span))
    while pieces > 1:
        after = -(-pieces // 2)
        more = min(k, 2 * span)
        made = plan.new(_I32, (outer, after, inner, more))
        params = {"total": outer * pieces * inner * kept, "size": size, "inner": inner, "span": span, "pieces": pieces,
                  "kept": kept, "after": after, "more": more}
        plan.dispatch(_merge_kernel(kind, largest), [source, plan.storage(found)], [plan.storage(made)], params,
                      -(-int(params["total"]) // 64), flops=32.0 * float(params["total"]))
        found, pieces, span, kept = made, after, 2 * span, more
    params = {"total": math.prod(shape), "size": size, "inner": inner, "kept": k}
    groups = -(-int(params["total"]) // 64)
    where = plan.pending(_places_kernel(), [plan.storage(found)], params, groups, _I32, shape)
    values = plan.pending(_values_kernel(kind), [source, plan.storage(found)], params, groups, x.dtype, shape,
                          touches=3 * math.prod(shape))
    return values, plan.widen(where)


@lru_cache
def _sort_kernel(kind: str, largest: bool) -> Kernel:
    """found[o, piece, j, rank] = place, where rank is how many elements of the piece come before this one."""
    better = ">" if largest else "<"
    body = f"""let t = group * 64u + lane;
if (t < params.total) {{
    let e = t % params.span;
    let list = t / params.span;
    let j = list % params.inner;
    let s = list / params.inner % params.pieces;
    let o = list / params.inner / params.pieces;
    let first = s * params.span;
    let count = min(params.span, params.size - first);
    if (e < count) {{
        var at = (o * params.size + first) * params.inner + j;
        let mine = key(x[at + e * params.inner]);
        var rank = 0u;
        for (var r = 0u; r < count; r++) {{
            let other = key(x[at]);
            rank += select(0u, 1u, (other {better} mine) | ((other == mine) & (r < e)));
            at += params.inner;
        }}
        if (rank < params.kept) {{ found[list * params.kept + rank] = i32(first + e); }}
    }}
}}"""
    names = ("total", "size", "inner", "span", "pieces", "kept")
    return Kernel("top_sort", body, (Binding("x", kind),), (Binding("found", "i32"),),
                  tuple((n, "u32") for n in names), result=None, functions=_KEYS[kind])


@lru_cache
def _merge_kernel(kind: str, largest: bool) -> Kernel:
    """Each element of two neighbouring lists finds by halving how many of the other list come before it."""
    better, as_good = (">", ">=") if largest else ("<", "<=")
    body = f"""let t = group * 64u + lane;
if (t < params.total) {{
    let e = t % params.kept;
    let list = t / params.kept;
    let j = list % params.inner;
    let s = list / params.inner % params.pieces;
    let o = list / params.inner / params.pieces;
    let base = o * params.size;
    let second = (s & 1u) == 1u;
    let other = s ^ 1u;
    let count = min(params.kept, params.size - s * params.span);
    let others = min(params.kept, max(params.size, other * params.span) - other * params.span);
    if (e < count) {{
        let place = found[t];
        let mine = key(x[(base + u32(place)) * params.inner + j]);
        let start = ((o * params.pieces + min(other, params.pieces - 1u)) * params.inner + j) * params.kept;
        var low = 0u;
        var high = others;
        while (low < high) {{
            let middle = (low + high) / 2u;
            let it = key(x[(base + u32(found[start + middle])) * params.inner + j]);
            let ahead = select(it {better} mine, it {as_good} mine, second);
            low = select(low, middle + 1u, ahead);
            high = select(middle, high, ahead);
        }}
        let rank = e + low;
        if (rank < params.more) {{
            made[((o * params.after + s / 2u) * params.inner + j) * params.more + rank] = place;
        }}
    }}
}}"""
    names = ("total", "size", "inner", "span", "pieces", "kept", "after", "more")
    return Kernel("top_merge", body, (Binding("x", kind), Binding("found", "i32")), (Binding("made", "i32"),),
                  tuple((n, "u32") for n in names), result=None, functions=_KEYS[kind])


_PLACE = """let t = group * 64u + lane;
if (t < params.total) {
    let j = t % params.inner;
    let r = t / params.inner % params.kept;
    let o = t / params.inner / params.kept;
    let place = found[(o * params.inner + j) * params.kept + r];
"""
_PLACE_PARAMS: tuple[tuple[str, Scalar], ...] = tuple((n, "u32") for n in ("total", "size", "inner", "kept"))


@lru_cache
def _places_kernel() -> Kernel:
    return Kernel("top_places", _PLACE + "store(t, place);\n}", (Binding("found", "i32"),),
                  params=_PLACE_PARAMS, result="i32")


@lru_cache
def _values_kernel(kind: str) -> Kernel:
    body = _PLACE + "store(t, x[(o * params.size + u32(place)) * params.inner + j]);\n}"
    return Kernel("top_values", body, (Binding("x", kind), Binding("found", "i32")),
                  params=_PLACE_PARAMS, result=kind)


@op("TopK", since=1)
class TopKByAttribute(Operator):
    """The k largest along axis."""

    k: int
    axis: int = -1

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Sort pieces, merge them."""
        (x,) = operands(plan, inputs, 1)
        return _top_k(plan, x, self.axis, self.k, True)


@op("TopK", since=10)
class TopK(Operator):
    """The k largest (or smallest) along axis in order, and their places; of equals the first come first.

    x: f32 | i32 | u32; k: one int64 -> values, and int64 places.
    """

    axis: int = -1
    largest: int = 1

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Sort pieces, merge them."""
        x, k = operands(plan, inputs, 2)
        if k.size != 1:
            raise bad(plan, "one number k", list(k.shape))
        return _top_k(plan, x, self.axis, plan.ints(k)[0], bool(self.largest))


def _top_k(plan: Lowering, x: Tensor, axis: int, k: int, largest: bool) -> tuple[Tensor, ...]:
    axis = plan.axis(axis, x.rank)
    if not x.rank or not 0 <= k <= x.shape[axis]:
        raise bad(plan, f"k of at most the size along axis {axis} of {list(x.shape)}", k)
    return _top(plan, x, axis, k, largest)
