"""Runs as OpenTelemetry's spans and metrics: `Telemetry`. The only file that imports it.

The API alone is used: where a program sets up no SDK, all of this goes nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from opentelemetry import metrics, trace

from .observer import Lane, Seen
from .statistics import Statistics

__all__ = ["Telemetry"]


class _Open:
    """A run that is not over: its span, what it waits for since when, and how long the device has had it."""

    __slots__ = ("begun", "busy_s", "called", "in_flight", "since", "span", "wait_s", "waits", "waits_since")

    def __init__(self, span: trace.Span, called: float) -> None:
        self.span, self.called = span, called
        self.begun = False
        self.in_flight = self.waits = 0
        self.since = self.waits_since = self.wait_s = self.busy_s = 0.0


class Telemetry:
    """A sink: a span for each run, within the span that its caller is in, and a few metrics.

    Args:
        look: the statistics of the scheduler, for the bytes on the device; called whenever a run ends.
    """

    def __init__(self, look: Callable[[], Statistics]) -> None:
        self._look = look
        try:
            number = version("trionnx")
        except PackageNotFoundError:
            number = ""
        self._tracer = trace.get_tracer("trionnx", number)
        meter = metrics.get_meter("trionnx", number)
        self._runs = meter.create_counter("trionnx.runs", "{run}", "Runs that ended, by outcome")
        self._took = meter.create_histogram("trionnx.run.duration", "s", "From the call of a run to its end")
        self._segments = meter.create_counter("trionnx.segments", "{segment}", "Segments given to the driver")
        self._queue = meter.create_up_down_counter("trionnx.queue.length", "{run}", "Runs that wait for their session")
        self._busy = meter.create_counter("trionnx.device.busy_time", "s", "Time with a segment in flight")
        self._memory = meter.create_up_down_counter("trionnx.device.memory", "By", "Bytes of all buffers on the device")
        self._open: dict[tuple[int, int], _Open] = {}
        self._bytes = 0

    def hear(self, seen: Seen) -> None:
        """Take in what happened."""
        key = seen.lane.queue, seen.run
        if seen.what == "called":
            self._open[key] = self._called(seen)
            return
        run = self._open.get(key)
        if run is None:
            return
        if seen.what == "handed":
            if not run.in_flight:
                run.since = seen.at
            run.in_flight += 1
        elif seen.seq >= 0:
            run.in_flight -= 1
            if not run.in_flight:
                run.busy_s += seen.at - run.since
        elif seen.what == "begun":
            run.begun = True
            self._queue.add(-1, _of(seen.lane))
            run.span.add_event("session is free")
        elif seen.what == "waits":
            run.waits_since = seen.at
            run.waits += 1
            run.span.add_event("waits for a turn")
        elif seen.what == "granted":
            run.wait_s += seen.at - run.waits_since
            run.span.add_event("has a turn")
        elif seen.what == "stops":
            run.span.add_event("stops", {"trionnx.outcome": seen.detail})
        elif seen.what == "ended":
            del self._open[key]
            self._ended(run, seen)

    def measure(self) -> None:
        """Tell how many bytes there are now."""
        now = self._look().device_bytes
        if now != self._bytes:
            self._memory.add(now - self._bytes)
            self._bytes = now

    def _called(self, seen: Seen) -> _Open:
        lane = seen.lane
        attributes: dict[str, str | int] = {**_of(lane), "trionnx.queue": lane.queue, "trionnx.priority": seen.priority}
        if seen.detail:
            attributes["trionnx.tag"] = seen.detail
        self._queue.add(1, _of(lane))
        return _Open(self._tracer.start_span(f"run {lane.model}", attributes=attributes), seen.at)

    def _ended(self, run: _Open, seen: Seen) -> None:
        of, outcome, counts, span = _of(seen.lane), {"trionnx.outcome": seen.detail}, seen.counts, run.span
        if not run.begun:
            self._queue.add(-1, of)
        if run.in_flight:
            run.busy_s += seen.at - run.since
        span.set_attributes(
            {
                **outcome,
                "trionnx.device.busy_time": run.busy_s,
                "trionnx.turns.waits": run.waits,
                "trionnx.turns.wait_time": run.wait_s,
            }
        )
        if counts is not None:
            span.set_attributes(
                {
                    "trionnx.segments.submitted": counts.submitted,
                    "trionnx.segments.finished": counts.finished,
                    "trionnx.segments.dropped": counts.dropped,
                }
            )
            self._segments.add(counts.submitted, of)
        if seen.detail == "failed":
            span.set_status(trace.StatusCode.ERROR)
        span.end()
        self._runs.add(1, of | outcome)
        self._took.record(seen.at - run.called, of | outcome)
        self._busy.add(run.busy_s, of)
        self.measure()


def _of(lane: Lane) -> dict[str, str]:
    return {"trionnx.model": lane.model, "trionnx.adapter": lane.adapter}
