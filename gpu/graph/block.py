"""A block: a straight line of steps, where its outputs lie, and what decides how it goes on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from .cycle import Cycle
from .memory import Slots
from .model import Value
from .steps import Step
from .tensor import Array, Storage, Tensor
from .walk import Walk

__all__ = ["Block", "Decision", "Result", "describe"]


@dataclass(frozen=True, slots=True)
class Result:
    """Where an output lies at the end: on the device, in the frame, or known ahead."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    storage: Storage | None = None
    key: int | None = None
    value: Array | None = None


@dataclass(eq=False, slots=True)
class Decision:
    """What a block's end waits for: arrays of the frame, by contents ("value") or by shape ("shape"), or a "turn"."""

    kind: Literal["value", "shape", "turn"]
    keys: tuple[int, ...]
    walk: Walk
    tensor: Tensor | None = None
    outputs: tuple[Value | None, ...] = ()
    cycle: Cycle | None = None

    def answer(self, arrays: Sequence[Any]) -> object:
        """The arrays' answer in a form that can be a dictionary's key."""
        if self.cycle is not None:
            return self.cycle.answer(arrays)
        if self.kind == "value":
            return tuple((a.dtype.str, a.shape, a.tobytes()) for a in arrays)
        return tuple(describe(a) for a in arrays)


@dataclass(eq=False, slots=True)
class Block:
    """A straight line of steps.

    Attributes:
        inputs: keys of the feeds in the frame (first block only). given: those that lie on the device.
        results: where the outputs lie that this block computes, and after how many of its steps.
        decision: what decides how it goes on, where it is not.
        following: blocks made so far, by answer; the oldest are forgotten.
        slots: memory of the path up to here. device: what the engine made for it.
    """

    steps: list[Step]
    slots: Slots
    inputs: dict[str, int] = field(default_factory=dict)
    given: dict[str, Storage] = field(default_factory=dict)
    results: dict[str, tuple[int, Result]] = field(default_factory=dict)
    decision: Decision | None = None
    following: OrderedDict[object, Block] = field(default_factory=OrderedDict)
    device: Any = None

    @property
    def home(self) -> Block:
        """The block that holds those that follow this one: for the body of a loop, the one before it."""
        if self.decision is None or self.decision.cycle is None:
            return self
        return self.decision.cycle.home  # type: ignore[no-any-return]


def describe(value: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Dtype and shape of a value of the frame; object and () for what is no array."""
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype, value.shape
    return np.dtype(object), ()
