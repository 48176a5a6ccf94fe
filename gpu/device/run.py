"""A run as the engine sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import RunStopped
from ..graph.planner import Block
from ..seam import Counts

__all__ = ["Run"]


@dataclass(eq=False, slots=True)
class Run:
    """A run: where it stands, and its arrays on the host.

    Attributes:
        stopped: one-way; set from any thread, read by the queue's just before it submits.
        fault: the error that ended it.
        frame: feeds and results of host steps, by key.
        block: the block that its segments are of, the `activation`-th it has entered.
    """

    number: int
    stopped: bool = False
    fault: BaseException | None = None
    frame: dict[int, Any] = field(default_factory=dict)
    block: Block | None = None
    activation: int = 0
    submitted: int = 0
    finished: int = 0
    dropped: int = 0

    def halted(self) -> bool:
        """Whether nothing more of it may be submitted."""
        return self.stopped or self.fault is not None

    def check(self) -> None:
        """Raises RunStopped once the run was stopped."""
        if self.stopped:
            raise RunStopped

    def counts(self) -> Counts:
        """What became of its segments."""
        return Counts(self.submitted, self.finished, self.dropped)
