"""What an engine is: something that executes models, on one queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from .seam import Begin, Done, Explained, Free, Load, Progress, Read, Segment, TensorRef

__all__ = ["Engine"]


@runtime_checkable
class Engine(Protocol):
    """One queue and the session on it.

    Every method returns at once: nothing here may wait, and nothing may be called from a signal
    handler. `done` is called exactly once, from any thread, and must not raise; requests are
    answered in the order in which they were made, except that `stop` and `close` reach into
    those that are waiting. A run obeys the `TerminatePolicy` that its `Begin` brings; what an engine
    cannot honour, its `Loaded.limits` tells.

    Rules for the caller: `load` first, and further models between runs. Between `begin` and `end` of a run, segments in
    order of `seq`, back to back, starting at Cursor(0, 0, 0). At most one run at a time between
    `begin` and the answer to its `end`.
    """

    def load(self, request: Load, done: Done, progress: Callable[[Progress], None]) -> None:
        """Make the session, or add a model to it. Loaded | Failed; `progress` before that, from any thread."""

    def begin(self, request: Begin, done: Done) -> None:
        """Check the feeds, plan, compile, allocate. Begun | Failed."""

    def submit(self, segment: Segment, done: Done) -> None:
        """Encode and submit. Fenced | Dropped | Failed."""

    def stop(self, run: int) -> None:
        """Submit nothing more of this run: one-way, at once, from any thread, no answer.

        Segments that were not yet given to the driver are answered Dropped; a `begin` or a
        `read` under way is answered Failed(RunStopped()) as soon as it can be left. What a `Fenced`
        has called ready can still be read afterwards; another `stop` ends such a read, too. No
        effect on a run that has ended or is unknown.
        """

    def recall(self, run: int, seq: int) -> None:
        """Submit no segment of this run whose number is below `seq`, from now on: at once, no answer.

        Those that were handed over and not given to the driver are answered Dropped. The run goes
        on: segments from `seq` on begin where the first that was dropped began.
        """

    def read(self, request: Read, done: Done) -> None:
        """Bring outputs back. Outputs | Failed."""

    def end(self, run: int, done: Done, kept: tuple[TensorRef, ...] = ()) -> None:
        """Wait for what is in flight, forget the run. Ended, also for a run that is not known.

        Of the values that the run had kept, those not in `kept` are given back.
        """

    def free(self, request: Free, done: Done) -> None:
        """Give values and models back. Freed.

        No run of these models is under way; their load is left as a run is that was stopped. A value
        that the run under way reads lasts until its end.
        """

    def explain(self, model: int = 0) -> tuple[Explained, ...]:
        """Where each node of a model's newest plan runs. Thread-safe, does not wait."""

    def close(self, done: Done) -> None:
        """Stop every run and a load under way, then give everything back. Closed, even if called twice."""
