"""A governor: who hands the next segment to an adapter. One per adapter and Trio run.

`decide` is pure; `Governor` is the thin part that keeps the state and tells who was granted a turn. Turns go round
in the order of asking: a run asks anew for each segment, so that nobody gets two turns while
another waits. At most `limit` segments are handed over and unfenced on an adapter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import trio

__all__ = ["Ask", "Governor", "Leave", "Return", "State", "decide", "governor_of"]


@dataclass(frozen=True, slots=True)
class State:
    """What a governor knows.

    Attributes:
        waiting: (run, limit) in the order of asking.
        held: run -> turns granted and not returned; no zeros.
    """

    waiting: tuple[tuple[int, int], ...] = ()
    held: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ask:
    """A run wants a turn, on an adapter that takes `limit` segments."""

    run: int
    limit: int


@dataclass(frozen=True, slots=True)
class Return:
    """A segment of the run was answered."""

    run: int


@dataclass(frozen=True, slots=True)
class Leave:
    """A run asks no more; answers to `in_flight` of its segments will still come."""

    run: int
    in_flight: int


def decide(state: State, event: Ask | Return | Leave) -> tuple[State, tuple[int, ...]]:
    """The state after an event, and the runs that get a turn by it."""
    waiting, held = list(state.waiting), dict(state.held)
    if isinstance(event, Ask):
        waiting.append((event.run, event.limit))
    elif isinstance(event, Return):
        held[event.run] = max(0, held.get(event.run, 0) - 1)
    else:
        waiting = [(run, limit) for run, limit in waiting if run != event.run]
        held[event.run] = min(event.in_flight, held.get(event.run, 0))
    granted = []
    while waiting and sum(held.values()) < waiting[0][1]:
        run, _ = waiting.pop(0)
        held[run] = held.get(run, 0) + 1
        granted.append(run)
    return replace(state, waiting=tuple(waiting), held={run: n for run, n in held.items() if n}), tuple(granted)


class Governor:
    """Grants turns on one adapter."""

    def __init__(self) -> None:
        self.state = State()
        self._granted: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()

    def new_run(self) -> int:
        """A number that no other run on this adapter has or had."""
        return next(self._numbers)

    def ask(self, run: int, limit: int, granted: Callable[[], None]) -> None:
        """Ask for one turn; `granted` is called when the run has it, perhaps at once.

        Args:
            run: its number; it has no other question open.
            limit: no turn while so many segments are handed over and unfenced on the adapter.
            granted: must not raise, and must not call the governor.
        """
        self._granted[run] = granted
        self._feed(Ask(run, limit))

    def returned(self, run: int) -> None:
        """A segment of the run was answered: its turn is free."""
        self._feed(Return(run))

    def leave(self, run: int, in_flight: int) -> None:
        """The run asks no more; `in_flight` answers are still to come (0 where none will)."""
        self._granted.pop(run, None)
        self._feed(Leave(run, in_flight))

    def _feed(self, event: Ask | Return | Leave) -> None:
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
