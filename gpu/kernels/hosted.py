"""Small tables that the host works out for a kernel, while planning where it can, else in the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..graph.steps import HostCall
from ..graph.tensor import Tensor

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Array, Shape

__all__ = ["hosted", "iota"]

COST_S = 20e-6


def hosted(plan: Lowering, call: Callable[..., Array], inputs: Sequence[Tensor], dtype: Any, shape: Shape) -> Tensor:
    """A tensor that the host makes of others: checked and flattened indices, tables of sources.

    Args:
        plan: takes the step; none is emitted where all inputs are known while planning.
        call: gets the arrays of `inputs` and returns one array; what it raises fails the run.
        inputs: fetched from the device if need be.
        dtype: of the result.
        shape: of the result.
    """
    dtype = np.dtype(dtype)
    values = [plan.known_value(t) for t in inputs]

    def made_of(arrays: Sequence[Array | None]) -> Array:
        return np.ascontiguousarray(call(*arrays), dtype).reshape(shape)

    if all(value is not None for value in values):
        return plan.constant(made_of(values))
    fixed = {index: value for index, value in enumerate(values) if value is not None}
    keys = tuple(plan.fetch(t) if value is None else None for t, value in zip(inputs, values, strict=True))
    made = Tensor(dtype, tuple(shape))
    target = plan.new_host(made)
    plan.steps.append(HostCall(lambda arrays, _: [made_of(arrays)], keys, (target,), COST_S, plan.node, fixed))
    return made


def iota(plan: Lowering, count: int, rank: int, axis: int, first: int = 0) -> Tensor:
    """The numbers first, first + 1, ... as int32 along one of `rank` dimensions, to broadcast."""
    shape = [1] * rank
    shape[axis] = count
    return plan.constant(np.arange(first, first + count, dtype=np.int32).reshape(shape))
