"""Indices along a dimension, checked where they are: while planning, on the host, or on the device."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ..graph.steps import IndexCheck
from .hosted import hosted
from .kernel import Binding, Kernel

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Tensor

__all__ = ["in_range"]

_I32 = np.dtype(np.int32)


def in_range(plan: Lowering, indices: Tensor, size: int, axis: int = 0) -> Tensor:
    """Indices into dimension `axis` of `size` elements as int32, 0 <= index < size.

    What is on the device as int32 is checked there: the kernel keeps what is out of range within
    it and raises the step's flag, at which the run fails once the segment is finished. Of several
    such indices of a step the error names one, always the same.

    Args:
        plan: takes the step; none is emitted where the indices are known while planning.
        indices: int32 or int64.
        size: of the dimension.
        axis: for the error's text.

    Raises:
        InvalidData: an index that is known while planning is out of range.
    """
    check = IndexCheck(plan.node, axis, size)
    here = plan.narrowed(indices) or indices
    known = plan.known_value(here) is not None
    if known or here.dtype != _I32 or plan.host_key(here) is not None or not size or not here.size:
        return hosted(plan, check.on_host, [indices], _I32, indices.shape)
    source, made = plan.storage(here), plan.new(_I32, indices.shape)
    params = {"count": here.size, "size": size, "flag": len(plan.checks)}
    groups = -(-here.size // 64)
    plan.dispatch(_kernel(), [source], [plan.storage(made), plan.flags], params, groups, check=check)
    return made


@lru_cache
def _kernel() -> Kernel:
    body = """let i = group * 64u + lane;
if (i < params.count) {
    let index = given[i];
    if ((index < -params.size) | (index >= params.size)) {
        atomicMax(&flags[params.flag], bitcast<u32>(index));
    }
    checked[i] = clamp(select(index, index + params.size, index < 0), 0, params.size - 1);
}"""
    return Kernel(
        "indices",
        body,
        reads=(Binding("given", "i32"),),
        writes=(Binding("checked", "i32"), Binding("flags", "atomic<u32>")),
        params=(("count", "u32"), ("size", "i32"), ("flag", "u32")),
        result=None,
    )
