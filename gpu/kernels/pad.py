"""Padding."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from ..errors import InvalidModel
from ..graph.tensor import contiguous_strides
from .elementwise import operands
from .kernel import Binding, Kernel, Scalar
from .move import QUADS, quad_loop, slices
from .registry import NoKernel, Operator, op

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Tensor

__all__ = ["pad"]


def pad(plan: Lowering, x: Tensor, begins: list[int], ends: list[int], mode: str, value: float | int) -> Tensor:
    """A tensor with elements added (or, negative, taken) before and after each dimension."""
    if x.type is None:
        raise NoKernel(f"no GPU type for {x.dtype.name}")
    shape = tuple(size + b + e for size, b, e in zip(x.shape, begins, ends, strict=True))
    if min(shape, default=0) < 0:
        raise InvalidModel(f"node {plan.node!r} (Pad): pads {begins + ends} take more than shape {list(x.shape)} has")
    if 0 in shape:
        return plan.new(x.dtype, shape)
    if x.size == 0 and mode != "constant":
        raise InvalidModel(f"node {plan.node!r} (Pad): nothing to pad with in shape {list(x.shape)}")
    if min((*begins, *ends), default=0) < 0 and (mode != "constant" or max((*begins, *ends)) <= 0):
        triples = enumerate(zip(x.shape, begins, ends, strict=True))
        x = slices(plan, x, {axis: slice(max(-b, 0), n + min(e, 0)) for axis, (n, b, e) in triples})
        return pad(plan, x, [max(b, 0) for b in begins], [max(e, 0) for e in ends], mode, value)
    if not any((*begins, *ends)):
        return x
    dims: list[int] = []
    sizes: list[int] = []
    before: list[int] = []
    for size, b, e in zip(x.shape, begins, ends, strict=True):
        if dims and not (b or e) and not before[-1] and dims[-1] == sizes[-1]:
            dims[-1] *= size
            sizes[-1] *= size
        else:
            dims.append(size + b + e)
            sizes.append(size)
            before.append(b)
    params: dict[str, int | float] = {"quads": -(-math.prod(shape) // 4)}
    for axis, stride in enumerate(contiguous_strides(tuple(sizes))):
        params |= {f"d{axis}": dims[axis], f"n{axis}": sizes[axis], f"b{axis}": before[axis], f"s{axis}": stride}
    if mode == "constant":
        params["value"] = value
    kernel = _pad_kernel(x.type, len(dims), mode, plan.target.cpu)
    groups = -(-math.prod(shape) // 4 // QUADS)
    of = x if mode != "constant" or value == 0 else None
    return plan.pending(kernel, [plan.storage(x)], params, groups, x.dtype, shape, of=of)


_STORED: dict[str, Scalar] = {"f32": "f32", "i32": "i32", "u32": "u32", "bool": "u32"}
_MOVED = {
    "constant": "inside = inside && c >= 0 && c < {n};",
    "edge": "c = clamp(c, 0, {n} - 1);",
    "wrap": "c = (c % {n} + {n}) % {n};",
    "reflect": "let p{axis} = max(2 * ({n} - 1), 1); c = (c % p{axis} + p{axis}) % p{axis};"
    " if (c >= {n}) {{ c = p{axis} - c; }}",
}


@lru_cache
def _pad_kernel(kind: str, rank: int, mode: str, cpu: bool) -> Kernel:
    stored = _STORED[kind]
    test = " != 0u" if kind == "bool" else ""
    lines = [f"fn at(i: u32) -> {kind} {{\nvar n = i;\nvar o = 0;\nvar inside = true;\nvar c: i32;\n"]
    for axis in range(rank - 1, -1, -1):
        index = f"n % params.d{axis}" if axis else "n"
        lines.append(f"c = i32({index}) - params.b{axis}; n = n / params.d{axis};\n")
        lines.append(_MOVED[mode].format(n=f"params.n{axis}", axis=axis) + f"\no += c * params.s{axis};\n")
    value = "params.value" + test if mode == "constant" else ""
    if mode == "constant":
        lines.append(f"if (!inside) {{ return {value}; }}\n")
    lines.append(f"return x[u32(o)]{test};\n}}\n")
    inner = f"let i = q * 4u;\nstore4(q, vec4<{kind}>(at(i), at(i + 1u), at(i + 2u), at(i + 3u)));"
    params: list[tuple[str, Scalar]] = [("quads", "u32")]
    for axis in range(rank):
        params.append((f"d{axis}", "u32"))
        params.extend((f"{letter}{axis}", "i32") for letter in "nbs")
    if mode == "constant":
        params.append(("value", stored))
    return Kernel(
        f"pad_{mode}{rank}d",
        quad_loop(cpu, inner),
        reads=(Binding("x", stored),),
        params=tuple(params),
        result=kind,
        width=4,
        functions="".join(lines),
    )


class _Pad(Operator):
    mode: str = "constant"

    def finish(self, plan: Lowering, x: Tensor, pads: list[int], axes: list[int], value: float | int) -> Tensor:
        if self.mode not in _MOVED:
            raise InvalidModel(f"node {plan.node!r} (Pad): unknown mode {self.mode!r}")
        if len(pads) != 2 * len(axes):
            raise InvalidModel(f"node {plan.node!r} (Pad): expected {2 * len(axes)} pads, got {len(pads)}")
        begins, ends = [0] * x.rank, [0] * x.rank
        for axis, begin, end in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
            at = plan.axis(axis, x.rank)
            begins[at] += begin
            ends[at] += end
        return pad(plan, x, begins, ends, self.mode, value)


@op("Pad", since=2)
class PadByAttributes(_Pad):
    """y = x with elements added around it, as pads says: all begins, then all ends."""

    pads: list[int]
    mode: str = "constant"
    value: float = 0.0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Copy."""
        (x,) = operands(plan, inputs, 1)
        return self.finish(plan, x, self.pads, list(range(x.rank)), self.value)


@op("Pad", since=11)
class Pad(_Pad):
    """y = x with elements added around it: inputs x, pads (all begins, then all ends), value, axes."""

    mode: str = "constant"

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Copy."""
        x, pads = operands(plan, inputs, 2)
        constant, axes = (*inputs[2:], None, None)[:2]
        value: float | int = 0
        if constant is not None and self.mode == "constant" and constant.size:
            value = plan.value(constant).reshape(-1)[0].item()
        wanted = list(range(x.rank)) if axes is None else plan.ints(axes)
        return self.finish(plan, x, plan.ints(pads), wanted, value)
