"""The WebGpu engine: a session on one wgpu device, behind the seam."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..errors import InvalidInput, RunStopped
from ..graph.block import Block, Result, describe
from ..graph.check import check_kernels, check_operators
from ..graph.model import Model
from ..graph.planner import Planner
from ..graph.read import read_model
from ..graph.steps import Fetch, HostCall, Upload
from ..graph.tensor import as_words, from_words, gpu_type
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
from .clock import Clock, Stamps, spacing
from .counter import Counter
from .device import Device
from .faults import translate
from .realise import PassWriter, Realised, Realiser
from .resident import Resident, brought, copied, uploaded
from .run import Run, times_of
from .thread import QueueThread

__all__ = ["WebGpuEngine"]

PLANS = 8
"""Plans that are kept, one for each set of input shapes."""
STAMPED = 4
"""Every so many segments are timed by the device, once the costs of their steps are known."""


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
        self._clock: Clock | None = None
        self._counter: Counter | None = None
        self._realiser: Realiser | None = None
        self._planners: dict[int, Planner] = {}
        self._plans: OrderedDict[tuple[int, object], Block] = OrderedDict()
        self._explained: dict[int, tuple[Explained, ...]] = {}
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
        return self._explained.get(model, ())

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
        self._planners[request.model] = Planner(model, device.target, request.allow_host_steps)
        shapes = _fixed_shapes(model, request.input_shapes)
        if shapes is not None:
            report("plan", 0, 1)
            self._plan(request.model, shapes, {}, check, report)
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
        self._clock = Clock.of(device)
        if self._count:
            self._counter = Counter(device)
        self._realiser = Realiser(device)
        self._kept.belong(request.actor, request.generation)
        return device

    def _plan(
        self,
        model: int,
        feeds: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
        given: Mapping[str, Resident],
        check: Callable[[], None],
        report: Callable[[str, int, int], None],
    ) -> Block:
        planner, realiser = self._planners[model], self._realiser
        assert realiser is not None
        lying = {name: resident.storage for name, resident in given.items()}
        shapes = tuple((name, dtype.str, shape) for name, (dtype, shape) in feeds.items())
        key = model, (shapes, tuple((name, s.nbytes, s.half) for name, s in lying.items()))
        block = self._plans.get(key)
        if block is None:
            block = planner.start(feeds, check, lying)
            self._explained[model] = planner.explained
        realiser.given = {storage: given[name].buffer for name, storage in block.given.items()}
        realiser.realise(block, check, report)
        self._plans[key] = block
        self._plans.move_to_end(key)
        for old in [key for key in self._plans if key[0] == model][:-PLANS]:
            realiser.forget(self._plans.pop(old))
        return block

    def _begin(self, run: Run, request: Begin) -> Reply:
        planner = self._planners.get(request.model)
        if planner is None:
            raise RunStopped
        model = planner.model
        if self._counter is not None:
            run.before = self._counter.read()
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
        block = self._plan(request.model, described, given, run.check, lambda *_: None)
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
        assert self._realiser is not None
        return self._realiser.realise(block, run.check, lambda *_: None)

    def _next(self, run: Run, block: Block) -> Block:
        planner, realiser = self._planners[run.request.model], self._realiser
        assert realiser is not None
        assert block.decision is not None
        following = planner.resume(block, [run.frame[key] for key in block.decision.keys], run.check)
        self._explained[run.request.model] = planner.explained
        known = block.home.following
        while len(known) > PLANS:
            realiser.forget(known.popitem(last=False)[1])
        return following

    def _submit(self, segment: Segment, done: Done) -> None:
        run = self._runs.get(segment.run)
        if run is None or run.drops(segment.seq):
            if run is not None:
                run.dropped += 1
            done(Dropped(segment.run, segment.seq))
            return
        try:
            assert run.block is not None
            realised: Realised = run.block.device
            if realised.kinds[segment.start.step] == "gpu":
                self._submit_gpu(run, run.block, segment, done)
            else:
                self._thread.drain()
                if run.drops(segment.seq):
                    run.dropped += 1
                    done(Dropped(segment.run, segment.seq))
                    return
                run.submitted += 1
                run.most_in_flight = max(run.most_in_flight, 1)
                try:
                    seconds = self._run_host(run, run.block, segment)
                finally:
                    run.finished += 1
                self._fenced(run, segment, seconds, done)
        except BaseException as error:
            run.fault = error
            done(Failed(translate(error)))

    def _submit_gpu(self, run: Run, block: Block, segment: Segment, done: Done) -> None:
        device, thread, realised = self._device, self._thread, block.device
        assert device is not None
        closely = run.request.profile or realised.unlearned(segment)
        stamps = None
        if self._clock is not None and (
            closely or realised.unsure(segment) or (segment.run + segment.seq) % STAMPED == 0
        ):
            stamps = self._clock.take()
        encoder = device.encoder()
        watch = None if realised.flags is None else realised.flags.watch(encoder, segment)
        writer = PassWriter(device, encoder)
        marks = self._encode(realised, segment, writer, stamps, closely)
        if self._counter is not None:
            self._counter.bump(writer)
        writer.end()
        if stamps is not None:
            stamps.resolve(encoder)
        if watch is not None:
            watch.bring(encoder)
        in_flight = thread.make_room(min(self._most, run.request.policy.max_in_flight))
        if run.drops(segment.seq):
            if watch is not None:
                watch.drop()
            device.drop(encoder)
            if stamps is not None:
                stamps.drop()
            run.dropped += 1
            done(Dropped(segment.run, segment.seq))
            return
        commands = device.finish(encoder)
        started = time.perf_counter()
        submission = device.submit(commands)
        run.submitted += 1
        run.on_gpu += 1
        run.most_in_flight = max(run.most_in_flight, in_flight)
        unasked: BaseException | None = None
        try:
            for asking in (stamps, watch):
                if asking is not None:
                    asking.ask()
        except BaseException as error:
            unasked = error

        def fenced(elapsed: float, error: BaseException | None) -> None:
            try:
                if error is not None or unasked is not None:
                    raise error or unasked  # type: ignore[misc]
                run.finished += 1
                seconds = [] if stamps is None else stamps.read()
                if seconds:
                    realised.learn(segment, marks, seconds)
                elif self._clock is None:
                    realised.learn(segment, (marks[0], marks[-1]), [elapsed])
                if run.request.profile:
                    told = (marks, seconds) if seconds else ((marks[0], marks[-1]), [elapsed])
                    run.times += times_of(block, segment, *told)
                if watch is not None:
                    watch.check()
                self._fenced(run, segment, sum(seconds) if seconds else None, done)
            except BaseException as error:
                run.fault = error
                done(Failed(translate(error)))

        thread.launched(submission, started, fenced)

    def _encode(
        self, realised: Realised, segment: Segment, writer: PassWriter, stamps: Stamps | None, closely: bool
    ) -> list[int]:
        """Write a segment's commands, and the time at its ends, or between its steps; where that was."""
        start, stop = segment.start, segment.stop
        first, last = start.step, stop.step + (stop.unit > 0)
        every = spacing(last - first) if closely and stamps is not None else last - first
        marks = [first]
        if stamps is not None:
            writer.mark(stamps)
        for index in range(first, last):
            call = realised.calls[index]
            if len(call) == 3:
                begin = start.unit if index == first else 0
                end = stop.unit if index == stop.step else call[2]
                writer.dispatch(call[0], call[1], begin, end)
            else:
                writer.copy(*call)
            if index + 1 == last or (index + 1 - first) % every == 0:
                marks.append(index + 1)
                if stamps is not None:
                    writer.mark(stamps)
        return marks

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

    def _run_host(self, run: Run, block: Block, segment: Segment) -> float:
        """Execute steps on the CPU; the seconds that they took."""
        device, realiser, realised = self._device, self._realiser, block.device
        assert device is not None
        assert realiser is not None
        marks, seconds = [segment.start.step], []
        before = time.perf_counter()
        for index in range(segment.start.step, segment.stop.step):
            step = block.steps[index]
            run.check()
            if isinstance(step, Upload):
                words = as_words(run.frame[step.key], step.target.half)
                device.write(*realiser.place(block, step.target), words, run.check)
            elif isinstance(step, Fetch):
                source, count = step.source, int(np.prod(step.shape))
                data = device.read(*realiser.place(block, source), count * source.each, run.check)
                run.frame[step.key] = from_words(data, step.dtype, step.shape, source.half)
            else:
                assert isinstance(step, HostCall)
                arrays = [
                    step.fixed[n] if n in step.fixed else None if key is None else run.frame[key]
                    for n, key in enumerate(step.inputs)
                ]
                for key, array in zip(step.outputs, step.call(arrays, run.check), strict=False):
                    if key is not None:
                        run.frame[key] = array
            now = time.perf_counter()
            marks.append(index + 1)
            seconds.append(now - before)
            before = now
        realised.learn(segment, marks, seconds)
        if run.request.profile:
            run.times += times_of(block, segment, marks, seconds)
        return sum(seconds)

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
        keep = run.request.keep
        try:
            return Outputs(
                request.run,
                {
                    name: (self._keep if name in keep else self._bring)(run, *run.reached[name], check)
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
        device, realiser = self._device, self._realiser
        assert device is not None
        assert realiser is not None
        storage = result.storage
        if storage is None or gpu_type(result.dtype) is None or 0 in result.shape:
            value = uploaded(device, self._bring(run, block, result, check), check)
        else:
            value = copied(device, *realiser.place(block, storage), storage, check)
        return self._kept.add(value, run.request.model, run.request.run, result.dtype, result.shape)

    def _release(self, value: Any) -> None:
        if isinstance(value, Resident):
            assert self._device is not None
            self._device.release(value.buffer)

    def _bring(self, run: Run, block: Block, result: Result, check: Callable[[], None]) -> Any:
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
        source = result.storage
        data = device.read(*realiser.place(block, source), int(np.prod(result.shape)) * source.each, check)
        return from_words(data, result.dtype, result.shape, source.half)

    def _end(self, number: int, done: Done, kept: tuple[TensorRef, ...]) -> None:
        try:
            self._thread.drain()
            self._kept.end(number, kept)
            run = self._runs.pop(number, None)
            if run is None:
                done(Ended(number, Counts()))
                return
            counted = None
            if self._counter is not None:
                counted = 0 if run.before is None else self._counter.read() - run.before
            done(Ended(number, run.counts(counted), tuple(run.times)))
        except BaseException as error:
            done(Failed(translate(error)))

    def _free(self, request: Free, done: Done) -> None:
        try:
            self._kept.free(request.tensors)
            for model in request.models:
                self._kept.free_model(model)
                for key in [key for key in self._plans if key[0] == model]:
                    assert self._realiser is not None
                    self._realiser.forget(self._plans.pop(key))
                self._planners.pop(model, None)
                self._explained.pop(model, None)
            done(Freed())
        except BaseException as error:
            done(Failed(translate(error)))

    def _close(self, done: Done) -> None:
        try:
            if self._device is not None:
                self._thread.drain()
                self._kept.clear()
                if self._realiser is not None:
                    for block in self._plans.values():
                        self._realiser.forget(block)
                    self._plans.clear()
                    self._realiser.close()
                if self._clock is not None:
                    self._clock.close()
                if self._counter is not None:
                    self._counter.close()
                # Whoever drops the last object of a device destroys it: that must be who holds the driver's lock.
                self._clock = self._counter = None
                self._device.close()
        finally:
            self._runs.clear()
            self._planners.clear()
            self._realiser = None
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
