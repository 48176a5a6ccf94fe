"""Values as the planner sees them: shapes and dtypes known, contents mostly not yet."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import ml_dtypes
import numpy as np

from ..kernels.kernel import Kernel

__all__ = [
    "HELD",
    "NARROW",
    "Apply",
    "Array",
    "Pending",
    "Storage",
    "Tensor",
    "as_halves",
    "as_words",
    "contiguous_strides",
    "from_words",
    "gpu_type",
]

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

F32, I32, U32, BOOL, F16, I64 = (
    np.dtype(t) for t in (np.float32, np.int32, np.uint32, np.bool_, np.float16, np.int64)
)
_GPU_TYPES = {F32: "f32", I32: "i32", U32: "u32", BOOL: "bool"}
HELD = {
    np.dtype(np.float16): F32,
    np.dtype(ml_dtypes.bfloat16): F32,
    np.dtype(np.int8): I32,
    np.dtype(np.int16): I32,
    np.dtype(np.uint8): U32,
    np.dtype(np.uint16): U32,
}
"""Narrow dtypes, and what shaders hold their values as: every value of the one is one of the other."""
_BITS, _SIGN = "bitcast<u32>(x)", "(bitcast<u32>(x) & 0x80000000u)"
NARROW = {
    # Rounded to nearest, ties to even; below 2 ** -14 in steps of 2 ** -24; from 65520 on infinite.
    np.dtype(
        np.float16
    ): f"select(select(select(bitcast<f32>(({_BITS} + 0xfffu + (({_BITS} >> 13u) & 1u)) & 0xffffe000u),"
    f" round(x * 16777216.0) / 16777216.0, abs(x) < 6.103515625e-5), bitcast<f32>({_SIGN} | 0x7f800000u),"
    f" abs(x) >= 65520.0), x, ({_BITS} & 0x7fffffffu) > 0x7f800000u)",
    np.dtype(ml_dtypes.bfloat16): f"select(bitcast<f32>(({_BITS} + 0x7fffu + (({_BITS} >> 16u) & 1u)) & 0xffff0000u),"
    f" x, ({_BITS} & 0x7fffffffu) > 0x7f800000u)",
    np.dtype(np.int8): "(x << 24u) >> 24u",
    np.dtype(np.int16): "(x << 16u) >> 16u",
    np.dtype(np.uint8): "x & 0xffu",
    np.dtype(np.uint16): "x & 0xffffu",
}
"""WGSL over x, in the type that holds it: the value that the narrow dtype would have (wrapped, rounded)."""

_AT_ONCE = 1 << 16


def gpu_type(dtype: np.dtype[Any]) -> str | None:
    """The WGSL type that holds a dtype without loss ("bool" is kept as u32 in buffers), None if there is none."""
    return _GPU_TYPES.get(HELD.get(dtype, dtype))


def contiguous_strides(shape: Shape) -> Shape:
    """Row-major strides in elements."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


@dataclass(eq=False, slots=True)
class Storage:
    """A piece of device memory, padded to 16 bytes.

    Attributes:
        nbytes: its size.
        role: "temp" (placed by liveness), "weight" (filled once, kept with the session), "flag"
            (a word for each step of the block that checks values), or "input" (what a run is given on the device).
        fill: for weights: makes the bytes, called once, when the weight is uploaded.
        half: elements are f16, which kernels read and write as f32; else they take 4 bytes each.
    """

    nbytes: int
    role: Literal["temp", "weight", "flag", "input"] = "temp"
    fill: Callable[[], Array] | None = None
    half: bool = False

    @property
    def each(self) -> int:
        """Bytes of an element."""
        return 2 if self.half else 4


@dataclass(eq=False, slots=True)
class Apply:
    """An elementwise expression that is not computed yet: `wgsl` over scalars named by `names`.

    `functions` is what it calls; `weight` says how many operators it is worth.
    """

    wgsl: str
    names: tuple[str, ...]
    args: tuple[Tensor, ...]
    params: tuple[tuple[str, float], ...] = ()
    label: str = ""
    functions: str = ""
    weight: int = 1


@dataclass(eq=False, slots=True)
class Pending:
    """A kernel with `result` that is not emitted yet, so that what follows can be fused onto its end."""

    kernel: Kernel
    reads: tuple[Storage, ...]
    params: dict[str, int | float]
    groups: int
    flops: float
    node: str = ""
    effort: float = 1.0
    touches: int | None = None


@dataclass(eq=False, slots=True)
class Tensor:
    """A value of the plan, compared by identity; where it lies is the plan's knowledge, not its own.

    Attributes:
        dtype: NumPy dtype. shape: all dimensions known.
        value: its contents where the model itself fixes them.
        apply: set for an elementwise result that may still be fused.
        pending: set for the result of a kernel that may still be fused onto.
        half: of dtype float32, but float16 has each of its values; where `value` is set, it may have.
    """

    dtype: np.dtype[Any]
    shape: Shape
    value: Array | None = None
    apply: Apply | None = None
    pending: Pending | None = None
    half: bool = False
    weights: dict[object, Storage] = field(default_factory=dict)
    derived: dict[object, Tensor] = field(default_factory=dict)

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


def as_words(array: Array, half: bool = False) -> Array:
    """An array as its buffer holds it: contiguous, 4 bytes per element, narrow dtypes widened, bool as u32.

    With `half` 2 bytes per element: float16, filled up to whole words.
    """
    if half:
        made = np.ascontiguousarray(array, F16).reshape(-1)
        return np.append(made, F16.type(0)) if array.size % 2 else made
    array = array.astype(U32 if array.dtype == BOOL else HELD.get(array.dtype, array.dtype), copy=False)
    assert array.dtype.itemsize == 4, array.dtype
    return np.ascontiguousarray(array)


def as_halves(array: Array) -> Array | None:
    """An array as float16, if float16 has each of its values. Arrays of other dtypes than float32 it does not have."""
    if array.dtype == F16:
        return array
    if array.dtype != F32:
        return None
    given = np.ascontiguousarray(array).reshape(-1)
    made = np.empty(given.size, F16)
    for start in range(0, given.size, _AT_ONCE):
        part, halves = given[start : start + _AT_ONCE], made[start : start + _AT_ONCE]
        with np.errstate(over="ignore"):
            halves[:] = part
        back = halves.astype(F32)
        if not np.array_equal(back.view(U32), part.view(U32)) and not np.array_equal(back, part, equal_nan=True):
            return None
    return made.reshape(array.shape)


def from_words(data: bytearray, dtype: np.dtype[Any], shape: Shape, half: bool = False) -> Array:
    """The array that a buffer's bytes are: with `half` they are float16; an int64 one lies there as int32."""
    if half:
        return np.frombuffer(data, F16).astype(dtype, copy=False).reshape(shape)
    if dtype == BOOL:
        bits: Array = np.frombuffer(data, U32) != 0
        return bits.reshape(shape)
    held: Array = np.frombuffer(data, I32 if dtype == I64 else HELD.get(dtype, dtype))
    return held.astype(dtype, copy=False).reshape(shape)
