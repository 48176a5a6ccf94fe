"""Numbers on what was run: `Statistics`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

__all__ = ["Statistics"]


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a session, or all sessions of a scheduler, do now and have done until now.

    Attributes:
        runs: runs that ended, in whatever way.
        queued: runs that wait now for their session to be free.
        segments_submitted: segments of ended runs that were given to the driver.
        segments_finished: of those, how many were seen to finish.
        segments_dropped: segments of ended runs that were handed over and not given to the driver.
        tensors: `DeviceTensor`s that are there now. tensor_bytes: the bytes that their arrays would have.
        running: runs that have their session now.
        in_flight: segments that are handed over now and unanswered.
        cancels: runs that were stopped on their way: by a cancelled scope, by `terminate`, by closing.
        failures: runs that ended in another error.
        device_bytes: bytes of all buffers on the device now, weights too; sessions beside each other share them. 0
            where the engine does not say: on the CPU, and in a worker process.
        busy_share: in which part of the last 50 ms a segment was with the device, 0 to 1. Of no weight where
            statistics are compared.
    """

    runs: int = 0
    queued: int = 0
    segments_submitted: int = 0
    segments_finished: int = 0
    segments_dropped: int = 0
    tensors: int = 0
    tensor_bytes: int = 0
    running: int = 0
    in_flight: int = 0
    cancels: int = 0
    failures: int = 0
    device_bytes: int = 0
    busy_share: float = field(default=0.0, compare=False)

    def __add__(self, other: Statistics) -> Statistics:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Statistics(**sums | {"busy_share": min(1.0, sums["busy_share"])})
