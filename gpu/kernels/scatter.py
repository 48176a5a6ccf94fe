"""Operators that put elements where indices say, in ONNX's order whatever the adapter does.

No two invocations write the same element: either one walks the updates of a whole row, or the
host has sorted the updates by where they go.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvalidData
from ..graph.fuse import collapse
from ..graph.tensor import contiguous_strides
from .elementwise import one_dtype, operands
from .gather import flat_indices, picked_rows
from .hosted import hosted
from .indices import in_range
from .kernel import Binding, Kernel
from .move import slices
from .reduce import MAX, MIN, PROD, SUM, Fold
from .registry import NoKernel, Operator, op
from .window import MOST_TURNS, bad

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Array, Tensor

__all__ = ["scattered"]

FOLDS = {"add": SUM, "mul": PROD, "max": MAX, "min": MIN}
WALK_ROWS = 64
"""Rows from which on a row by itself is walked by one invocation, however long it is."""
WALK_LENGTH = 256
"""Updates of a row up to which one invocation walks them, however few rows there are."""


def _last_of_each(flat: Array) -> Array:
    """Positions, with -1 for those that a later one repeats."""
    _, found = np.unique(flat[::-1], return_index=True)
    kept = np.full(flat.shape, -1, np.int32)
    last = flat.size - 1 - found
    kept[last] = flat[last]
    return kept


def _grouped(flat: Array) -> Array:
    """Updates grouped by position, in order: [which update] [position of a group, or -1] [where groups begin]."""
    count = flat.size
    order = np.argsort(flat, kind="stable")
    ranked = flat[order]
    first = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]]) if count else np.zeros(0, np.int64)
    table = np.full(3 * count + 1, count, np.int32)
    table[:count] = order
    table[count : 2 * count] = -1
    table[count : count + first.size] = ranked[first]
    table[2 * count : 2 * count + first.size] = first
    return table


def scattered(
    plan: Lowering, x: Tensor, flat: tuple[Tensor, ...], place: Callable[..., Array], updates: Tensor, inner: int,
    count: int, reduction: str,
) -> Tensor:
    """A copy of x in which runs of `inner` elements are replaced by, or combined with, those of `updates`.

    Args:
        plan: takes the kernels.
        x: read by flat index.
        flat: what `place` is called with.
        place: makes the position, in runs, of each of the `count` runs of updates; called on the host.
        updates: count * inner elements.
        inner: elements of a run.
        count: runs in `updates`.
        reduction: "none", "add", "mul", "max" or "min".
    """
    if reduction == "none":
        table = hosted(plan, lambda *a: _last_of_each(place(*a).reshape(-1)), flat, np.int32, (count,))
    else:
        table = hosted(plan, lambda *a: _grouped(place(*a).reshape(-1)), flat, np.int32, (3 * count + 1,))
    made = _copied(plan, x)
    wide = inner % 4 == 0
    params: dict[str, int | float] = {"total": count * inner // (4 if wide else 1), "count": count,
                                      "inner": inner // 4 if wide else inner, "first": 0, "most": 0xFFFFFFFF}
    reads = [plan.storage(updates), plan.storage(table)]
    groups = -(-int(params["total"]) // 64)
    if reduction == "none":
        plan.dispatch(_put_kernel(wide), reads, [plan.storage(made)], params, groups, touches=2 * count * inner + count)
        return made
    kernel = _group_kernel(FOLDS[reduction], x.type or "", wide)
    most = MOST_TURNS if plan.target.cpu else max(count, 1)
    for first in range(0, count, most):
        plan.dispatch(kernel, reads, [plan.storage(made)], {**params, "first": first, "most": most}, groups)
    return made


def _copied(plan: Lowering, x: Tensor) -> Tensor:
    source, made = plan.storage(x), plan.new(x.dtype, x.shape)
    plan.copy(source, 0, plan.storage(made), 0, x.size)
    return made


@lru_cache
def _put_kernel(wide: bool) -> Kernel:
    body = """let i = group * 64u + lane;
if (i < params.total) {
    let row = i / params.inner;
    let at = where_[row];
    if (at >= 0) { y[u32(at) * params.inner + i - row * params.inner] = updates[i]; }
}"""
    kind = "vec4u" if wide else "u32"
    return Kernel("scatter", body, (Binding("updates", kind), Binding("where_", "i32")), (Binding("y", kind),),
                  tuple((n, "u32") for n in ("total", "inner")), result=None)


def _fold_code(how: Fold, kind: str) -> str:
    both = how.wgsl if kind == "f32" else how.integer or how.wgsl
    parts = ", ".join(f"fold(a.{c}, b.{c})" for c in "xyzw")
    return (f"fn fold(a: {kind}, b: {kind}) -> {kind} {{ return {both}; }}\n"
            f"fn fold4(a: vec4<{kind}>, b: vec4<{kind}>) -> vec4<{kind}> {{ return vec4<{kind}>({parts}); }}\n")


@lru_cache
def _group_kernel(how: Fold, kind: str, wide: bool) -> Kernel:
    body = f"""let i = group * 64u + lane;
if (i < params.total) {{
    let row = i / params.inner;
    let at = table[params.count + row];
    if (at >= 0) {{
        let e = i - row * params.inner;
        let begin = min(u32(table[2u * params.count + row]) + params.first, params.count);
        let end = min(begin + params.most, u32(table[2u * params.count + row + 1u]));
        let place = u32(at) * params.inner + e;
        var a = y[place];
        for (var k = begin; k < end; k++) {{
            a = fold{4 if wide else ''}(a, updates[u32(table[k]) * params.inner + e]);
        }}
        y[place] = a;
    }}
}}"""
    item = f"vec4<{kind}>" if wide else kind
    return Kernel(f"scatter_{how.name}", body, (Binding("updates", item), Binding("table", "i32")),
                  (Binding("y", item),), tuple((n, "u32") for n in ("total", "count", "inner", "first", "most")),
                  result=None, functions=_fold_code(how, kind))


def _check(plan: Lowering, x: Tensor, updates: Tensor, indices: Tensor, reduction: str) -> None:
    one_dtype(plan, [x, updates])
    if indices.dtype not in (np.int32, np.int64):
        raise bad(plan, "int32 or int64 indices", indices.dtype.name)
    if reduction != "none" and reduction not in FOLDS:
        raise bad(plan, "reduction none, add, mul, max or min", reduction)
    if x.type is None or (reduction != "none" and x.type == "bool"):
        raise NoKernel(f"no kernel for {x.dtype.name}")


@op("Scatter", since=9)
@op("ScatterElements", since=11)
class ScatterElements(Operator):
    """y = x, but y[i, j, ...] with the index along axis from the second input is the third input's element there.

    x: any shape; indices: int32 | int64, of x's rank; updates: as indices. With a reduction the
    element is combined with what was there, in the order of the updates.
    """

    axis: int = 0
    reduction: str = "none"

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Copy x, then put the updates in."""
        x, indices, updates = operands(plan, inputs, 3)
        axis = plan.axis(self.axis, x.rank)
        _check(plan, x, updates, indices, self.reduction)
        if indices.shape != updates.shape or indices.rank != x.rank or any(
            i > n for a, (i, n) in enumerate(zip(indices.shape, x.shape, strict=True)) if a != axis
        ):
            raise bad(plan, f"indices and updates that fit {list(x.shape)}",
                      f"{list(indices.shape)} and {list(updates.shape)}")
        if not indices.size or not x.rank:
            return x if x.rank or not indices.size else updates
        length = indices.shape[axis]
        if indices.size // length >= WALK_ROWS or length <= WALK_LENGTH:
            return self._walk(plan, x, indices, updates, axis)
        node, shape = plan.node, x.shape

        def place(array: Array) -> Array:
            along = flat_indices(node, array.reshape(-1, 1), (shape[axis],)).reshape(array.shape)
            strides = contiguous_strides(shape)
            flat = along.astype(np.int64) * strides[axis]
            for a, n in enumerate(array.shape):
                if a != axis:
                    flat += (np.arange(n) * strides[a]).reshape((-1,) + (1,) * (array.ndim - 1 - a))
            return flat.astype(np.int32)

        return scattered(plan, x, (indices,), place, updates, 1, indices.size, self.reduction)

    def _walk(self, plan: Lowering, x: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
        where = in_range(plan, indices, x.shape[axis], axis)
        strides, steps = list(contiguous_strides(x.shape)), list(contiguous_strides(indices.shape))
        others = [a for a in range(x.rank) if a != axis]
        dims = tuple(indices.shape[a] for a in others)
        merged, (at, read) = collapse(dims or (1,), [[strides[a] for a in others] or [0],
                                                     [steps[a] for a in others] or [0]])
        made = _copied(plan, x)
        params: dict[str, int | float] = {"rows": math.prod(dims), "stride": strides[axis], "step": steps[axis]}
        for a, (n, s, r) in enumerate(zip(merged, at, read, strict=True)):
            params |= {f"d{a}": n, f"s{a}": s, f"r{a}": r}
        kernel = _walk_kernel(self.reduction, x.type or "", len(merged))
        reads = [plan.storage(updates), plan.storage(where)]
        length = indices.shape[axis]
        most = MOST_TURNS if plan.target.cpu else length
        for first in range(0, length, most):
            span = {"first": first, "last": min(first + most, length)}
            plan.dispatch(kernel, reads, [plan.storage(made)], {**params, **span}, -(-math.prod(dims) // 32))
        return made


@lru_cache
def _walk_kernel(reduction: str, kind: str, rank: int) -> Kernel:
    lines = ["let row = group * 32u + lane;\nif (row < params.rows) {\nvar n = row; var at = 0u; var read = 0u;"]
    for a in range(rank - 1, -1, -1):
        lines.append(f"{{ let c = n % params.d{a}; n /= params.d{a};")
        lines.append(f"at += c * params.s{a}; read += c * params.r{a}; }}")
    value = "updates[source]" if reduction == "none" else "fold(y[to], updates[source])"
    lines.append(f"""for (var k = params.first; k < params.last; k++) {{
let source = read + k * params.step;
let to = at + u32(where_[source]) * params.stride;
y[to] = {value};
}}
}}""")
    item = "u32" if reduction == "none" else kind
    names = ["rows", "first", "last", "stride", "step", *(f"{letter}{a}" for a in range(rank) for letter in "dsr")]
    return Kernel(f"scatter_rows_{reduction}", "\n".join(lines), (Binding("updates", item), Binding("where_", "i32")),
                  (Binding("y", item),), tuple((n, "u32") for n in names), result=None, lanes=32,
                  functions="" if reduction == "none" else _fold_code(FOLDS[reduction], kind))


@op("ScatterND", since=11)
class ScatterND(Operator):
    """y = x, but y[index tuple] is the third input's slice for each tuple in the last dimension of the second.

    x: any shape; indices: int64 [..., k]; updates: [..., the dimensions of x from k on]. With a
    reduction the slice is combined with what was there, in the order of the updates.
    """

    reduction: str = "none"

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Copy x, then put the updates in."""
        x, indices, updates = operands(plan, inputs, 3)
        _check(plan, x, updates, indices, self.reduction)
        depth = indices.shape[-1] if indices.rank else 0
        wanted = (*indices.shape[:-1], *x.shape[depth:])
        if not indices.rank or depth > x.rank or updates.shape != wanted:
            raise bad(plan, f"updates of shape {list(wanted)} and tuples of at most {x.rank} numbers",
                      f"{list(updates.shape)} and tuples of {depth}")
        if not updates.size:
            return x
        node, sizes = plan.node, x.shape[:depth]
        count = math.prod(indices.shape[:-1])
        inner = math.prod(x.shape[depth:])
        return scattered(plan, x, (indices,), lambda a: flat_indices(node, a, sizes), updates, inner, count,
                         self.reduction)


@op("TensorScatter", since=24)
class TensorScatter(Operator):
    """y = a cache with new entries written along axis from each sequence's write index on.

    past_cache: [B, ..., S, ...]; update: the same with fewer along axis; write_indices: int64 [B].
    """

    axis: int = -2
    mode: str = "linear"

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Copy the cache, then put the update in."""
        x, update = operands(plan, inputs, 2)
        one_dtype(plan, [x, update])
        axis = plan.axis(self.axis, x.rank)
        batch, outer = x.shape[0], math.prod(x.shape[1:axis])
        size, length, inner = x.shape[axis], update.shape[axis], math.prod(x.shape[axis + 1 :])
        if axis == 0 or update.shape != (*x.shape[:axis], length, *x.shape[axis + 1 :]) or length > size:
            raise bad(plan, f"an update that fits {list(x.shape)}", list(update.shape))
        if x.type is None:
            raise NoKernel(f"no GPU type for {x.dtype.name}")
        if not update.size:
            return x
        first = inputs[2] if len(inputs) > 2 else None
        first = plan.constant(np.zeros(batch, np.int64)) if first is None else first
        node, circular = plan.node, self.mode == "circular"

        def place(starts: Array) -> Array:
            along = starts.reshape(-1, 1) + np.arange(length)
            if circular:
                along = along % size
            elif along.min() < 0 or along.max() >= size:
                raise InvalidData(node, f"writing {length} entries ends outside of {size}")
            return (np.arange(batch * outer).reshape(batch, outer, 1) * size + along[:, None]).astype(np.int32)

        return scattered(plan, x, (first,), place, update, inner, batch * outer * length, "none")


@op("Compress", since=9)
class Compress(Operator):
    """y = the elements of x along axis (of x flattened, by default) where the second input is true."""

    axis: int | None = None

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Copy; the condition decides the shape, so planning waits for it."""
        x, condition = operands(plan, inputs, 2)
        axis = 0 if self.axis is None else plan.axis(self.axis, x.rank)
        shape = x.shape if self.axis is not None else (x.size,)
        if condition.rank != 1 or condition.dtype != np.bool_ or condition.size > shape[axis]:
            raise bad(plan, f"a condition of at most {shape[axis]} booleans", list(condition.shape))
        if x.type is None:
            raise NoKernel(f"no GPU type for {x.dtype.name}")
        kept = np.flatnonzero(plan.value(condition))
        made = (*shape[:axis], kept.size, *shape[axis + 1 :])
        x = plan.view(x, shape)
        if kept.size and kept[-1] - kept[0] + 1 == kept.size:
            return slices(plan, x, {axis: slice(int(kept[0]), int(kept[-1]) + 1)})
        return picked_rows(plan, x, plan.constant(kept.astype(np.int32)), axis, made)
