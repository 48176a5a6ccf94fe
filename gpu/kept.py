"""The values that an engine keeps for its caller between runs. Pure; used on the engine's own thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from .errors import DeviceLost, InvalidInput
from .seam import TensorRef

__all__ = ["Kept"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    value: T
    model: int
    run: int


class Kept(Generic[T]):
    """Values by their `TensorRef`s.

    What is freed during a run is gone from here at once, and released at the end of the run, which
    may be reading it.

    Args:
        release: called with each value that is given back.
    """

    def __init__(self, release: Callable[[T], None] = lambda _: None) -> None:
        self._release = release
        self._entries: dict[int, _Entry[T]] = {}
        self._next = 0
        self._run: int | None = None
        self._gone: list[T] = []
        self._actor = self._generation = 0

    def __len__(self) -> int:
        return len(self._entries)

    def belong(self, actor: int, generation: int) -> None:
        """Say whose the values are; once, before there are any."""
        self._actor, self._generation = actor, generation

    def add(self, value: T, model: int, run: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> TensorRef:
        """Keep a value that a run has made; it is given back at the run's end unless that says otherwise."""
        ref = TensorRef(self._actor, self._generation, self._next, dtype, shape)
        self._next += 1
        self._entries[ref.id] = _Entry(value, model, run)
        return ref

    def find(self, name: str, ref: TensorRef) -> T:
        """The value of a ref.

        Args:
            name: what it is fed to, for the message.
            ref: what the caller has.

        Raises:
            InvalidInput: it is another engine's, or was given back.
            DeviceLost: it went with an earlier device.
        """
        if ref.actor != self._actor:
            raise InvalidInput(name, "a tensor on this session's device", "one on another")
        if ref.generation != self._generation:
            raise DeviceLost(f"the tensor for {name!r} went with the device that it was on")
        entry = self._entries.get(ref.id)
        if entry is None:
            raise InvalidInput(name, "a tensor that is there", "one that was freed")
        return entry.value

    def begin(self, run: int) -> None:
        """From now on a run may read what is here."""
        self._run = run

    def end(self, run: int, kept: Iterable[TensorRef]) -> None:
        """The run is over; of what it has made, only what is in `kept` stays."""
        stays = {ref.id for ref in kept}
        if run == self._run:
            self._run = None
        self._drop(id_ for id_, entry in self._entries.items() if entry.run == run and id_ not in stays)
        self._drop(())

    def free(self, refs: Iterable[TensorRef]) -> None:
        """Give values back; those that are not there are passed over."""
        mine = (self._actor, self._generation)
        self._drop(ref.id for ref in refs if (ref.actor, ref.generation) == mine)

    def free_model(self, model: int) -> None:
        """Give back what the runs of a model have made."""
        self._drop(id_ for id_, entry in self._entries.items() if entry.model == model)

    def clear(self) -> None:
        """Give everything back; no run is under way."""
        self._run = None
        self._drop(self._entries)

    def _drop(self, ids: Iterable[int]) -> None:
        for id_ in tuple(ids):
            entry = self._entries.pop(id_, None)
            if entry is not None:
                self._gone.append(entry.value)
        while self._gone and self._run is None:
            self._release(self._gone.pop())
