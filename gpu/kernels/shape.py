"""Shapes: operators that move nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvalidModel
from .elementwise import operands
from .registry import NoKernel, Operator, op

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Array, Tensor

__all__ = ["reshaped"]


def reshaped(shape: tuple[int, ...], wanted: list[int], allow_zero: bool) -> tuple[int, ...]:
    """The shape that Reshape makes: 0 takes over a dimension (unless allowed), one -1 takes the rest.

    Raises:
        ValueError: they do not fit; the text says why.
    """
    out = list(wanted)
    for axis, size in enumerate(wanted):
        if size == 0 and not allow_zero:
            if axis >= len(shape):
                raise ValueError(f"shape {wanted} takes over dimension {axis} of {list(shape)}")
            out[axis] = shape[axis]
    if out.count(-1) > 1 or min(out, default=0) < -1:
        raise ValueError(f"{wanted} is no shape")
    if -1 in out:
        rest = math.prod(size for size in out if size != -1)
        if rest == 0 or math.prod(shape) % rest:
            raise ValueError(f"cannot reshape {list(shape)} to {wanted}")
        out[out.index(-1)] = math.prod(shape) // rest
    if math.prod(out) != math.prod(shape):
        raise ValueError(f"cannot reshape {list(shape)} to {wanted}")
    return tuple(out)


@op("Reshape", since=5)
class Reshape(Operator):
    """y = the elements of x under another shape."""

    allowzero: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """View the input."""
        x, shape = operands(plan, inputs, 2)
        wanted = plan.ints(shape)
        try:
            made = reshaped(x.shape, wanted, bool(self.allowzero))
        except ValueError as error:
            raise InvalidModel(f"node {plan.node!r} (Reshape): {error}") from None
        return plan.view(x, made)


@op("Flatten", since=1)
class Flatten(Operator):
    """y = x with the dimensions before axis merged, and those from it on."""

    axis: int = 1

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """View the input."""
        (x,) = operands(plan, inputs, 1)
        if not -x.rank <= self.axis <= x.rank:
            raise InvalidModel(
                f"node {plan.node!r} (Flatten): axis {self.axis} is out of range for {x.rank} dimensions"
            )
        axis = self.axis + x.rank if self.axis < 0 else self.axis
        return plan.view(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


def _axes(plan: Lowering, axes: list[int], rank: int) -> list[int]:
    made = [plan.axis(axis, rank) for axis in axes]
    if len(set(made)) < len(made):
        raise InvalidModel(f"node {plan.node!r} ({plan.op}): axes {axes} repeat")
    return made


def _squeeze(plan: Lowering, x: Tensor, axes: list[int] | None) -> Tensor:
    if axes is None:
        return plan.view(x, [size for size in x.shape if size != 1])
    dropped = _axes(plan, axes, x.rank)
    for axis in dropped:
        if x.shape[axis] != 1:
            raise InvalidModel(
                f"node {plan.node!r} (Squeeze): expected size 1 in dimension {axis}, got shape {list(x.shape)}"
            )
    return plan.view(x, [size for axis, size in enumerate(x.shape) if axis not in dropped])


def _unsqueeze(plan: Lowering, x: Tensor, axes: list[int]) -> Tensor:
    rank = x.rank + len(axes)
    added = _axes(plan, axes, rank)
    sizes = iter(x.shape)
    return plan.view(x, [1 if axis in added else next(sizes) for axis in range(rank)])


@op("Squeeze", since=1)
class SqueezeByAttribute(Operator):
    """y = x without dimensions of size 1: those in axes, or all."""

    axes: list[int] | None = None

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """View the input."""
        (x,) = operands(plan, inputs, 1)
        return _squeeze(plan, x, self.axes)


@op("Squeeze", since=13)
class Squeeze(Operator):
    """y = x without dimensions of size 1: those in the second input, or all."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """View the input."""
        (x,) = operands(plan, inputs, 1)
        axes = inputs[1] if len(inputs) > 1 else None
        return _squeeze(plan, x, None if axes is None else plan.ints(axes))


@op("Unsqueeze", since=1)
class UnsqueezeByAttribute(Operator):
    """y = x with dimensions of size 1 put in at axes."""

    axes: list[int]

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """View the input."""
        (x,) = operands(plan, inputs, 1)
        return _unsqueeze(plan, x, self.axes)


@op("Unsqueeze", since=13)
class Unsqueeze(Operator):
    """y = x with dimensions of size 1 put in at the axes in the second input."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """View the input."""
        x, axes = operands(plan, inputs, 2)
        return _unsqueeze(plan, x, plan.ints(axes))


@op("Shape", since=1)
class Shape(Operator):
    """y = the shape of x, or its dimensions from start to end: int64."""

    start: int = 0
    end: int | None = None

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Known while planning."""
        (x,) = operands(plan, inputs, 1)
        first, last, _ = slice(self.start, self.end).indices(x.rank)
        return plan.constant(np.array(x.shape[first:last], np.int64))


@op("Size", since=1)
class Size(Operator):
    """y = the number of elements of x: int64."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Known while planning."""
        return plan.constant(np.array(operands(plan, inputs, 1)[0].size, np.int64))


@op("ConstantOfShape", since=9)
class ConstantOfShape(Operator):
    """y = one value, repeated: the shape is the input."""

    value: Array | None = None

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Known while planning, or for large float tensors an expression."""
        (shape,) = operands(plan, inputs, 1)
        sizes = plan.ints(shape)
        if min(sizes, default=0) < 0:
            raise InvalidModel(f"node {plan.node!r} (ConstantOfShape): {sizes} is no shape")
        value = np.zeros((), np.float32) if self.value is None else self.value.reshape(-1)[0]
        one = plan.constant(value)
        if one.type is not None and math.prod(sizes) > 1024:
            return plan.map("x", {"x": one}, shape=tuple(sizes))
        if math.prod(sizes) > 1 << 24:
            raise NoKernel(f"no GPU type for {one.dtype.name}")
        return plan.constant(np.broadcast_to(one.value if one.value is not None else value, tuple(sizes)))
