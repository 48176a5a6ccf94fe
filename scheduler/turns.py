"""Who may hand the next segment to an adapter: a pure function of state, event and time.

Rules, in this order:
1. No turn while the adapter has as many segments as it may: a run that is there alone may hand over a
   few ahead; where there are several, they have `Ask.limit` together, and what was handed over ahead
   is recalled when another run comes.
2. A run that has waited for `aging_s` since its last turn goes first, the longest wait before others.
3. The higher priority goes first.
4. Then the earlier deadline.
5. Then the share that has used the least of the adapter for its weight.
6. Then who asked first.
A run that is held gets no turn until it is released.

What a share has used counts from the least that any share in action has. Who went away for a moment keeps its
claim, or its debt; who sleeps while the others use `LAG_S` loses both, and nobody runs up more of a debt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

__all__ = [
    "LAG_S",
    "Ask",
    "Event",
    "Hold",
    "Leave",
    "Outcome",
    "Release",
    "Return",
    "State",
    "decide",
    "needed_s",
    "urgent",
]

LAG_S = 0.2
"""Seconds of use, by weight, that a share may lag behind another and be made up for; also of idleness: then all
begin anew."""

Waiter = tuple["Ask", float]


@dataclass(frozen=True, slots=True)
class Ask:
    """A run wants a turn: to hand over one segment.

    Attributes:
        run: its number. limit: segments that the adapter may have from all runs together.
        ahead: how many more this run may hand over while no other is there.
        priority: a higher one goes first. deadline: by the clock of `now`; the earlier goes first.
        share: whose use of the adapter it counts as. weight: how much of it that share is to have.
        cost_s: estimated seconds of the segment.
        left_s: estimated seconds of it and all that follows in the run.
    """

    run: int
    limit: int
    ahead: int = 0
    priority: int = 0
    deadline: float = math.inf
    share: int = 0
    weight: float = 1.0
    cost_s: float = 0.0
    left_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Return:
    """A segment of the run was answered; it took `took_s` seconds, None where not known, 0 where dropped."""

    run: int
    took_s: float | None = None


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


class State(NamedTuple):
    """What a governor knows.

    Attributes:
        waiting: who waits, and since when, in the order of asking.
        held: run -> its turns that are granted and not returned; none empty.
        paused: runs that get no turn for now.
        used: share -> seconds used, by its weight, more than the least in action; less than 0 for who is away.
        idle_since: when the last run left.
    """

    waiting: tuple[Waiter, ...] = ()
    held: Mapping[int, tuple[Ask, ...]] = MappingProxyType({})
    paused: frozenset[int] = frozenset()
    used: Mapping[int, float] = MappingProxyType({})
    idle_since: float = -math.inf

    @property
    def in_flight(self) -> int:
        """Segments that are handed over and unanswered."""
        return sum(map(len, self.held.values()))

    @property
    def runs(self) -> frozenset[int]:
        """The runs that wait or hold turns."""
        return frozenset(self.held) | {ask.run for ask, _ in self.waiting}


class Outcome(NamedTuple):
    """What an event leads to.

    Attributes:
        granted: the runs that get a turn, in order. recalled: runs to take back what is not submitted.
    """

    state: State
    granted: tuple[int, ...] = ()
    recalled: tuple[int, ...] = ()


def decide(state: State, event: Event, now: float, aging_s: float = math.inf) -> Outcome:
    """The state after an event, and what follows from it.

    Args:
        state: before.
        event: what happened.
        now: by the clock of deadlines.
        aging_s: how long a run waits for a turn at most while others with a higher claim come.
    """
    state = _after(state, event, now)
    granted: list[int] = []
    while True:
        ready = [waiter for waiter in state.waiting if waiter[0].run not in state.paused]
        if not ready:
            break
        runs = state.runs - (state.paused - state.held.keys())
        first = urgent(ready, state.used, now, aging_s)
        ask = first[0]
        if state.in_flight >= ask.limit + (ask.ahead if runs == {ask.run} else 0):
            break
        waiting = tuple(waiter for waiter in state.waiting if waiter is not first)
        held = {**state.held, ask.run: (*state.held.get(ask.run, ()), ask)}
        used = _charged(state.used, ask, ask.cost_s)
        state = state._replace(waiting=waiting, held=held, used=used)
        granted.append(ask.run)
    recalled: tuple[int, ...] = ()
    if isinstance(event, Ask | Release) and event.run not in granted:
        mine = event.priority if isinstance(event, Ask) else math.inf
        ahead = [
            run
            for run, (ask, *more) in state.held.items()
            if run != event.run and len(more) >= ask.limit and ask.priority <= mine
        ]
        recalled = tuple(ahead)
    return Outcome(_evened(state, now), tuple(granted), recalled)


def urgent(waiting: Iterable[Waiter], used: Mapping[int, float], now: float, aging_s: float) -> Waiter:
    """The one of several that goes first, by rules 2 to 6.

    Args:
        waiting: who waits and since when, in the order of asking; not empty.
        used: share -> seconds used, by its weight; 0 where it is not in there.
        now: by the clock of deadlines.
        aging_s: how long one waits at most while others with a higher claim come.
    """

    def rank(waiter: Waiter) -> tuple[float, int, float, float]:
        ask, since = waiter
        starved = since if now - since >= aging_s else math.inf
        return starved, -ask.priority, ask.deadline, used.get(ask.share, 0.0)

    return min(waiting, key=rank)


def needed_s(mine: Ask, others: Iterable[Ask]) -> float:
    """Estimated seconds until a run is through, where each run's `left_s` is what remains of it.

    Those count that go before it: of a higher priority, or of the same one and not of a later deadline.
    """
    before = (-mine.priority, mine.deadline)
    return mine.left_s + sum(ask.left_s for ask in others if (-ask.priority, ask.deadline) <= before)


def _after(state: State, event: Event, now: float) -> State:
    match event:
        case Ask():
            idle = not state.waiting and not state.held and now - state.idle_since >= LAG_S
            used = {} if idle else dict(state.used)
            used.setdefault(event.share, 0.0)
            return state._replace(waiting=(*state.waiting, (event, now)), used=used)
        case Return():
            held = dict(state.held)
            asks = held.pop(event.run, ())
            if not asks:
                return state
            if asks[1:]:
                held[event.run] = asks[1:]
            more_s = 0.0 if event.took_s is None else event.took_s - asks[0].cost_s
            return state._replace(held=held, used=_charged(state.used, asks[0], more_s))
        case Leave():
            held = dict(state.held)
            asks = held.pop(event.run, ())
            if kept := asks[: event.in_flight]:
                held[event.run] = kept
            left = state.used
            for ask in asks[len(kept) :]:
                left = _charged(left, ask, -ask.cost_s)
            waiting = tuple(waiter for waiter in state.waiting if waiter[0].run != event.run)
            return state._replace(waiting=waiting, held=held, paused=state.paused - {event.run}, used=left)
        case Hold():
            return state._replace(paused=state.paused | {event.run})
        case Release():
            return state._replace(paused=state.paused - {event.run})


def _charged(used: Mapping[int, float], ask: Ask, seconds: float) -> Mapping[int, float]:
    """With so many seconds more used by a run's share; no earlier debt of more than `LAG_S` is kept."""
    before = used.get(ask.share, 0.0)
    return {**used, ask.share: (min(before, LAG_S) if seconds > 0 else before) + seconds / ask.weight}


def _evened(state: State, now: float) -> State:
    """What is used, counted anew from the least in action; who is away and has nothing to claim is forgotten."""
    there = {asks[0].share for asks in state.held.values()}
    there |= {ask.share for ask, _ in state.waiting if ask.run not in state.paused}
    least = min((state.used[share] for share in there), default=0.0)
    kept = there | {ask.share for ask, _ in state.waiting}
    used = {
        share: max(seconds - least, -LAG_S)
        for share, seconds in state.used.items()
        if share in kept or (seconds != least and seconds - least > -LAG_S)
    }
    if state.waiting or state.held or not used:
        return state._replace(used=used, idle_since=-math.inf)
    return state._replace(used=used, idle_since=now if state.idle_since == -math.inf else state.idle_since)
