"""What happens to runs and their segments, told in one place: `Observer`; who listens are its sinks.

Runs tell their session's observer, the observer tells the sinks: a trace, telemetry. Without sinks all that is
left of it is the meter of how busy the device is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

import trio

from ..gpu.seam import Counts, Dropped, Fenced, Reply

__all__ = ["WINDOW_S", "Lane", "Meter", "Observer", "Outcome", "Seen", "Sink"]

WINDOW_S = 0.05
"""The time, in seconds up to now, that a busy share is of."""

Outcome = Literal["whole", "cancelled", "terminated", "closed", "failed"]
What = Literal["called", "begun", "waits", "granted", "handed", "finished", "dropped", "failed", "stops", "ended"]


class Lane(NamedTuple):
    """A session: the number of its queue, the model's name, and what it computes on."""

    queue: int
    model: str
    adapter: str


class Seen(NamedTuple):
    """One thing that happened.

    Attributes:
        at: by Trio's clock. what: to the run, "called" .. "granted", "stops", "ended"; to a segment, the others.
        run: its number; no other run of the queue has it. seq: the segment's, in its run.
        detail: of "called", the run's tag; of "handed", the kind of the steps; of "stops" and "ended", the outcome.
        gpu_s: of "finished", seconds on the device, where known. priority: of "called".
        counts: of "ended", what became of the segments.
    """

    at: float
    what: What
    lane: Lane
    run: int
    seq: int = -1
    detail: str = ""
    gpu_s: float | None = None
    counts: Counts | None = None
    priority: int = 0


class Sink(NamedTuple):
    """Who listens.

    Attributes:
        hear: is told what happens, on the Trio thread; must not raise.
        closely: whether each segment is to be told of as soon as it is answered, which takes a wake of the Trio
            thread; else of several at once, when there is something to do for their run.
    """

    hear: Callable[[Seen], None]
    closely: bool = True


class Meter:
    """How busy a device is: the time in which at least one segment is with it.

    Attributes:
        in_flight: segments that are handed over and unanswered.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._since = 0.0
        self._past: deque[tuple[float, float]] = deque()

    def takes_off(self, now: float) -> None:
        """A segment is handed over."""
        if not self.in_flight:
            self._since = now
        self.in_flight += 1

    def lands(self, now: float) -> None:
        """A segment is answered."""
        self.in_flight -= 1
        if not self.in_flight:
            self._past.append((self._since, now))
            while self._past[0][1] < now - WINDOW_S:
                self._past.popleft()

    def share(self, now: float) -> float:
        """The busy part of the last `WINDOW_S` seconds, 0 to 1."""
        start = now - WINDOW_S
        busy_s = sum(max(0.0, end - max(begin, start)) for begin, end in self._past)
        if self.in_flight:
            busy_s += now - max(self._since, start)
        return min(1.0, busy_s / WINDOW_S)


class Observer:
    """What the runs of one session tell.

    Args:
        lane: the session.
        sinks: who hears of it.
        whole: the meter of the whole scheduler.

    Attributes:
        lane, meter: of this session alone.
        listened: whether anybody listens closely; only then replies are worth a wake of the Trio thread each.
    """

    def __init__(self, lane: Lane, sinks: tuple[Sink, ...], whole: Meter) -> None:
        self.lane, self._sinks, self._whole = lane, sinks, whole
        self.meter = Meter()
        self.listened = any(sink.closely for sink in sinks)

    def handed(self, run: int, seq: int, kind: str) -> None:
        """A segment is handed over."""
        now = trio.current_time()
        self.meter.takes_off(now)
        self._whole.takes_off(now)
        if self._sinks:
            self._say(Seen(now, "handed", self.lane, run, seq, kind))

    def answered(self, run: int, seq: int, reply: Reply) -> None:
        """A segment is finished, was dropped, or failed."""
        now = trio.current_time()
        self.meter.lands(now)
        self._whole.lands(now)
        if self._sinks:
            what: What = "dropped" if isinstance(reply, Dropped) else "failed"
            gpu_s = None
            if isinstance(reply, Fenced):
                what, gpu_s = "finished", reply.gpu_s
            self._say(Seen(now, what, self.lane, run, seq, gpu_s=gpu_s))

    def tell(self, what: What, run: int, detail: str = "", counts: Counts | None = None, priority: int = 0) -> None:
        """Something else happened to a run."""
        if self._sinks:
            now = trio.current_time()
            self._say(Seen(now, what, self.lane, run, detail=detail, counts=counts, priority=priority))

    def _say(self, seen: Seen) -> None:
        for sink in self._sinks:
            sink.hear(seen)
