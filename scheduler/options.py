"""Options of one run, and the way to stop it from anywhere: `RunOptions`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from ..gpu.policy import TerminatePolicy
from ..gpu.seam import NodeTime
from .arguments import callback_of, policy_of, whole_of

__all__ = ["RunOptions"]


class Stoppable(Protocol):
    """A run that holds options."""

    def terminate(self) -> bool:
        """Stop, from any thread; whether this call is what stops it."""
        raise NotImplementedError


class RunOptions:
    """Options of a run. One object may be given to several runs, at once or in turn.

    Args:
        priority: a whole number; where several sessions share an adapter, a higher one goes first.
        tag: a name for people, in traces.
        policy: how the run is cut up and ends; None: the session's.
        profile: measure each node: see `node_times`. Costs time.
        on_progress: called as ``on_progress(done, total)``, in segments, on the Trio thread,
            whenever a segment has finished. `total` may grow while the run goes on, where the
            model decides from values how it continues. What it raises stops the run and leaves it.

    Raises:
        TypeError: an argument is of a wrong kind; an async `on_progress` is, too.
    """

    __slots__ = ("_deadline", "_runs", "_terminated", "_times", "on_progress", "policy", "priority", "profile", "tag")

    def __init__(
        self,
        *,
        priority: int = 0,
        tag: str = "",
        on_progress: Callable[[int, int], None] | None = None,
        policy: TerminatePolicy | None = None,
        profile: bool = False,
    ) -> None:
        self.priority = priority
        self.tag = tag
        self.on_progress = on_progress
        self.policy = policy
        self.profile = profile
        self._runs: set[Stoppable] = set()
        self._deadline = math.inf  # of those for whom the run is done, besides its caller's
        self._terminated = False
        self._times: tuple[NodeTime, ...] = ()

    if not TYPE_CHECKING:  # type checkers would take any attribute

        def __setattr__(self, name: str, value: object) -> None:
            if name == "terminate":
                raise AttributeError("terminate is a method here: call options.terminate()")
            if name == "on_progress":
                callback_of(name, value)
            elif name == "priority":
                value = whole_of(name, value)
            elif name == "policy":
                policy_of(name, value)
            elif name == "profile" and not isinstance(value, bool):
                raise TypeError(f"profile is True or False, not {value!r}")
            elif name == "tag" and not isinstance(value, str):
                raise TypeError(f"tag is a string, not {type(value).__name__}")
            object.__setattr__(self, name, value)

    def terminate(self) -> None:
        """Stop the runs that hold these options now; each raises `RunTerminated`, or what its policy says.

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

    @property
    def node_times(self) -> tuple[NodeTime, ...]:
        """What each step took, and how much it did, in the newest run that ended with these options.

        Nothing where `profile` was not set. A step that was cut comes in parts. `trionnx profile` sums them up.
        """
        return self._times
