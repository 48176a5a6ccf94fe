"""Memory of a device that the host can read, and the answer that says when.

The answer to a request for mapping need not come on the thread that waits for the fence: whoever
has the driver look for news (wgpu does for all devices at once while it opens another one) takes
it along, and calls back a little later than the fence is through.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from ..errors import DeviceLost

if TYPE_CHECKING:
    from .device import Device

__all__ = ["Staging"]

COPY_DST, MAP_READ = 0x8, 0x1
ANSWER_BOUND_S = 10.0
"""How long an answer may take once the fence is through; another thread has it by then."""


class Staging:
    """A buffer to copy into: copy, submit, `ask`, wait for the fence, `read`.

    Args:
        device: where it is. nbytes: its size.

    Attributes:
        handle: the raw buffer. nbytes: its size.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device, self.nbytes = device, nbytes
        self._buffer = device.buffer(nbytes, MAP_READ | COPY_DST)
        self.handle = self._buffer._internal
        self._answered = threading.Event()
        self._answer = 0, ""
        ffi, lib = device.ffi, device.lib

        def answer(status: int, message: Any, _one: Any, _two: Any) -> None:
            text = b"" if message.data == ffi.NULL else bytes(ffi.buffer(message.data, message.length))
            self._answer = status, text.decode(errors="replace")
            self._answered.set()

        self._callback = ffi.callback("void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)", answer)
        self._info = ffi.new("WGPUBufferMapCallbackInfo *")
        self._info.mode, self._info.callback = lib.WGPUCallbackMode_AllowProcessEvents, self._callback

    def ask(self, nbytes: int) -> None:
        """Ask for the first bytes, once what fills them has been submitted."""
        self._answered.clear()
        device = self._device
        device.safe.wgpuBufferMapAsync(self.handle, device.lib.WGPUMapMode_Read, 0, nbytes, self._info[0])

    def read(self, nbytes: int) -> bytes:
        """The bytes that were asked for, once the submission has finished.

        Raises:
            DeviceLost: the device does not answer; all that is left to do is `release`.
        """
        device = self._device
        if not self._answered.wait(ANSWER_BOUND_S):
            raise DeviceLost(f"the device did not give its results back in {ANSWER_BOUND_S:g} s")
        status, text = self._answer
        if status != device.lib.WGPUMapAsyncStatus_Success:
            raise DeviceLost(f"the device did not give its results back: {text or f'status {status}'}")
        data = bytes(device.ffi.buffer(device.safe.wgpuBufferGetConstMappedRange(self.handle, 0, nbytes), nbytes))
        device.safe.wgpuBufferUnmap(self.handle)
        return data

    def release(self) -> None:
        """Give it back; nothing in flight may use it."""
        self._device.release(self._buffer)
