"""The WebGpu engine: a session on one wgpu device, behind the seam."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..errors import InvalidInput, RunStopped
from ..graph.block import Block, Result, describe
from ..graph.check import check_kernels, check_operators
from ..graph.model import Model
from ..graph.planner import Planner
from ..graph.read import read_model
from ..graph.tensor import gpu_type
from ..kept import Kept
from ..seam import (
    Begin,
    Begun,
    Closed,
    Counts,
    Done,
    Dropped,
    Ended,
    Explained,
    Failed,
    Fenced,
    Free,
    Freed,
    Load,
    Loaded,
    Outputs,
    Progress,
    Read,
    Reply,
    Segment,
    TensorRef,
)
from ..shapes import check_shapes
from .adapters import AdapterInfo, choose_adapter
from .device import Device
from .executor import Executor
from .faults import translate
from .plans import Plans, fixed_shapes
from .realise import Realised, Realiser
from .resident import Resident, brought, copied, uploaded
from .run import Run
from .thread import QueueThread

__all__ = ["WebGpuEngine"]


class WebGpuEngine:
    """Runs models on a GPU. See gpu/engine.py for the rules.

    Args:
        adapter: index or part of a name, or an `AdapterInfo`; None = the best there is.
        max_in_flight: segments on the queue at once; a run's policy may say less.
        count: have the device itself count the segments that it executes, as `Counts.counted`. Costs
            a dispatch for each.
    """

    def __init__(
        self, adapter: AdapterInfo | str | int | None = None, max_in_flight: int = 2, *, count: bool = False
    ) -> None:
        self._selector = adapter
        self._thread = QueueThread("trionnx-webgpu")
        self._most = max_in_flight
        self._count = count
        self._runs: dict[int, Run] = {}
        self._closing = False
        self._latch: Callable[[int, int], bool] | None = None
        self._device: Device | None = None
        self._executor: Executor | None = None
        self._plans = Plans()
        self._unwanted: set[int] = set()
        self._kept: Kept[Any] = Kept(self._release)

    def watch(self, drops: Callable[[int, int], bool]) -> None:
        """From now on ask this, too, just before a segment is submitted: whether it may not, by run and number."""
        self._latch = drops

    @property
    def device(self) -> Device | None:
        """The device, once there is one (tests and `doctor` look at its counters)."""
        return self._device

    @property
    def device_bytes(self) -> int:
        """Bytes of all buffers on the device now. Thread-safe, does not wait."""
        return 0 if self._device is None else self._device.bytes

    @property
    def _realiser(self) -> Realiser | None:
        return None if self._executor is None else self._executor.realiser

    # --- the seam: any thread -------------------------------------------------------------------

    def load(self, request: Load, done: Done, progress: Callable[[Progress], None]) -> None:
        """See Engine."""
        self._post(done, lambda: self._load(request, progress))

    def begin(self, request: Begin, done: Done) -> None:
        """See Engine."""
        run = self._runs[request.run] = Run(request, latch=self._latch)
        self._post(done, lambda: self._begin(run, request))

    def submit(self, segment: Segment, done: Done) -> None:
        """See Engine."""
        if not self._thread.post(lambda: self._submit(segment, done)):
            done(Failed(RunStopped()))

    def stop(self, run: int) -> None:
        """See Engine."""
        known = self._runs.get(run)
        if known is not None:
            known.stops += 1

    def recall(self, run: int, seq: int) -> None:
        """See Engine."""
        known = self._runs.get(run)
        if known is not None:
            known.recalled = seq

    def read(self, request: Read, done: Done) -> None:
        """See Engine."""
        if request.tensors:
            reading = self._runs[request.run] = Run(Begin(request.run, {}, ()))
            self._post(done, lambda: self._read_kept(reading, request))
            return
        run = self._runs.get(request.run)
        stops = 0 if run is None else run.stops
        self._post(done, lambda: self._read(request, stops))

    def end(self, run: int, done: Done, kept: tuple[TensorRef, ...] = ()) -> None:
        """See Engine."""
        if not self._thread.post(lambda: self._end(run, done, kept)):
            done(Ended(run, Counts()))

    def free(self, request: Free, done: Done) -> None:
        """See Engine."""
        self._unwanted.update(request.models)
        if not self._thread.post(lambda: self._free(request, done)):
            done(Freed())

    def explain(self, model: int = 0) -> tuple[Explained, ...]:
        """See Engine."""
        return self._plans.explained(model)

    def close(self, done: Done) -> None:
        """See Engine."""
        self._closing = True
        for run in list(self._runs.values()):
            run.stops += 1
        if not self._thread.post(lambda: self._close(done)):
            done(Closed())

    def _post(self, done: Done, job: Callable[[], Reply]) -> None:
        def answer() -> None:
            try:
                reply = job()
            except BaseException as error:
                reply = Failed(translate(error))
            done(reply)

        if not self._thread.post(answer):
            done(Failed(RunStopped()))

    # --- the queue's thread -----------------------------------------------------------------------

    def _check_load(self, model: int) -> None:
        if self._closing or model in self._unwanted:
            raise RunStopped

    def _load(self, request: Load, progress: Callable[[Progress], None]) -> Reply:
        def report(phase: str, done: int, total: int) -> None:
            progress(Progress(phase, done, total))

        check = partial(self._check_load, request.model)
        check()
        model = read_model(request.source, check=check, progress=report)
        check_shapes((*model.inputs, *model.overridable), request.input_shapes)
        check_operators(model, check)
        if not request.allow_host_steps:
            check_kernels(model, check)
        device = self._device or self._open(request, model, check, report)
        self._plans.add(request.model, Planner(model, device.target, request.allow_host_steps))
        shapes = fixed_shapes(model, request.input_shapes)
        if shapes is not None:
            report("plan", 0, 1)
            assert self._executor is not None
            self._plans.start(request.model, shapes, {}, self._executor.realiser, check, report)
        return Loaded(
            model.inputs,
            model.outputs,
            model.overridable,
            model.metadata,
            "webgpu",
            str(device.info),
            ("WebGpuExecutionProvider",),
            identity=device.info.identity,
        )

    def _open(
        self, request: Load, model: Model, check: Callable[[], None], report: Callable[[str, int, int], None]
    ) -> Device:
        selector = self._selector
        report("open", 0, 1)
        info = selector if isinstance(selector, AdapterInfo) else choose_adapter(selector)
        check()
        device = self._device = Device(info, model.graph.has_float16(), check, request.memory_limit_bytes)
        self._thread.wait_for = device.wait
        self._executor = Executor(device, self._thread, self._most, self._count)
        self._kept.belong(request.actor, request.generation)
        return device

    def _begin(self, run: Run, request: Begin) -> Reply:
        model, executor = self._plans.model(request.model), self._executor
        if model is None:
            raise RunStopped
        assert executor is not None
        if executor.counter is not None:
            run.before = executor.counter.read()
        run.check()
        feeds = {n: np.asarray(f) if isinstance(f, np.generic) else f for n, f in request.feeds.items()}
        refs = {name: feed for name, feed in feeds.items() if isinstance(feed, TensorRef)}
        check_shapes((*model.inputs, *model.overridable), {name: ref.shape for name, ref in refs.items()})
        self._kept.begin(request.run)
        feeds |= {name: self._kept.find(name, ref) for name, ref in refs.items()}
        given = {name: feed for name, feed in feeds.items() if isinstance(feed, Resident)}
        feeds = {**model.defaults, **feeds}
        for value in model.graph.inputs:
            if value.name not in feeds:
                if value.dtype is not None:
                    raise InvalidInput(value.name, "an array", "nothing")
                feeds[value.name] = None  # an optional input; the scheduler leaves out no other
        described = {v.name: describe(feeds[v.name]) for v in model.graph.inputs}
        described |= {name: (refs[name].dtype, refs[name].shape) for name in given}
        block = self._plans.start(request.model, described, given, executor.realiser, run.check, lambda *_: None)
        run.frame = {key: feeds[name] for name, key in block.inputs.items()}
        return Begun(request.run, self._enter(run, block))

    def _enter(self, run: Run, block: Block) -> Any:
        """Have a run stand at a block's start; a block without steps is passed over."""
        while True:
            run.block = block
            realised = self._realise(run, block)
            if not realised.calls:
                run.reach(block, 0)
            if realised.calls or block.decision is None:
                return realised.view(run.activation, block.decision is not None)
            block = self._next(run, block)

    def _realise(self, run: Run, block: Block) -> Realised:
        assert self._executor is not None
        return self._executor.realiser.realise(block, run.check, lambda *_: None)

    def _next(self, run: Run, block: Block) -> Block:
        assert self._executor is not None
        assert block.decision is not None
        values = [run.frame[key] for key in block.decision.keys]
        return self._plans.follow(run.request.model, block, values, self._executor.realiser, run.check)

    def _submit(self, segment: Segment, done: Done) -> None:
        run = self._runs.get(segment.run)
        if run is None or run.drops(segment.seq):
            self._drop(run, segment, done)
            return
        try:
            block, executor = run.block, self._executor
            assert block is not None
            assert executor is not None
            if block.device.kinds[segment.start.step] == "gpu":
                if not executor.submit(run, block, segment, partial(self._landed, run, segment, done)):
                    self._drop(run, segment, done)
                return
            self._thread.drain()
            if run.drops(segment.seq):
                self._drop(run, segment, done)
                return
            run.submitted += 1
            run.most_in_flight = max(run.most_in_flight, 1)
            try:
                seconds = executor.compute(run, block, segment)
            finally:
                run.finished += 1
            self._fenced(run, segment, seconds, done)
        except BaseException as error:
            run.fault = error
            done(Failed(translate(error)))

    def _drop(self, run: Run | None, segment: Segment, done: Done) -> None:
        if run is not None:
            run.dropped += 1
        done(Dropped(segment.run, segment.seq))

    def _landed(
        self, run: Run, segment: Segment, done: Done, seconds: float | None, error: BaseException | None
    ) -> None:
        try:
            if error is not None:
                raise error
            self._fenced(run, segment, seconds, done)
        except BaseException as failed:
            run.fault = failed
            done(Failed(translate(failed)))

    def _fenced(self, run: Run, segment: Segment, seconds: float | None, done: Done) -> None:
        block = run.block
        assert block is not None
        run.reach(block, segment.stop.step)
        following = None
        if block.decision is not None and run.fault is None and segment.stop.step == len(block.device.calls):
            run.activation += 1
            with contextlib.suppress(RunStopped):  # what is ready can be read all the same
                run.check()
                following = self._enter(run, self._next(run, block))
        done(Fenced(segment.run, segment.seq, seconds, following, run.announce()))

    def _read(self, request: Read, stops: int) -> Reply:
        run = self._runs.get(request.run)
        if run is None:
            raise RunStopped

        def check() -> None:
            run.check_since(stops)

        self._thread.drain()
        check()
        if not run.reached.keys() >= set(request.names):
            raise RunStopped
        executor, keep = self._executor, run.request.keep
        assert executor is not None
        try:
            return Outputs(
                request.run,
                {
                    name: (self._keep if name in keep else executor.bring)(run, *run.reached[name], check)
                    for name in request.names
                },
            )
        finally:
            if keep:
                assert self._device is not None
                self._device.wait(None)

    def _read_kept(self, reading: Run, request: Read) -> Reply:
        try:
            reading.check()
            self._thread.drain()
            assert self._device is not None
            values = [brought(self._device, self._kept.find("", ref), ref, reading.check) for ref in request.tensors]
            return Outputs(request.run, tensors=tuple(values))
        finally:
            self._runs.pop(request.run, None)

    def _keep(self, run: Run, block: Block, result: Result, check: Callable[[], None]) -> Any:
        device, executor = self._device, self._executor
        assert device is not None
        assert executor is not None
        storage = result.storage
        if storage is None or gpu_type(result.dtype) is None or 0 in result.shape:
            value = uploaded(device, executor.bring(run, block, result, check), check)
        else:
            value = copied(device, *executor.realiser.place(block, storage), storage, check)
        return self._kept.add(value, run.request.model, run.request.run, result.dtype, result.shape)

    def _release(self, value: Any) -> None:
        if isinstance(value, Resident):
            assert self._device is not None
            self._device.release(value.buffer)

    def _end(self, number: int, done: Done, kept: tuple[TensorRef, ...]) -> None:
        try:
            self._thread.drain()
            self._kept.end(number, kept)
            run = self._runs.pop(number, None)
            if run is None:
                done(Ended(number, Counts()))
                return
            counted = None
            counter = None if self._executor is None else self._executor.counter
            if counter is not None:
                counted = 0 if run.before is None else counter.read() - run.before
            done(Ended(number, run.counts(counted), tuple(run.times)))
        except BaseException as error:
            done(Failed(translate(error)))

    def _free(self, request: Free, done: Done) -> None:
        try:
            self._kept.free(request.tensors)
            for model in request.models:
                self._kept.free_model(model)
                self._plans.free(model, self._realiser)
            done(Freed())
        except BaseException as error:
            done(Failed(translate(error)))

    def _close(self, done: Done) -> None:
        try:
            if self._device is not None:
                self._thread.drain()
                self._kept.clear()
                self._plans.close(self._realiser)
                if self._executor is not None:
                    self._executor.close()
                self._device.close()
        finally:
            self._runs.clear()
            self._executor = None
            self._thread.finish()
            done(Closed())
