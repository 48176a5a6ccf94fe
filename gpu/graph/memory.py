"""Which temporary values may share memory: slots, given out by liveness.

This file knows steps and storages, no device: a slot becomes a buffer in gpu/device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .steps import Copy, Dispatch, Fetch, HostCall, Step, Upload
from .tensor import Storage

__all__ = ["Slot", "Slots", "touched"]


@dataclass(eq=False, slots=True)
class Slot:
    """Memory that holds one storage at a time; compared by identity."""

    nbytes: int


class Slots:
    """The slots along one path of blocks.

    Attributes:
        where: the slot of each temporary storage that lives, or lived, on this path.
        all: every slot of the path, in order of making.
    """

    def __init__(self) -> None:
        self.where: dict[Storage, Slot] = {}
        self.all: list[Slot] = []
        self._free: list[Slot] = []
        self._live: set[Storage] = set()

    def fork(self) -> Slots:
        """The state at a block's end, for one of several blocks that may follow."""
        other = Slots()
        other.where = {s: self.where[s] for s in self._live}
        other.all, other._free, other._live = list(self.all), list(self._free), set(self._live)
        return other

    def assign(self, steps: Sequence[Step], live_out: set[Storage]) -> None:
        """Give every temporary storage of a block a slot.

        Rules:
            1. A storage has its slot from the first step that touches it to the last, or on to
               the block's end where `live_out` holds it.
            2. The smallest free slot that is large enough serves; else the largest free slot
               that this block made grows; else a new one is made.
        """
        last: dict[Storage, int] = {}
        for index, step in enumerate(steps):
            for storage in touched(step):
                last[storage] = index
        known = len(self.all)
        growable: set[Slot] = set()
        gone = [s for s in self._live if s not in last and s not in live_out]
        self._release(gone)
        for index, step in enumerate(steps):
            for storage in touched(step):
                if storage.role == "temp" and storage not in self._live:
                    self.where[storage] = self._take(storage.nbytes, growable)
                    self._live.add(storage)
            self._release(
                s for s in dict.fromkeys(touched(step)) if last[s] == index and s not in live_out and s in self._live
            )
        assert known <= len(self.all)

    def hold(self, storages: Iterable[Storage]) -> None:
        """Give storages slots at a block's end already, for several blocks that follow to share."""
        for storage in storages:
            if storage.role == "temp" and storage not in self._live:
                self.where[storage] = self._take(storage.nbytes, set())
                self._live.add(storage)

    def _take(self, nbytes: int, growable: set[Slot]) -> Slot:
        fits = [s for s in self._free if s.nbytes >= nbytes]
        if fits:
            slot = min(fits, key=lambda s: s.nbytes)
        else:
            loose = [s for s in self._free if s in growable]
            if loose:
                slot = max(loose, key=lambda s: s.nbytes)
                slot.nbytes = nbytes
            else:
                slot = Slot(nbytes)
                growable.add(slot)
                self.all.append(slot)
                return slot
        self._free.remove(slot)
        return slot

    def _release(self, storages: Iterable[Storage]) -> None:
        for storage in list(storages):
            self._live.discard(storage)
            self._free.append(self.where[storage])


def touched(step: Step) -> Iterator[Storage]:
    """The storages that a step reads or writes."""
    if isinstance(step, Dispatch):
        yield from step.reads
        yield from step.writes
    elif isinstance(step, Copy):
        yield step.source
        yield step.target
    elif isinstance(step, Upload):
        yield step.target
    elif isinstance(step, Fetch):
        yield step.source
    else:
        assert isinstance(step, HostCall)
