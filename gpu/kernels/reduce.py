"""Reductions. Sums are made of partial sums of at most CHUNK elements each, in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from ..graph.tensor import contiguous_strides
from .elementwise import operands
from .functions import LOG
from .kernel import Binding, Kernel
from .move import strided
from .registry import NoKernel, Operator, op

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Shape, Tensor

__all__ = ["CHUNK", "fold", "kept_shape", "to_rows"]

CHUNK = 1024
"""Elements that one invocation adds up, at most."""


@dataclass(frozen=True, slots=True)
class Fold:
    """How elements are put together.

    Attributes:
        wgsl: an expression over a and b. start: where it starts, by type.
        integer: the expression for integers, where it is another.
    """

    name: str
    wgsl: str
    start: dict[str, str]
    integer: str = ""

    def __hash__(self) -> int:
        return hash(self.name)


SUM = Fold("sum", "a + b", {"f32": "0.0", "i32": "0", "u32": "0u"})
PROD = Fold("prod", "a * b", {"f32": "1.0", "i32": "1", "u32": "1u"})
# By their bits: drivers may take it that floats are never NaN, and then a != a is false.
_NAN = "max(bitcast<u32>(a) & 0x7fffffffu, bitcast<u32>(b) & 0x7fffffffu) > 0x7f800000u"
MAX = Fold(
    "max",
    f"select(max(a, b), a + b, {_NAN})",
    {"f32": "-params.infinity", "i32": "-2147483647 - 1", "u32": "0u"},
    "max(a, b)",
)
MIN = Fold(
    "min",
    f"select(min(a, b), a + b, {_NAN})",
    {"f32": "params.infinity", "i32": "2147483647", "u32": "4294967295u"},
    "min(a, b)",
)


def to_rows(plan: Lowering, x: Tensor, axes: Sequence[int]) -> tuple[Tensor, int, int, int]:
    """A tensor as [outer, size, inner] with `size` over axes; they are moved together if need be.

    Returns:
        The tensor to read by flat index, and the three sizes.
    """
    axes = [a for a in axes if x.shape[a] != 1]
    if not axes:
        return x, x.size, 1, 1
    between = [a for a in range(axes[0], axes[-1]) if a not in axes and x.shape[a] != 1]
    if between:
        order = [a for a in range(x.rank) if a not in axes] + axes
        strides = contiguous_strides(x.shape)
        shape = tuple(x.shape[a] for a in order)
        x = strided(plan, x, shape, shape, [strides[a] for a in order], 0)
        axes = list(range(x.rank - len(axes), x.rank))
    size = math.prod(x.shape[a] for a in axes)
    return x, math.prod(x.shape[: axes[0]]), size, math.prod(x.shape[axes[-1] + 1 :])


def fold(
    plan: Lowering, x: Tensor, outer: int, size: int, inner: int, how: Fold, shape: Shape, each: str = "v"
) -> Tensor:
    """Put the `size` elements of [outer, size, inner] together.

    Args:
        plan: takes the kernels.
        x: read by flat index.
        outer: first of its three sizes.
        size: second.
        inner: third.
        how: what is done with two elements.
        shape: of the result, outer * inner elements.
        each: WGSL over v, what is folded of each element.
    """
    kind = x.type
    if kind not in how.start:
        raise NoKernel(f"no kernel for {x.dtype.name}")
    count = outer * inner
    if count == 0:
        return plan.new(x.dtype, shape)
    if not plan.target.cpu and inner == 1 and size >= 128:
        kernel = _group_kernel(how, kind, each)
        params: dict[str, int | float] = {"size": size, "infinity": math.inf}
        return plan.pending(kernel, [plan.storage(x)], params, outer, x.dtype, shape, flops=x.size)
    while True:
        chunk = choose_chunk(count, size, plan.target.cpu)
        pieces = max(1, -(-size // chunk)) if size else 1
        wide = "row" if inner == 1 and size % 4 == 0 and chunk % 4 == 0 else "quad" if inner % 4 == 0 else ""
        kernel = _fold_kernel(how, kind, wide, each)
        total = outer * pieces * inner
        params = {"total": total, "size": size, "chunk": chunk, "pieces": pieces, "inner": inner, "infinity": math.inf}
        groups = -(-total // (4 if wide == "quad" else 1) // kernel.lanes)
        made_shape = shape if pieces == 1 else (outer, pieces, inner)
        made = plan.pending(kernel, [plan.storage(x)], params, groups, x.dtype, made_shape, flops=outer * size * inner)
        if pieces == 1:
            return made
        x, size, each = made, pieces, "v"


def choose_chunk(count: int, size: int, cpu: bool) -> int:
    """How many of `size` elements one invocation takes: few enough to keep all busy and the sum accurate."""
    if size <= 64:
        return max(size, 1)
    wanted = size * count // (256 if cpu else 16384)
    return min(-(-size // 4) * 4, CHUNK, max(32, -(-wanted // 4) * 4))


@lru_cache
def _fold_kernel(how: Fold, kind: str, wide: str, each: str) -> Kernel:
    # Four partial results: of every fourth element, or (quad) one for each of four columns.
    start = how.start[kind]
    lines = [
        "let t = group * 32u + lane;",
        f"if (t < params.total{' / 4u' if wide == 'quad' else ''}) {{",
        f"let width = params.inner{' / 4u' if wide == 'quad' else ''};",
        "let j = t % width; let s = t / width % params.pieces; let o = t / width / params.pieces;",
        "let first = s * params.chunk; let last = min(first + params.chunk, params.size);",
    ]
    vector = f"vec4<{kind}>"
    if wide == "row":
        lines += [
            f"var a = {vector}({start});",
            "let base = o * params.size / 4u;",
            "for (var i = base + first / 4u; i < base + last / 4u; i++) { a = fold4(a, each4(x[i])); }",
            "store(t, fold(fold(a.x, a.y), fold(a.z, a.w)));",
        ]
    else:
        item = vector if wide else kind
        four = "4" if wide else ""
        lines += [f"var a{k} = {item}({start});" for k in range(4)]
        lines += [
            "var i = o * params.size * width + first * width + j; var r = first;",
            "for (; r + 4u <= last; r += 4u) {",
            *(f"a{k} = fold{four}(a{k}, each{four}(x[i{f' + {k}u * width' if k else ''}]));" for k in range(4)),
            "i += 4u * width; }",
            f"for (; r < last; r++) {{ a0 = fold{four}(a0, each{four}(x[i])); i += width; }}",
            f"store{four}(t, fold{four}(fold{four}(a0, a1), fold{four}(a2, a3)));",
        ]
    lines.append("}")
    return Kernel(
        f"reduce_{how.name}" + (f"_{wide}" if wide else ""),
        "\n".join(lines),
        reads=(Binding("x", vector if wide else kind),),
        params=(*((n, "u32") for n in ("total", "size", "chunk", "pieces", "inner")), ("infinity", "f32")),
        result=kind,
        width=4 if wide == "quad" else 1,
        lanes=32,
        functions=_fold_functions(how, kind, each),
    )


def _fold_functions(how: Fold, kind: str, each: str) -> str:
    vector = f"vec4<{kind}>"
    folds, eaches = (", ".join(form.format(c=c) for c in "xyzw") for form in ("fold(a.{c}, b.{c})", "each(a.{c})"))
    both = how.wgsl if kind == "f32" else how.integer or how.wgsl
    return (
        f"fn fold(a: {kind}, b: {kind}) -> {kind} {{ return {both}; }}\n"
        f"fn fold4(a: {vector}, b: {vector}) -> {vector} {{ return {vector}({folds}); }}\n"
        f"fn each(v: {kind}) -> {kind} {{ return {each}; }}\n"
        f"fn each4(a: {vector}) -> {vector} {{ return {vector}({eaches}); }}\n"
    )


@lru_cache
def _group_kernel(how: Fold, kind: str, each: str) -> Kernel:
    """One workgroup for each row; each lane takes every 128th element."""
    body = f"""var a = {how.start[kind]};
var part = {how.start[kind]};
let base = group * params.size;
var n = 0u;
for (var i = lane; i < params.size; i += 128u) {{
    part = fold(part, each(x[base + i]));
    n++;
    if (n == 256u) {{ a = fold(a, part); part = {how.start[kind]}; n = 0u; }}
}}
shared_parts[lane] = fold(a, part);
for (var step = 64u; step > 0u; step /= 2u) {{
    workgroupBarrier();
    if (lane < step) {{ shared_parts[lane] = fold(shared_parts[lane], shared_parts[lane + step]); }}
}}
if (lane == 0u) {{ store(group, shared_parts[0]); }}"""
    return Kernel(
        f"reduce_{how.name}_group",
        body,
        reads=(Binding("x", kind),),
        params=(("size", "u32"), ("infinity", "f32")),
        result=kind,
        lanes=128,
        functions=f"var<workgroup> shared_parts: array<{kind}, 128>;\n" + _fold_functions(how, kind, each),
    )


def kept_shape(shape: Shape, axes: Sequence[int], keepdims: bool) -> Shape:
    """The shape after a reduction over axes."""
    return tuple(1 if a in axes else n for a, n in enumerate(shape) if keepdims or a not in axes)


@dataclass(kw_only=True)
class Reduce(Operator):
    """y = x reduced over axes (all by default), which keep size 1 or go: f32 (Sum, Prod, Max, Min: i32, u32 too).

    Attributes:
        how: how elements are put together. each: of what of each element v. then: what is done with the result v.
    """

    how: ClassVar[Fold] = SUM
    each: ClassVar[str] = "v"
    then: ClassVar[str] = ""
    axes: list[int] | None = None
    keepdims: int = 1
    noop_with_empty_axes: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernels; the last one may be fused onto."""
        (x,) = operands(plan, inputs, 1)
        second = inputs[1] if len(inputs) > 1 else None
        given = self.axes if second is None else plan.ints(second)
        if not given and self.noop_with_empty_axes:
            return self.untouched(plan, x)
        axes = sorted({plan.axis(a, x.rank) for a in given}) if given else list(range(x.rank))
        if x.type not in ("f32", "i32", "u32") or (x.type != "f32" and (self.each != "v" or self.then)):
            raise NoKernel(f"no kernel for {x.dtype.name}")
        shape = kept_shape(x.shape, axes, bool(self.keepdims))
        return self.reduce(plan, x, axes, shape)

    def untouched(self, plan: Lowering, x: Tensor) -> Tensor:
        """What it does when nothing is reduced."""
        return x

    def reduce(self, plan: Lowering, x: Tensor, axes: list[int], shape: Shape) -> Tensor:
        """Reduce over sorted axes."""
        count = math.prod(x.shape[a] for a in axes)
        rows, outer, size, inner = to_rows(plan, x, axes)
        made = fold(plan, rows, outer, size, inner, self.how, shape, self.each)
        params = {"count": count, "inf": math.inf, "nan": math.nan}
        used = {name: value for name, value in params.items() if f"params.{name}" in self.then}
        return plan.map(self.then, {"v": made}, params=used) if self.then else made


@op("ReduceSum")
class ReduceSum(Reduce):
    """y = the sum."""


@op("ReduceMean")
class ReduceMean(Reduce):
    """y = the mean."""

    then = "v / params.count"


@op("ReduceProd")
class ReduceProd(Reduce):
    """y = the product."""

    how = PROD


@op("ReduceMax")
class ReduceMax(Reduce):
    """y = the largest; NaN if any is."""

    how = MAX


@op("ReduceMin")
class ReduceMin(Reduce):
    """y = the smallest; NaN if any is."""

    how = MIN


@op("ReduceL1")
class ReduceL1(Reduce):
    """y = the sum of |x|."""

    each = "abs(v)"


@op("ReduceL2")
class ReduceL2(Reduce):
    """y = the square root of the sum of x * x."""

    each = "v * v"
    then = "sqrt(v)"


@op("ReduceSumSquare")
class ReduceSumSquare(Reduce):
    """y = the sum of x * x."""

    each = "v * v"


@op("ReduceLogSum")
class ReduceLogSum(Reduce):
    """y = ln of the sum."""

    then = LOG.format(x="v")


@op("ReduceLogSumExp")
class ReduceLogSumExp(Reduce):
    """y = ln of the sum of e ** x."""

    how = MAX

    def reduce(self, plan: Lowering, x: Tensor, axes: list[int], shape: Shape) -> Tensor:
        """Reduce over sorted axes: the largest first, so that nothing overflows."""
        if x.type != "f32":
            raise NoKernel(f"no kernel for {x.dtype.name}")
        rows, outer, size, inner = to_rows(plan, x, axes)
        top = fold(plan, rows, outer, size, inner, MAX, (outer, 1, inner))
        plan.storage(top)
        top = plan.map("select(0.0, v, abs(v) <= 3.4028234e38)", {"v": top})
        powers = plan.map("exp(x - m)", {"x": plan.view(rows, (outer, size, inner)), "m": top})
        total = fold(plan, powers, outer, size, inner, SUM, shape)
        return plan.map(
            "select(log(v), -params.inf, v == 0.0) + m",
            {"v": total, "m": plan.view(top, shape)},
            params={"inf": math.inf},
        )
