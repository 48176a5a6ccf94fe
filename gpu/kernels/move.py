"""Operators that only move elements: one strided copy serves them all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from ..errors import InvalidModel
from ..graph.fuse import collapse
from ..graph.tensor import contiguous_strides
from .elementwise import one_dtype, operands
from .kernel import Binding, Kernel
from .registry import NoKernel, Operator, op

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Shape, Tensor

__all__ = ["QUADS", "quad_loop", "slices", "strided"]

QUADS = 256
"""Groups of four elements that one workgroup of a copying kernel makes."""


def quad_loop(cpu: bool, inner: str) -> str:
    """Statements that run `inner` for each group of four elements `q` < params.quads of a workgroup."""
    index = "(group * 64u + lane) * 4u + k" if cpu else "group * 256u + k * 64u + lane"
    return f"for (var k = 0u; k < 4u; k++) {{\nlet q = {index};\nif (q < params.quads) {{\n{inner}\n}}\n}}"


# One turn does where the four elements lie in one row. (A branch would not do: software adapters
# compute both of its sides.)
FOUR_PLACES = """var o = vec4u();
var turn = 0u;
loop {{
    let ahead = vec4u(0u, 1u, 2u, 3u) - turn;
    o = select(o, place(q * 4u + turn) + ahead * {step}, ahead < vec4u(4u));
    turn++;
    if (turn >= params.turns) {{ break; }}
}}
"""


def strided(
    plan: Lowering, x: Tensor, shape: Shape, dims: Sequence[int], strides: Sequence[int], offset: int
) -> Tensor:
    """Copy: y[i0, i1, ...] = x[offset + i0 * strides[0] + i1 * strides[1] + ...], as `shape`.

    Args:
        plan: takes the kernel.
        x: contiguous, read by flat index.
        shape: of the result; its elements are those of `dims` in row-major order.
        dims: how far each index runs.
        strides: in elements, may be negative or 0.
        offset: of the first element.
    """
    if x.type is None:
        raise NoKernel(f"no GPU type for {x.dtype.name}")
    if 0 in shape:
        return plan.new(x.dtype, shape)
    merged, (steps,) = collapse(tuple(dims), [strides])
    size = math.prod(merged)
    if len(merged) == 1 and (steps[0] == 1 or size == 1):
        if size == x.size:
            return plan.view(x, shape)
        source, made = plan.storage(x), plan.new(x.dtype, shape, of=[x])
        plan.copy(source, offset, plan.storage(made), 0, size)
        return made
    wide = steps[-1] == 1 and not any(n % 4 for n in (merged[-1], offset, *steps[:-1]))
    if wide:
        merged[-1] //= 4
        offset //= 4
        steps = [step // 4 for step in steps[:-1]] + [1]
        wide = len(merged) > 1
    params: dict[str, int | float] = {"quads": -(-size // 4), "offset": offset & 0xFFFFFFFF}
    params |= {f"d{axis}": size for axis, size in enumerate(merged) if axis}
    params |= {f"s{axis}": step & 0xFFFFFFFF for axis, step in enumerate(steps)}
    if not wide:
        params["turns"] = 1 if merged[-1] % 4 == 0 else 4
    kernel = _strided_kernel(x.type, len(merged), wide, plan.target.cpu)
    return plan.pending(kernel, [plan.storage(x)], params, -(-size // 4 // QUADS), x.dtype, shape,
                        touches=2 * size, of=x)


@lru_cache
def _strided_kernel(kind: str, rank: int, wide: bool, cpu: bool) -> Kernel:
    stored = "u32" if kind == "bool" else kind
    lines = ["fn place(i: u32) -> u32 {\nvar n = i;\nvar o = params.offset;\n"]
    for axis in range(rank - 1, 0, -1):
        lines.append(f"let q{axis} = n / params.d{axis}; o += (n - q{axis} * params.d{axis}) * params.s{axis};\n")
        lines.append(f"n = q{axis};\n")
    lines.append("return o + n * params.s0;\n}\n")
    if wide:
        test = " != vec4u()" if kind == "bool" else ""
        inner = f"store4(q, x[place(q)]{test});"
    else:
        test = " != 0u" if kind == "bool" else ""
        inner = FOUR_PLACES.format(step=f"params.s{rank - 1}")
        inner += f"store4(q, vec4<{kind}>(" + ", ".join(f"x[o.{c}]{test}" for c in "xyzw") + "));"
    names = ["quads", "offset", *(f"d{a}" for a in range(1, rank)), *(f"s{a}" for a in range(rank))]
    names += [] if wide else ["turns"]
    return Kernel(
        f"copy{rank}d{'x4' if wide else ''}",
        quad_loop(cpu, inner),
        reads=(Binding("x", f"vec4<{stored}>" if wide else stored),),
        params=tuple((name, "u32") for name in names),
        result=kind,
        width=4,
        functions="".join(lines),
    )


@op("Transpose", since=1)
class Transpose(Operator):
    """y = x with its dimensions in another order; default: reversed."""

    perm: list[int] | None = None

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Copy, or view where only dimensions of size 1 move."""
        (x,) = operands(plan, inputs, 1)
        perm = list(range(x.rank))[::-1] if self.perm is None else self.perm
        if sorted(perm) != list(range(x.rank)):
            raise InvalidModel(f"node {plan.node!r} (Transpose): perm {perm} does not fit {x.rank} dimensions")
        strides = contiguous_strides(x.shape)
        shape = tuple(x.shape[axis] for axis in perm)
        return strided(plan, x, shape, shape, [strides[axis] for axis in perm], 0)


def slices(plan: Lowering, x: Tensor, parts: dict[int, slice]) -> Tensor:
    """x[parts], by axis; steps may be negative."""
    strides = list(contiguous_strides(x.shape))
    shape, offset = list(x.shape), 0
    for axis, part in parts.items():
        start, stop, step = part.indices(x.shape[axis])
        shape[axis] = len(range(start, stop, step))
        offset += start * strides[axis]
        strides[axis] *= step
    return strided(plan, x, tuple(shape), shape, strides, offset)


def _slice(
    plan: Lowering, x: Tensor, starts: list[int], ends: list[int], axes: list[int] | None, steps: list[int] | None
) -> Tensor:
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    if len({len(starts), len(ends), len(axes), len(steps)}) > 1:
        raise InvalidModel(f"node {plan.node!r} (Slice): starts, ends, axes and steps differ in length")
    if 0 in steps:
        raise InvalidModel(f"node {plan.node!r} (Slice): expected steps other than 0, got {steps}")
    parts = {plan.axis(a, x.rank): slice(b, e, s) for a, b, e, s in zip(axes, starts, ends, steps, strict=True)}
    if len(parts) < len(axes):
        raise InvalidModel(f"node {plan.node!r} (Slice): axes {axes} repeat")
    return slices(plan, x, parts)


@op("Slice", since=1)
class SliceByAttributes(Operator):
    """y = x[starts:ends] along axes."""

    starts: list[int]
    ends: list[int]
    axes: list[int] | None = None

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Copy."""
        (x,) = operands(plan, inputs, 1)
        return _slice(plan, x, self.starts, self.ends, self.axes, None)


@op("Slice", since=10)
class Slice(Operator):
    """y = x[starts:ends:steps] along axes, all of them inputs."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Copy."""
        x, starts, ends = operands(plan, inputs, 3)
        axes, steps = (*inputs[3:], None, None)[:2]
        given = [None if t is None else plan.ints(t) for t in (starts, ends, axes, steps)]
        return _slice(plan, x, given[0] or [], given[1] or [], given[2], given[3])


def _split(plan: Lowering, x: Tensor, axis: int, sizes: list[int]) -> tuple[Tensor, ...]:
    if sum(sizes) != x.shape[axis] or min(sizes) < 0:
        size = x.shape[axis]
        raise InvalidModel(f"node {plan.node!r} (Split): sizes {sizes} do not make up dimension {axis} of size {size}")
    made, start = [], 0
    for size in sizes:
        made.append(slices(plan, x, {axis: slice(start, start + size)}))
        start += size
    return tuple(made)


@op("Split", since=2)
class SplitByAttribute(Operator):
    """The pieces of x along an axis, of the sizes in split, else equal ones."""

    axis: int = 0
    split: list[int] | None = None

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Copy."""
        (x,) = operands(plan, inputs, 1)
        axis = plan.axis(self.axis, x.rank)
        sizes = self.split
        if sizes is None:
            if x.shape[axis] % plan.outputs:
                size = x.shape[axis]
                raise InvalidModel(f"node {plan.node!r} (Split): {plan.outputs} equal pieces of {size} are not whole")
            sizes = [x.shape[axis] // plan.outputs] * plan.outputs
        return _split(plan, x, axis, sizes)


@op("Split", since=13)
class Split(Operator):
    """The pieces of x along an axis, of the sizes in the second input, else equal ones (the last may be smaller)."""

    axis: int = 0
    num_outputs: int | None = None

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Copy."""
        (x,) = operands(plan, inputs, 1)
        axis = plan.axis(self.axis, x.rank)
        given = inputs[1] if len(inputs) > 1 else None
        if given is not None:
            return _split(plan, x, axis, plan.ints(given))
        count, size = self.num_outputs or plan.outputs, x.shape[axis]
        each = -(-size // count)
        sizes = [each] * (count - 1)
        return _split(plan, x, axis, [*sizes, size - sum(sizes)])


@op("Concat", since=4)
class Concat(Operator):
    """y = the inputs one after another along an axis."""

    axis: int

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Copy each input to its place."""
        tensors = operands(plan, inputs, max(1, len(inputs)))
        one_dtype(plan, tensors)
        first = tensors[0]
        axis = plan.axis(self.axis, first.rank)
        for tensor in tensors:
            if (*tensor.shape[:axis], *tensor.shape[axis + 1 :]) != (*first.shape[:axis], *first.shape[axis + 1 :]):
                listed = ", ".join(str(list(t.shape)) for t in tensors)
                raise InvalidModel(f"node {plan.node!r} (Concat): shapes {listed} differ outside of axis {axis}")
        total = sum(t.shape[axis] for t in tensors)
        tensors = [t for t in tensors if t.size]
        if len(tensors) == 1:
            return tensors[0]
        made = plan.new(first.dtype, (*first.shape[:axis], total, *first.shape[axis + 1 :]), of=tensors)
        target = plan.storage(made)
        outer, inner = math.prod(first.shape[:axis]), math.prod(first.shape[axis + 1 :])
        start = 0
        for tensor in tensors:
            run = tensor.shape[axis] * inner
            plan.place(plan.storage(tensor), target, start * inner, outer, run, total * inner)
            start += tensor.shape[axis]
        return made


@op("Tile", since=6)
class Tile(Operator):
    """y = x repeated along each dimension, as often as the second input says."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Copy."""
        x, repeats = operands(plan, inputs, 2)
        counts = plan.ints(repeats)
        if len(counts) != x.rank or min(counts, default=0) < 0:
            raise InvalidModel(f"node {plan.node!r} (Tile): repeats {counts} do not fit shape {list(x.shape)}")
        strides = contiguous_strides(x.shape)
        dims = [n for pair in zip(counts, x.shape, strict=True) for n in pair]
        steps = [n for stride in strides for n in (0, stride)]
        shape = tuple(n * size for n, size in zip(counts, x.shape, strict=True))
        return strided(plan, x, shape, dims, steps, 0)


def _blocks(plan: Lowering, x: Tensor, size: int) -> None:
    if x.rank != 4 or size < 1:
        shape = list(x.shape)
        raise InvalidModel(f"node {plan.node!r} ({plan.op}): expected 4 dimensions and blocks, got {shape} and {size}")


def _permuted(plan: Lowering, x: Tensor, parts: Sequence[int], perm: Sequence[int], shape: Shape) -> Tensor:
    strides = contiguous_strides(tuple(parts))
    return strided(plan, x, shape, [parts[axis] for axis in perm], [strides[axis] for axis in perm], 0)


@op("DepthToSpace", since=1)
class DepthToSpace(Operator):
    """y = blocks of channels laid out as pixels: [n, c * b * b, h, w] -> [n, c, h * b, w * b]."""

    blocksize: int
    mode: str = "DCR"

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Copy."""
        (x,) = operands(plan, inputs, 1)
        b = self.blocksize
        _blocks(plan, x, b)
        n, c, h, w = x.shape
        if c % (b * b):
            raise InvalidModel(f"node {plan.node!r} (DepthToSpace): {c} channels do not make blocks of {b} by {b}")
        c //= b * b
        parts, perm = (
            ((n, b, b, c, h, w), (0, 3, 4, 1, 5, 2)) if self.mode == "DCR" else ((n, c, b, b, h, w), (0, 1, 4, 2, 5, 3))
        )
        return _permuted(plan, x, parts, perm, (n, c, h * b, w * b))


@op("SpaceToDepth", since=1)
class SpaceToDepth(Operator):
    """y = blocks of pixels laid out as channels: [n, c, h * b, w * b] -> [n, b * b * c, h, w]."""

    blocksize: int
    mode: str = "DCR"

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Copy."""
        (x,) = operands(plan, inputs, 1)
        b = self.blocksize
        _blocks(plan, x, b)
        n, c, h, w = x.shape
        if h % b or w % b:
            raise InvalidModel(f"node {plan.node!r} (SpaceToDepth): {h} by {w} pixels do not make blocks of {b} by {b}")
        perm = (0, 3, 5, 1, 2, 4) if self.mode == "DCR" else (0, 1, 3, 5, 2, 4)
        return _permuted(plan, x, (n, c, h // b, b, w // b, b), perm, (n, c * b * b, h // b, w // b))
