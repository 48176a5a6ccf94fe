"""An engine without a device, that answers by Trio's clock: for tests of schedules.

It behaves as one queue of a GPU does: requests in order, at most `max_in_flight` segments with the
driver, the rest held back and dropped when their run is stopped. What it outputs depends on every
unit that was executed and on their order, and not on where segments were cut.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import trio

from ..gpu.errors import RunStopped
from ..gpu.kept import Kept
from ..gpu.seam import (
    Begin,
    Begun,
    BlockView,
    Closed,
    Counts,
    Done,
    Dropped,
    Ended,
    Explained,
    Failed,
    Fenced,
    Finished,
    Free,
    Freed,
    Load,
    Loaded,
    ModelMetadata,
    NodeTime,
    Outputs,
    Progress,
    Read,
    Segment,
    StepKind,
    StepView,
    TensorInfo,
    TensorRef,
)

__all__ = ["FakeEngine", "FakeModel", "Happening"]

Array = np.ndarray[Any, Any]
What = Literal["load", "begin", "handed", "driver", "finish", "drop", "stop", "read", "end", "free", "close"]


class Happening(NamedTuple):
    """One line of an engine's log: what happened to which run and segment, and when by Trio's clock."""

    at: float
    what: What
    run: int = -1
    seq: int = -1


@dataclass
class FakeModel:
    """What a `FakeEngine` plays. Given to `load` as the source.

    Attributes:
        blocks: the steps of each block, in the order in which they follow.
        dynamic: numbers of the blocks at whose end what follows is "decided by values".
        load_s: seconds that a load takes. Likewise begin_s, read_s, end_s.
        speed: seconds that a segment takes, for each estimated second of it.
        failures: what to fail with, each once: keys "load", "begin", "read", "end", or the `seq`
            of a segment, which then fails when it would have finished.
        hangs: keys, as above, that never get an answer; also "close", and a key "driver" makes the
            device stop at whatever segment it executes next.
        early: output -> (block, step) that makes it; the others are made by the last step.
        adapter: the identity of the adapter.
        engines: the engines that were made for it, in order.
    """

    blocks: tuple[tuple[StepView, ...], ...] = ((StepView("gpu", cost_s=0.005),) * 10,)
    dynamic: frozenset[int] = frozenset()
    load_s: float = 0.0
    begin_s: float = 0.0
    read_s: float = 0.0
    end_s: float = 0.0
    speed: float = 1.0
    failures: dict[str | int, BaseException] = field(default_factory=dict)
    hangs: set[str | int] = field(default_factory=set)
    early: dict[str, tuple[int, int]] = field(default_factory=dict)
    adapter: str = "fake"
    inputs: tuple[TensorInfo, ...] = (TensorInfo("x", "tensor(float)", ("n",), np.dtype(np.float32)),)
    overridable: tuple[TensorInfo, ...] = ()
    engines: list[FakeEngine] = field(default_factory=list)

    def view(self, activation: int = 0) -> BlockView | Finished:
        """The plan from one block on, as far as it is static."""
        if activation == len(self.blocks):
            return Finished()
        then = None if activation in self.dynamic else self.view(activation + 1)
        return BlockView(activation, self.blocks[activation], then)

    def expected(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """What a run outputs that executes each unit once, in order."""
        trace = 0
        early: dict[str, Array] = {}
        for activation, steps in enumerate(self.blocks):
            for index, step in enumerate(steps):
                for unit in range(step.units):
                    trace = _mix(trace, activation, index, unit)
                early |= self.made_at(activation, index, feeds, trace)
        return {**_outputs(feeds, trace), **early}

    def made_at(self, activation: int, step: int, feeds: Mapping[str, Array], trace: int) -> dict[str, Array]:
        """The outputs that a step makes early."""
        names = [name for name, place in self.early.items() if place == (activation, step)]
        return {name: _outputs(feeds, trace)[name] for name in names}


def _mix(trace: int, *numbers: int) -> int:
    for number in numbers:
        trace = (trace * 1_000_003 + number + 1) % (2**61 - 1)
    return trace


def _outputs(feeds: Mapping[str, Array], trace: int) -> dict[str, Array]:
    total = sum(float(np.sum(feed)) for feed in feeds.values())
    return {"y": np.asarray(feeds["x"], np.float64) + trace % 65536, "trace": np.array([trace, round(total)], np.int64)}


class _Run:
    """A run's frame in the engine."""

    def __init__(self, request: Begin, model: FakeModel) -> None:
        self.request = request
        self.model = model
        self.feeds = {name: np.array(feed) for name, feed in request.feeds.items() if not isinstance(feed, TensorRef)}
        self.stops = self.recalled = 0
        self.trace = 0
        self.early: dict[str, Array] = {}
        self.news: list[str] = []
        self.times: list[NodeTime] = []
        self.submitted = self.finished = self.dropped = self.most = self.on_gpu = 0


class FakeEngine:
    """A deterministic engine for tests; needs a Trio run, and all calls on its thread but `stop`.

    Args:
        adapter: ignored; the model names it.
        max_in_flight: segments that the driver has at once.
        model: what it plays where `load` gets no `FakeModel`.

    Attributes:
        log: everything that happened, in order.
    """

    def __init__(self, adapter: object = None, max_in_flight: int = 2, model: FakeModel | None = None) -> None:
        self.max_in_flight = max_in_flight
        self.model = model or FakeModel()
        self.models: dict[int, FakeModel] = {}
        self.kept: Kept[Array] = Kept()
        self.log: list[Happening] = []
        self._todo: deque[Callable[[], Awaitable[None]]] = deque()
        self._driver: deque[tuple[_Run, Segment, float, Done]] = deque()
        self._runs: dict[int, _Run] = {}
        self._changed = trio.Event()
        self._token: trio.lowlevel.TrioToken | None = None
        self._closing = False
        self._gone = False

    # --- the engine's methods -------------------------------------------------------------------

    def load(self, request: Load, done: Done, progress: Callable[[Progress], None]) -> None:
        """Play the source, where it is a `FakeModel`."""
        model = request.source if isinstance(request.source, FakeModel) else self.model
        model.engines.append(self)
        if self._token is None:
            self.model = model
            self.kept.belong(request.actor, request.generation)
            self._token = trio.lowlevel.current_trio_token()
            trio.lowlevel.spawn_system_task(self._live)
        self.models[request.model] = model

        def stopped() -> bool:
            return self._closing or request.model not in self.models

        async def work() -> None:
            for part in range(4):
                progress(Progress("compile", part, 4))
                if not await self._pass(model.load_s / 4, stopped):
                    done(Failed(RunStopped()))
                    return
            progress(Progress("compile", 4, 4))
            if await self._goes_wrong("load", done, stopped, model):
                return
            outputs = (
                TensorInfo("y", "tensor(double)", ("n",), np.dtype(np.float64)),
                TensorInfo("trace", "tensor(int64)", (2,), np.dtype(np.int64)),
            )
            metadata = ModelMetadata(producer_name="trionnx", graph_name="fake")
            done(Loaded(model.inputs, outputs, model.overridable, metadata, "fake", model.adapter, ("FakeProvider",)))

        self._later("load", work)

    def begin(self, request: Begin, done: Done) -> None:
        """Start a run."""
        run = self._runs[request.run] = _Run(request, self.models.get(request.model, self.model))

        async def work() -> None:
            stopped = self._is_stopped(run)
            self.kept.begin(request.run)
            try:
                for name, feed in request.feeds.items():
                    if isinstance(feed, TensorRef):
                        run.feeds[name] = self.kept.find(name, feed)
            except Exception as error:
                done(Failed(error))
                return
            if not await self._pass(run.model.begin_s, stopped):
                done(Failed(RunStopped()))
            elif not await self._goes_wrong("begin", done, stopped, run.model):
                done(Begun(request.run, run.model.view()))

        self._later("begin", work, request.run)

    def submit(self, segment: Segment, done: Done) -> None:
        """Hold the segment back until the driver has room; then give it to the driver, or drop it."""
        run = self._runs[segment.run]

        async def work() -> None:
            def stopped() -> bool:
                return run.stops > 0 or segment.seq < run.recalled

            most = min(self.max_in_flight, run.request.policy.max_in_flight)
            await self._until(lambda: len(self._driver) < most or stopped())
            if stopped():
                run.dropped += 1
                self._note("drop", segment.run, segment.seq)
                done(Dropped(segment.run, segment.seq))
                return
            run.submitted += 1
            self._note("driver", segment.run, segment.seq)
            self._driver.append((run, segment, self._seconds(run, segment), done))
            run.most = max(run.most, len(self._driver))
            run.on_gpu += self._kind(run, segment) == "gpu"
            self._tell()

        self._later("handed", work, segment.run, segment.seq)

    def stop(self, run: int) -> None:
        """Stop a run: from any thread, at once."""
        frame = self._runs.get(run)
        if frame is None:
            return
        frame.stops += 1
        assert self._token is not None
        self.log.append(Happening(trio.current_time() if trio.lowlevel.in_trio_run() else math.nan, "stop", run))
        self._token.run_sync_soon(self._tell)

    def recall(self, run: int, seq: int) -> None:
        """Drop what the driver has not got."""
        frame = self._runs.get(run)
        if frame is not None:
            frame.recalled = seq
            self._tell()

    def read(self, request: Read, done: Done) -> None:
        """Give outputs of a run that has executed everything, or those that are ready; or what was kept."""
        if request.tensors:
            self._read_kept(request, done)
            return
        run = self._runs[request.run]
        stopped = self._is_stopped(run, run.stops)

        async def work() -> None:
            await self._until(lambda: not self._driver)
            outputs = run.early if run.stops else {**_outputs(run.feeds, run.trace), **run.early}
            if not outputs.keys() >= set(request.names) or not await self._pass(run.model.read_s, stopped):
                done(Failed(RunStopped()))
            elif not await self._goes_wrong("read", done, stopped, run.model):
                done(Outputs(request.run, {name: self._keep(run, name, outputs[name]) for name in request.names}))

        self._later("read", work, request.run)

    def _keep(self, run: _Run, name: str, array: Array) -> Any:
        request = run.request
        if name not in request.keep:
            return array
        return self.kept.add(array, request.model, request.run, array.dtype, array.shape)

    def _read_kept(self, request: Read, done: Done) -> None:
        async def work() -> None:
            try:
                arrays = tuple(np.array(self.kept.find("", ref)) for ref in request.tensors)
            except Exception as error:
                done(Failed(error))
                return
            if await self._pass(self.model.read_s, lambda: self._closing):
                done(Outputs(request.run, tensors=arrays))
            else:
                done(Failed(RunStopped()))

        self._later("read", work, request.run)

    def free(self, request: Free, done: Done) -> None:
        """Forget arrays and models."""
        for model in request.models:
            self.models.pop(model, None)
        self._tell()

        async def work() -> None:
            self.kept.free(request.tensors)
            for model in request.models:
                self.kept.free_model(model)
            done(Freed())

        self._later("free", work)

    def end(self, run: int, done: Done, kept: tuple[TensorRef, ...] = ()) -> None:
        """Wait for what is in flight, and forget the run."""

        async def work() -> None:
            await self._until(lambda: not self._driver)
            model = self._runs[run].model if run in self._runs else self.model
            await self._pass(model.end_s, lambda: False)
            if not await self._goes_wrong("end", done, lambda: False, model):
                self.kept.end(run, kept)
                frame = self._runs.pop(run, None)
                if frame is None:
                    done(Ended(run, Counts()))
                    return
                counted = frame.on_gpu if frame.submitted == frame.finished else None
                counts = (frame.submitted, frame.finished, frame.dropped, frame.most, frame.on_gpu, counted)
                done(Ended(run, Counts(*counts), tuple(frame.times)))

        self._later("end", work, run)

    def explain(self, model: int = 0) -> tuple[Explained, ...]:
        """One line for each step."""
        steps = [step for block in self.models.get(model, self.model).blocks for step in block]
        return tuple(Explained(f"step{index}", "Fake", step.kind, "a fake") for index, step in enumerate(steps))

    def close(self, done: Done) -> None:
        """Stop everything, wait for the driver, and end."""
        self._closing = True
        for run in tuple(self._runs):
            self.stop(run)
        if self._gone or self._token is None:
            done(Closed())
            return

        async def work() -> None:
            await self._until(lambda: not self._driver)
            if not await self._goes_wrong("close", done, lambda: False):
                self._gone = True
                self._runs.clear()
                self.kept.clear()
                done(Closed())

        self._later("close", work)

    # --- what tests ask -------------------------------------------------------------------------

    def times(self, what: What, run: int | None = None) -> list[float]:
        """When something happened, of all runs or of one."""
        return [line.at for line in self.log if line.what == what and run in (None, line.run)]

    def count(self, what: What, run: int | None = None) -> int:
        """How often something happened, in all runs or in one."""
        return len(self.times(what, run))

    @property
    def at_rest(self) -> bool:
        """Whether no request is under way, nothing is with the driver and no run is known."""
        return not (self._todo or self._driver or self._runs)

    # --- the queue's thread and the device, played by one system task -------------------------

    def _later(self, what: What, work: Callable[[], Awaitable[None]], run: int = -1, seq: int = -1) -> None:
        self._note(what, run, seq)
        self._todo.append(work)
        self._tell()

    def _note(self, what: What, run: int, seq: int = -1) -> None:
        self.log.append(Happening(trio.current_time(), what, run, seq))

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _live(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._device)
            while not self._gone:
                await self._until(lambda: bool(self._todo))
                await self._todo[0]()
                self._todo.popleft()
            nursery.cancel_scope.cancel()

    async def _device(self) -> None:
        while True:
            await self._until(lambda: bool(self._driver))
            run, segment, seconds, done = self._driver[0]
            await trio.sleep(seconds)
            if "driver" in run.model.hangs or segment.seq in run.model.hangs:
                await trio.sleep_forever()
            next_block = self._execute(run, segment)
            run.finished += 1
            error = run.model.failures.pop(segment.seq, None)
            run.stops += error is not None
            self._note("finish", segment.run, segment.seq)
            self._driver.popleft()
            self._tell()
            ready = tuple(run.news)
            run.news.clear()
            if run.request.profile:
                run.times.append(NodeTime(f"segment{segment.seq}", "Fake", self._kind(run, segment), seconds))
            done(Failed(error) if error else Fenced(segment.run, segment.seq, seconds, next_block, ready))

    def _execute(self, run: _Run, segment: Segment) -> BlockView | Finished | None:
        steps, stop = run.model.blocks[segment.start.activation], segment.stop
        for index in range(segment.start.step, min(stop.step + 1, len(steps))):
            first = segment.start.unit if index == segment.start.step else 0
            last = stop.unit if index == stop.step else steps[index].units
            for unit in range(first, last):
                run.trace = _mix(run.trace, segment.start.activation, index, unit)
            if last == steps[index].units and last > 0:
                made = run.model.made_at(segment.start.activation, index, run.feeds, run.trace)
                run.early |= made
                run.news += made
        if stop.activation == len(run.model.blocks) - 1 and stop.step == len(steps):
            made = {n: a for n, a in _outputs(run.feeds, run.trace).items() if n not in run.early}
            run.early |= made
            run.news += made
        if stop.step == len(steps) and stop.activation in run.model.dynamic:
            return run.model.view(stop.activation + 1)
        return None

    def _seconds(self, run: _Run, segment: Segment) -> float:
        steps, start, stop = run.model.blocks[segment.start.activation], segment.start, segment.stop
        total = 0.0
        for index in range(start.step, min(stop.step + 1, len(steps))):
            first = start.unit if index == start.step else 0
            last = stop.unit if index == stop.step else steps[index].units
            total += steps[index].cost_s * (last - first) / steps[index].units
        return total * run.model.speed

    def _is_stopped(self, run: _Run, before: int = 0) -> Callable[[], bool]:
        return lambda: run.stops > before

    def _kind(self, run: _Run, segment: Segment) -> StepKind:
        return run.model.blocks[segment.start.activation][segment.start.step].kind

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            await self._changed.wait()

    async def _pass(self, seconds: float, stopped: Callable[[], bool]) -> bool:
        """Let time pass, or less where it is stopped; whether it was not."""
        if seconds:
            with trio.move_on_after(seconds):
                await self._until(stopped)
        return not stopped()

    async def _goes_wrong(
        self, key: str, done: Done, stopped: Callable[[], bool], model: FakeModel | None = None
    ) -> bool:
        model = model or self.model
        if key in model.hangs:
            await self._until(lambda: key not in model.hangs)
        if stopped():
            done(Failed(RunStopped()))
            return True
        error = model.failures.pop(key, None)
        if error is not None:
            done(Failed(error))
        return error is not None
