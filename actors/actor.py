"""An actor: the one Trio task that owns an engine, takes messages from a mailbox and hands replies back.

Rules of this file: it knows no policy and no blocks. It does not count what is in flight and does
not decide what is sent next. An error of one request goes to who asked; only a bug ends the task.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import trio

from ..gpu.engine import Engine
from ..gpu.errors import RunStopped, SessionInitTimeout
from ..gpu.seam import (
    Begin,
    Begun,
    BlockView,
    Done,
    Dropped,
    Ended,
    Explained,
    Failed,
    Finished,
    Free,
    Load,
    Loaded,
    Outputs,
    Progress,
    Read,
    Reply,
    Segment,
    TensorRef,
)

__all__ = ["CLOSE_BOUND_S", "Actor", "run_actor"]

CLOSE_BOUND_S = 10.0
"""How long an engine's answer to close is waited for, in seconds, before it is abandoned."""

GONE = (trio.RunFinishedError, OSError)
"""What a token raises whose Trio run is over; OSError, where it was a guest and its host's loop was simply left."""

OnReply = Callable[[Reply], None]
IsNews = Callable[[Reply], bool]
OnProgress = Callable[[str, int, int], None]
_numbers = itertools.count()
ReplyT = TypeVar("ReplyT", bound=Reply)


class _Request:
    """One message: how it is sent, who hears the reply, and how often its run had been stopped by then."""

    __slots__ = ("is_news", "on_reply", "run", "send", "stops")

    def __init__(
        self,
        send: Callable[[Engine, Done], None],
        on_reply: OnReply,
        run: int | None = None,
        stops: int = 0,
        is_news: IsNews | None = None,
    ) -> None:
        self.send, self.on_reply, self.run, self.stops, self.is_news = send, on_reply, run, stops, is_news


class Actor:
    """The handle on an actor. Made by `run_actor`; used from its Trio run, `stop_nowait` from any thread.

    Attributes:
        number: no other actor of this process has it. generation: of its engine, counted from 0.
        loaded: what the engine said of the first model.
        closed: set once the engine was given back, or abandoned.
    """

    loaded: Loaded

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.number, self.generation = next(_numbers), 0
        self._token = trio.lowlevel.current_trio_token()
        self._outbox, self._mailbox = trio.open_memory_channel[_Request](math.inf)
        self._serving = trio.CancelScope()
        self._pending: set[_Request] = set()
        self._replies: deque[tuple[_Request, Reply]] = deque()
        self._stops: dict[int, list[None]] = {}  # appending is atomic: any thread may
        self._open = True
        self._abandoned = False
        self._bug: BaseException | None = None
        self.closed = trio.Event()

    # --- what the scheduler sends ---------------------------------------------------------------

    def submit_nowait(self, segment: Segment, on_reply: OnReply, is_news: IsNews = lambda _: True) -> None:
        """Hand a segment over, past the mailbox: all that it may have to follow has been answered.

        Args:
            segment: what to execute.
            on_reply: hears Fenced, Dropped or Failed, once, on the Trio thread.
            is_news: called with the reply first, on any thread; where it says False, the reply
                does not wake the Trio thread, but comes with the next one.
        """
        request = _Request(lambda engine, done: engine.submit(segment, done), on_reply, is_news=is_news)
        self._pending.add(request)
        if not self._open:
            self._deliver(request, Failed(trio.ClosedResourceError("the session was closed")))
        elif self._stops.get(segment.run, True):
            self._deliver(request, Dropped(segment.run, segment.seq))
        else:
            self._send(request)

    async def begin(self, request: Begin) -> BlockView | Finished:
        """Start a run and give its first block.

        Raises:
            Exception: what the engine failed with; `RunStopped` where the run was stopped.

        **Cancellation:** the engine goes on with it; follow with `stop_nowait` and `end`.
        """
        self._stops[request.run] = []
        return (await self._ask(Begun, lambda engine, done: engine.begin(request, done), request.run)).block

    async def read(self, run: int, names: tuple[str, ...]) -> Mapping[str, Any]:
        """Bring outputs back: of a finished run, or those that a `Fenced` has called ready.

        Raises:
            Exception: what the engine failed with; `RunStopped` where the run was stopped.

        **Cancellation:** the reply is dropped when it comes; follow with `stop_nowait` and `end`.
        """
        request = Read(run, names)
        return (await self._ask(Outputs, lambda engine, done: engine.read(request, done), run)).values

    async def read_kept(self, run: int, tensors: tuple[TensorRef, ...]) -> tuple[Any, ...]:
        """Bring values back that the engine has kept.

        Args:
            run: a number that no run has or had.
            tensors: which.

        Raises:
            Exception: what the engine failed with.

        **Cancellation:** the engine leaves it when it can; the reply is dropped.
        """
        request = Read(run, tensors=tensors)
        self._stops[run] = []
        try:
            return (await self._ask(Outputs, lambda engine, done: engine.read(request, done), run)).tensors
        finally:
            self.stop_nowait(run)
            self._stops.pop(run, None)

    async def end(self, run: int, kept: tuple[TensorRef, ...] = ()) -> Ended:
        """Wait until nothing of the run is in flight, and forget it, and what it kept but for `kept`.

        **Cancellation:** the engine forgets the run all the same, when it can.
        """

        def send(engine: Engine, done: Done) -> None:
            if kept:
                engine.end(run, done, kept)
            else:
                engine.end(run, done)

        try:
            return await self._ask(Ended, send)
        finally:
            self._stops.pop(run, None)

    async def load(
        self, request: Load, on_progress: OnProgress | None = None, timeout_s: float = math.inf
    ) -> Loaded:
        """Load a further model.

        Raises:
            SessionInitTimeout: it took longer than `timeout_s` seconds; the load goes on, as after a cancellation.
            Exception: what the engine failed with; what `on_progress` raised.

        **Cancellation:** the load goes on; follow with `free_nowait`, which ends it.
        """
        return await self._load(request, on_progress, timeout_s)

    def free_nowait(self, request: Free, on_reply: OnReply = lambda _: None) -> None:
        """Give values and models back; `on_reply` hears when that is done, or when the actor has ended."""
        self._post(_Request(lambda engine, done: engine.free(request, done), on_reply))

    def stop_nowait(self, run: int) -> None:
        """Stop a run: one-way, at once, ahead of the mailbox. Thread-safe; no effect on a run that is over."""
        stops = self._stops.get(run)
        if stops is not None:
            stops.append(None)
            self._engine.stop(run)

    def recall_nowait(self, run: int, seq: int) -> None:
        """Take back the segments of a run below `seq` that are not submitted yet; each is answered Dropped."""
        if run in self._stops:
            self._engine.recall(run, seq)

    @property
    def device_bytes(self) -> int:
        """Bytes of buffers on the device now; 0 where the engine does not say."""
        return getattr(self._engine, "device_bytes", 0)

    def explain(self, model: int = 0) -> tuple[Explained, ...]:
        """Where each node of a model's newest plan runs."""
        return self._engine.explain(model) if model else self._engine.explain()

    def close_nowait(self, *, abandon: bool = False) -> None:
        """Let the task give the engine back, and end. `closed` tells when.

        Args:
            abandon: do not wait for the engine's answer; for an engine that hangs.
        """
        self._abandoned = self._abandoned or abandon
        self._outbox.close()

    # --- the task -------------------------------------------------------------------------------

    async def _load(self, request: Load, on_progress: OnProgress | None, timeout_s: float) -> Loaded:
        phase = ["start"]
        with trio.move_on_after(timeout_s):
            return await self._loaded(request, on_progress, phase)
        raise SessionInitTimeout(phase[0], timeout_s)

    async def _loaded(self, request: Load, on_progress: OnProgress | None, phase: list[str]) -> Loaded:
        request = replace(request, actor=self.number, generation=self.generation)
        heard: deque[Progress | Reply] = deque()
        news = trio.Event()

        def hear(item: Progress | Reply) -> None:
            heard.append(item)
            news.set()

        def progress(item: Progress) -> None:
            phase[0] = item.phase
            if on_progress is not None:
                with contextlib.suppress(*GONE):
                    self._token.run_sync_soon(hear, item)

        load = _Request(lambda engine, done: engine.load(request, done, progress), hear)
        self._pending.add(load)
        if self._open:
            self._send(load)
        else:
            self._deliver(load, Failed(trio.ClosedResourceError("the session was closed")))
        while True:
            await news.wait()
            news = trio.Event()
            while heard:
                item = heard.popleft()
                if isinstance(item, Progress):
                    assert on_progress is not None
                    on_progress(item.phase, item.done, item.total)
                else:
                    return _expect(Loaded, item)

    async def _serve(self) -> None:
        with self._serving:
            async for request in self._mailbox:
                if request.run is not None and len(self._stops.get(request.run, (None,))) != request.stops:
                    self._deliver(request, Failed(RunStopped()))
                else:
                    self._send(request)
        if self._bug is not None:
            raise self._bug

    async def _shut(self) -> None:
        self._open = False
        self._outbox.close()
        try:
            closing = trio.Event()
            request = _Request(lambda engine, done: engine.close(done), lambda reply: closing.set())
            self._pending.add(request)
            self._send(request)
            if not self._abandoned:
                with trio.move_on_after(CLOSE_BOUND_S, shield=True):
                    await closing.wait()
        finally:
            for left in tuple(self._pending):
                self._deliver(left, Failed(trio.ClosedResourceError("the session was closed")))
            self.closed.set()

    # --- messages -------------------------------------------------------------------------------

    def _post(self, request: _Request) -> None:
        self._pending.add(request)
        try:
            self._outbox.send_nowait(request)
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            self._deliver(request, Failed(trio.ClosedResourceError("the session was closed")))

    async def _ask(self, kind: type[ReplyT], send: Callable[[Engine, Done], None], run: int | None = None) -> ReplyT:
        answered = trio.Event()
        replies: list[Reply] = []

        def on_reply(reply: Reply) -> None:
            replies.append(reply)
            answered.set()

        self._post(_Request(send, on_reply, run, 0 if run is None else len(self._stops.get(run, ()))))
        await answered.wait()
        return _expect(kind, replies[0])

    def _send(self, request: _Request) -> None:
        def done(reply: Reply) -> None:
            self._replies.append((request, reply))
            if request.is_news is None or request.is_news(reply):
                with contextlib.suppress(*GONE):
                    self._token.run_sync_soon(self._hear)

        try:
            request.send(self._engine, done)
        except Exception as error:
            self._deliver(request, Failed(error))

    def _hear(self) -> None:
        while self._replies:
            self._deliver(*self._replies.popleft())

    def _deliver(self, request: _Request, reply: Reply) -> None:
        """Runs as a callback of the Trio token: an exception here would take the whole Trio run down."""
        if request not in self._pending:
            return
        self._pending.discard(request)
        try:
            request.on_reply(reply)
        except BaseException as error:
            self._bug = error
            self._serving.cancel()


def _expect(kind: type[ReplyT], reply: Reply) -> ReplyT:
    if isinstance(reply, Failed):
        raise reply.error
    if not isinstance(reply, kind):
        raise TypeError(f"the engine answered {type(reply).__name__}, not {kind.__name__}")
    return reply


async def run_actor(
    make: Callable[[], Engine],
    request: Load,
    on_progress: OnProgress | None = None,
    timeout_s: float = math.inf,
    *,
    task_status: trio.TaskStatus[Actor] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Be an actor: make the engine, load, then serve until closed. For `nursery.start`, which gives the `Actor`.

    Args:
        make: makes the engine; returns at once.
        request: what to load.
        on_progress: called with (phase, done, total) during the load, on the Trio thread; what it
            raises ends the load and is raised here.
        timeout_s: how long the load may take; past it the engine is told to close, and is not waited for:
            what it makes late it gives back by itself.
        task_status: told the handle once the session is loaded, not before.

    Raises:
        SessionInitTimeout: the load took too long.
        Exception: until `started()`, what the engine failed to load with.

    **Cancellation:** the engine is closed, shielded, for at most `CLOSE_BOUND_S` seconds.
    """
    actor = Actor(make())
    try:
        try:
            actor.loaded = await actor._load(request, on_progress, timeout_s)
        except SessionInitTimeout:
            actor._abandoned = True
            raise
        task_status.started(actor)
        await actor._serve()
    finally:
        await actor._shut()
