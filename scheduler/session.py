"""The public handle on one model, loaded on one device: `Session`."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import trio

from ..gpu.errors import DeviceHung, InvalidInput, RunStopped
from ..gpu.policy import TerminatePolicy
from ..gpu.seam import Explained, Free, Loaded, ModelMetadata, TensorInfo, TensorRef
from .batch import Batches
from .binding import IOBinding
from .cut import KEPT, PieceTable
from .feeds import check_feeds, check_names
from .home import Home
from .line import Errand, Line
from .neighbours import Neighbours
from .observer import Lane, Meter, Observer, Sink
from .options import RunOptions
from .run import Deliver, Run, Share
from .statistics import Statistics
from .stream import Stream, streaming
from .tensor import DeviceTensor

__all__ = ["Session"]

Array = np.ndarray[Any, Any]


class Session(trio.abc.AsyncResource):
    """A loaded model. Made by `Scheduler.load`; to be used in the Trio run that made it."""

    def __init__(
        self,
        neighbours: Neighbours,
        home: Home,
        policy: TerminatePolicy,
        max_in_flight: int,
        weight: float,
        aging_s: float,
        admission: bool = False,
        model: int = 0,
        loaded: Loaded | None = None,
        replicas: Sequence[Session] = (),
        sinks: tuple[Sink, ...] = (),
        meter: Meter | None = None,
    ) -> None:
        self._replicas = tuple(replicas)
        self._batches: Batches | None = None
        self._neighbours = neighbours
        self._actor = neighbours.actor
        self._model = model
        self._loaded = loaded or self._actor.loaded
        self._home = home
        self._max_in_flight = max_in_flight
        self._policy = self._lowered(policy)
        self._pieces = PieceTable()
        self._governor = neighbours.governor
        self._governor.aging_s = min(aging_s, self._governor.aging_s)
        self._share = Share(self._governor.new_run(), weight, admission)
        self._known_s: dict[tuple[tuple[str, tuple[int, ...]], ...], float] = {}
        lane = Lane(self._actor.number, self._loaded.metadata.graph_name or "model", self._loaded.adapter)
        self._observer = Observer(lane, sinks, meter or Meter())
        self._runs: set[Run] = set()
        self._tensors: dict[int, int] = {}
        self._gone: trio.Event | None = None
        self._left = trio.Event()
        self._closed = False
        self._statistics = Statistics()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "hung" if self._neighbours.hung else "open"
        return f"<trionnx.Session {self._loaded.metadata.graph_name!r} on {self.backend}, {self.adapter}: {state}>"

    async def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: RunOptions | None = None,
    ) -> list[Any]:
        """Compute outputs from inputs. Concurrent runs of a session wait for each other.

        The most urgent one is next: by priority, then by deadline, then first come, first served. Of replicas, the
        one with the fewest runs takes it. With `batch_wait_s`, runs may go together.

        Args:
            output_names: names of outputs, in the order wanted; None: all.
            input_feed: input name -> array of the declared dtype and shape, or a `DeviceTensor`; numbers and lists of
                numbers are converted. Not to be written to until `run` returns.
            run_options: a handle to stop this run from elsewhere, and its progress.

        Returns:
            The outputs, NumPy arrays (a list or dict where the model's output is a sequence or map). Where
            the run was terminated and its policy says "stop_submit", None for outputs that were not reached.

        Raises:
            InvalidInput: a name, dtype or shape that the model does not take; nothing was sent.
            RunTerminated: `run_options.terminate()` was called.
            RunRefused: with `admission`: as long as one like it took, it cannot be over by the caller's deadline.
            trio.ClosedResourceError: the session or the scheduler is closed, or was during the run; a tensor that is
                fed is closed.
            InvalidModel, UnsupportedOperator: what only the shapes of these inputs show.
            InvalidData: the values of an input break an operator's rule.
            OutOfDeviceMemory: the device has no room for this run.
            DeviceLost: the driver dropped the device.
            DeviceHung: the device did not finish a segment, of this run or an earlier one, within its
                policy's bound; the session cannot be used any more.
            TypeError: an argument is of a wrong kind.
            RuntimeError: called from another Trio run, another thread or a forked process.

        **Cancellation:** no further segment is handed over; `run` is left once those in flight have
        finished, or after a bounded time. The session can be used again at once. Once the outputs
        have been read they are returned, whatever is cancelled then.
        """
        self._home.check("a session")
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._batches is not None:
            self._least_loaded(input_feed)._check()
            wanted, feeds, options = self._checked(output_names, input_feed, run_options)
            if self._batches.fits(wanted, feeds, options):
                return await self._batches.run(wanted, feeds, options)
        return await self._alone(output_names, input_feed, run_options)

    async def _alone(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: RunOptions | None
    ) -> list[Any]:
        return await self._least_loaded(input_feed)._prepare(output_names, input_feed, run_options)(None)

    def io_binding(self) -> IOBinding:
        """What `run_with_iobinding` takes: inputs and outputs that may stay on the device."""
        return IOBinding(self)

    async def run_with_iobinding(self, iobinding: IOBinding, run_options: RunOptions | None = None) -> None:
        """Run with what is bound; `iobinding.get_outputs()` has the outputs then.

        Args:
            iobinding: of this session. Outputs that are not bound are not brought.
            run_options: as of `run`.

        Raises:
            ValueError: no output is bound, or the binding is another session's.
            trio.BusyResourceError: a tensor that is bound as an output is one of another run that is not over.
            Exception: as `run` does.

        **Cancellation:** as of `run`; tensors that are bound as outputs keep what they have.
        """
        self._home.check("a session")
        await trio.lowlevel.checkpoint_if_cancelled()
        if not isinstance(iobinding, IOBinding):
            raise TypeError(f"iobinding is what io_binding() gives, not {type(iobinding).__name__}")
        if iobinding._session is not self:
            raise ValueError("the binding is another session's")
        bound = dict(iobinding._outputs)
        if not bound:
            raise ValueError("no output is bound")
        keep = tuple(name for name, device in bound.items() if device != "cpu")
        targets = {name: tensor for name, tensor in bound.items() if isinstance(tensor, DeviceTensor)}
        writer = object()
        self._check()
        try:
            for name, tensor in targets.items():
                self._check_near(name, tensor)
                tensor._begin_write(writer, name)
            perform = self._prepare(tuple(bound), dict(iobinding._inputs), run_options, keep)
            made = dict(zip(bound, await perform(None), strict=True))
            for name, ref in made.items():
                if isinstance(ref, TensorRef):
                    made[name] = self._own(name, ref, targets.get(name))
            iobinding._made = made
        finally:
            for tensor in targets.values():
                tensor._end_write(writer)

    @asynccontextmanager
    async def stream(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: RunOptions | None = None,
    ) -> AsyncIterator[Stream]:
        """Compute outputs and have each as soon as it is there: ``async with session.stream(...) as items``.

        Args:
            output_names: names of outputs; None: all.
            input_feed: as of `run`.
            run_options: as of `run`.

        Yields:
            What ``async for name, array in items`` goes over. Leaving before its end stops the run.

        Raises:
            Exception: as `run` does; what happens during the run is raised by the ``async for``.

        **Cancellation:** as of `run`, of the block and of the ``async for`` alike.
        """
        self._home.check("a session")
        await trio.lowlevel.checkpoint_if_cancelled()
        member = self._least_loaded(input_feed)
        async with streaming(member._prepare(output_names, input_feed, run_options)) as stream:
            yield stream

    def _prepare(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: RunOptions | None,
        keep: tuple[str, ...] = (),
    ) -> Callable[[Deliver | None], Awaitable[list[Any]]]:
        """Check what a run is given; then it must be performed, once. It can be stopped from now on."""
        self._check()
        wanted, feeds, options = self._checked(output_names, input_feed, run_options)
        for name, feed in feeds.items():
            if isinstance(feed, DeviceTensor):
                self._check_near(name, feed)
        policy = self._policy if options.policy is None else self._lowered(options.policy)
        pieces = partial(self._pieces.of, policy)
        like: tuple[tuple[str, tuple[int, ...]], ...] = ()
        if self._share.admission:
            like = tuple((name, tuple(feed.shape)) for name, feed in feeds.items() if hasattr(feed, "shape"))
        governor, share = self._governor, self._share
        run = Run(
            *(self._actor, governor, self._home, policy, options, pieces, share, self._observer, self._model, keep),
            self._known_s.get(like, 0.0),
        )
        before_s = self._neighbours.before_s(run) if self._share.admission else 0.0
        self._runs.add(run)
        self._neighbours.runs.add(run)
        options._runs.add(run)

        async def perform(deliver: Deliver | None) -> list[Any]:
            try:
                made = await run.perform(self._neighbours.line, self._check, feeds, wanted, deliver, before_s)
                if self._share.admission and run.outcome == "whole":
                    self._know(like, run.spent_s)
                return made
            finally:
                options._runs.discard(run)
                self._leave(run)
                options._times = run.ended.times

        return perform

    def _checked(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: RunOptions | None
    ) -> tuple[tuple[str, ...], dict[str, Any], RunOptions]:
        options = RunOptions() if run_options is None else run_options
        if not isinstance(options, RunOptions):
            raise TypeError(f"run_options is a trionnx.RunOptions or None, not {type(options).__name__}")
        wanted = check_names(self._loaded.outputs, output_names)
        return wanted, check_feeds(self._loaded.inputs, self._loaded.overridable, input_feed), options

    def _least_loaded(self, input_feed: Mapping[str, Any]) -> Session:
        """Who is to do a run: of the replicas that can be used the one with the fewest runs.

        Tensors on a device are where this session is.
        """
        if not self._replicas:
            return self
        feeds: Any = input_feed  # not checked yet
        if isinstance(feeds, Mapping) and any(isinstance(feed, DeviceTensor) for feed in feeds.values()):
            return self
        sound = [one for one in (self, *self._replicas) if one._usable()]
        return min(sound, key=lambda one: len(one._neighbours.runs), default=self)

    def _usable(self) -> bool:
        try:
            self._check()
        except (trio.ClosedResourceError, DeviceHung):
            return False
        return True

    def _line(self, capacity: int) -> Line:
        """A line before the session's, by the same rules."""
        return Line(self._governor, capacity)

    def _know(self, like: tuple[tuple[str, tuple[int, ...]], ...], spent_s: float) -> None:
        """Remember what a run with inputs of these shapes took."""
        if len(self._known_s) >= KEPT and like not in self._known_s:
            del self._known_s[next(iter(self._known_s))]
        self._known_s[like] = spent_s

    def get_inputs(self) -> list[TensorInfo]:
        """The inputs that must be fed."""
        return list(self._loaded.inputs)

    def get_outputs(self) -> list[TensorInfo]:
        """The outputs, in the model's order."""
        return list(self._loaded.outputs)

    def get_overridable_initializers(self) -> list[TensorInfo]:
        """The inputs that may be fed and have a value where they are not."""
        return list(self._loaded.overridable)

    def get_modelmeta(self) -> ModelMetadata:
        """What the model says of itself."""
        return self._loaded.metadata

    def get_providers(self) -> list[str]:
        """What executes the model, in ONNX Runtime's spelling."""
        return list(self._loaded.providers)

    @property
    def policy(self) -> TerminatePolicy:
        """How runs are cut up and end, unless `RunOptions` say otherwise."""
        return self._policy

    def describe_policy(self) -> str:
        """What the policy means on this session's engine, in sentences; and what of it cannot be had there."""
        return self._policy.describe(self._loaded.limits)

    @property
    def backend(self) -> str:
        """The engine: "webgpu", "cpu" or the name of a registered one."""
        return self._loaded.backend

    @property
    def adapter(self) -> str:
        """What the engine computes on."""
        return self._loaded.adapter

    @property
    def adapters(self) -> tuple[str, ...]:
        """What each replica computes on, in the order in which they were loaded; of one, `adapter` alone."""
        return tuple(one.adapter for one in (self, *self._replicas))

    def explain(self) -> list[Explained]:
        """Where each node of the model runs and why, in the newest plan.

        Raises:
            trio.ClosedResourceError: the session is closed.
        """
        if self._closed:
            raise trio.ClosedResourceError("the session is closed")
        return list(self._actor.explain(self._model))

    def statistics(self) -> Statistics:
        """What the session, with its replicas, does now and has done until now."""
        return sum((replica._own_statistics() for replica in self._replicas), self._own_statistics())

    def _own_statistics(self) -> Statistics:
        return self._statistics + Statistics(
            runs=0 if self._batches is None else self._batches.runs,
            queued=sum(run.waits for run in self._runs),
            tensors=len(self._tensors),
            tensor_bytes=sum(self._tensors.values()),
            running=sum(not run.waits for run in self._runs),
            in_flight=self._observer.meter.in_flight,
            device_bytes=self._actor.device_bytes,
            busy_share=self._observer.meter.share(trio.current_time()),
        )

    def close(self) -> None:
        """Close without waiting: runs are stopped and raise ClosedResourceError; the rest follows by itself.

        Raises:
            RuntimeError: called from another Trio run, another thread or a forked process.
        """
        self._home.check("a session")
        self._closed = True
        for replica in self._replicas:
            replica.close()
        if self._batches is not None:
            self._batches.close()
        self._tensors.clear()
        for run in tuple(self._runs):
            run.close()
        self._give_back()

    async def aclose(self) -> None:
        """Close, and wait until everything is given back. No effect on a closed session.

        Raises:
            RuntimeError: called from another Trio run, another thread or a forked process.

        **Cancellation:** what is closed stays closed; only the wait ends.
        """
        self.close()
        for one in (self, *self._replicas):
            await one._left.wait()
            assert one._gone is not None
            await one._gone.wait()

    def _lowered(self, policy: TerminatePolicy) -> TerminatePolicy:
        return replace(policy, max_in_flight=min(policy.max_in_flight, self._max_in_flight))

    def _check(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("the session is closed")
        self._neighbours.check()

    def _leave(self, run: Run) -> None:
        self._runs.discard(run)
        self._neighbours.runs.discard(run)
        if run.hung:
            self._neighbours.hang(DeviceHung(f"{self.adapter} did not finish a run in time"))
        counts = run.ended.counts
        self._statistics += Statistics(
            *(1, 0, counts.submitted, counts.finished, counts.dropped),
            cancels=run.outcome in ("cancelled", "terminated", "closed"),
            failures=run.outcome == "failed",
        )
        if self._closed:
            self._give_back()

    def _give_back(self) -> None:
        if not self._runs and self._gone is None:
            self._gone = self._neighbours.leave(self._model)
            self._left.set()

    # --- values that stay on the device ---------------------------------------------------------

    def _own(self, name: str, ref: TensorRef, target: DeviceTensor | None) -> DeviceTensor:
        if not self._closed:
            self._tensors[ref.id] = math.prod(ref.shape) * ref.dtype.itemsize
        if target is None:
            return DeviceTensor(self, name, ref)
        target._take(self, ref)
        return target

    def _free(self, ref: TensorRef) -> None:
        self._tensors.pop(ref.id, None)
        self._actor.free_nowait(Free((ref,)))

    def _check_near(self, name: str, tensor: DeviceTensor) -> None:
        """Refuse a tensor that is not where this session computes."""
        tensor._current(name)
        if tensor._session._neighbours is not self._neighbours:
            there = f"one of a session apart, on {tensor.adapter}"
            raise InvalidInput(name, "a tensor of this session or of one that was loaded beside it", there)

    async def _bring(self, ref: Callable[[], TensorRef]) -> Array:
        """The array of a tensor, once the queue is free."""
        number = self._governor.new_run()
        async with self._neighbours.line.turn(Errand(number, self._share.number)):
            asked = ref()
            with trio.move_on_after(self._policy.hang_timeout_s):
                try:
                    (array,) = await self._actor.read_kept(number, (asked,))
                except RunStopped:
                    raise trio.ClosedResourceError("the session was closed during the copy") from None
                made: Array = array
                return made
            error = DeviceHung(f"{self.adapter} did not give a tensor back in time; load the model anew")
            self._neighbours.hang(error)
        raise error
