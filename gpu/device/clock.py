"""When things happened on the device, by its own clock: timestamps that are written between commands."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from .device import COPY_SRC, Device
from .staging import Staging

__all__ = ["MARKS", "Clock", "Stamps", "spacing"]

FEATURES = frozenset(("timestamp-query", "timestamp-query-inside-encoders", "timestamp-query-inside-passes"))
MARKS = 512
"""Timestamps that one command buffer may hold."""
SLOTS = 6
RESOLVE = 0x200


def spacing(steps: int) -> int:
    """Every how many steps the time is written, so that `MARKS` are enough: one goes before the first step."""
    return -(-steps // (MARKS - 1))


class Clock:
    """The timestamps of one device, for a few command buffers in flight at once."""

    def __init__(self, device: Device) -> None:
        self._device = device
        lib = device.lib
        self._queries = device.native.create_query_set(type="timestamp", count=MARKS * SLOTS)
        self._resolved = device.buffer(MARKS * SLOTS * 8, RESOLVE | COPY_SRC)
        self._period_s = 1e-9 * float(lib.wgpuQueueGetTimestampPeriod(device.queue))
        self._free = [Stamps(self, slot, Staging(device, MARKS * 8)) for slot in range(SLOTS)]

    @staticmethod
    def of(device: Device) -> Clock | None:
        """The clock of a device; None where it cannot write timestamps between commands."""
        return Clock(device) if set(device.native.features) >= FEATURES else None

    def take(self) -> Stamps | None:
        """Timestamps for one command buffer; None where too many are in flight."""
        return self._free.pop() if self._free else None

    def close(self) -> None:
        """Give the buffers back. Nothing is in flight."""
        for stamps in self._free:
            stamps.staging.release()
        self._free.clear()
        self._device.release(self._resolved)
        del self._queries, self._resolved


class Stamps:
    """The timestamps of one command buffer: mark, resolve, submit, ask, wait for the fence, read.

    Attributes:
        staging: where they come to the host.
    """

    def __init__(self, clock: Clock, slot: int, staging: Staging) -> None:
        self._clock, self._first, self.staging = clock, slot * MARKS, staging
        self._count = 0
        device = clock._device
        self._lib = device.lib
        self._queries = clock._queries._internal
        self._resolved = clock._resolved._internal

    def mark(self, encoder: Any, compute_pass: Any) -> None:
        """Write the time, in the pass where one is open."""
        number = self._first + self._count
        if compute_pass is None:
            self._lib.wgpuCommandEncoderWriteTimestamp(encoder, self._queries, number)
        else:
            self._lib.wgpuComputePassEncoderWriteTimestamp(compute_pass, self._queries, number)
        self._count += 1

    def resolve(self, encoder: Any) -> None:
        """Have the times brought to the host, at the end of the command buffer."""
        count, offset = self._count, self._first * 8
        self._lib.wgpuCommandEncoderResolveQuerySet(
            encoder, self._queries, self._first, count, self._resolved, offset
        )
        target = self.staging.handle
        self._lib.wgpuCommandEncoderCopyBufferToBuffer(encoder, self._resolved, offset, target, 0, count * 8)

    def ask(self) -> None:
        """Ask for the mapping, once the command buffer has been submitted: it is there with the fence."""
        self.staging.ask(self._count * 8)

    def read(self) -> list[float]:
        """Seconds between marks, after the fence. Empty where the device does not tell. Gives the slot back.

        Raises:
            DeviceLost: the device does not answer; the slot is lost.
        """
        times = np.frombuffer(self.staging.read(self._count * 8), np.uint64).tolist()
        self.drop()
        spans = [(after - before) * self._clock._period_s for before, after in pairwise(times)]
        return spans if times[0] and min(spans) >= 0 else []

    def drop(self) -> None:
        """Give the slot back."""
        self._count = 0
        self._clock._free.append(self)
