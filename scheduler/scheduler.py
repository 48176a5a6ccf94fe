"""The public way in: `open_scheduler` and the `Scheduler` that it gives."""

from __future__ import annotations

import errno
import inspect
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import trio

from ..actors import CLOSE_BOUND_S, Actor, run_actor
from ..gpu.errors import SessionInitTimeout
from ..gpu.policy import TerminatePolicy
from ..gpu.seam import Load
from . import recovery
from .arguments import adapter_of, callback_of, count_of, folder_of, policy_of, positive_of, shapes_of
from .backends import check_backend, choose, retreat
from .batch import Batches
from .exposed import expose as expose_statistics
from .home import Home
from .isolation import Isolation, isolated_factory, isolation_of, place_of, variables_of
from .neighbours import Neighbours
from .observer import Meter, Sink
from .placement import Claim, placement
from .run import BEGIN_BOUND_S
from .session import Session
from .statistics import Statistics
from .trace import Trace

__all__ = ["Scheduler", "open_scheduler"]

INIT_TIMEOUT_S = 20.0
"""How long a session may take to be made, in seconds, unless `load` says otherwise."""

EXIT_BOUND_S = 2 * BEGIN_BOUND_S + 2 * CLOSE_BOUND_S
"""Longer than what each session bounds by itself, in seconds; then what is left is abandoned."""


class Scheduler(trio.abc.AsyncResource):
    """Loads models and owns the sessions. Made by `open_scheduler`."""

    def __init__(
        self,
        nursery: trio.Nursery,
        backend: str,
        adapter: str | int | None,
        policy: TerminatePolicy,
        max_in_flight: int,
        aging_s: float,
        cache_dir: str | os.PathLike[str] | None,
        isolation: Isolation = "thread",
        batch_wait_s: float = 0.0,
        admission: bool = False,
        sinks: tuple[Sink, ...] = (),
    ) -> None:
        self._nursery = nursery
        self._batch_wait_s = batch_wait_s
        self._admission = admission
        self._aging_s = aging_s
        self._policy = policy
        self._backend = backend
        self._adapter = adapter
        self._isolation = isolation
        self._max_in_flight = max_in_flight
        self._cache_dir = cache_dir
        self._home = Home()
        self._closed = False
        self._loads: set[trio.CancelScope] = set()
        self._sessions: dict[tuple[int, int], Session] = {}
        self._changed = trio.Event()
        self._past = Statistics()
        self._sinks = sinks
        self._meter = Meter()

    async def load(
        self,
        source: Any,
        *,
        backend: str | None = None,
        adapter: str | int | None = None,
        isolation: Isolation | None = None,
        policy: TerminatePolicy | None = None,
        init_timeout_s: float = INIT_TIMEOUT_S,
        weight: float = 1.0,
        replicas: int = 1,
        beside: Session | None = None,
        input_shapes: Mapping[str, Sequence[int]] | None = None,
        allow_host_steps: bool = True,
        cpu_threads: int | None = None,
        memory_limit_bytes: int | None = None,
        on_progress: Callable[[str, int, int], None] | None = None,
    ) -> Session:
        """Load a model on a device.

        Args:
            source: a path, bytes, a file object open for reading bytes (Trio's too), or an onnx.ModelProto.
            backend: "auto", "webgpu", "cpu" or a registered name; None: the scheduler's.
            adapter: index or part of the name of an adapter; None: the scheduler's.
            isolation: "thread" or "process", see `open_scheduler`; None: the scheduler's.
            policy: how runs are cut up and end; None: the scheduler's.
            init_timeout_s: seconds that the engine may take to make the session, the wait for a queue and the
                probe of the drivers not counted. Past it nothing more is made on that back end in this process:
                later loads go to worker processes, with one thread, on a software adapter or on the CPU.
            weight: how much of the adapter's time the session is to have beside others of the same
                priority: twice the weight, twice the time.
            replicas: how often to load the model, each time with a queue of its own, behind one session: a run
                goes to the one with the fewest, and no more to one whose device hung. Adapters that are alike
                are used in turn.
            beside: a session of this scheduler to share the device and the queue with: one run at a time of both, and
                tensors that stay on the device (`Session.io_binding`) can go from one to the other. Its back end and
                adapter are taken. The load waits until the queue is free. Either can be closed by itself.
            input_shapes: input name -> shape: plan, and compile shaders, for these now and not in the first
                run. Inputs whose shapes the model fixes need not be named.
            allow_host_steps: False: an operator on floats that has no kernel is an error.
            cpu_threads: threads for back ends that compute on the CPU, at least 1; None: theirs to choose. A software
                adapter takes it in a worker process; in this one its driver's own setting holds.
            memory_limit_bytes: memory on an adapter that the session may have, at least 1; None: what there is. Not
                with `beside`, and not for the CPU.
            on_progress: called as ``on_progress(phase, done, total)`` on the Trio thread; `total`
                may be 0. What it raises ends the load and leaves it.

        Returns:
            A session; it and its memory live until it or the scheduler is closed.

        Raises:
            InvalidModel: the file cannot be read, or its graph breaks ONNX's rules.
            InvalidInput: `input_shapes` names no input of the model, or a shape that its input cannot have.
            UnsupportedOperator: an operator cannot run here.
            NoAdapter: there is nothing to run on, or not what was asked for, or its driver does not work, or
                the back end got stuck too often.
            OutOfDeviceMemory: the device has no room for the weights.
            SessionInitTimeout: it took longer than `init_timeout_s`. It is not tried again; what comes late
                is given back.
            DeviceLost: the worker process ended during the load, or could not be started.
            OSError: the file cannot be opened.
            ValueError: an unknown name of a back end or of an isolation, a back end that cannot be isolated,
                `cpu_threads`, `memory_limit_bytes` or `replicas` below 1, a `weight` or an `init_timeout_s` that is
                not positive, or a negative size in `input_shapes`; `beside` with `backend`, `adapter`, `isolation`,
                `memory_limit_bytes` or `replicas`, or of another scheduler.
            TypeError: an argument is of a wrong kind; an async `on_progress` is, too.
            trio.ClosedResourceError: the scheduler or `beside` is closed, or the scheduler was during the load.
            RuntimeError: called from another Trio run, another thread or a forked process.

        **Cancellation:** the load is stopped (between two pipelines), and waited for, shielded, for a
        bounded time; nothing is left behind.
        """
        self._home.check("a scheduler")
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check()
        adapter = adapter_of(adapter)
        policy = policy_of("policy", policy) or self._policy
        weight = positive_of("weight", weight)
        init_timeout_s = positive_of("init_timeout_s", init_timeout_s)
        apart = self._isolation if isolation is None else isolation_of(isolation)
        shapes = shapes_of(input_shapes)
        callback_of("on_progress", on_progress)
        if cpu_threads is not None:
            cpu_threads = count_of("cpu_threads", cpu_threads)
        replicas = count_of("replicas", replicas)
        if memory_limit_bytes is not None:
            memory_limit_bytes = count_of("memory_limit_bytes", memory_limit_bytes)
        if beside is not None:
            self._check_beside(beside, backend, adapter, isolation, memory_limit_bytes)
            if replicas > 1:
                raise ValueError("beside a session, a model is loaded once: give no replicas")
        sessions: list[Session] = []
        with trio.CancelScope() as scope:
            self._loads.add(scope)
            try:
                content = await _content(source)

                async def one(others: Sequence[Session] = ()) -> Session:
                    model, loaded = 0, None
                    if beside is None:
                        request = Load(
                            content, shapes, allow_host_steps, cpu_threads, memory_limit_bytes=memory_limit_bytes
                        )
                        asked = backend or self._backend, self._adapter if adapter is None else adapter
                        neighbours = await self._new_neighbours(*asked, apart, request, on_progress, init_timeout_s)
                    else:
                        beside._check()
                        neighbours = beside._neighbours
                        model = neighbours.number()
                        request = Load(content, shapes, allow_host_steps, cpu_threads, model)
                        loaded = await neighbours.load(request, on_progress, init_timeout_s)
                    session = self._sessions[neighbours.actor.number, model] = Session(
                        *(neighbours, self._home, policy, self._max_in_flight, weight),
                        *(self._aging_s, self._admission, model, loaded, others),
                        sinks=self._sinks,
                        meter=self._meter,
                    )
                    return session

                try:
                    while len(sessions) < replicas - 1:
                        sessions.append(await one())
                    sessions.append(await one(sessions[:]))
                except BaseException:
                    for session in sessions:
                        session.close()
                    raise
            finally:
                self._loads.discard(scope)
                self._forget()
        if len(sessions) < replicas or self._closed:
            for session in sessions:
                session.close()
            await trio.lowlevel.checkpoint_if_cancelled()
            raise trio.ClosedResourceError("the scheduler was closed during the load")
        made = sessions[-1]
        if self._batch_wait_s:
            made._batches = Batches(
                *(self._nursery, made._line(replicas + 1), self._batch_wait_s, self._home, made.policy),
                *(made.get_inputs(), made.get_outputs(), made._alone),
            )
        return made

    async def _new_neighbours(
        self,
        backend: str,
        adapter: str | int | None,
        isolation: Isolation,
        request: Load,
        on_progress: Callable[[str, int, int], None] | None,
        timeout_s: float,
    ) -> Neighbours:
        """Choose an adapter, and load a model there."""
        place, health = placement(), recovery.health
        choice = retreat(backend, adapter, self._cache_dir, health.stuck)
        if afresh := choice is not None:
            claim = place.claim(choice.identity)
        else:
            async with place.lock:
                choice = await choose(backend, adapter, self._cache_dir, place.sessions)
                claim = place.claim(choice.identity)
            afresh = health.stuck(choice.backend)
        fault = partial(self._fault, choice.backend)
        try:
            if afresh and await place_of(choice.backend) is not None:
                health.start(choice.backend)
                isolation, request = "process", replace(request, cpu_threads=1)
            variables = variables_of(choice.drivers, request.cpu_threads)
            factory = await isolated_factory(choice.backend, isolation, variables)

            def make() -> Any:
                return factory(adapter=choice.adapter, max_in_flight=self._max_in_flight)

            actor: Actor = await self._nursery.start(self._keep, make, request, on_progress, claim, timeout_s)
        except BaseException as error:
            claim.release()
            if isinstance(error, SessionInitTimeout):
                fault(error)
            raise
        return Neighbours(actor, self._forget, fault)

    def statistics(self) -> Statistics:
        """What all sessions together do now and have done until now, the closed ones too."""
        total = sum((session._own_statistics() for session in self._sessions.values()), self._past)
        actors = {session._actor for session in self._sessions.values()}
        device_bytes = sum(actor.device_bytes for actor in actors)
        return replace(total, device_bytes=device_bytes, busy_share=self._meter.share(trio.current_time()))

    async def aclose(self) -> None:
        """Stop and drain every session, and close them. No effect on a closed scheduler.

        Raises:
            RuntimeError: called from another Trio run, another thread or a forked process.

        **Cancellation:** what is closed stays closed; only the wait ends.
        """
        self._home.check("a scheduler")
        self._closed = True
        for scope in self._loads:
            scope.cancel()
        for session in tuple(self._sessions.values()):
            session.close()
        await trio.lowlevel.checkpoint()
        while self._loads or self._sessions:
            await self._changed.wait()

    def _look(self) -> tuple[tuple[str, ...], Statistics]:
        """The sessions, for people, and the statistics."""
        lanes = [session._observer.lane for session in self._sessions.values()]
        return tuple(f"{lane.model} on {lane.adapter}" for lane in lanes), self.statistics()

    async def _keep(
        self,
        make: Callable[[], Any],
        request: Load,
        on_progress: Callable[[str, int, int], None] | None,
        claim: Claim,
        timeout_s: float,
        *,
        task_status: trio.TaskStatus[Actor] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """An actor's supervisor: forgets its session when it has ended."""
        try:
            await run_actor(make, request, on_progress, timeout_s, task_status=task_status)
        finally:
            claim.release()
            self._forget()

    def _fault(self, backend: str, error: Exception) -> None:
        recovery.recover(recovery.Fault(error, backend))

    def _forget(self) -> None:
        for key, session in tuple(self._sessions.items()):
            if session._actor.closed.is_set() or (session._gone is not None and session._gone.is_set()):
                last = self._sessions.pop(key)._own_statistics()
                self._past += replace(last, device_bytes=0, busy_share=0.0)
        self._changed.set()
        self._changed = trio.Event()

    def _check(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("the scheduler is closed")

    def _check_beside(self, beside: Any, *taken: Any) -> None:
        if not isinstance(beside, Session):
            raise TypeError(f"beside is a session or None, not {type(beside).__name__}")
        if beside._home is not self._home:
            raise ValueError("beside is a session of another scheduler")
        if any(value is not None for value in taken):
            raise ValueError("beside a session, its back end, adapter, isolation and memory are taken: give none")
        beside._check()


@asynccontextmanager
async def open_scheduler(
    *,
    backend: str = "auto",
    adapter: str | int | None = None,
    isolation: Isolation = "thread",
    policy: TerminatePolicy | None = None,
    max_in_flight: int = 2,
    aging_s: float = 1.0,
    admission: bool = False,
    batch_wait_s: float = 0.0,
    cache_dir: str | os.PathLike[str] | None = None,
    trace: str | os.PathLike[str] | None = None,
    expose: bool | None = None,
    telemetry: bool = False,
) -> AsyncIterator[Scheduler]:
    """Open a scheduler, for ``async with``; leaving stops and drains every session.

    Args:
        backend: what sessions run on unless `load` says otherwise. "auto": what ``TRIONNX_BACKEND``
            names, else a hardware adapter, else "cpu" where onnxruntime is installed, else a software adapter.
        adapter: index or part of the name of an adapter; None: what ``TRIONNX_ADAPTER`` says, else the best.
        isolation: where engines run. "thread": in this process, with the lowest latency. "process": each session
            in a worker process of its own, so that a driver that crashes or hangs costs that session alone.
        policy: how runs are cut up and end, unless `load` or `RunOptions` say otherwise; None: as
            `TerminatePolicy` has it.
        max_in_flight: segments on an adapter's queue at once, at least 1; a policy can only lower it.
        aging_s: seconds that a run waits for a turn at most while others of a higher priority come.
        admission: whether a run is refused, with `RunRefused`, that cannot be over by its caller's deadline, as long
            as runs with inputs of its shapes take. The first of them is always admitted.
        batch_wait_s: seconds that a run waits at most for others of its session to go with: where all inputs and the
            outputs wanted have the same named dimension first, runs are put together along it. For models whose
            rows do not depend on each other. 0: runs go by themselves.
        cache_dir: the folder where it is remembered which drivers work; None: what ``TRIONNX_CACHE_DIR`` says,
            else the user's cache folder. It need not exist; where it cannot be written, nothing is remembered.
        trace: a file to be written when the scheduler is left, in whatever way, with what its runs did, in Chrome's
            JSON format. Until then it is kept in memory. Each segment then wakes Trio's thread.
        expose: let ``trionnx top`` show the statistics: they are written to a file of this user's alone, twice a
            second. None: where ``TRIONNX_EXPOSE`` is 1.
        telemetry: tell OpenTelemetry of runs: a span for each, and metrics. With the extra ``trionnx[otel]``.

    Yields:
        The scheduler.

    Raises:
        ValueError: an unknown name of a back end or of an isolation, `max_in_flight` below 1, an `aging_s`
            that is not positive, or a `batch_wait_s` below 0.
        TypeError: an argument is of a wrong kind.
        ImportError: `telemetry` without the extra.
        OSError: the trace cannot be written, or its folder is not there; likewise of what is to be exposed.
        RuntimeError: called outside Trio.

    **Cancellation:** leaving is shielded and bounded; what hangs is abandoned.
    """
    check_backend(backend, "back end")
    adapter = adapter_of(adapter)
    isolation = isolation_of(isolation)
    if not isinstance(admission, bool):
        raise TypeError(f"admission is True or False, not {admission!r}")
    policy = policy_of("policy", policy) or TerminatePolicy()
    max_in_flight = count_of("max_in_flight", max_in_flight)
    aging_s = positive_of("aging_s", aging_s)
    if batch_wait_s != 0:
        batch_wait_s = positive_of("batch_wait_s", batch_wait_s)
    folder_of("cache_dir", cache_dir)
    if not (expose is None or isinstance(expose, bool)):
        raise TypeError(f"expose is True, False or None, not {expose!r}")
    if not isinstance(telemetry, bool):
        raise TypeError(f"telemetry is True or False, not {telemetry!r}")
    tracer = None if trace is None else Trace(folder_of("trace", trace) or "")
    sinks: tuple[Sink, ...] = () if tracer is None else (Sink(tracer.note),)
    teller = _telemetry(lambda: scheduler.statistics()) if telemetry else None
    if teller is not None:
        sinks += (Sink(teller.hear, closely=False),)
    await trio.lowlevel.checkpoint()
    error: BaseException
    try:
        async with trio.open_nursery(strict_exception_groups=True) as nursery:
            scheduler = Scheduler(
                *(nursery, backend, adapter, policy, max_in_flight, aging_s, cache_dir, isolation),
                *(batch_wait_s, admission, sinks),
            )
            try:
                if os.environ.get("TRIONNX_EXPOSE") == "1" if expose is None else expose:
                    await nursery.start(expose_statistics, scheduler._look)
                yield scheduler
            finally:
                with trio.move_on_after(EXIT_BOUND_S, shield=True):
                    await scheduler.aclose()
                if teller is not None:
                    teller.measure()
                if tracer is not None:
                    with trio.CancelScope(shield=True):
                        await trio.to_thread.run_sync(tracer.write)
                nursery.cancel_scope.cancel()
        return
    except BaseExceptionGroup as group:
        others = [one for one in group.exceptions if not isinstance(one, trio.Cancelled)]
        if len(others) > 1:
            raise
        error = (others or group.exceptions)[0]
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context
        del error, context


def _telemetry(look: Callable[[], Statistics]) -> Any:
    try:
        from .telemetry import Telemetry
    except ModuleNotFoundError as error:
        raise ImportError("telemetry needs OpenTelemetry: pip install 'trionnx[otel]'") from error
    return Telemetry(look)


async def _content(source: Any) -> Any:
    """A source that an engine takes: file objects are read here, in a thread."""
    if isinstance(source, os.PathLike):
        return os.fspath(source)
    if isinstance(source, str) and not source:  # as a path it would be the working directory
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
    read = getattr(source, "read", None)
    if read is None:
        return source
    if inspect.iscoroutinefunction(read):
        content = await read()
    else:
        content = await trio.to_thread.run_sync(read, abandon_on_cancel=True)
    if not isinstance(content, bytes):
        raise TypeError(f"a model's file object gives bytes, not {type(content).__name__}; open it in mode 'rb'")
    return content
