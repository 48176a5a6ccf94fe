"""What steps found out about values: flags on the device, read behind the fence of their segment.

A segment in which such a step begins clears its flag first; one in which it ends copies it, last
of all, to memory that the host can see. So the fence that is waited for anyway brings it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..graph.steps import IndexCheck
from ..seam import Segment
from .device import COPY_DST, COPY_SRC, STORAGE, Device
from .staging import Staging

__all__ = ["Flags", "Watch"]


class Flags:
    """The flags of a block: a word for each step that checks, 0 where all is well, else the index that is not.

    Args:
        device: where they are. checks: step and check, in the order of their words.

    Attributes:
        buffer: what the steps write to.
    """

    def __init__(self, device: Device, checks: Sequence[tuple[int, IndexCheck]]) -> None:
        self._device = device
        self.checks = checks
        self._nbytes = max(16, -(-len(checks) // 4) * 16)
        self.buffer = device.buffer(self._nbytes, STORAGE | COPY_SRC | COPY_DST)
        self._idle: list[Staging] = []

    def watch(self, encoder: Any, segment: Segment) -> Watch | None:
        """Clear the flags of the steps that begin in a segment; what to do for those that end in it."""
        start, stop = segment.start, segment.stop
        begin = [n for n, (step, _) in enumerate(self.checks) if start[1:] <= (step, 0) < stop[1:]]
        end = [n for n, (step, _) in enumerate(self.checks) if start.step <= step < stop.step]
        if begin:
            self._device.lib.wgpuCommandEncoderClearBuffer(encoder, self.buffer._internal, 4 * begin[0], 4 * len(begin))
        return Watch(self, end[0], len(end)) if end else None

    def take(self) -> Staging:
        """Memory that the host can see; `give` it back."""
        return self._idle.pop() if self._idle else Staging(self._device, self._nbytes)

    def give(self, staging: Staging) -> None:
        """Nobody uses this memory any more."""
        self._idle.append(staging)

    def copy(self, encoder: Any, staging: Staging, first: int, count: int) -> None:
        """Encode the copy of some flags to the start of `staging`."""
        self._device.lib.wgpuCommandEncoderCopyBufferToBuffer(
            encoder, self.buffer._internal, 4 * first, staging.handle, 0, 4 * count
        )

    def release(self) -> None:
        """Give the memory back; nothing in flight may use it."""
        self._device.release(self.buffer)
        for staging in self._idle:
            staging.release()
        self._idle.clear()


class Watch:
    """The flags of the steps that end in one segment."""

    __slots__ = ("_count", "_first", "_flags", "_staging")

    def __init__(self, flags: Flags, first: int, count: int) -> None:
        self._flags, self._first, self._count = flags, first, count
        self._staging: Staging | None = None

    def bring(self, encoder: Any) -> None:
        """Encode, behind the segment's steps, what makes the flags visible."""
        self._staging = self._flags.take()
        self._flags.copy(encoder, self._staging, self._first, self._count)

    def drop(self) -> None:
        """The segment is not submitted."""
        assert self._staging is not None
        self._flags.give(self._staging)

    def ask(self) -> None:
        """Ask for the flags, once the segment has been submitted."""
        assert self._staging is not None
        self._staging.ask(4 * self._count)

    def check(self) -> None:
        """The submission has finished: raise InvalidData where a flag was raised."""
        assert self._staging is not None
        try:
            found = np.frombuffer(self._staging.read(4 * self._count), np.int32)
        except BaseException:
            self._staging.release()
            raise
        self._flags.give(self._staging)
        if found.any():
            number = int(np.flatnonzero(found)[0])
            _, check = self._flags.checks[self._first + number]
            raise check.error(int(found[number]))
