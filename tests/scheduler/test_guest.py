"""Trio as a guest of asyncio: runs are stopped out of the host's own code, outside of Trio's tasks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import trio
from onnx import TensorProto, helper, numpy_helper

import trionnx
from guest import trio_as_guest
from trionnx.actors.fake import FakeEngine, FakeModel
from trionnx.gpu.device.engine import WebGpuEngine
from trionnx.gpu.seam import StepView
from trionnx.scheduler.run import AHEAD
from watch import Watch

ROOT = Path(__file__).resolve().parent.parent.parent
SIDE, LAYERS = 256, 24
LIMIT_S = 120


def products() -> onnx.ModelProto:
    """Matrix products, one after the other."""
    names = ["x", *(f"v{number}" for number in range(LAYERS - 1)), "y"]
    nodes = [helper.make_node("MatMul", [names[i], "w"], [names[i + 1]]) for i in range(LAYERS)]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [SIDE, SIDE]) for name in "xy"]
    weights = numpy_helper.from_array(np.eye(SIDE, dtype=np.float32), "w")
    graph = helper.make_graph(nodes, "products", infos[:1], infos[1:], [weights])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


class Stage:
    """Trio's side runs a model whole, then again while the host looks on, then whole; all on one thread."""

    def __init__(self, backend: str, source: Any, feeds: dict[str, Any]) -> None:
        self.backend, self.source, self.feeds = backend, source, feeds
        self.session: trionnx.Session | None = None
        self.watch: Watch | None = None
        self.scope = trio.CancelScope()
        self.options = trionnx.RunOptions(
            on_progress=self.progress, policy=trionnx.TerminatePolicy(checkpoint_interval_s=0.002)
        )
        self.begun = asyncio.Event()
        self.turns = 0
        self.turns_at: list[int] = []
        self.handed = self.fenced = self.total = -1
        self.ended = ""

    def progress(self, done: int, total: int) -> None:
        self.turns_at.append(self.turns)
        self.total = total
        if done == 3:
            self.begun.set()

    async def play(self) -> str:
        """Trio's side; how the watched run ended."""
        async with trionnx.open_scheduler(backend=self.backend) as scheduler:
            session = self.session = await scheduler.load(self.source)
            before = await session.run(None, self.feeds)
            with Watch(session) as self.watch:
                self.ended = await self._watched(session)
            if self.ended != "ClosedResourceError":
                after = await session.run(None, self.feeds)
                assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
            return self.ended

    async def _watched(self, session: trionnx.Session) -> str:
        with self.scope:
            try:
                await session.run(None, self.feeds, self.options)
            except (trionnx.RunTerminated, trio.ClosedResourceError) as error:
                return type(error).__name__
        return "Cancelled" if self.scope.cancelled_caught else "outputs"

    async def turn(self) -> None:
        """The host's heartbeat: one beat for each turn of its loop."""
        while True:
            self.turns += 1
            await asyncio.sleep(0)

    async def host(self, act: Callable[[Stage], Awaitable[None]]) -> str:
        """asyncio's side: does something once a few segments are done."""
        async with asyncio.timeout(LIMIT_S), trio_as_guest(self.play) as result:
            beating = asyncio.ensure_future(self.turn())
            try:
                waiting = asyncio.ensure_future(self.begun.wait())
                await asyncio.wait([result, waiting], return_when="FIRST_COMPLETED")
                waiting.cancel()
                await act(self)
                return str(await result)
            finally:
                beating.cancel()

    def look(self) -> None:
        """Note how far the run is, right after the host has stopped it."""
        assert self.watch is not None
        self.handed, self.fenced = len(self.watch.handed), self.watch.fenced

    def check_stopped(self) -> None:
        """The run did not go on: nothing was handed over, and only what was in flight finished.

        Beside that, answers may have been on their way to a loop that has much to do: of what was handed over ahead.
        """
        assert self.watch is not None
        assert len(self.watch.handed) == self.handed < self.total
        assert self.watch.fenced <= self.fenced + 2 + AHEAD
        # Where the scheduler is cancelled as well, its actors close at once, and say no more of runs.
        if self.watch.ended is not None:
            assert self.watch.ended.counts.finished == self.watch.fenced
            assert self.watch.miscounted is False


@pytest.fixture(params=["fake", "webgpu"])
def stage(request: pytest.FixtureRequest, engines: dict[str, Any]) -> Any:
    made: list[Any] = []
    feeds: dict[str, Any]
    if request.param == "fake":
        model = FakeModel(blocks=((StepView("gpu", cost_s=0.002),) * 60,))
        made = model.engines
        stage = Stage("fake", model, {"x": np.arange(4, dtype=np.float32)})
    else:

        def factory(*, adapter: str | int | None, max_in_flight: int) -> WebGpuEngine:
            engine = WebGpuEngine(adapter, max_in_flight, count=True)
            made.append(engine)
            return engine

        trionnx.register_engine("counting", factory)
        feeds = {"x": np.random.default_rng(0).standard_normal((SIDE, SIDE)).astype(np.float32)}
        stage = Stage("counting", products(), feeds)
    yield stage
    (engine,) = made
    if isinstance(engine, FakeEngine):
        assert engine.at_rest
    else:
        assert engine.device is not None
        assert (engine.device.bytes, len(engine._runs)) == (0, 0)


async def cancel(stage: Stage) -> None:
    stage.scope.cancel()
    stage.look()


async def terminate(stage: Stage) -> None:
    stage.options.terminate()
    assert stage.options.terminated
    assert stage.session is not None
    assert all(run.scope.cancel_called for run in stage.session._runs)
    stage.look()


async def terminate_from_a_thread(stage: Stage) -> None:
    await asyncio.to_thread(stage.options.terminate)
    stage.look()


async def close(stage: Stage) -> None:
    assert stage.session is not None
    stage.session.close()
    stage.look()


@pytest.mark.parametrize(
    ("act", "ending"),
    [
        (cancel, "Cancelled"),
        (terminate, "RunTerminated"),
        (terminate_from_a_thread, "RunTerminated"),
        (close, "ClosedResourceError"),
    ],
)
def test_the_host_stops_a_run(stage: Stage, act: Callable[[Stage], Awaitable[None]], ending: str) -> None:
    assert asyncio.run(stage.host(act)) == ending
    stage.check_stopped()


def test_the_hosts_loop_turns_while_the_device_computes(stage: Stage) -> None:
    async def look_on(_: Stage) -> None:
        pass

    assert asyncio.run(stage.host(look_on)) == "outputs"
    segments = len(stage.turns_at)
    assert segments > 5
    assert stage.turns_at[-1] - stage.turns_at[0] >= 5 * segments


def test_an_exception_of_the_host_stops_the_device(stage: Stage) -> None:
    async def fail(stage: Stage) -> None:
        stage.look()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(stage.host(fail))
    assert stage.ended == ""
    stage.check_stopped()


ABANDONED = """
import asyncio, sys, threading, time
sys.path[:0] = ["tests/scheduler", "examples", "benchmarks"]
import trio, trionnx
from test_guest import Stage, WebGpuEngine, products, SIDE
import numpy as np

engines = []

def factory(*, adapter, max_in_flight):
    engines.append(WebGpuEngine(adapter, max_in_flight))
    return engines[0]

trionnx.register_engine("kept", factory)
kept = []

async def host():
    stage = Stage("kept", products(), {"x": np.ones((SIDE, SIDE), np.float32)})
    kept.append(stage)
    loop = asyncio.get_running_loop()
    trio.lowlevel.start_guest_run(
        stage.play,
        run_sync_soon_threadsafe=loop.call_soon_threadsafe,
        run_sync_soon_not_threadsafe=loop.call_soon,
        done_callback=print,
    )
    await stage.begun.wait()
    raise ZeroDivisionError

try:
    asyncio.run(host())
except ZeroDivisionError:
    kept[0].look()
engine, = engines
ended = threading.Event()
engine._thread.post(lambda: (engine._thread.drain(), ended.set()))
assert ended.wait(60)
(run,) = engine._runs.values()
print(kept[0].handed - kept[0].fenced, len(kept[0].watch.handed) - kept[0].handed, run.finished < kept[0].total)
"""


def test_a_host_that_just_leaves_leaves_a_device_that_comes_to_rest() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ABANDONED], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    handed, late, short = done.stdout.split()
    assert 0 <= int(handed) <= 2 + 1 + AHEAD
    assert (late, short) == ("0", "True")
    assert "in thread trionnx" not in done.stderr
