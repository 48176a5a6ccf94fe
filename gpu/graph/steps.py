"""What a plan is made of. Shapes and buffers are fixed here; device objects are not made yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..kernels.kernel import Program
from .tensor import Array, Storage

__all__ = ["Copy", "Dispatch", "Fetch", "HostCall", "HostFunction", "Step", "Upload"]

HostFunction = Callable[[Sequence[Array | None], Callable[[], None]], Sequence[Any]]
"""Gets one array (or None) per input, and what to call now and then: it raises once the run is stopped."""


@dataclass(eq=False, slots=True)
class Dispatch:
    """One run of a kernel over `groups` workgroups."""

    program: Program
    reads: tuple[Storage, ...]
    writes: tuple[Storage, ...]
    params: bytes
    groups: int
    cost_s: float
    node: str


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
