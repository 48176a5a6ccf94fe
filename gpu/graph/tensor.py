"""Values as the planner sees them: shapes and dtypes known, contents mostly not yet."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ..kernels.kernel import Kernel

__all__ = ["Apply", "Array", "Pending", "Storage", "Tensor", "as_words", "contiguous_strides", "gpu_type"]

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

_GPU_TYPES = {
    np.dtype(np.float32): "f32",
    np.dtype(np.int32): "i32",
    np.dtype(np.uint32): "u32",
    np.dtype(np.bool_): "bool",
}


def gpu_type(dtype: np.dtype[Any]) -> str | None:
    """The WGSL type that holds a dtype without loss ("bool" is kept as u32 in buffers), None if there is none."""
    return _GPU_TYPES.get(dtype)


def contiguous_strides(shape: Shape) -> Shape:
    """Row-major strides in elements."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


@dataclass(eq=False, slots=True)
class Storage:
    """A piece of device memory. Elements take 4 bytes each; padded to 16 bytes.

    Attributes:
        nbytes: its size.
        role: "temp" (placed by liveness), or "weight" (filled once, kept with the session).
        fill: for weights: makes the bytes, called once, when the weight is uploaded.
    """

    nbytes: int
    role: Literal["temp", "weight"] = "temp"
    fill: Callable[[], Array] | None = None


@dataclass(eq=False, slots=True)
class Apply:
    """An elementwise expression that is not computed yet: `wgsl` over scalars named by `names`."""

    wgsl: str
    names: tuple[str, ...]
    args: tuple[Tensor, ...]
    params: tuple[tuple[str, float], ...] = ()
    label: str = ""


@dataclass(eq=False, slots=True)
class Pending:
    """A kernel with `result` that is not emitted yet, so that what follows can be fused onto its end."""

    kernel: Kernel
    reads: tuple[Storage, ...]
    params: dict[str, int | float]
    groups: int
    flops: float
    node: str = ""


@dataclass(eq=False, slots=True)
class Tensor:
    """A value of the plan, compared by identity; where it lies is the plan's knowledge, not its own.

    Attributes:
        dtype: NumPy dtype. shape: all dimensions known.
        value: its contents where the model itself fixes them.
        apply: set for an elementwise result that may still be fused.
        pending: set for the result of a kernel that may still be fused onto.
    """

    dtype: np.dtype[Any]
    shape: Shape
    value: Array | None = None
    apply: Apply | None = None
    pending: Pending | None = None
    weights: dict[object, Storage] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def type(self) -> str | None:
        """WGSL scalar type, None where the GPU has none for its dtype."""
        return gpu_type(self.dtype)

    def __repr__(self) -> str:
        return f"Tensor({self.dtype.name}{list(self.shape)})"


def as_words(array: Array) -> Array:
    """An array as its buffer holds it: contiguous, 4 bytes per element, bool as u32."""
    if array.dtype == np.bool_:
        array = array.astype(np.uint32)
    assert array.dtype.itemsize == 4, array.dtype
    return np.ascontiguousarray(array)
