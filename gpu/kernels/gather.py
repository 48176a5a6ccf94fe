"""Operators that pick elements by indices."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvalidData, InvalidModel
from ..graph.fuse import collapse
from ..graph.steps import IndexCheck
from ..graph.tensor import contiguous_strides
from .elementwise import operands
from .hosted import hosted
from .indices import in_range
from .kernel import Binding, Kernel
from .move import QUADS, quad_loop, slices
from .registry import NoKernel, Operator, op

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Array, Tensor

__all__ = ["flat_indices", "picked_rows"]


def _indices(plan: Lowering, indices: Tensor, size: int, axis: int) -> Tensor:
    """Indices along a dimension as int32, 0 <= index < size. Raises InvalidModel, InvalidData."""
    if indices.dtype not in (np.int32, np.int64):
        raise InvalidModel(f"node {plan.node!r} ({plan.op}): expected int32 or int64 indices, got {indices.dtype.name}")
    return in_range(plan, indices, size, axis)


@op("Gather", since=1)
class Gather(Operator):
    """y = x with dimension axis indexed by the second input, whose shape takes its place."""

    axis: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Copy; rows of four elements at a time where there are such."""
        x, indices = operands(plan, inputs, 2)
        axis = plan.axis(self.axis, x.rank)
        if x.type is None:
            raise NoKernel(f"no GPU type for {x.dtype.name}")
        size = x.shape[axis]
        shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
        known = plan.known_value(indices)
        if known is not None and known.size == 1:
            index = int(IndexCheck(plan.node, axis, size).on_host(known).reshape(-1)[0])
            return plan.view(slices(plan, x, {axis: slice(index, index + 1)}), shape)
        if 0 in shape:
            return plan.new(x.dtype, shape)
        return picked_rows(plan, x, _indices(plan, indices, size, axis), axis, shape)


def picked_rows(plan: Lowering, x: Tensor, where: Tensor, axis: int, shape: tuple[int, ...]) -> Tensor:
    """X at int32 indices along an axis, which are in range; nothing of the result is empty or it is made at once."""
    if 0 in shape:
        return plan.new(x.dtype, shape)
    assert x.type is not None
    inner = math.prod(x.shape[axis + 1 :])
    wide = inner % 4 == 0
    params = {
        "quads": -(-math.prod(shape) // 4),
        "inner": inner // 4 if wide else inner,
        "picks": where.size,
        "size": x.shape[axis],
    }
    kernel = _gather_kernel(x.type, wide, plan.target.cpu)
    groups = -(-params["quads"] // QUADS)
    return plan.pending(kernel, [plan.storage(x), plan.storage(where)], params, groups, x.dtype, shape,
                        touches=2 * math.prod(shape) + where.size, of=x)


@lru_cache
def _gather_kernel(kind: str, wide: bool, cpu: bool) -> Kernel:
    stored = "u32" if kind == "bool" else kind
    item = f"vec4<{kind}>"
    test = f" != {'vec4u()' if wide else '0u'}" if kind == "bool" else ""
    functions = f"""fn pick(i: u32) -> {item if wide else kind} {{
    let row = i / params.inner;
    let index = u32(where_[row % params.picks]);
    return x[(row / params.picks * params.size + index) * params.inner + i % params.inner]{test};
}}
"""
    each = "pick(q)" if wide else f"{item}(" + ", ".join(f"pick(q * 4u + {k}u)" for k in range(4)) + ")"
    return Kernel(
        "gather" + ("x4" if wide else ""),
        quad_loop(cpu, f"store4(q, {each});"),
        reads=(Binding("x", f"vec4<{stored}>" if wide else stored), Binding("where_", "i32")),
        params=tuple((n, "u32") for n in ("quads", "inner", "picks", "size")),
        result=kind,
        width=4,
        functions=functions,
    )


@op("GatherElements", since=11)
class GatherElements(Operator):
    """y[i, j, ...] = x at the same place, but with the index along axis taken from the second input."""

    axis: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Copy."""
        x, indices = operands(plan, inputs, 2)
        axis = plan.axis(self.axis, x.rank)
        if x.type is None:
            raise NoKernel(f"no GPU type for {x.dtype.name}")
        if indices.rank != x.rank or any(
            i > n for a, (i, n) in enumerate(zip(indices.shape, x.shape, strict=True)) if a != axis
        ):
            raise InvalidModel(
                f"node {plan.node!r} (GatherElements): "
                f"indices of shape {list(indices.shape)} do not fit {list(x.shape)}"
            )
        if not indices.size:
            return plan.new(x.dtype, indices.shape)
        where = _indices(plan, indices, x.shape[axis], axis)
        strides = list(contiguous_strides(x.shape))
        step, strides[axis] = strides[axis], 0
        return _picked(plan, x, where, indices.shape, indices.shape, strides, step)


def _picked(
    plan: Lowering,
    x: Tensor,
    where: Tensor,
    shape: tuple[int, ...],
    dims: tuple[int, ...],
    strides: list[int],
    step: int,
) -> Tensor:
    """y[i] = x[base(i) + where[i] * step], base walking x by strides over dims."""
    merged, (steps,) = collapse(dims, [strides])
    params: dict[str, int | float] = {"quads": -(-math.prod(shape) // 4), "step": step}
    params |= {f"d{a}": n for a, n in enumerate(merged)} | {f"s{a}": n for a, n in enumerate(steps)}
    assert x.type is not None
    kernel = _picked_kernel(x.type, len(merged), plan.target.cpu)
    groups = -(-int(params["quads"]) // QUADS)
    return plan.pending(kernel, [plan.storage(x), plan.storage(where)], params, groups, x.dtype, shape,
                        touches=2 * math.prod(shape) + where.size, of=x)


@lru_cache
def _picked_kernel(kind: str, rank: int, cpu: bool) -> Kernel:
    stored = "u32" if kind == "bool" else kind
    test = " != 0u" if kind == "bool" else ""
    lines = [f"fn pick(i: u32) -> {kind} {{\nvar n = i;\nvar o = u32(where_[i]) * params.step;\n"]
    for axis in range(rank - 1, -1, -1):
        lines.append(f"o += n % params.d{axis} * params.s{axis}; n /= params.d{axis};\n")
    lines.append(f"return x[o]{test};\n}}\n")
    each = ", ".join(f"pick(q * 4u + {k}u)" for k in range(4))
    names = ["quads", "step", *(f"{letter}{axis}" for axis in range(rank) for letter in "ds")]
    return Kernel(
        "gather_elements",
        quad_loop(cpu, f"store4(q, vec4<{kind}>({each}));"),
        reads=(Binding("x", stored), Binding("where_", "i32")),
        params=tuple((n, "u32") for n in names),
        result=kind,
        width=4,
        functions="".join(lines),
    )


@op("GatherND", since=11)
class GatherND(Operator):
    """y = x at the index tuples in the last dimension of the second input."""

    batch_dims: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Copy; the host checks the indices and makes one of each tuple."""
        x, indices = operands(plan, inputs, 2)
        if x.type is None:
            raise NoKernel(f"no GPU type for {x.dtype.name}")
        b = self.batch_dims
        depth = indices.shape[-1] if indices.rank else 0
        if not 0 <= b < min(x.rank, indices.rank) or not 1 <= depth <= x.rank - b or x.shape[:b] != indices.shape[:b]:
            raise InvalidModel(
                f"node {plan.node!r} (GatherND): indices of shape {list(indices.shape)} do not fit {list(x.shape)}"
            )
        rest = x.shape[b + depth :]
        shape = (*indices.shape[:-1], *rest)
        if 0 in shape:
            return plan.new(x.dtype, shape)
        span, node, sizes = math.prod(x.shape[b : b + depth]), plan.node, x.shape[b : b + depth]
        flat = hosted(plan, lambda a: flat_indices(node, a, sizes), [indices], np.int32, indices.shape[:-1])
        batch, inner = math.prod(x.shape[:b]), math.prod(rest)
        params = {"quads": -(-math.prod(shape) // 4), "picks": flat.size // batch, "size": span, "inner": inner}
        kernel = _gather_nd_kernel(x.type, plan.target.cpu)
        groups = -(-params["quads"] // QUADS)
        return plan.pending(kernel, [plan.storage(x), plan.storage(flat)], params, groups, x.dtype, shape,
                            touches=2 * math.prod(shape) + flat.size, of=x)


def flat_indices(node: str, indices: Array, sizes: tuple[int, ...]) -> Array:
    """Index tuples [..., len(sizes)] as positions in row-major order. Raises InvalidData."""
    limits = np.array(sizes, np.int64)
    wide = indices.astype(np.int64)
    if ((wide < -limits) | (wide >= limits)).any():
        raise InvalidData(node, f"an index is out of range for shape {list(sizes)}")
    flat = np.where(wide < 0, wide + limits, wide) @ np.array(contiguous_strides(sizes), np.int64)
    return np.asarray(flat, np.int32)


@lru_cache
def _gather_nd_kernel(kind: str, cpu: bool) -> Kernel:
    stored = "u32" if kind == "bool" else kind
    test = " != 0u" if kind == "bool" else ""
    functions = f"""fn pick(i: u32) -> {kind} {{
    let row = i / params.inner;
    let index = u32(where_[row]);
    return x[(row / params.picks * params.size + index) * params.inner + i % params.inner]{test};
}}
"""
    each = ", ".join(f"pick(q * 4u + {k}u)" for k in range(4))
    return Kernel(
        "gather_nd",
        quad_loop(cpu, f"store4(q, vec4<{kind}>({each}));"),
        reads=(Binding("x", stored), Binding("where_", "i32")),
        params=tuple((n, "u32") for n in ("quads", "inner", "picks", "size")),
        result=kind,
        width=4,
        functions=functions,
    )
