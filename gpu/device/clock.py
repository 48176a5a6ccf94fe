"""When things happened on the device, by its own clock: timestamps that are written between commands."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from .device import COPY_DST, COPY_SRC, MAP_READ, Device

__all__ = ["MARKS", "Clock", "Stamps", "spacing"]

FEATURES = frozenset(("timestamp-query", "timestamp-query-inside-encoders", "timestamp-query-inside-passes"))
MARKS = 64
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
        signature = "void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)"
        self._callback = device.ffi.callback(signature, lambda *_: None)
        self._free = [Stamps(self, slot, device.buffer(MARKS * 8, MAP_READ | COPY_DST)) for slot in range(SLOTS)]

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
            self._device.release(stamps.staging)
        self._free.clear()
        self._device.release(self._resolved)
        del self._queries, self._resolved


class Stamps:
    """The timestamps of one command buffer: mark, resolve, submit, ask, wait for the fence, read.

    Attributes:
        staging: where they come to the host.
    """

    def __init__(self, clock: Clock, slot: int, staging: Any) -> None:
        self._clock, self._first, self.staging = clock, slot * MARKS, staging
        self._count = 0
        device = clock._device
        self._lib, self._null, self._cast = device.lib, device.ffi.NULL, device.ffi.cast
        self._info = device.ffi.new("WGPUBufferMapCallbackInfo *")
        self._info.mode = device.lib.WGPUCallbackMode_AllowProcessEvents
        self._info.callback = clock._callback
        self._queries, self._buffer = clock._queries._internal, staging._internal
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
        self._lib.wgpuCommandEncoderCopyBufferToBuffer(encoder, self._resolved, offset, self._buffer, 0, count * 8)

    def ask(self) -> None:
        """Ask for the mapping, once the command buffer has been submitted: it is there with the fence."""
        self._lib.wgpuBufferMapAsync(self._buffer, self._lib.WGPUMapMode_Read, 0, self._count * 8, self._info[0])

    def read(self) -> list[float]:
        """Seconds between marks, after the fence. Empty where the device does not tell. Gives the slot back."""
        count, period_s = self._count, self._clock._period_s
        pointer = self._lib.wgpuBufferGetConstMappedRange(self._buffer, 0, count * 8)
        if pointer == self._null:
            self.drop()
            return []
        times = list(self._cast("uint64_t *", pointer)[0:count])
        self._lib.wgpuBufferUnmap(self._buffer)
        self.drop()
        spans = [(after - before) * period_s for before, after in pairwise(times)]
        return spans if times[0] and min(spans) >= 0 else []

    def drop(self) -> None:
        """Give the slot back."""
        self._count = 0
        self._clock._free.append(self)
