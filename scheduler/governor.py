"""A governor: who hands the next segment to an adapter. One per adapter and Trio run.

Which run that is, `turns.decide` says; here is the state that it needs, and who hears of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import trio

from .turns import Ask, Event, Hold, Leave, Release, Return, State, decide, needed_s

__all__ = ["LOOK_S", "Governor", "Taker", "governor_of"]


LOOK_S = 0.02
"""How old the deadline of a run that waits may be, while others have turns."""


class Taker(Protocol):
    """A run, as its governor sees it. What it is told must not raise, and must not call the governor."""

    @property
    def remaining_s(self) -> float:
        """Estimated seconds of what has not finished."""
        raise NotImplementedError

    def granted(self) -> None:
        """It has the turn that it asked for."""
        raise NotImplementedError

    def look(self) -> None:
        """It waits, and others had turns meanwhile: it may ask again, as urgent as it is now."""
        raise NotImplementedError

    def recall(self) -> None:
        """Another run is to go first: what is handed over and not submitted is to be taken back."""
        raise NotImplementedError


class Governor:
    """Grants turns on one adapter.

    Attributes:
        aging_s: how long a run waits for a turn at most while others with a higher claim come.
    """

    def __init__(self) -> None:
        self.state = State()
        self.aging_s = math.inf
        self._takers: dict[int, Taker] = {}
        self._looked: dict[int, float] = {}
        self._numbers = itertools.count()

    def new_run(self) -> int:
        """A number that no other run on this adapter has or had."""
        return next(self._numbers)

    @property
    def used(self) -> Mapping[int, float]:
        """Share -> seconds used, by its weight, more than another."""
        return self.state.used

    @property
    def contended(self) -> bool:
        """Whether several runs are there. From any thread."""
        state = self.state
        return len(state.held) > 1 or any(ask.run not in state.held for ask, _ in state.waiting)

    def ask(self, taker: Taker, ask: Ask) -> None:
        """Ask for one turn; the taker is told when it has it, perhaps at once. A question that is open is replaced."""
        self._takers[ask.run] = taker
        self._looked[ask.run] = trio.current_time()
        self._feed(ask)

    def needed_s(self, ask: Ask) -> float:
        """Estimated seconds until a run that asks for its first turn is through, those counted that go before it."""
        newest = {run: held[-1] for run, held in self.state.held.items()}
        newest |= {waiter.run: waiter for waiter, _ in self.state.waiting}
        others = (replace(other, left_s=self._takers[run].remaining_s) for run, other in newest.items())
        return needed_s(ask, (other for other in others if other.run != ask.run))

    def returned(self, run: int, took_s: float | None) -> None:
        """A segment of the run was answered: its turn is free."""
        self._feed(Return(run, took_s))

    def hold(self, run: int) -> None:
        """Suspend a run at the next edge of a segment."""
        self._feed(Hold(run))

    def release(self, run: int) -> None:
        """Let a run that was held go on."""
        self._feed(Release(run))

    def leave(self, run: int, in_flight: int) -> None:
        """The run asks no more; `in_flight` answers are still to come (0 where none will)."""
        self._feed(Leave(run, in_flight))
        if not in_flight:
            self._takers.pop(run, None)
            self._looked.pop(run, None)

    def _feed(self, event: Event) -> None:
        now = trio.current_time()
        outcome = decide(self.state, event, now, self.aging_s)
        self.state = outcome.state
        for run in outcome.recalled:
            self._takers[run].recall()
        for run in outcome.granted:
            self._takers[run].granted()
        if outcome.granted:
            self._remind(now)

    def _remind(self, now: float) -> None:
        """Deadlines move, and only a run itself can read its own: let those look that did not for a while."""
        for waiter, _ in self.state.waiting:
            if now - self._looked[waiter.run] >= LOOK_S:
                self._looked[waiter.run] = now
                self._takers[waiter.run].look()


_governors: trio.lowlevel.RunVar[dict[str, Governor]] = trio.lowlevel.RunVar("trionnx governors")


def governor_of(adapter: str) -> Governor:
    """The governor of an adapter in this Trio run, by the adapter's identity."""
    try:
        governors = _governors.get()
    except LookupError:
        governors = {}
        _governors.set(governors)
    return governors.setdefault(adapter, Governor())
