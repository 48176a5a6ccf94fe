"""An engine that tells of its device: which blocks a run enters, and how much memory there is at most."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import trionnx
import works
from trionnx.gpu.device.device import Device
from trionnx.gpu.device.engine import WebGpuEngine
from trionnx.gpu.device.realise import Realised
from trionnx.gpu.device.run import Run
from trionnx.gpu.graph.block import Block
from trionnx.gpu.graph.model import Model
from trionnx.gpu.seam import Begin, Load, Reply

__all__ = ["WalkedDevice", "WalkedEngine", "walked_session"]


class WalkedDevice:
    """Counts the buffers that a device makes.

    Attributes:
        buffers: how many it has made since.
        fixed: bytes that it held before there was a model. most: the most that it held at once since, beyond these.
    """

    def __init__(self, device: Device) -> None:
        self.buffers = self.most = 0
        self.fixed = device.bytes
        make = device.buffer

        def buffer(nbytes: int, *usage: int) -> Any:
            made = make(nbytes, *usage)
            self.buffers += 1
            self.most = max(self.most, device.bytes - self.fixed)
            return made

        # On this device alone.
        vars(device)["buffer"] = buffer


class WalkedEngine(WebGpuEngine):
    """A WebGpuEngine that is watched.

    Attributes:
        blocks: those that the last run entered, in order.
        walked: what is counted of its device, once it has one.
    """

    def __init__(self, *, adapter: str | int | None = None, max_in_flight: int = 2) -> None:
        super().__init__(adapter, max_in_flight)
        self.blocks: list[Block] = []
        self.walked: WalkedDevice | None = None

    def _open(
        self, request: Load, model: Model, check: Callable[[], None], report: Callable[[str, int, int], None]
    ) -> Device:
        device = super()._open(request, model, check, report)
        self.walked = WalkedDevice(device)
        return device

    def _begin(self, run: Run, request: Begin) -> Reply:
        self.blocks.clear()
        return super()._begin(run, request)

    def _realise(self, run: Run, block: Block) -> Realised:
        self.blocks.append(block)
        return super()._realise(run, block)


@asynccontextmanager
async def walked_session(
    work: works.Work, adapter: str | None = None
) -> AsyncIterator[tuple[trionnx.Session, WalkedEngine, WalkedDevice]]:
    """A session of a model, planned for its feeds, on an engine that is watched.

    Yields:
        The session, its engine and its device.

    **Cancellation:** as that of a load; the session is closed on the way out.
    """
    made: list[WalkedEngine] = []

    def engine(*, adapter: str | int | None, max_in_flight: int) -> WalkedEngine:
        made.append(WalkedEngine(adapter=adapter, max_in_flight=max_in_flight))
        return made[-1]

    trionnx.register_engine("webgpu, walked", engine)
    async with trionnx.open_scheduler(backend="webgpu", adapter=adapter) as scheduler:
        shapes = {name: value.shape for name, value in work.feeds.items()}
        session = await scheduler.load(work.source, input_shapes=shapes, backend="webgpu, walked")
        (walked,) = made
        assert walked.walked is not None
        yield session, walked, walked.walked
