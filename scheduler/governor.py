"""A governor: who hands the next segment to an adapter. One per adapter and Trio run.

`decide` is pure; `Governor` is the thin part that keeps the state and tells who was granted a turn.
The highest priority goes first; among equals turns go round in the order of asking: a run asks anew
for each segment, so that nobody gets two turns while another waits. A run that is held gets none
until it is released. At most `limit` segments are handed over and unfenced on an adapter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import trio

__all__ = ["Ask", "Governor", "Hold", "Leave", "Release", "Return", "State", "decide", "governor_of"]


@dataclass(frozen=True, slots=True)
class State:
    """What a governor knows.

    Attributes:
        waiting: who waits, in the order of asking.
        held: run -> turns granted and not returned; no zeros.
        paused: runs that get no turn for now.
    """

    waiting: tuple[Ask, ...] = ()
    held: Mapping[int, int] = field(default_factory=dict)
    paused: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Ask:
    """A run wants a turn.

    Attributes:
        limit: no turn while so many segments are handed over and unfenced on the adapter.
        priority: a higher one goes first.
        ahead: how many more may be handed over while no other run is there.
    """

    run: int
    limit: int
    priority: int = 0
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Return:
    """A segment of the run was answered."""

    run: int


@dataclass(frozen=True, slots=True)
class Leave:
    """A run asks no more; answers to `in_flight` of its segments will still come."""

    run: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class Hold:
    """A run gets no further turn, until it is released. What it has handed over goes on."""

    run: int


@dataclass(frozen=True, slots=True)
class Release:
    """A run that was held gets turns again."""

    run: int


Event = Ask | Return | Leave | Hold | Release


def decide(state: State, event: Event) -> tuple[State, tuple[int, ...]]:
    """The state after an event, and the runs that get a turn by it."""
    waiting, held, paused = list(state.waiting), dict(state.held), state.paused
    match event:
        case Ask():
            waiting.append(event)
        case Return():
            held[event.run] = max(0, held.get(event.run, 0) - 1)
        case Leave():
            waiting = [ask for ask in waiting if ask.run != event.run]
            held[event.run] = min(event.in_flight, held.get(event.run, 0))
            paused -= {event.run}
        case Hold():
            paused |= {event.run}
        case Release():
            paused -= {event.run}
    granted = []
    while ready := [ask for ask in waiting if ask.run not in paused]:
        first = max(ready, key=lambda ask: ask.priority)
        alone = len(waiting) == 1 and held.keys() <= {first.run}
        if sum(held.values()) >= first.limit + alone * first.ahead:
            break
        waiting.remove(first)
        held[first.run] = held.get(first.run, 0) + 1
        granted.append(first.run)
    left = {run: count for run, count in held.items() if count}
    return State(tuple(waiting), left, paused), tuple(granted)


class Governor:
    """Grants turns on one adapter."""

    def __init__(self) -> None:
        self.state = State()
        self._granted: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()

    @property
    def contended(self) -> bool:
        """Whether a run waits for another's turn to come back. From any thread."""
        return bool(self.state.waiting) and len(self.state.held.keys() | {a.run for a in self.state.waiting}) > 1

    def new_run(self) -> int:
        """A number that no other run on this adapter has or had."""
        return next(self._numbers)

    def ask(self, run: int, limit: int, granted: Callable[[], None], priority: int = 0, ahead: int = 0) -> None:
        """Ask for one turn; `granted` is called when the run has it, perhaps at once.

        Args:
            run: its number; it has no other question open.
            limit: no turn while so many segments are handed over and unfenced on the adapter.
            granted: must not raise, and must not call the governor.
            priority: a higher one goes first.
            ahead: how many more may be handed over while no other run is there.
        """
        self._granted[run] = granted
        self._feed(Ask(run, limit, priority, ahead))

    def returned(self, run: int) -> None:
        """A segment of the run was answered: its turn is free."""
        self._feed(Return(run))

    def hold(self, run: int) -> None:
        """Suspend a run at the next edge of a segment."""
        self._feed(Hold(run))

    def release(self, run: int) -> None:
        """Let a run that was held go on."""
        self._feed(Release(run))

    def leave(self, run: int, in_flight: int) -> None:
        """The run asks no more; `in_flight` answers are still to come (0 where none will)."""
        self._granted.pop(run, None)
        self._feed(Leave(run, in_flight))

    def _feed(self, event: Event) -> None:
        self.state, granted = decide(self.state, event)
        for run in granted:
            self._granted.pop(run)()


_governors: trio.lowlevel.RunVar[dict[str, Governor]] = trio.lowlevel.RunVar("trionnx governors")


def governor_of(adapter: str) -> Governor:
    """The governor of an adapter in this Trio run, by the adapter's identity."""
    try:
        governors = _governors.get()
    except LookupError:
        governors = {}
        _governors.set(governors)
    return governors.setdefault(adapter, Governor())
