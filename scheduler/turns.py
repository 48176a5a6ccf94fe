"""Who may hand the next segment to an adapter: a pure function of state, event and time.

Rules, in this order:
1. No turn while the adapter has as many segments as it may: a run that is there alone may hand over a
   few ahead; where there are several, they have `Ask.limit` together, and what was handed over ahead
   is recalled when another run comes.
2. A run that has waited for `aging_s` since its last turn goes first, the longest wait before others.
3. The higher priority goes first; and while a run of a higher one is there, from its first question until it
   leaves, nobody else gets a turn: what is submitted beside the last of its segments would delay it.
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
from dataclasses import dataclass, field

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
    """A run wants a turn: to hand over one segment. Its question that is open is replaced.

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


@dataclass(frozen=True, slots=True)
class State:
    """What a governor knows.

    Attributes:
        waiting: who waits, and since when, in the order of asking.
        held: run -> its turns that are granted and not returned; none empty.
        there: run -> its priority, of those that have asked and not left.
        paused: runs that get no turn for now.
        used: share -> seconds used, by its weight, more than the least in action; less than 0 for who is away.
        idle_since: when the last run left.
    """

    waiting: tuple[Waiter, ...] = ()
    held: Mapping[int, tuple[Ask, ...]] = field(default_factory=dict)
    there: Mapping[int, int] = field(default_factory=dict)
    paused: frozenset[int] = frozenset()
    used: Mapping[int, float] = field(default_factory=dict)
    idle_since: float = -math.inf

    @property
    def in_flight(self) -> int:
        """Segments that are handed over and unanswered."""
        return sum(map(len, self.held.values()))

    @property
    def runs(self) -> frozenset[int]:
        """The runs that wait or hold turns."""
        return frozenset(self.held) | {ask.run for ask, _ in self.waiting}


@dataclass(frozen=True, slots=True)
class Outcome:
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
    books = _Books(state)
    books.enter(event, now)
    granted = books.grant(now, aging_s)
    recalled: tuple[int, ...] = ()
    if isinstance(event, Ask | Release) and event.run not in granted:
        mine = event.priority if isinstance(event, Ask) else math.inf
        ahead = [
            run
            for run, (ask, *more) in books.held.items()
            if run != event.run and len(more) >= ask.limit and ask.priority <= mine
        ]
        recalled = tuple(ahead)
    books.even(now)
    return Outcome(books.state(), tuple(granted), recalled)


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


class _Books:
    """A state while it is changed."""

    __slots__ = ("held", "idle_since", "paused", "there", "used", "waiting")

    def __init__(self, state: State) -> None:
        self.waiting = list(state.waiting)
        self.held = dict(state.held)
        self.there = dict(state.there)
        self.paused = state.paused
        self.used = dict(state.used)
        self.idle_since = state.idle_since

    def state(self) -> State:
        return State(tuple(self.waiting), self.held, self.there, self.paused, self.used, self.idle_since)

    def enter(self, event: Event, now: float) -> None:
        """What an event says, without what follows from it."""
        match event:
            case Ask():
                self._ask(event, now)
            case Return():
                asks = self.held.pop(event.run, ())
                if not asks:
                    return
                if asks[1:]:
                    self.held[event.run] = asks[1:]
                if event.took_s is not None:
                    self._charge(asks[0], event.took_s - asks[0].cost_s)
            case Leave():
                asks = self.held.pop(event.run, ())
                if kept := asks[: event.in_flight]:
                    self.held[event.run] = kept
                for ask in asks[len(kept) :]:
                    self._charge(ask, -ask.cost_s)
                self.waiting = [waiter for waiter in self.waiting if waiter[0].run != event.run]
                self.there.pop(event.run, None)
                self.paused -= {event.run}
            case Hold():
                self.paused |= {event.run}
            case Release():
                self.paused -= {event.run}

    def _ask(self, ask: Ask, now: float) -> None:
        if not self.waiting and not self.held and now - self.idle_since >= LAG_S:
            self.used = {}
        self.used.setdefault(ask.share, 0.0)
        self.there[ask.run] = ask.priority
        for place, (other, since) in enumerate(self.waiting):
            if other.run == ask.run:
                self.waiting[place] = ask, since
                return
        self.waiting.append((ask, now))

    def grant(self, now: float, aging_s: float) -> list[int]:
        """Give turns, while there are some and somebody may have one; to whom, in order."""
        granted: list[int] = []
        while True:
            ready = [waiter for waiter in self.waiting if waiter[0].run not in self.paused]
            if not ready:
                return granted
            first = urgent(ready, self.used, now, aging_s)
            ask, since = first
            above = (priority for run, priority in self.there.items() if run not in self.paused)
            if now - since < aging_s and ask.priority < max(above):
                return granted
            mine = self.held.get(ask.run, ())
            in_flight = sum(map(len, self.held.values()))
            if in_flight >= ask.limit and (in_flight >= ask.limit + ask.ahead or not self._alone(ask.run)):
                return granted
            self.waiting.remove(first)
            self.held[ask.run] = (*mine, ask)
            self._charge(ask, ask.cost_s)
            granted.append(ask.run)

    def _alone(self, run: int) -> bool:
        """Whether no other run waits or has turns; one that is held only if it has."""
        if len(self.held) > 1 or (self.held and run not in self.held):
            return False
        return all(ask.run == run or ask.run in self.paused for ask, _ in self.waiting)

    def _charge(self, ask: Ask, seconds: float) -> None:
        """So many seconds more are used by a run's share; no earlier debt of more than `LAG_S` is kept."""
        before = self.used.get(ask.share, 0.0)
        self.used[ask.share] = (min(before, LAG_S) if seconds > 0 else before) + seconds / ask.weight

    def even(self, now: float) -> None:
        """Count what is used anew from the least in action; who is away with nothing to claim is forgotten."""
        there = {asks[0].share for asks in self.held.values()}
        there |= {ask.share for ask, _ in self.waiting if ask.run not in self.paused}
        least = min((self.used[share] for share in there), default=0.0)
        kept = there | {ask.share for ask, _ in self.waiting}
        self.used = {
            share: max(seconds - least, -LAG_S)
            for share, seconds in self.used.items()
            if share in kept or (seconds != least and seconds - least > -LAG_S)
        }
        if self.waiting or self.held or not self.used:
            self.idle_since = -math.inf
        elif self.idle_since == -math.inf:
            self.idle_since = now
