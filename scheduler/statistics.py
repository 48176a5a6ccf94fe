"""Numbers on what was run: `Statistics`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Statistics"]


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a session, or all sessions of a scheduler, have done until now.

    Attributes:
        runs: runs that ended, in whatever way.
        queued: runs that wait now for their session to be free.
        segments_submitted: segments of ended runs that were given to the driver.
        segments_finished: of those, how many were seen to finish.
        segments_dropped: segments of ended runs that were handed over and not given to the driver.
        tensors: `DeviceTensor`s that are there now. tensor_bytes: the bytes that their arrays would have.
    """

    runs: int = 0
    queued: int = 0
    segments_submitted: int = 0
    segments_finished: int = 0
    segments_dropped: int = 0
    tensors: int = 0
    tensor_bytes: int = 0

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(
            self.runs + other.runs,
            self.queued + other.queued,
            self.segments_submitted + other.segments_submitted,
            self.segments_finished + other.segments_finished,
            self.segments_dropped + other.segments_dropped,
            self.tensors + other.tensors,
            self.tensor_bytes + other.tensor_bytes,
        )
