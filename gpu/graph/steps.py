"""What a plan is made of. Shapes and buffers are fixed here; device objects are not made yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import InvalidData
from ..kernels.kernel import Program
from .tensor import Array, Storage

__all__ = ["Copy", "Dispatch", "Fetch", "HostCall", "HostFunction", "IndexCheck", "Step", "Upload"]

HostFunction = Callable[[Sequence[Array | None], Callable[[], None]], Sequence[Any]]
"""Gets one array (or None) per input, and what to call now and then: it raises once the run is stopped."""


@dataclass(frozen=True, slots=True)
class IndexCheck:
    """That indices are within a dimension; negative ones count from its end."""

    node: str
    axis: int
    size: int

    def on_host(self, indices: Array) -> Array:
        """The indices as int32, 0 <= index < size. Raises InvalidData."""
        bad = (indices < -self.size) | (indices >= self.size)
        if bad.any():
            raise self.error(int(indices[bad][0]))
        return np.where(indices < 0, indices + self.size, indices).astype(np.int32)

    def error(self, index: int) -> InvalidData:
        """What is raised for an index that is not."""
        return InvalidData(self.node, f"index {index} is out of range for dimension {self.axis} of size {self.size}")


@dataclass(eq=False, slots=True)
class Dispatch:
    """One run of a kernel over `groups` workgroups.

    Attributes:
        flops: operations on numbers that it does. nbytes: bytes that it reads and writes, each once.
        check: what it finds out about values. The last of `writes` is the block's flags then.
    """

    program: Program
    reads: tuple[Storage, ...]
    writes: tuple[Storage, ...]
    params: bytes
    groups: int
    cost_s: float
    node: str
    flops: float = 0.0
    nbytes: int = 0
    check: IndexCheck | None = None


@dataclass(eq=False, slots=True)
class Copy:
    """A stretch of one buffer into another; bytes, multiples of 4."""

    source: Storage
    source_offset: int
    target: Storage
    target_offset: int
    nbytes: int
    cost_s: float
    node: str


@dataclass(eq=False, slots=True)
class Upload:
    """An array of the frame (by its key) into a buffer; the frame's dtype has a GPU type."""

    key: int
    target: Storage
    dtype: np.dtype[Any]
    nbytes: int
    node: str


@dataclass(eq=False, slots=True)
class Fetch:
    """A buffer into the frame."""

    source: Storage
    key: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    node: str


@dataclass(eq=False, slots=True)
class HostCall:
    """A computation on the CPU: arrays of the frame in, arrays of the frame out.

    Attributes:
        call: returns one array per output.
        inputs: keys, None where an optional input is left out. outputs: keys, None = not wanted.
        op: the operator, for people.
    """

    call: HostFunction
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    cost_s: float
    node: str
    fixed: dict[int, Array] = field(default_factory=dict)
    op: str = ""


Step = Dispatch | Copy | Upload | Fetch | HostCall
