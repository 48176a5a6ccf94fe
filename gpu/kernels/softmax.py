"""Softmax and LogSoftmax."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from ..errors import InvalidModel
from .elementwise import operands
from .kernel import Binding, Kernel, Scalar
from .reduce import MAX, SUM, fold
from .registry import NoKernel, Operator, op
from .window import MOST_TURNS

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Tensor

__all__ = ["softmax"]


LOWEST = 3.4028234e38
"""No finite number is further from 0."""
# NaN is looked for by its bits: max() may drop it, and exp(NaN) is not NaN on every driver.
_SEEN = "(bitcast<vec4u>({x}) & vec4u(0x7fffffffu))"
_LOST = "(bitcast<u32>(top) & 0x7fffffffu) >= 0x7f800000u"
_PARAMS = {"inf": math.inf, "nan": math.nan}


def softmax(
    plan: Lowering, x: Tensor, outer: int, size: int, inner: int, log: bool, *, masked: bool = False
) -> Tensor:
    """Softmax, e ** x / sum(e ** x), or its logarithm, over the middle one of [outer, size, inner].

    With `masked`, where there is nothing but -inf to sum up the result is 0, not NaN.
    """
    if x.type != "f32":
        raise NoKernel(f"no kernel for {x.dtype.name}")
    if x.size == 0:
        return plan.new(x.dtype, x.shape)
    rows = outer * inner
    infinity = LOWEST if masked else math.inf
    if not plan.target.cpu and inner == 1:
        kernel = _group_kernel(log)
        params: dict[str, int | float] = {"size": size, "infinity": infinity, **_PARAMS}
        return plan.pending(kernel, [plan.storage(x)], params, outer, x.dtype, x.shape, flops=8.0 * x.size)
    if in_steps(rows, size):
        values = plan.view(x, (outer, size, inner))
        top = fold(plan, values, outer, size, inner, MAX, (outer, 1, inner))
        plan.storage(top)
        powers = plan.map("exp(x - max(m, params.low))", {"x": values, "m": top}, params={"low": -infinity})
        if not log:
            plan.storage(powers)
        total = fold(plan, powers, outer, size, inner, SUM, (outer, 1, inner))
        plan.storage(total)
        lost = f"select({{value}}, params.nan, ({_LOST.replace('top', 'm')}){' & !(m < 0.0)' if masked else ''})"
        nan = {"nan": math.nan}
        if log:
            made = plan.map(lost.format(value="x - m - log(s)"), {"x": values, "m": top, "s": total}, params=nan)
        else:
            made = plan.map(lost.format(value="e / max(s, 1e-30)"), {"e": powers, "s": total, "m": top}, params=nan)
        return made if values is x else plan.view(made, x.shape)
    wide = inner == 1 and size % 4 == 0
    kernel = _row_kernel(wide, log)
    params = {"rows": rows, "size": size, "inner": inner, "infinity": infinity, **_PARAMS}
    return plan.pending(
        kernel, [plan.storage(x)], params, -(-rows // kernel.lanes), x.dtype, x.shape, flops=8.0 * x.size
    )


def in_steps(rows: int, size: int) -> bool:
    """Whether there are too few rows to give one to each invocation, or they are too long for one."""
    return (size * rows >= 4096 and rows < 32) or 3 * size > MOST_TURNS


_END = {
    True: f"let less = select(top + log(total), params.nan, {_LOST});",
    False: f"let scale = select(1.0 / max(total, 1e-30), params.nan, {_LOST});",
}


@lru_cache
def _row_kernel(wide: bool, log: bool) -> Kernel:
    # One row for each invocation.
    floats: tuple[tuple[str, Scalar], ...] = tuple((name, "f32") for name in ("infinity", "inf", "nan"))
    params: tuple[tuple[str, Scalar], ...] = (("rows", "u32"), ("size", "u32"), ("inner", "u32"), *floats)
    head = "let t = group * 8u + lane;\nif (t < params.rows) {\nvar top = -params.infinity;\n"
    if wide:
        body = f"""let quads = params.size / 4u; let base = t * quads;
var top4 = vec4f(top);
var seen = vec4u();
for (var r = 0u; r < quads; r++) {{
    let v = x[base + r];
    top4 = max(top4, v);
    seen = max(seen, {_SEEN.format(x="v")});
}}
top = max(max(top4.x, top4.y), max(top4.z, top4.w));
top = select(top, params.inf, any(seen > vec4u(0x7f800000u)));
var total4 = vec4f();
for (var r = 0u; r < quads; r++) {{ total4 += exp(x[base + r] - top); }}
let total = (total4.x + total4.y) + (total4.z + total4.w);
{_END[log]}
for (var r = 0u; r < quads; r++) {{
    store4(base + r, {"x[base + r] - less" if log else "exp(x[base + r] - top) * scale"});
}}
}}"""
        kind = "vec4f"
    else:
        body = f"""let step = params.inner; let base = t / step * params.size * step + t % step;
var seen = 0u;
for (var r = 0u; r < params.size; r++) {{
    let v = x[base + r * step];
    top = max(top, v);
    seen = max(seen, bitcast<u32>(v) & 0x7fffffffu);
}}
top = select(top, params.inf, seen > 0x7f800000u);
var total = 0.0;
var part = 0.0;
for (var r = 0u; r < params.size; r++) {{
    part += exp(x[base + r * step] - top);
    if (r % 64u == 63u) {{ total += part; part = 0.0; }}
}}
total += part;
{_END[log]}
for (var r = 0u; r < params.size; r++) {{
    let i = base + r * step;
    store(i, {"x[i] - less" if log else "exp(x[i] - top) * scale"});
}}
}}"""
        kind = "f32"
    name = ("log_softmax" if log else "softmax") + ("x4" if wide else "")
    return Kernel(
        name,
        head + body,
        reads=(Binding("x", kind),),
        params=params,
        result="f32",
        width=4 if wide else 1,
        lanes=8,
    )


@lru_cache
def _group_kernel(log: bool) -> Kernel:
    """One row for each workgroup."""
    body = f"""let base = group * params.size;
var top = -params.infinity;
var seen = 0u;
for (var r = lane; r < params.size; r += 64u) {{
    top = max(top, x[base + r]);
    seen = max(seen, bitcast<u32>(x[base + r]) & 0x7fffffffu);
}}
parts[lane] = select(top, params.inf, seen > 0x7f800000u);
for (var step = 32u; step > 0u; step /= 2u) {{
    workgroupBarrier();
    if (lane < step) {{ parts[lane] = max(parts[lane], parts[lane + step]); }}
}}
workgroupBarrier();
top = parts[0];
workgroupBarrier();
var total = 0.0;
for (var r = lane; r < params.size; r += 64u) {{ total += exp(x[base + r] - top); }}
parts[lane] = total;
for (var step = 32u; step > 0u; step /= 2u) {{
    workgroupBarrier();
    if (lane < step) {{ parts[lane] += parts[lane + step]; }}
}}
workgroupBarrier();
total = parts[0];
{_END[log]}
for (var r = lane; r < params.size; r += 64u) {{
    store(base + r, {"x[base + r] - less" if log else "exp(x[base + r] - top) * scale"});
}}"""
    return Kernel(
        "log_softmax_group" if log else "softmax_group",
        body,
        reads=(Binding("x"),),
        params=(("size", "u32"), ("infinity", "f32"), ("inf", "f32"), ("nan", "f32")),
        functions="var<workgroup> parts: array<f32, 64>;\n",
    )


class _Softmax(Operator):
    log: ClassVar[bool] = False

    def along(self, plan: Lowering, x: Tensor, axis: int) -> Tensor:
        axis = plan.axis(axis, x.rank)
        if x.rank == 0:
            return softmax(plan, x, 1, 1, 1, self.log)
        return softmax(plan, x, math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :]), self.log)

    def flattened(self, plan: Lowering, x: Tensor, axis: int) -> Tensor:
        if not -x.rank <= axis <= x.rank:
            raise InvalidModel(f"node {plan.node!r} ({plan.op}): axis {axis} is out of range for {x.rank} dimensions")
        axis = axis + x.rank if axis < 0 else axis
        return softmax(plan, x, math.prod(x.shape[:axis]), math.prod(x.shape[axis:]), 1, self.log)


@op("Softmax", since=1)
class SoftmaxFlattened(_Softmax):
    """y = e ** x / sum(e ** x) over all dimensions from axis on."""

    axis: int = 1

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernels; the last one may be fused onto."""
        return self.flattened(plan, operands(plan, inputs, 1)[0], self.axis)


@op("Softmax", since=13)
class Softmax(_Softmax):
    """y = e ** x / sum(e ** x) along axis."""

    axis: int = -1

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernels; the last one may be fused onto."""
        return self.along(plan, operands(plan, inputs, 1)[0], self.axis)


@op("LogSoftmax", since=1)
class LogSoftmaxFlattened(SoftmaxFlattened):
    """y = x - ln(sum(e ** x)) over all dimensions from axis on."""

    log = True


@op("LogSoftmax", since=13)
class LogSoftmax(Softmax):
    """y = x - ln(sum(e ** x)) along axis."""

    log = True
