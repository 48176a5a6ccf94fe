"""Which temporary values may share memory: slots, given out by liveness.

This file knows steps and storages, no device: a slot becomes a buffer in gpu/device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .steps import Copy, Dispatch, Fetch, HostCall, Step, Upload
from .tensor import Storage

__all__ = ["Place", "Slot", "Slots", "touched"]

ALIGNED = 256
"""Bytes: where in a buffer a binding may begin, on every adapter."""


@dataclass(eq=False, slots=True)
class Slot:
    """Memory that becomes one buffer; compared by identity."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a storage lies: so many bytes behind a slot's start."""

    slot: Slot
    offset: int = 0


class Slots:
    """The slots along one path of blocks.

    Attributes:
        where: the place of each temporary storage that lives, or lived, on this path.
        all: every slot of the path, in order of making.
    """

    def __init__(self) -> None:
        self.where: dict[Storage, Place] = {}
        self.all: list[Slot] = []
        self._live: set[Storage] = set()

    def fork(self) -> Slots:
        """The state at a block's end, for one of several blocks that may follow."""
        other = Slots()
        other.where = {s: self.where[s] for s in self._live}
        other.all, other._live = list(self.all), set(self._live)
        return other

    def assign(self, steps: Sequence[Step], live_out: set[Storage]) -> None:
        """Give every temporary storage of a block a place.

        Rules:
            1. A storage has its place from the first step that touches it to the last, or on to
               the block's end where `live_out` holds it.
            2. What a step writes lies in another slot than all else that it touches, and what
               lives on at the block's end, in a slot that nothing else that does lies in.
            3. The large ones choose first. The smallest gap that is large enough serves, of those
               that are free for so long; else a slot is made, of just that size.
            4. Those of the same size choose in the order of their steps, or the other way round:
               whichever takes less.
        """
        spans = _spans(steps, live_out, self._live)
        apart = _apart(steps)
        ending = [s for s, (_, last) in spans.items() if last == len(steps)]
        for storage in ending:
            apart.setdefault(storage, set()).update(ending)
        known = {s: self.where[s] for s in self._live & spans.keys()}
        tries = [_arranged(spans, apart, known, self.all, sign) for sign in (1, -1)]
        where, slots = min(tries, key=lambda made: sum(slot.nbytes for slot in made[1]))
        self.where.update(where)
        self.all = slots
        self._live = set(ending)

    def hold(self, storages: Iterable[Storage]) -> None:
        """Give storages slots at a block's end already, for several blocks that follow to share."""
        for storage in storages:
            if storage.role == "temp" and storage not in self._live:
                taken = {self.where[s].slot for s in self._live}
                free = [s for s in self.all if s.nbytes >= storage.nbytes and s not in taken]
                if not free:
                    free = [Slot(storage.nbytes)]
                    self.all.append(free[0])
                self.where[storage] = Place(min(free, key=lambda s: s.nbytes))
                self._live.add(storage)


def _spans(steps: Sequence[Step], live_out: set[Storage], live_in: set[Storage]) -> dict[Storage, tuple[int, int]]:
    """The first and the last step of each temporary storage; the number of steps for one that lives on."""
    spans: dict[Storage, tuple[int, int]] = {}
    for index, step in enumerate(steps):
        for storage in touched(step):
            if storage.role == "temp":
                first = 0 if storage in live_in else index
                spans[storage] = spans.get(storage, (first, 0))[0], index
    for storage in live_out:
        if storage in spans or storage in live_in:
            spans[storage] = spans.get(storage, (0, 0))[0], len(steps)
    return spans


def _apart(steps: Sequence[Step]) -> dict[Storage, set[Storage]]:
    """Whose slot each storage may not share, though it be for a part of it: wgpu sees whole buffers."""
    apart: dict[Storage, set[Storage]] = {}
    for step in steps:
        written = step.writes if isinstance(step, Dispatch) else (step.target,) if isinstance(step, Copy) else ()
        for one in written:
            for other in touched(step):
                apart.setdefault(one, set()).add(other)
                apart.setdefault(other, set()).add(one)
    return apart


def _arranged(
    spans: Mapping[Storage, tuple[int, int]],
    apart: Mapping[Storage, set[Storage]],
    known: Mapping[Storage, Place],
    slots: Sequence[Slot],
    sign: int,
) -> tuple[dict[Storage, Place], list[Slot]]:
    """Places for storages that have none yet, and all slots."""
    where = dict(known)
    # Of each slot, by step: the stretches of it that are taken.
    taken: dict[Slot, dict[int, list[tuple[int, int]]]] = {slot: {} for slot in slots}

    def take(storage: Storage, place: Place) -> None:
        first, last = spans[storage]
        stretch = place.offset, place.offset + storage.nbytes
        for index in range(first, last + 1):
            taken[place.slot].setdefault(index, []).append(stretch)

    for storage, place in known.items():
        take(storage, place)
    order = sorted(spans.keys() - known.keys(), key=lambda s: (-s.nbytes, sign * spans[s][0], sign * spans[s][1]))
    for storage in order:
        first, last = spans[storage]
        closed = {where[s].slot for s in apart.get(storage, ()) if s in where}
        best: tuple[int, Place] | None = None
        for slot, by_step in taken.items():
            if slot in closed or slot.nbytes < storage.nbytes:
                continue
            found = {stretch for index in range(first, last + 1) for stretch in by_step.get(index, ())}
            offset = 0
            for begin, end in (*sorted(found), (slot.nbytes, 0)):
                gap = begin - offset
                if gap >= storage.nbytes and (best is None or gap < best[0]):
                    best = gap, Place(slot, offset)
                offset = max(offset, -(-end // ALIGNED) * ALIGNED)
        if best is None:
            best = 0, Place(Slot(storage.nbytes))
            taken[best[1].slot] = {}
        where[storage] = best[1]
        take(storage, best[1])
    return where, list(taken)


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
