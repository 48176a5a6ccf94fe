"""The public handle on one model, loaded on one device: `Session`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import trio

from ..actors import Actor
from ..gpu.errors import DeviceHung
from ..gpu.policy import TerminatePolicy
from ..gpu.seam import Explained, ModelMetadata, TensorInfo
from .cut import PieceTable
from .feeds import check_feeds, check_names
from .governor import governor_of
from .home import Home
from .options import RunOptions
from .run import Deliver, Run, Share
from .statistics import Statistics
from .stream import Stream, streaming

__all__ = ["Session"]


class Session(trio.abc.AsyncResource):
    """A loaded model. Made by `Scheduler.load`; to be used in the Trio run that made it."""

    def __init__(
        self, actor: Actor, home: Home, policy: TerminatePolicy, max_in_flight: int, weight: float, aging_s: float
    ) -> None:
        self._actor = actor
        self._loaded = actor.loaded
        self._home = home
        self._max_in_flight = max_in_flight
        self._policy = self._lowered(policy)
        self._pieces = PieceTable()
        self._governor = governor_of(self._loaded.identity or f"{self._loaded.backend}: {self._loaded.adapter}")
        self._governor.aging_s = min(aging_s, self._governor.aging_s)
        self._share = Share(self._governor.new_run(), weight)
        self._lock = trio.StrictFIFOLock()
        self._runs: set[Run] = set()
        self._closed = self._hung = False
        self._statistics = Statistics()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "hung" if self._hung else "open"
        return f"<trionnx.Session {self._loaded.metadata.graph_name!r} on {self.backend}, {self.adapter}: {state}>"

    async def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: RunOptions | None = None,
    ) -> list[Any]:
        """Compute outputs from inputs. Concurrent runs of a session queue, first come, first served.

        Args:
            output_names: names of outputs, in the order wanted; None: all.
            input_feed: input name -> array of the declared dtype and shape; numbers and lists of
                numbers are converted. Not to be written to until `run` returns.
            run_options: a handle to stop this run from elsewhere, and its progress.

        Returns:
            The outputs, NumPy arrays (a list or dict where the model's output is a sequence or map). Where
            the run was terminated and its policy says "stop_submit", None for outputs that were not reached.

        Raises:
            InvalidInput: a name, dtype or shape that the model does not take; nothing was sent.
            RunTerminated: `run_options.terminate()` was called.
            trio.ClosedResourceError: the session or the scheduler is closed, or was during the run.
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
        return await self._prepare(output_names, input_feed, run_options)(None)

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
        async with streaming(self._prepare(output_names, input_feed, run_options)) as stream:
            yield stream

    def _prepare(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: RunOptions | None
    ) -> Callable[[Deliver | None], Awaitable[list[Any]]]:
        """Check what a run is given; then it must be performed, once. It can be stopped from now on."""
        self._check()
        options = RunOptions() if run_options is None else run_options
        if not isinstance(options, RunOptions):
            raise TypeError(f"run_options is a trionnx.RunOptions or None, not {type(options).__name__}")
        wanted = check_names(self._loaded.outputs, output_names)
        feeds = check_feeds(self._loaded.inputs, self._loaded.overridable, input_feed)
        policy = self._policy if options.policy is None else self._lowered(options.policy)
        pieces = partial(self._pieces.of, policy)
        run = Run(self._actor, self._governor, self._home, policy, options, pieces, self._share)
        self._runs.add(run)
        options._runs.add(run)

        async def perform(deliver: Deliver | None) -> list[Any]:
            try:
                return await run.perform(self._lock, self._check, feeds, wanted, deliver)
            finally:
                options._runs.discard(run)
                self._leave(run)
                options._times = run.ended.times

        return perform

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

    def explain(self) -> list[Explained]:
        """Where each node of the model runs and why, in the newest plan.

        Raises:
            trio.ClosedResourceError: the session is closed.
        """
        if self._closed:
            raise trio.ClosedResourceError("the session is closed")
        return list(self._actor.explain())

    def statistics(self) -> Statistics:
        """What the session has done until now."""
        return self._statistics + Statistics(queued=self._lock.statistics().tasks_waiting)

    def close(self) -> None:
        """Close without waiting: runs are stopped and raise ClosedResourceError; the rest follows by itself.

        Raises:
            RuntimeError: called from another Trio run, another thread or a forked process.
        """
        self._home.check("a session")
        self._closed = True
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
        await self._actor.closed.wait()

    def _lowered(self, policy: TerminatePolicy) -> TerminatePolicy:
        return replace(policy, max_in_flight=min(policy.max_in_flight, self._max_in_flight))

    def _check(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("the session is closed")
        if self._hung or any(run.hung for run in self._runs):
            raise DeviceHung(f"{self.adapter} did not finish an earlier run; load the model anew")

    def _leave(self, run: Run) -> None:
        self._runs.discard(run)
        self._hung = self._hung or run.hung
        counts = run.ended.counts
        self._statistics += Statistics(1, 0, counts.submitted, counts.finished, counts.dropped)
        if self._closed:
            self._give_back()

    def _give_back(self) -> None:
        if not self._runs:
            self._actor.close_nowait(abandon=self._hung)
