"""One wgpu device: buffers, pipelines, uploads, read-back. Used by one thread, that of its queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import OutOfDeviceMemory
from ..kernels.kernel import Program
from .adapters import AdapterInfo, adapter_features, driver_lock, one_at_a_time, target_of
from .half import measure_half
from .shader import checks_for, make_module
from .staging import Staging
from .subgroup import measure_subgroup

__all__ = ["Device", "Pipeline"]

PIECE = 4 << 20
"""Bytes that are uploaded or read back between two looks at whether to go on."""
COPIED = 64 << 20
"""Likewise for copies from buffer to buffer."""

STORAGE, UNIFORM, COPY_SRC, COPY_DST = 0x80, 0x40, 0x4, 0x8
COMPUTE = 0x4
Check = Callable[[], None]


class Pipeline:
    """A compiled program."""

    __slots__ = ("handle", "layout", "native", "program", "warm")

    def __init__(self, program: Program, native: Any, layout: Any) -> None:
        self.program, self.native, self.layout = program, native, layout
        self.handle = native._internal
        self.warm = False


class Device:
    """A device and what lives as long as it does.

    Args:
        info: its adapter.
        f16: whether float16 is going to be computed with.
        check: called while another session's call to the drivers is waited for; what it raises ends the wait.
        memory_limit_bytes: of `bytes`; None: what the device has.

    Attributes:
        info: its adapter. target: facts for kernels. bytes: device memory that is allocated now.
        uploaded, read_back: bytes that have gone to the device, and come from it, since it was made.
    """

    def __init__(
        self,
        info: AdapterInfo,
        f16: bool = True,
        check: Check = lambda: None,
        memory_limit_bytes: int | None = None,
    ) -> None:
        from wgpu.backends.wgpu_native import _api, ffi, lib

        self.info, self.target = info, target_of(info)
        self.target = replace(self.target, f16=f16 and self.target.f16)
        self.lib, self.ffi, self.safe = lib, ffi, _api.libf
        self.bytes = self.uploaded = self.read_back = 0
        limits = {
            "max-immediate-size": 16,
            "max-storage-buffers-per-shader-stage": self.target.max_storage_buffers,
            "max-storage-buffer-binding-size": self.target.max_binding_bytes,
            "max-buffer-size": info._adapter.limits["max-buffer-size"],
        }
        self._most_bytes = memory_limit_bytes
        with driver_lock(check):
            self.native = info._adapter.request_device_sync(
                label="trionnx", required_features=adapter_features(info, self.target.f16), required_limits=limits
            )
        self.handle = self.native._internal
        self.queue = self.native.queue._internal
        self._pipelines: dict[Program, Pipeline] = {}
        self._layouts: dict[tuple[bool, int, int], tuple[Any, Any]] = {}
        self._staging: Staging | None = None
        self._index, self._commands = ffi.new("WGPUSubmissionIndex *"), ffi.new("WGPUCommandBuffer[1]")
        self._align = int(self.native.limits["min-uniform-buffer-offset-alignment"])
        if self.target.cpu and "subgroup" in self.native.features:
            self.target = replace(self.target, subgroup=measure_subgroup(self))
        if self.target.f16:
            there = "shader-f16" in self.native.features
            self.target = replace(self.target, f16=there and measure_half(self))

    @property
    def pipelines(self) -> int:
        """How many pipelines have been made."""
        return len(self._pipelines)

    # --- buffers ------------------------------------------------------------------------------

    def buffer(self, nbytes: int, usage: int = STORAGE | COPY_SRC | COPY_DST) -> Any:
        """A new buffer. Raises OutOfDeviceMemory (translated by the engine)."""
        if self._most_bytes is not None and self.bytes + nbytes > self._most_bytes:
            raise OutOfDeviceMemory(
                f"{nbytes} bytes more than the {self.bytes} that are there would pass the limit of {self._most_bytes}"
            )
        made = self.native.create_buffer(size=nbytes, usage=usage)
        self.bytes += nbytes
        return made

    def release(self, buffer: Any) -> None:
        """Give a buffer back at once; nothing in flight may use it."""
        self.bytes -= buffer.size
        buffer.destroy()

    def write(self, buffer: Any, offset: int, array: np.ndarray[Any, Any], check: Check) -> None:
        """Copy an array's bytes (contiguous, a multiple of 4) into a buffer, in pieces; ordered with submissions."""
        data = array.reshape(-1).view(np.uint8).data
        self.uploaded += len(data)
        for start in range(0, len(data), PIECE):
            if start:
                check()
            piece = data[start : start + PIECE]
            self.safe.wgpuQueueWriteBuffer(
                self.queue, buffer._internal, offset + start, self.ffi.from_buffer(piece), len(piece)
            )
            if start and start % (8 * PIECE) == 0:
                self.submit(self.finish(self.encoder()))
                self.wait(None)

    def read(self, buffer: Any, begin: int, nbytes: int, check: Check) -> bytearray:
        """Bytes of a buffer, from a multiple of 4 on, once all that was submitted has finished; in pieces."""
        out = bytearray(nbytes)
        self.read_back += nbytes
        for start in range(0, nbytes, PIECE):
            check()
            size = min(PIECE, nbytes - start)
            self._read_piece(buffer, begin + start, size, memoryview(out)[start : start + size])
        return out

    def copy(self, source: Any, begin: int, target: Any, nbytes: int, check: Check) -> None:
        """Copy bytes of a buffer to another's start, ordered with submissions; the last piece is not waited for."""
        for start in range(0, nbytes, COPIED):
            if start:
                self.wait(None)
            check()
            encoder = self.encoder()
            size = min(COPIED, nbytes - start)
            self.lib.wgpuCommandEncoderCopyBufferToBuffer(
                encoder, source._internal, begin + start, target._internal, start, size
            )
            self.submit(self.finish(encoder))

    def _read_piece(self, buffer: Any, start: int, size: int, into: memoryview) -> None:
        padded = (size + 3) // 4 * 4
        staging, self._staging = self._staging, None
        if staging is None or staging.nbytes < padded:
            if staging is not None:
                staging.release()
            staging = Staging(self, max(padded, 1 << 16))
        try:
            encoder = self.encoder()
            self.lib.wgpuCommandEncoderCopyBufferToBuffer(encoder, buffer._internal, start, staging.handle, 0, padded)
            self.submit(self.finish(encoder))
            staging.ask(padded)
            self.wait(None)
            into[:] = staging.read(padded)[:size]
        except BaseException:
            staging.release()
            raise
        self._staging = staging

    # --- pipelines ----------------------------------------------------------------------------

    def pipeline(self, program: Program) -> Pipeline:
        """The pipeline of a program: made once per device."""
        made = self._pipelines.get(program)
        if made is None:
            made = self._pipelines[program] = self.compile(program)
        return made

    def compile(self, program: Program) -> Pipeline:
        """A pipeline that is not kept."""
        with one_at_a_time():
            group_layout, layout = self._layout(program)
            module = make_module(self.native, program.name, program.wgsl, checks_for(self.info.backend))
            native = self.native.create_compute_pipeline(
                label=program.name, layout=layout, compute={"module": module, "entry_point": "main"}
            )
        return Pipeline(program, native, group_layout)

    def _layout(self, program: Program) -> tuple[Any, Any]:
        key = (bool(program.params), program.reads, program.writes)
        if key not in self._layouts:
            kinds = ["uniform"] * key[0] + ["read-only-storage"] * key[1] + ["storage"] * key[2]
            entries = [{"binding": n, "visibility": COMPUTE, "buffer": {"type": kind}} for n, kind in enumerate(kinds)]
            group = self.native.create_bind_group_layout(entries=entries)
            whole = self.native.create_pipeline_layout(bind_group_layouts=[group], immediate_size=4)
            self._layouts[key] = group, whole
        return self._layouts[key]

    def bind(self, pipeline: Pipeline, params: Any, params_offset: int, buffers: list[tuple[Any, int, int]]) -> Any:
        """A bind group: the parameters, then of each buffer so many bytes (last) from one on."""
        resources: list[dict[str, Any]] = []
        if pipeline.program.params:
            size = (len(pipeline.program.params) * 4 + 15) // 16 * 16
            resources.append({"buffer": params, "offset": params_offset, "size": size})
        resources += [{"buffer": b, "offset": begin, "size": size} for b, begin, size in buffers]
        return self.native.create_bind_group(
            layout=pipeline.layout, entries=[{"binding": n, "resource": r} for n, r in enumerate(resources)]
        )

    def align(self, nbytes: int) -> int:
        """The next offset at which uniform parameters may lie."""
        return (nbytes + self._align - 1) // self._align * self._align

    # --- the queue ----------------------------------------------------------------------------

    def encoder(self) -> Any:
        """A raw command encoder."""
        return self.lib.wgpuDeviceCreateCommandEncoder(self.handle, self.ffi.NULL)

    def finish(self, encoder: Any) -> Any:
        """A raw command buffer; the encoder is gone. Raises wgpu's errors for what was encoded."""
        try:
            return self.safe.wgpuCommandEncoderFinish(encoder, self.ffi.NULL)
        finally:
            self.lib.wgpuCommandEncoderRelease(encoder)

    def drop(self, encoder: Any) -> None:
        """Give up what was encoded. Once it is finished that is not possible: wgpu keeps it until it is submitted."""
        self.lib.wgpuCommandEncoderRelease(encoder)

    def submit(self, commands: Any) -> Any:
        """Submit one command buffer and return the number to wait for. May block while the driver does."""
        self._commands[0] = commands
        try:
            return self.safe.wgpuQueueSubmitForIndex(self.queue, 1, self._commands)
        finally:
            self.lib.wgpuCommandBufferRelease(commands)

    def wait(self, submission: Any) -> None:
        """Block until one submission has finished, or, with None, all of them."""
        if submission is None:
            self.safe.wgpuDevicePoll(self.handle, True, self.ffi.NULL)
        else:
            self._index[0] = submission
            self.safe.wgpuDevicePoll(self.handle, True, self._index)

    def close(self) -> None:
        """Give the device back with all that was made on it."""
        self._pipelines.clear()
        self._layouts.clear()
        if self._staging is not None:
            self._staging.release()
            self._staging = None
        with one_at_a_time():
            self.native.destroy()
            self.native._release()
