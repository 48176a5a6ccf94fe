"""CumSum, CumProd; and operators that compare places: OneHot, Trilu, ReverseSequence, EyeLike."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from onnx import helper

from ..errors import InvalidData
from .elementwise import operands
from .gather import picked_rows
from .hosted import hosted, iota
from .kernel import Binding, Kernel
from .move import slices
from .reduce import PROD, SUM, Fold
from .registry import NoKernel, Operator, op
from .window import bad

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Array, Tensor

__all__: list[str] = []

PIECE = 256
"""Elements that one invocation runs over."""


def _running(plan: Lowering, x: Tensor, outer: int, size: int, inner: int, how: Fold, exclusive: bool,
             reverse: bool) -> Tensor:
    """What comes before each element of [outer, size, inner] along the middle, put together (with it, by default).

    Long rows are cut into pieces; what the pieces before put together is where a piece starts.
    """
    kind = x.type or ""
    pieces = -(-size // PIECE)
    params: dict[str, int | float] = {"rows": outer * pieces * inner, "size": size, "inner": inner,
                                      "piece": PIECE, "pieces": pieces}
    groups = -(-int(params["rows"]) // 32)
    reads = [plan.storage(x)]
    if pieces > 1:
        kernel = _running_kernel(how, kind, "whole", False, reverse)
        wholes = plan.pending(kernel, reads, params, groups, x.dtype, (outer, pieces, inner), flops=x.size)
        reads.append(plan.storage(_running(plan, wholes, outer, pieces, inner, how, True, reverse)))
    kernel = _running_kernel(how, kind, "before" if exclusive else "with", pieces > 1, reverse)
    return plan.pending(kernel, reads, params, groups, x.dtype, x.shape, flops=x.size)


@lru_cache
def _running_kernel(how: Fold, kind: str, mode: str, offset: bool, reverse: bool) -> Kernel:
    both = how.wgsl if kind == "f32" else how.integer or how.wgsl
    # What a piece holds is put together before what is in front of it is: fewer digits are lost.
    value = {"whole": "", "before": "a", "with": "put(a, x[i])"}[mode]
    store = value and f"store(i, {f'put(start, {value})' if offset else value});"
    turns = "(last - 1u - r)" if reverse else "(first + r)"
    body = f"""let t = group * 32u + lane;
if (t < params.rows) {{
    let j = t % params.inner;
    let s = t / params.inner % params.pieces;
    let o = t / params.inner / params.pieces;
    let first = s * params.piece;
    let last = min(first + params.piece, params.size);
    {"let start = starts[t];" if offset else ""}
    var a = {how.start[kind]};
    for (var r = 0u; r < last - first; r++) {{
        let i = (o * params.size + {turns}) * params.inner + j;
        {store}
        a = put(a, x[i]);
    }}
    {"store(t, a);" if mode == "whole" else ""}
}}"""
    reads = (Binding("x", kind), Binding("starts", kind)) if offset else (Binding("x", kind),)
    functions = f"fn put(a: {kind}, b: {kind}) -> {kind} {{ return {both}; }}\n"
    names = ("rows", "size", "inner", "piece", "pieces")
    return Kernel(f"running_{how.name}", body, reads, params=tuple((n, "u32") for n in names), result=kind, lanes=32,
                  functions=functions)


@op("CumSum", since=11)
class CumSum(Operator):
    """y = the sum of x up to each element along the axis in the second input: f32 | i32 | u32."""

    how = SUM
    exclusive: int = 0
    reverse: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernels; the last one may be fused onto."""
        x, axes = operands(plan, inputs, 2)
        if axes.size != 1:
            raise bad(plan, "one axis", f"{axes.size}")
        axis = plan.axis(plan.ints(axes)[0], x.rank)
        if x.type not in self.how.start:
            raise NoKernel(f"no kernel for {x.dtype.name}")
        if 0 in x.shape:
            return plan.new(x.dtype, x.shape)
        outer, size, inner = math.prod(x.shape[:axis]), x.shape[axis] if x.rank else 1, math.prod(x.shape[axis + 1 :])
        return _running(plan, x, outer, size, inner, self.how, bool(self.exclusive), bool(self.reverse))


@op("CumProd", since=26)
class CumProd(CumSum):
    """y = the product of x up to each element along the axis in the second input: f32 | i32 | u32."""

    how = PROD


def _hot(depth: int, values: Array) -> Array:
    """Places 0 to depth - 1 of indices that may count from the end; -1 where out of range."""
    wide = values.astype(np.int64)
    wide = np.where(wide < 0, wide + depth, wide)
    return np.where((wide < 0) | (wide >= depth), -1, wide)


@op("OneHot", since=9)
class OneHot(Operator):
    """y = off everywhere along a new axis of `depth` places, but on where the index says; values: [off, on].

    indices: any numbers; depth: one number; values: [2] -> y: of the dtype of values.
    """

    axis: int = -1

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Compare places; elementwise, so that it fuses."""
        indices, depths, values = operands(plan, inputs, 3)
        if depths.size != 1 or values.shape != (2,):
            raise bad(plan, "one depth and two values", f"{list(depths.shape)} and {list(values.shape)}")
        if values.type is None:
            raise NoKernel(f"no GPU type for {values.dtype.name}")
        depth = plan.ints(depths)[0]
        if depth < 0:
            raise InvalidData(plan.node, f"a depth of {depth}")
        rank = indices.rank + 1
        axis = plan.axis(self.axis, rank)
        shape = (*indices.shape[:axis], 1, *indices.shape[axis:])
        made = (*indices.shape[:axis], depth, *indices.shape[axis:])
        where = hosted(plan, lambda array: _hot(depth, array), [indices], np.int32, shape)
        return plan.map(
            "select(off, on, i == j)",
            {
                "off": plan.view(slices(plan, values, {0: slice(0, 1)}), (1,) * rank),
                "on": plan.view(slices(plan, values, {0: slice(1, 2)}), (1,) * rank),
                "i": where,
                "j": iota(plan, depth, rank, axis),
            },
            dtype=values.dtype,
            shape=made,
        )


@op("Trilu", since=14)
class Trilu(Operator):
    """y = x above (or below) diagonal k, 0 on the other side: x: [..., n, m]; k: one int64."""

    upper: int = 1

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Compare places; elementwise, so that it fuses."""
        (x,) = operands(plan, inputs, 1)
        if x.rank < 2:
            raise bad(plan, "at least 2 dimensions", x.rank)
        if x.type is None:
            raise NoKernel(f"no GPU type for {x.dtype.name}")
        second = inputs[1] if len(inputs) > 1 else None
        rows, columns = x.shape[-2:]
        k = 0 if second is None else max(-rows - 1, min(columns + 1, plan.ints(second)[0]))
        zero = {"f32": "0.0", "i32": "0", "u32": "0u", "bool": "false"}[x.type]
        return plan.map(
            f"select({zero}, x, {'j >= i' if self.upper else 'j <= i'})",
            {"x": x, "i": iota(plan, rows, 2, 0, k), "j": iota(plan, columns, 2, 1)},
        )


@op("ReverseSequence", since=10)
class ReverseSequence(Operator):
    """y = x with the first sequence_lens[b] entries of time of each sequence b in reverse order."""

    batch_axis: int = 1
    time_axis: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Copy."""
        x, lengths = operands(plan, inputs, 2)
        first, second = plan.axis(self.batch_axis, x.rank), plan.axis(self.time_axis, x.rank)
        if x.rank < 2 or {first, second} != {0, 1} or lengths.shape != (x.shape[first],):
            raise bad(plan, "batch and time as the first two dimensions, and a length for each sequence",
                      f"{list(x.shape)} and {list(lengths.shape)}")
        if x.type is None:
            raise NoKernel(f"no GPU type for {x.dtype.name}")
        node, shape = plan.node, x.shape

        def sources(array: Array) -> Array:
            if ((array < 0) | (array > shape[second])).any():
                raise InvalidData(node, f"a sequence length is not in 0 to {shape[second]}")
            time = np.arange(shape[second])[:, None]
            from_time = np.where(time < array, array - 1 - time, time)
            batch = np.broadcast_to(np.arange(shape[first]), from_time.shape)
            return from_time * shape[1] + batch if second == 0 else (batch * shape[1] + from_time).T

        where = hosted(plan, sources, [lengths], np.int32, (shape[0] * shape[1],))
        return picked_rows(plan, plan.view(x, (shape[0] * shape[1], *shape[2:])), where, 0, shape)


@op("EyeLike", since=9)
class EyeLike(Operator):
    """y = 1 on diagonal k and 0 elsewhere, of the shape of x: [n, m]."""

    dtype: int | None = None
    k: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """A constant: only the shape counts."""
        (x,) = operands(plan, inputs, 1)
        if x.rank != 2:
            raise bad(plan, "2 dimensions", x.rank)
        given = plan.given[0] if plan.given else None
        dtype = (given or x.dtype) if self.dtype is None else helper.tensor_dtype_to_np_dtype(self.dtype)
        return plan.constant(np.eye(x.shape[0], x.shape[1], self.k).astype(dtype))
