"""The WebGpu engine: a session on one wgpu device, behind the seam."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import InvalidInput, RunStopped
from ..graph.check import check_kernels, check_operators
from ..graph.model import Model
from ..graph.planner import Block, Planner, Result, describe
from ..graph.read import read_model
from ..graph.steps import Fetch, HostCall, Upload
from ..graph.tensor import as_words, from_words
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
    Load,
    Loaded,
    Outputs,
    Progress,
    Read,
    Reply,
    Segment,
)
from ..shapes import check_shapes
from .adapters import AdapterInfo, choose_adapter
from .device import Device
from .faults import translate
from .realise import PassWriter, Realised, Realiser
from .run import Run
from .thread import QueueThread

__all__ = ["WebGpuEngine"]

PLANS = 8
"""Plans that are kept, one for each set of input shapes."""


class WebGpuEngine:
    """Runs models on a GPU. See gpu/engine.py for the rules.

    Args:
        adapter: index or part of a name, or an `AdapterInfo`; None = the best there is.
        max_in_flight: segments on the queue at once.
    """

    def __init__(self, adapter: AdapterInfo | str | int | None = None, max_in_flight: int = 2) -> None:
        self._selector = adapter
        self._thread = QueueThread("trionnx-webgpu", max_in_flight)
        self._runs: dict[int, Run] = {}
        self._closing = False
        self._device: Device | None = None
        self._realiser: Realiser | None = None
        self._model: Model | None = None
        self._planner: Planner | None = None
        self._plans: OrderedDict[object, Block] = OrderedDict()
        self._explained: tuple[Explained, ...] = ()

    @property
    def device(self) -> Device | None:
        """The device, once there is one (tests and `doctor` look at its counters)."""
        return self._device

    # --- the seam: any thread -------------------------------------------------------------------

    def load(self, request: Load, done: Done, progress: Callable[[Progress], None]) -> None:
        """See Engine."""
        self._post(done, lambda: self._load(request, progress))

    def begin(self, request: Begin, done: Done) -> None:
        """See Engine."""
        run = self._runs[request.run] = Run(request.run)
        self._post(done, lambda: self._begin(run, request))

    def submit(self, segment: Segment, done: Done) -> None:
        """See Engine."""
        if not self._thread.post(lambda: self._submit(segment, done)):
            done(Failed(RunStopped()))

    def stop(self, run: int) -> None:
        """See Engine."""
        known = self._runs.get(run)
        if known is not None:
            known.stopped = True

    def read(self, request: Read, done: Done) -> None:
        """See Engine."""
        self._post(done, lambda: self._read(request))

    def end(self, run: int, done: Done) -> None:
        """See Engine."""
        if not self._thread.post(lambda: self._end(run, done)):
            done(Ended(run, Counts()))

    def explain(self) -> tuple[Explained, ...]:
        """See Engine."""
        return self._explained

    def close(self, done: Done) -> None:
        """See Engine."""
        self._closing = True
        for run in list(self._runs.values()):
            run.stopped = True
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

    def _check_load(self) -> None:
        if self._closing:
            raise RunStopped

    def _load(self, request: Load, progress: Callable[[Progress], None]) -> Reply:
        def report(phase: str, done: int, total: int) -> None:
            progress(Progress(phase, done, total))

        check = self._check_load
        check()
        model = read_model(request.source, check=check, progress=report)
        check_shapes((*model.inputs, *model.overridable), request.input_shapes)
        check_operators(model, check)
        if not request.allow_host_steps:
            check_kernels(model, check)
        selector = self._selector
        info = selector if isinstance(selector, AdapterInfo) else choose_adapter(selector)
        check()
        device = self._device = Device(info)
        self._thread.wait_for = device.wait
        self._realiser = Realiser(device)
        self._model = model
        self._planner = Planner(model, device.target, request.allow_host_steps)
        shapes = _fixed_shapes(model, request.input_shapes)
        if shapes is not None:
            report("plan", 0, 1)
            self._plan(shapes, check, report)
        return Loaded(
            model.inputs,
            model.outputs,
            model.overridable,
            model.metadata,
            "webgpu",
            str(info),
            ("WebGpuExecutionProvider",),
        )

    def _plan(
        self,
        feeds: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
        check: Callable[[], None],
        report: Callable[[str, int, int], None],
    ) -> Block:
        planner, realiser = self._planner, self._realiser
        assert planner is not None
        assert realiser is not None
        key = tuple((name, dtype.str, shape) for name, (dtype, shape) in feeds.items())
        block = self._plans.get(key)
        if block is None:
            block = planner.start(feeds, check)
            self._explained = planner.explained
        realiser.realise(block, check, report)
        self._plans[key] = block
        self._plans.move_to_end(key)
        while len(self._plans) > PLANS:
            realiser.forget(self._plans.popitem(last=False)[1])
        return block

    def _begin(self, run: Run, request: Begin) -> Reply:
        model = self._model
        assert model is not None
        run.check()
        feeds = {n: np.asarray(f) if isinstance(f, np.generic) else f for n, f in request.feeds.items()}
        feeds = {**model.defaults, **feeds}
        for value in model.graph.inputs:
            if value.name not in feeds:
                if value.dtype is not None:
                    raise InvalidInput(value.name, "an array", "nothing")
                feeds[value.name] = None  # an optional input; the scheduler leaves out no other
        described = {v.name: describe(feeds[v.name]) for v in model.graph.inputs}
        block = self._plan(described, run.check, lambda *_: None)
        run.frame = {key: feeds[name] for name, key in block.inputs.items()}
        return Begun(run.number, self._enter(run, block))

    def _enter(self, run: Run, block: Block) -> Any:
        """Have a run stand at a block's start; a block without steps is passed over."""
        while True:
            run.block = block
            realised = self._realise(run, block)
            if realised.calls or block.decision is None:
                return realised.view(run.activation, block.decision is not None)
            block = self._next(run, block)

    def _realise(self, run: Run, block: Block) -> Realised:
        assert self._realiser is not None
        return self._realiser.realise(block, run.check, lambda *_: None)

    def _next(self, run: Run, block: Block) -> Block:
        planner, realiser = self._planner, self._realiser
        assert planner is not None
        assert realiser is not None
        assert block.decision is not None
        following = planner.resume(block, [run.frame[key] for key in block.decision.keys], run.check)
        self._explained = planner.explained
        known = block.home.following
        while len(known) > PLANS:
            realiser.forget(known.popitem(last=False)[1])
        return following

    def _submit(self, segment: Segment, done: Done) -> None:
        run = self._runs.get(segment.run)
        if run is None or run.halted():
            if run is not None:
                run.dropped += 1
            done(Dropped(segment.run, segment.seq))
            return
        try:
            assert run.block is not None
            realised: Realised = run.block.device
            if realised.kinds[segment.start.step] == "gpu":
                self._submit_gpu(run, realised, segment, done)
            else:
                self._thread.drain()
                if run.halted():
                    run.dropped += 1
                    done(Dropped(segment.run, segment.seq))
                    return
                run.submitted += 1
                self._run_host(run, run.block, segment)
                self._fenced(run, segment, None, done)
        except BaseException as error:
            run.fault = error
            done(Failed(translate(error)))

    def _submit_gpu(self, run: Run, realised: Realised, segment: Segment, done: Done) -> None:
        device, thread = self._device, self._thread
        assert device is not None
        encoder = device.encoder()
        watch = None if realised.flags is None else realised.flags.watch(encoder, segment)
        writer = PassWriter(device, encoder)
        stop = segment.stop
        for index in range(segment.start.step, stop.step + (stop.unit > 0)):
            call = realised.calls[index]
            if len(call) == 3:
                first = segment.start.unit if index == segment.start.step else 0
                last = stop.unit if index == stop.step else call[2]
                writer.dispatch(call[0], call[1], first, last)
            else:
                writer.copy(*call)
        writer.end()
        if watch is not None:
            watch.bring(encoder)
        commands = device.finish(encoder)
        thread.make_room()
        if run.halted():
            if watch is not None:
                watch.drop()
            device.drop(commands)
            run.dropped += 1
            done(Dropped(segment.run, segment.seq))
            return
        started = time.perf_counter()
        submission = device.submit(commands)
        run.submitted += 1

        def fenced(seconds: float) -> None:
            run.finished += 1
            realised.learn(segment, seconds)
            try:
                if watch is not None:
                    watch.check(submission)
                self._fenced(run, segment, seconds, done)
            except BaseException as error:
                run.fault = error
                done(Failed(translate(error)))

        thread.launched(submission, started, fenced)

    def _fenced(self, run: Run, segment: Segment, seconds: float | None, done: Done) -> None:
        block = run.block
        assert block is not None
        if seconds is None:
            run.finished += 1
        following = None
        if block.decision is not None and run.fault is None and segment.stop.step == len(block.device.calls):
            run.activation += 1
            following = self._enter(run, self._next(run, block))
        done(Fenced(segment.run, segment.seq, seconds, following))

    def _run_host(self, run: Run, block: Block, segment: Segment) -> None:
        device, realiser = self._device, self._realiser
        assert device is not None
        assert realiser is not None
        for step in block.steps[segment.start.step : segment.stop.step]:
            run.check()
            if isinstance(step, Upload):
                device.write(realiser.buffer(block, step.target), 0, as_words(run.frame[step.key]), run.check)
            elif isinstance(step, Fetch):
                data = device.read(realiser.buffer(block, step.source), int(np.prod(step.shape)) * 4, run.check)
                run.frame[step.key] = from_words(data, step.dtype, step.shape)
            else:
                assert isinstance(step, HostCall)
                arrays = [
                    step.fixed[n] if n in step.fixed else None if key is None else run.frame[key]
                    for n, key in enumerate(step.inputs)
                ]
                for key, array in zip(step.outputs, step.call(arrays), strict=False):
                    if key is not None:
                        run.frame[key] = array

    def _read(self, request: Read) -> Reply:
        run = self._runs.get(request.run)
        if run is None:
            raise RunStopped
        self._thread.drain()
        run.check()
        block = run.block
        assert block is not None
        assert block.results is not None
        values = {name: self._bring(run, block, block.results[name]) for name in request.names}
        return Outputs(request.run, values)

    def _bring(self, run: Run, block: Block, result: Result) -> Any:
        device, realiser = self._device, self._realiser
        assert device is not None
        assert realiser is not None
        if result.value is not None:
            return result.value.copy()
        if result.key is not None:
            value = run.frame[result.key]
            return np.array(value) if isinstance(value, np.ndarray | np.generic) else value
        assert result.storage is not None
        if 0 in result.shape:
            return np.empty(result.shape, result.dtype)
        data = device.read(realiser.buffer(block, result.storage), int(np.prod(result.shape)) * 4, run.check)
        return from_words(data, result.dtype, result.shape)

    def _end(self, number: int, done: Done) -> None:
        try:
            self._thread.drain()
            run = self._runs.pop(number, None)
            done(Ended(number, Counts() if run is None else run.counts()))
        except BaseException as error:
            done(Failed(translate(error)))

    def _close(self, done: Done) -> None:
        try:
            if self._device is not None:
                self._thread.drain()
                assert self._realiser is not None
                for block in self._plans.values():
                    self._realiser.forget(block)
                self._plans.clear()
                self._realiser.close()
                self._device.close()
        finally:
            self._runs.clear()
            self._model = self._planner = self._realiser = None
            self._thread.finish()
            done(Closed())


def _fixed_shapes(
    model: Model, given: Mapping[str, tuple[int, ...]] | None
) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]] | None:
    """Every input's dtype and shape, where the model or the caller fixes them all."""
    shapes: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
    for info in (*model.inputs, *model.overridable):
        default = model.defaults.get(info.name)
        shape: Sequence[Any] | None = (given or {}).get(info.name) or (
            default.shape if default is not None else info.shape
        )
        if info.dtype is None or shape is None or not all(isinstance(d, int) for d in shape):
            return None
        shapes[info.name] = (info.dtype, tuple(int(d) for d in shape))
    return {value.name: shapes[value.name] for value in model.graph.inputs}
