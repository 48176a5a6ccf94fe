"""Who waits for an engine's queue: `Line`. So many have it at a time; the most urgent of the others is next."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import trio

from .governor import Governor
from .turns import Ask, urgent

__all__ = ["Errand", "Line", "Waits"]

LOOKS = 32
"""How many of those who wait look at their deadlines anew, whenever one is through."""


class Waits(Protocol):
    """Who may have the queue. What it is told must not raise, and must not call the line."""

    def claim(self) -> Ask:
        """How urgent it is now; called in its own task."""
        raise NotImplementedError

    def look(self) -> None:
        """It has the queue, and who is behind it changed."""
        raise NotImplementedError


class Errand:
    """What has the queue for a moment and is no run: a copy, a load."""

    def __init__(self, number: int, share: int = -1) -> None:
        self._number, self._share = number, share

    def claim(self) -> Ask:
        """As urgent as its caller's deadline."""
        return Ask(self._number, 1, deadline=trio.current_effective_deadline(), share=self._share)

    def look(self) -> None:
        """It takes as long as it takes."""


@dataclass(eq=False, slots=True)
class Place:
    """A place in the line. `since`: when it was taken; `called`: whether it has the queue."""

    ask: Ask
    since: float
    number: int
    task: trio.lowlevel.Task
    sleeps: bool = True
    called: bool = False


class Line:
    """The wait for one queue, by the rules of `turns`: priority, deadline, share, arrival.

    Nothing of what waits is copied or sent: a caller's task waits, and that is all. Once in `aging_s` seconds, who has
    waited longer than that goes first.

    Args:
        governor: says what each share has used, and when one has waited too long.
        capacity: how many may have it at a time.

    Attributes:
        first: how urgent the most urgent one is that waits; None while nobody does.
    """

    def __init__(self, governor: Governor, capacity: int = 1) -> None:
        self._governor = governor
        self._free = capacity
        self._holders: list[Waits] = []
        self._places: dict[Place, None] = {}  # who looked longest ago comes first
        self._arrivals = 0
        self._aged = -math.inf
        self.first: Ask | None = None

    def __len__(self) -> int:
        return len(self._places)

    async def enter(self, who: Waits) -> None:
        """Wait for the queue; then it is to be left.

        **Cancellation:** the place is given up.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._free:
            self._free -= 1
            self._holders.append(who)
            await trio.lowlevel.cancel_shielded_checkpoint()
            return
        self._arrivals += 1
        place = Place(who.claim(), trio.current_time(), self._arrivals, trio.lowlevel.current_task())
        self._take(place)

        def abort(_: object) -> trio.lowlevel.Abort:
            self._give_up(place)
            return trio.lowlevel.Abort.SUCCEEDED

        while True:
            await trio.lowlevel.wait_task_rescheduled(abort)
            if place.called:
                self._holders.append(who)
                return
            self._give_up(place)
            place.sleeps, place.ask = True, who.claim()
            self._take(place)

    @asynccontextmanager
    async def turn(self, who: Waits) -> AsyncIterator[None]:
        """Have the queue for the time of an ``async with``.

        **Cancellation:** as of `enter`; within, none of its own.
        """
        await self.enter(who)
        try:
            yield
        finally:
            self.leave(who)

    def leave(self, who: Waits) -> None:
        """Let the next one have the queue."""
        self._holders.remove(who)
        if not self._places:
            self._free += 1
            return
        chosen = self._next()
        self._give_up(chosen)
        chosen.called = True
        self._wake(chosen)
        for place, _ in zip(tuple(self._places), range(LOOKS), strict=False):
            self._wake(place)

    def _wake(self, place: Place) -> None:
        if place.sleeps:
            place.sleeps = False
            trio.lowlevel.reschedule(place.task)

    def _next(self) -> Place:
        now, aging_s, used = trio.current_time(), self._governor.aging_s, self._governor.used
        waiting = [(place.ask, place.since) for place in sorted(self._places, key=_arrival)]
        first = urgent(waiting, used, now, math.inf)
        if now - self._aged >= aging_s:
            aged = urgent(waiting, used, now, aging_s)
            if aged is not first:
                first, self._aged = aged, now
        return next(place for place in self._places if place.ask is first[0])

    def _take(self, place: Place) -> None:
        self._places[place] = None
        if self.first is None or _rank(place.ask) < _rank(self.first):
            self.first = place.ask
            for holder in self._holders:
                holder.look()

    def _give_up(self, place: Place) -> None:
        del self._places[place]
        if self.first is place.ask:
            self.first = min((other.ask for other in self._places), key=_rank, default=None)


def _arrival(place: Place) -> int:
    return place.number


def _rank(ask: Ask) -> tuple[int, float]:
    return -ask.priority, ask.deadline
