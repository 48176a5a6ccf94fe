"""One call of a session: the loop that submits, and how it ends.

Runs in the caller's task. It alone advances the program counter, and it alone asks the caller's
cancel scopes. It does not know what an engine is, nor how turns are shared out.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

import trio

from ..actors import Actor
from ..gpu.errors import RunStopped, RunTerminated
from ..gpu.seam import BlockView, Counts, Cursor, Dropped, Failed, Fenced, Finished, Reply, Segment
from . import cut
from .feeds import is_slow, pack
from .governor import Governor
from .home import Home

__all__ = ["BEGIN_BOUND_S", "DRAIN_FACTOR", "DRAIN_FLOOR_S", "Run"]

DRAIN_FLOOR_S = 2.0
"""What is in flight is waited for at least so many seconds."""
DRAIN_FACTOR = 8.0
"""And at least so many times its estimated seconds."""
BEGIN_BOUND_S = 60.0
"""The same while the run has not begun: a pipeline that is being compiled cannot be interrupted."""

Reason = Literal["terminated", "closed", "read", "failed"]


class Run:
    """A run, from the wait for its session to the end of its drain.

    Attributes:
        scope: the run's own cancel scope, which `terminate` and `close` cancel.
        counts: what became of its segments, once it has ended.
        hung: whether the drain's bound passed.
    """

    def __init__(
        self,
        actor: Actor,
        governor: Governor,
        home: Home,
        *,
        max_in_flight: int,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._actor = actor
        self._governor = governor
        self._home = home
        self._limit = max_in_flight + 1
        self._on_progress = on_progress
        self._number = governor.new_run()
        # What came first; setdefault is atomic, so that any thread may try.
        self._first: dict[None, Reason] = {}
        self._place: tuple[BlockView, Cursor] | Finished | None = None
        self._replies: deque[Reply] = deque()
        self._sleeper: trio.lowlevel.Task | None = None
        self._flying: dict[int, float] = {}
        self._begun = False
        self._seq = self._done = self._total = 0
        self.scope = trio.CancelScope()
        self.counts = Counts()
        self.hung = False

    # --- stopping -------------------------------------------------------------------------------

    def terminate(self) -> bool:
        """Stop the run, from any thread; whether this is what stops it."""
        if not self._comes_first("terminated"):
            return False
        self._actor.stop_nowait(self._number)
        if self._home.here():
            self.scope.cancel()
        else:
            with contextlib.suppress(trio.RunFinishedError):
                self._home.token.run_sync_soon(self.scope.cancel)
        return True

    def close(self) -> None:
        """Stop the run because its session is being closed; on the Trio thread."""
        if self._comes_first("closed"):
            self._actor.stop_nowait(self._number)
            self.scope.cancel()

    def _comes_first(self, reason: Reason) -> bool:
        return None not in self._first and self._first.setdefault(None, reason) is reason

    # --- running --------------------------------------------------------------------------------

    async def perform(
        self,
        lock: trio.StrictFIFOLock,
        check: Callable[[], None],
        feeds: Mapping[str, Any],
        wanted: tuple[str, ...],
    ) -> list[Any]:
        """Wait for the session, run, drain.

        Args:
            lock: held by the session's run of the moment.
            check: raises where the session became unusable during the wait.
            feeds: arrays by name.
            wanted: names of outputs.

        Returns:
            The outputs, in the order wanted.

        Raises:
            RunTerminated: `terminate` came first.
            trio.ClosedResourceError: `close` came first.
            Exception: what the engine or `on_progress` failed with, where that came first.

        **Cancellation:** hands no further segment over, waits, shielded and bounded, for those in
        flight. Outranks every other outcome until the outputs have been read.
        """
        outputs: Mapping[str, Any] | None = None
        error: Exception | None = None
        try:
            with self.scope:
                if is_slow(feeds):
                    feeds = await trio.to_thread.run_sync(pack, feeds, abandon_on_cancel=True)
                async with lock:
                    check()
                    outputs = await self._stream(feeds, wanted)
        except Exception as caught:
            error = caught
        if outputs is not None:
            return [outputs[name] for name in wanted]
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            reason = self._first.get(None)
            if reason == "terminated":
                done = max(self._done, self.counts.finished)
                raise RunTerminated(done, max(self._total, self._seq), not self.hung)
            if reason == "closed":
                raise trio.ClosedResourceError("the session was closed during the run")
            assert error is not None
            raise error
        finally:
            del error

    async def _stream(self, feeds: Mapping[str, Any], wanted: tuple[str, ...]) -> Mapping[str, Any] | None:
        outputs: Mapping[str, Any] | None = None
        try:
            self._enter(await self._actor.begin(self._number, pack(feeds), wanted))
            self._begun = True
            while await self._room_and_next():
                await self._turn()
                if trio.current_effective_deadline() <= trio.current_time():
                    await trio.lowlevel.checkpoint()
                await trio.lowlevel.checkpoint_if_cancelled()
                self._hand_over()
            read = await self._actor.read(self._number, wanted)
            if self._comes_first("read"):
                outputs = read
        except Exception:
            self._comes_first("failed")
            raise
        finally:
            self._actor.stop_nowait(self._number)
            self._governor.leave(self._number, len(self._flying))
            await self._drain()
        return outputs

    async def _drain(self) -> None:
        with trio.move_on_after(self._drain_bound(), shield=True) as bound, contextlib.suppress(Exception):
            self.counts = await self._actor.end(self._number)
        self.hung = bound.cancelled_caught
        self._governor.leave(self._number, 0)

    def _drain_bound(self) -> float:
        if not self._begun:
            return BEGIN_BOUND_S
        return max(DRAIN_FLOOR_S, DRAIN_FACTOR * sum(self._flying.values()))

    def _enter(self, then: BlockView | Finished | None) -> None:
        self._place = (then, Cursor(then.activation)) if isinstance(then, BlockView) else then
        self._total = self._seq + cut.count_segments(then)

    async def _room_and_next(self) -> bool:
        """Take replies in; True: a segment may be cut now, False: every segment has finished."""
        while True:
            self._take_replies()
            if isinstance(self._place, tuple) and len(self._flying) < self._limit:
                return True
            if isinstance(self._place, Finished) and not self._flying:
                return False
            if self._place is None and not self._flying:
                raise RuntimeError("the engine decided nothing at the end of a block")
            await self._sleep()

    async def _turn(self) -> None:
        granted = False

        def grant() -> None:
            nonlocal granted
            granted = True
            self._wake()

        self._governor.ask(self._number, self._limit, grant)
        while not granted:
            await self._sleep()
            self._take_replies()

    async def _sleep(self) -> None:
        """Wait for `_wake`. A cancel stops what is held back in the instant in which it is made."""
        self._sleeper = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._sleeper = None
            self._actor.stop_nowait(self._number)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def _wake(self) -> None:
        if self._sleeper is not None:
            trio.lowlevel.reschedule(self._sleeper)
            self._sleeper = None

    def _take_replies(self) -> None:
        while self._replies:
            reply = self._replies.popleft()
            if isinstance(reply, Failed):
                raise reply.error
            if isinstance(reply, Dropped):
                raise RunStopped
            assert isinstance(reply, Fenced)
            if reply.next is not None and self._place is None:
                self._enter(reply.next)
            self._done += 1
            if self._on_progress is not None:
                self._on_progress(self._done, self._total)

    def _hand_over(self) -> None:
        """Cut and send the next segment. Not async: nothing may come between the checkpoint and this."""
        if None in self._first:
            raise RunStopped
        assert isinstance(self._place, tuple)
        block, start = self._place
        stop = cut.cut(block, start)
        segment = Segment(self._number, self._seq, start, stop)
        self._seq += 1
        self._flying[segment.seq] = cut.cost(block, start, stop)
        self._place = cut.advance(block, stop)

        def on_reply(reply: Reply) -> None:
            del self._flying[segment.seq]
            self._governor.returned(self._number)
            self._replies.append(reply)
            self._wake()

        self._actor.submit_nowait(segment, on_reply)
