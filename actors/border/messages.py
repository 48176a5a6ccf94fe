"""The closed list of messages between a session's process and its worker.

Nothing else crosses: no callback, no scope, no plan, no handle. Most are the seam's own types; here are those
that only a border needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...gpu.seam import (
    Begin,
    Begun,
    Closed,
    Dropped,
    Ended,
    Explained,
    Failed,
    Fenced,
    Free,
    Freed,
    Load,
    Loaded,
    Outputs,
    Progress,
    Read,
    Segment,
    TensorRef,
)

__all__ = ["MESSAGES", "Close", "End", "Explanation", "Lost", "Recall", "Setup", "Stop", "Up"]


@dataclass(frozen=True, slots=True)
class Setup:
    """Make the engine. The first message to a worker.

    Attributes:
        engine: where its factory is, as ``"module:name"``.
        adapter: what the factory is given. max_in_flight: likewise.
        path: where Python looks for modules here, should the factory be of the application's own.
    """

    engine: str
    adapter: str | int | None
    max_in_flight: int
    path: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop a run. A word in shared memory comes first, for engines that look there."""

    run: int


@dataclass(frozen=True, slots=True)
class Recall:
    """Take the segments of a run below `seq` back. A word in shared memory comes first here, too."""

    run: int
    seq: int


@dataclass(frozen=True, slots=True)
class End:
    """End a run; of the values that it had kept, those in `kept` stay."""

    run: int
    kept: tuple[TensorRef, ...] = ()


@dataclass(frozen=True, slots=True)
class Close:
    """Close the engine, and leave."""


@dataclass(frozen=True, slots=True)
class Up:
    """From a worker: its imports are done, and the engine is made."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """From a worker: where each node of a model's new plan runs."""

    model: int
    nodes: tuple[Explained, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """From a worker, unasked: it cannot go on, and ends."""

    reason: str


MESSAGES: tuple[type, ...] = (
    *(Setup, Load, Begin, Segment, Stop, Recall, Read, End, Free, Close),
    *(Up, Progress, Loaded, Begun, Fenced, Dropped, Outputs, Ended, Freed, Failed, Closed, Explanation, Lost),
)
