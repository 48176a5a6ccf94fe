"""Normalisations. Means and variances are taken in two passes over the data."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvalidModel
from .elementwise import operands
from .kernel import Binding, Kernel, Scalar
from .reduce import SUM, fold
from .registry import NoKernel, Operator, op
from .softmax import in_steps

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Shape, Tensor

__all__ = ["moments"]


def moments(
    plan: Lowering, x: Tensor, rows: int, epsilon: float, shape: Shape, centred: bool = True
) -> tuple[Tensor, Tensor]:
    """Mean and 1 / sqrt(variance + epsilon) of each of `rows` equal stretches of x.

    Args:
        plan: takes the kernel.
        x: f32.
        rows: how many stretches.
        epsilon: added to the variance.
        shape: of both results.
        centred: False: the mean is taken to be 0.
    """
    size = x.size // rows if rows else 0
    if plan.target.cpu and size and in_steps(rows, size):
        return _moments_in_steps(plan, x, rows, size, epsilon, shape, centred)
    mean, scale = plan.new(x.dtype, shape), plan.new(x.dtype, shape)
    group = not plan.target.cpu and size >= 128
    wide = size % 4 == 0 and not group
    kernel = _group_moments(centred) if group else _moments(wide, centred)
    params = {"rows": rows, "size": size, "epsilon": epsilon}
    groups = rows if group else -(-rows // kernel.lanes)
    plan.dispatch(
        kernel, [plan.storage(x)], [plan.storage(mean), plan.storage(scale)], params, groups, flops=5.0 * x.size
    )
    return mean, scale


def _moments_in_steps(
    plan: Lowering, x: Tensor, rows: int, size: int, epsilon: float, shape: Shape, centred: bool
) -> tuple[Tensor, Tensor]:
    """The same of few or long stretches, by reductions, which share a stretch out."""
    values = plan.view(x, (rows, size))
    mean = plan.constant(np.zeros(shape, x.dtype))
    if centred:
        total = fold(plan, values, rows, size, 1, SUM, (rows, 1))
        flat = plan.map("s / params.n", {"s": total}, params={"n": size})
        mean = plan.view(flat, shape)
        values = plan.map("x - m", {"x": values, "m": flat})
    squares = fold(plan, values, rows, size, 1, SUM, (rows, 1), "v * v")
    scale = plan.map("1.0 / sqrt(s / params.n + params.e)", {"s": squares}, params={"n": size, "e": epsilon})
    return mean, plan.view(scale, shape)


_PARAMS: tuple[tuple[str, Scalar], ...] = (("rows", "u32"), ("size", "u32"), ("epsilon", "f32"))
_WRITES = (Binding("mean"), Binding("scale"))


@lru_cache
def _moments(wide: bool, centred: bool) -> Kernel:
    """One stretch for each invocation."""
    kind = "vec4f" if wide else "f32"
    total = "(s.x + s.y) + (s.z + s.w)" if wide else "s"

    def loop(term: str) -> str:
        return f"""{{
    var s = {kind}();
    for (var i = 0u; i < count;) {{
        var part = {kind}();
        for (let stop = min(i + 64u, count); i < stop; i++) {{ let v = x[first + i]; part += {term}; }}
        s += part;
    }}
    total = {total};
}}
"""

    body = f"""let t = group * 8u + lane;
if (t < params.rows) {{
let count = params.size{" / 4u" if wide else ""};
let first = t * count;
var total = 0.0;
var m = 0.0;
{loop("v") + "m = total / f32(params.size);" if centred else ""}
{loop("(v - m) * (v - m)")}
mean[t] = m;
scale[t] = 1.0 / sqrt(total / f32(params.size) + params.epsilon);
}}"""
    return Kernel(
        f"moments{'x4' if wide else ''}",
        body,
        reads=(Binding("x", kind),),
        writes=_WRITES,
        params=_PARAMS,
        result=None,
        lanes=8,
    )


@lru_cache
def _group_moments(centred: bool) -> Kernel:
    """One stretch for each workgroup."""

    def loop(term: str) -> str:
        return f"""{{
    var s = 0.0;
    for (var i = lane; i < params.size; i += 128u) {{ let v = x[first + i]; s += {term}; }}
    parts[lane] = s;
    for (var step = 64u; step > 0u; step /= 2u) {{
        workgroupBarrier();
        if (lane < step) {{ parts[lane] += parts[lane + step]; }}
    }}
    workgroupBarrier();
    total = parts[0];
    workgroupBarrier();
}}
"""

    body = f"""let first = group * params.size;
var total = 0.0;
var m = 0.0;
{loop("v") + "m = total / f32(params.size);" if centred else ""}
{loop("(v - m) * (v - m)")}
if (lane == 0u) {{
    mean[group] = m;
    scale[group] = 1.0 / sqrt(total / f32(params.size) + params.epsilon);
}}"""
    return Kernel(
        "moments_group",
        body,
        reads=(Binding("x"),),
        writes=_WRITES,
        params=_PARAMS,
        result=None,
        lanes=128,
        functions="var<workgroup> parts: array<f32, 128>;\n",
    )


def _float(plan: Lowering, *tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and tensor.type != "f32":
            raise NoKernel(f"no kernel for {tensor.dtype.name}")


def _channels(plan: Lowering, x: Tensor, *tensors: Tensor) -> list[int]:
    """The shape with which a value per channel meets x. Raises InvalidModel."""
    if x.rank < 2:
        raise InvalidModel(f"node {plan.node!r} ({plan.op}): expected 2 or more dimensions, got shape {list(x.shape)}")
    for tensor in tensors:
        if tensor.shape != (x.shape[1],):
            raise InvalidModel(
                f"node {plan.node!r} ({plan.op}): expected shape [{x.shape[1]}] for {x.shape[1]} channels,"
                f" got {list(tensor.shape)}"
            )
    return [x.shape[1]] + [1] * (x.rank - 2)


@op("BatchNormalization", since=7)
class BatchNormalization(Operator):
    """y = (x - mean) / sqrt(var + epsilon) * scale + b, per channel: inference; x: [n, c, ...]."""

    epsilon: float = 1e-5
    training_mode: int = 0
    spatial: int = 1

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the expression; known statistics are folded into a factor and a summand."""
        x, *statistics = operands(plan, inputs, 5)
        if self.training_mode or not self.spatial:
            raise NoKernel("training mode" if self.training_mode else "statistics per element")
        _float(plan, x, *statistics)
        if x.rank == 1:
            raise NoKernel("one dimension")
        shape = _channels(plan, x, *statistics)
        values = [plan.known_value(t) for t in statistics]
        if all(v is not None for v in values):
            scale, b, mean, var = (v.astype(np.float64).reshape(shape) for v in values if v is not None)
            factor = scale / np.sqrt(var + self.epsilon)
            summand = b - mean * factor
            args = {
                "x": x,
                "s": plan.constant(factor.astype(np.float32)),
                "b": plan.constant(summand.astype(np.float32)),
            }
            return plan.map("x * s + b", args, shape=x.shape)
        args = {"x": x} | dict(zip("sbmv", (plan.view(t, shape) for t in statistics), strict=True))
        return plan.map(
            "(x - m) / sqrt(v + params.epsilon) * s + b", args, shape=x.shape, params={"epsilon": self.epsilon}
        )


@op("InstanceNormalization", since=6)
class InstanceNormalization(Operator):
    """y = (x - mean) / sqrt(var + epsilon) * scale + b over each channel's own elements; x: [n, c, ...]."""

    epsilon: float = 1e-5

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the statistics' kernel and the expression."""
        x, scale, b = operands(plan, inputs, 3)
        _float(plan, x, scale, b)
        shape = _channels(plan, x, scale, b)
        mean, inverse = moments(plan, x, x.shape[0] * x.shape[1], self.epsilon, (x.shape[0], *shape))
        return plan.map(
            "(x - m) * i * s + b",
            {"x": x, "m": mean, "i": inverse, "s": plan.view(scale, shape), "b": plan.view(b, shape)},
            shape=x.shape,
        )


@op("GroupNormalization", since=18)
class GroupNormalization(Operator):
    """y = (x - mean) / sqrt(var + epsilon) * scale + b over groups of channels; x: [n, c, ...]."""

    num_groups: int
    epsilon: float = 1e-5

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the statistics' kernel and the expression."""
        x, scale, b = operands(plan, inputs, 3)
        _float(plan, x, scale, b)
        groups = self.num_groups
        if x.rank < 2 or groups < 1 or x.shape[1] % groups:
            raise InvalidModel(
                f"node {plan.node!r} (GroupNormalization): {groups} groups do not share shape {list(x.shape)} out"
            )
        n, c = x.shape[:2]
        rest = math.prod(x.shape[2:])
        per = groups if plan.opset < 21 else c
        if scale.shape != (per,) or b.shape != (per,):
            shapes = f"{list(scale.shape)} and {list(b.shape)}"
            raise InvalidModel(f"node {plan.node!r} (GroupNormalization): expected shapes [{per}], got {shapes}")
        shape = (groups, 1, 1) if per == groups else (groups, c // groups, 1)
        mean, inverse = moments(plan, x, n * groups, self.epsilon, (n, groups, 1, 1))
        made = plan.map(
            "(x - m) * i * s + b",
            {
                "x": plan.view(x, (n, groups, c // groups, rest)),
                "m": mean,
                "i": inverse,
                "s": plan.view(scale, shape),
                "b": plan.view(b, shape),
            },
        )
        return plan.view(made, x.shape)


@op("LayerNormalization", since=1)
class LayerNormalization(Operator):
    """y = (x - mean) / sqrt(var + epsilon) * scale + b over the dimensions from axis on."""

    axis: int = -1
    epsilon: float = 1e-5
    stash_type: int = 1

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Add the statistics' kernel and the expression; outputs: y, mean, 1 / sqrt(var + epsilon)."""
        x, scale = operands(plan, inputs, 2)
        b = inputs[2] if len(inputs) > 2 else None
        _float(plan, x, scale, b)
        mean, inverse = _row_moments(plan, x, self.axis, self.epsilon, True)
        args = {"x": x, "m": mean, "i": inverse, "s": scale}
        wgsl = "(x - m) * i * s"
        if b is not None:
            args["b"] = b
            wgsl += " + b"
        return _like(plan, plan.map(wgsl, args), x), mean, inverse


@op("RMSNormalization", since=23)
class RMSNormalization(Operator):
    """y = x / sqrt(mean(x * x) + epsilon) * scale over the dimensions from axis on."""

    axis: int = -1
    epsilon: float = 1e-5
    stash_type: int = 1

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the statistics' kernel and the expression."""
        x, scale = operands(plan, inputs, 2)
        _float(plan, x, scale)
        _, inverse = _row_moments(plan, x, self.axis, self.epsilon, False)
        return _like(plan, plan.map("x * i * s", {"x": x, "i": inverse, "s": scale}), x)


def _row_moments(plan: Lowering, x: Tensor, axis: int, epsilon: float, centred: bool) -> tuple[Tensor, Tensor]:
    axis = plan.axis(axis, x.rank)
    shape = (*x.shape[:axis], *[1] * (x.rank - axis))
    return moments(plan, x, math.prod(shape), epsilon, shape, centred)


def _like(plan: Lowering, made: Tensor, x: Tensor) -> Tensor:
    if made.shape != x.shape:
        raise InvalidModel(f"node {plan.node!r} ({plan.op}): scale or bias do not broadcast to shape {list(x.shape)}")
    return made
