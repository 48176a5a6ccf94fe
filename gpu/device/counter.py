"""A counter on the device that every segment bumps: proof of what the device has executed."""

from __future__ import annotations

import numpy as np

from ..kernels.kernel import Program
from .device import Device
from .realise import PassWriter

__all__ = ["Counter"]

WGSL = """@group(0) @binding(0) var<storage, read_write> segments: atomic<u32>;
@compute @workgroup_size(1) fn main() { atomicAdd(&segments, 1u); }
"""


class Counter:
    """Counts the command buffers that a device has executed."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffer = device.buffer(16)
        self._pipeline = device.pipeline(Program("count", WGSL, 0, 1, (), 1))
        self._group = device.bind(self._pipeline, None, 0, [(self._buffer, 0, 16)])

    def bump(self, writer: PassWriter) -> None:
        """Have what is being written count itself."""
        writer.dispatch(self._pipeline, self._group._internal, 0, 1)

    def read(self) -> int:
        """What the device has counted, once all that was submitted has finished."""
        data = self._device.read(self._buffer, 0, 4, lambda: None)
        return int(np.frombuffer(data, np.uint32)[0])

    def close(self) -> None:
        """Give the buffer back."""
        self._device.release(self._buffer)
