"""Options of one run, and the way to stop it from anywhere: `RunOptions`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from .arguments import callback_of

__all__ = ["RunOptions"]


class Stoppable(Protocol):
    """A run that holds options."""

    def terminate(self) -> bool:
        """Stop, from any thread; whether this call is what stops it."""
        raise NotImplementedError


class RunOptions:
    """Options of a run. One object may be given to several runs, at once or in turn.

    Args:
        on_progress: called as ``on_progress(done, total)``, in segments, on the Trio thread,
            whenever a segment has finished. `total` may grow while the run goes on, where the
            model decides from values how it continues. What it raises stops the run and leaves it.

    Raises:
        TypeError: `on_progress` is no function, or an async one.
    """

    __slots__ = ("_runs", "_terminated", "on_progress")

    def __init__(self, *, on_progress: Callable[[int, int], None] | None = None) -> None:
        self.on_progress = on_progress
        self._runs: set[Stoppable] = set()
        self._terminated = False

    if not TYPE_CHECKING:  # type checkers would take any attribute

        def __setattr__(self, name: str, value: object) -> None:
            if name == "terminate":
                raise AttributeError("terminate is a method here: call options.terminate()")
            if name == "on_progress":
                callback_of(name, value)
            object.__setattr__(self, name, value)

    def terminate(self) -> None:
        """Stop the runs that hold these options now; each raises `RunTerminated`.

        From any thread. No effect where no run holds them, and none on runs that start later. A run
        whose outputs have been read returns them all the same; one whose caller's cancel scope is
        cancelled as well leaves with Cancelled.
        """
        for run in tuple(self._runs):
            if run.terminate():
                self._terminated = True

    @property
    def terminated(self) -> bool:
        """Whether `terminate` has stopped a run."""
        return self._terminated

    @contextlib.contextmanager
    def _held_by(self, run: Stoppable) -> Iterator[None]:
        self._runs.add(run)
        try:
            yield
        finally:
            self._runs.discard(run)
