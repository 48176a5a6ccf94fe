"""One call of a session: the loop that submits, and how it ends.

Runs in the caller's task. It alone advances the program counter, and it alone asks the caller's
cancel scopes. It does not know what an engine is, nor how turns are shared out.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import trio

from ..actors import Actor
from ..gpu.errors import DeviceHung, RunRefused, RunStopped, RunTerminated
from ..gpu.policy import TerminatePolicy
from ..gpu.seam import Begin, BlockView, Cursor, Dropped, Ended, Failed, Fenced, Finished, Reply, Segment, TensorRef
from . import cut
from .feeds import is_slow, pack
from .flight import Flight
from .governor import Governor
from .home import Home
from .latch import Latch
from .line import Line
from .observer import Observer, Outcome
from .options import RunOptions
from .tensor import current
from .turns import Ask

__all__ = ["AHEAD", "BEGIN_BOUND_S", "Deliver", "Run", "Share"]

BEGIN_BOUND_S = 60.0
"""How long a run is waited for that has not begun: a pipeline that is being compiled cannot be interrupted."""

AHEAD = 3
"""Segments that may be handed over beyond those in flight while no other run wants the adapter: each wake
of the Trio thread takes a CPU from a software adapter for about 0.2 ms. A stop drops them all the same."""

Reason = Literal["terminated", "closed", "read", "failed"]
Deliver = Callable[[str, Any], None]
Pieces = Callable[[BlockView], Mapping[Cursor, cut.Piece]]


class Share(NamedTuple):
    """Whose use of an adapter a run counts as: a session's, and how much it is to have beside others.

    With `admission`, its runs are refused that cannot be over by their deadlines.
    """

    number: int
    weight: float
    admission: bool = False


class Run:
    """A run, from the wait for its session to the end of its drain.

    Attributes:
        scope: the run's own cancel scope, which `terminate` and `close` cancel.
        ended: what the engine said at the end: what became of the segments.
        hung: whether the device did not come back within a bound.
        outcome: how it ended, once it has.
        spent_s: estimated seconds of what was handed over.
        rank: how urgent it was when last looked at; less is more.
    """

    rank: tuple[int, float]

    def __init__(
        self,
        actor: Actor,
        governor: Governor,
        home: Home,
        policy: TerminatePolicy,
        options: RunOptions,
        pieces: Pieces,
        share: Share,
        observer: Observer,
        model: int = 0,
        keep: tuple[str, ...] = (),
        left_s: float = 0.0,
    ) -> None:
        self._actor = actor
        self._governor = governor
        self._home = home
        self._policy = policy
        self._options = options
        self._pieces = pieces
        self._share = share
        self._observer = observer
        self._model, self._keep = model, keep
        self._number = governor.new_run()
        self._first: Latch[Reason] = Latch()
        self._place: tuple[BlockView, Cursor] | Finished | None = None
        self._planned: Mapping[Cursor, cut.Piece] = {}
        self._replies: deque[Reply] = deque()
        self._sleeper: trio.lowlevel.Task | None = None
        self._flight = Flight(policy)
        self._ready: dict[str, None] = {}
        self._outputs: dict[str, Any] = {}
        self._asked = self._begun = self._over = False
        self._seq = self._answered = self._done = self._total = 0
        self._places: dict[int, tuple[BlockView, Cursor, float]] = {}
        self._recalled = self._rewound = 0
        self._granted = self._looks = False
        self._left_s = left_s
        self.spent_s = 0.0
        self._known = left_s > 0
        self._eager = options.on_progress is not None or observer.listened
        self._line: Line | None = None
        self.scope = trio.CancelScope()
        self.claim()
        self.ended = Ended(self._number)
        self.hung = False
        self.outcome: Outcome = "whole"
        observer.tell("called", self._number, options.tag, priority=options.priority)

    @property
    def remaining_s(self) -> float:
        """Estimated seconds of what has not finished; before the run has begun, what one like it took."""
        return self._left_s + sum(cost_s for _, _, cost_s in self._places.values())

    @property
    def waits(self) -> bool:
        """Whether the session is not free for it yet."""
        return not self._asked

    # --- stopping, pausing ------------------------------------------------------------------------

    def terminate(self) -> bool:
        """Stop the run, from any thread; whether this is what stops it."""
        if not self._first.settle("terminated"):
            return False
        self._actor.stop_nowait(self._number)
        self._home.cancel(self.scope)
        return True

    def close(self) -> None:
        """Stop the run because its session is being closed; on the Trio thread."""
        if self._first.settle("closed"):
            self._actor.stop_nowait(self._number)
            self.scope.cancel()

    def pause(self) -> None:
        """Suspend the run at the next edge of a segment; what the device has goes on. On the Trio thread."""
        if not self._over:
            self._governor.hold(self._number)
            self.recall()

    def resume(self) -> None:
        """Let the run go on that was paused."""
        self._governor.release(self._number)

    # --- running --------------------------------------------------------------------------------

    async def perform(
        self,
        line: Line,
        check: Callable[[], None],
        feeds: Mapping[str, Any],
        wanted: tuple[str, ...],
        deliver: Deliver | None = None,
        before_s: float = 0.0,
    ) -> list[Any]:
        """Wait for the session, run, drain.

        Args:
            line: where runs of the session wait for each other.
            check: raises where the session became unusable during the wait.
            feeds: arrays by name.
            wanted: names of outputs.
            deliver: called with each output wanted as soon as it is there.
            before_s: estimated seconds of the runs that the session does first.

        Returns:
            The outputs, in the order wanted, a `TensorRef` of each that is kept; None for those that were not
            reached, where the run was terminated and its policy says "stop_submit".

        Raises:
            RunTerminated: `terminate` came first.
            trio.ClosedResourceError: `close` came first.
            RunRefused: it cannot be over by the caller's deadline, and its share is subject to admission.
            DeviceHung: a segment took longer than the policy bears.
            Exception: what the engine or `on_progress` failed with, where that came first.

        **Cancellation:** hands no further segment over, waits, shielded and bounded, for those in
        flight. Outranks every other outcome until the outputs have been read.
        """
        outputs: Mapping[str, Any] | None = None
        error: Exception | None = None
        mine = False
        try:
            try:
                with self.scope:
                    self._admit(before_s + self._left_s)
                    self._line = line
                    await line.enter(self)
                    mine = True
                    check()
                    if is_slow(feeds):
                        feeds = await trio.to_thread.run_sync(pack, feeds, abandon_on_cancel=True)
                    outputs = await self._stream(feeds, wanted, deliver)
            except Exception as caught:
                self._first.settle("failed")
                error = caught
            if outputs is None and self._stops_softly():
                outputs = await self._what_was_reached(wanted, deliver)
        finally:
            self.outcome = self._how(outputs)
            await self._leave(outputs or {})
            self._observer.tell("ended", self._number, self.outcome, self.ended.counts)
            if mine:
                line.leave(self)
        if outputs is not None:
            return [outputs[name] for name in wanted]
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            reason = self._first.value
            if reason == "terminated":
                done = max(self._done, self.ended.counts.finished)
                raise RunTerminated(done, max(self._total, done + len(self._flight)), not self.hung)
            if reason == "closed":
                raise trio.ClosedResourceError("the session was closed during the run")
            assert error is not None
            raise error
        finally:
            del error

    async def _stream(
        self, feeds: Mapping[str, Any], wanted: tuple[str, ...], deliver: Deliver | None
    ) -> Mapping[str, Any] | None:
        self._asked = True
        self._observer.tell("begun", self._number)
        self._eager = self._eager or deliver is not None
        given = current(pack(feeds))
        profile = self._options.profile
        request = Begin(self._number, given, wanted, self._policy, profile, self._model, self._keep)
        self._enter(await self._actor.begin(request))
        self._begun = True
        if isinstance(self._place, tuple):
            self._admit(self._governor.needed_s(self._ask()))
        with self._flight.watch:
            while await self._next():
                if deliver is not None:
                    await self._bring(tuple(name for name in self._ready if name in wanted), deliver)
                await self._turn()
                if trio.current_effective_deadline() <= trio.current_time():
                    await trio.lowlevel.checkpoint()
                await trio.lowlevel.checkpoint_if_cancelled()
                self._hand_over()
        if self._flight.watch.cancelled_caught:
            raise self._hangs()
        await self._bring(wanted, deliver)
        return self._outputs if self._first.settle("read") else None

    async def _bring(self, names: tuple[str, ...], deliver: Deliver | None) -> None:
        """Read outputs that are there and were not read yet."""
        names = tuple(dict.fromkeys(name for name in names if name not in self._outputs))
        if not names:
            return
        made: Mapping[str, Any] | None = None
        with trio.move_on_after(self._flight.hang_bound()):
            made = await self._actor.read(self._number, names)
        if made is None:
            raise self._hangs()
        self._outputs.update(made)
        if deliver is not None:
            for name in names:
                deliver(name, made[name])

    def _hangs(self) -> DeviceHung:
        self.hung = True
        return DeviceHung(
            f"the device did not finish within {self._flight.hang_bound():g} s what takes about "
            f"{self._flight.seconds:.3g} s; load the model anew"
        )

    # --- the end --------------------------------------------------------------------------------

    def _stops_softly(self) -> bool:
        return self._first.value == "terminated" and self._policy.on_terminate == "stop_submit"

    async def _what_was_reached(self, wanted: tuple[str, ...], deliver: Deliver | None) -> Mapping[str, Any]:
        """The outputs of a run that was terminated; None for those that it did not reach."""
        if self._begun:
            with trio.move_on_after(self._flight.drain_bound()), contextlib.suppress(Exception):
                while self._flight:
                    await self._nap()
                self._hear()
                await self._bring(tuple(name for name in self._ready if name in wanted), deliver)
            self.hung = self.hung or bool(self._flight)
        await trio.lowlevel.checkpoint_if_cancelled()
        return dict.fromkeys(wanted) | self._outputs

    def _how(self, outputs: Mapping[str, Any] | None) -> Outcome:
        reason = self._first.value
        if outputs is None and trio.current_effective_deadline() == -math.inf:
            return "cancelled"
        return "whole" if reason == "read" else reason or "cancelled"

    async def _leave(self, outputs: Mapping[str, Any]) -> None:
        """Hand nothing more over, and wait for what is in flight. Of what was kept, what is in `outputs` stays."""
        kept = tuple(value for value in outputs.values() if isinstance(value, TensorRef))
        self._over = True
        if self.outcome != "whole":
            self._observer.tell("stops", self._number, self.outcome)
        self._governor.leave(self._number, len(self._flight))
        if not self._asked:
            return
        self._actor.stop_nowait(self._number)
        bound_s = 0.0 if self.hung else self._flight.drain_bound() if self._begun else BEGIN_BOUND_S
        with trio.move_on_after(bound_s, shield=True) as bound, contextlib.suppress(Exception):
            self.ended = await self._actor.end(self._number, kept)
        self.hung = self.hung or bound.cancelled_caught
        self._governor.leave(self._number, 0)

    # --- the loop's parts -----------------------------------------------------------------------

    def _enter(self, then: BlockView | Finished | None) -> None:
        self._go_to((then, Cursor(then.activation)) if isinstance(then, BlockView) else then)
        self._total, self._left_s = self._done + len(self._flight), 0.0
        while isinstance(then, BlockView):
            pieces = self._pieces(then)
            self._total += len(pieces)
            self._left_s += sum(piece.cost_s for piece in pieces.values())
            then = then.then

    def _go_to(self, place: tuple[BlockView, Cursor] | Finished | None) -> None:
        if isinstance(place, tuple) and not (isinstance(self._place, tuple) and self._place[0] is place[0]):
            self._planned = self._pieces(place[0])
        self._place = place

    async def _next(self) -> bool:
        """Take replies in; True: there is something to cut, False: every segment has finished."""
        while True:
            self._take_replies()
            if isinstance(self._place, tuple):
                return True
            if isinstance(self._place, Finished) and not self._flight:
                return False
            if self._place is None and not self._flight:
                raise RuntimeError("the engine decided nothing at the end of a block")
            await self._nap()

    def _admit(self, needed_s: float) -> None:
        """Refuse the run where it is known to be late. What one like it took must be known."""
        if self._share.admission and self._known:
            left_s = min(self._flight.callers_deadline(), self._options._deadline) - trio.current_time()
            if needed_s > left_s:
                raise RunRefused(round(needed_s, 4), round(left_s, 4))

    def claim(self) -> Ask:
        """How urgent the run is now. To be called in its task."""
        deadline = min(self._flight.callers_deadline(), self._options._deadline)
        self.rank = -self._options.priority, deadline
        return Ask(self._number, 1, 0, self._options.priority, deadline, self._share.number, self._share.weight)

    def _ask(self) -> Ask:
        """For a turn, as urgent as the most urgent that waits for this run to end."""
        priority, deadline = self._options.priority, min(self._flight.callers_deadline(), self._options._deadline)
        self.rank = -priority, deadline
        behind = None if self._line is None else self._line.first
        if behind is not None and (-behind.priority, behind.deadline) < self.rank:
            priority, deadline = behind.priority, behind.deadline
        share, cost_s = self._share, self._piece().cost_s
        limit = self._policy.max_in_flight
        return Ask(self._number, limit, AHEAD, priority, deadline, share.number, share.weight, cost_s, self._left_s)

    async def _turn(self) -> None:
        self._granted = False
        self._take_replies()  # those that came while outputs were read
        asked = self._ask()
        self._governor.ask(self, asked)
        waits = not self._granted
        if waits:
            self._observer.tell("waits", self._number)
        while not self._granted or self._recalled:
            await self._nap()
            self._take_replies()
            if self._looks and not self._granted:
                self._looks = False
                again = self._ask()
                if (again.priority, again.deadline) != (asked.priority, asked.deadline):
                    asked = again
                    self._governor.ask(self, asked)
        if waits:
            self._observer.tell("granted", self._number)

    def granted(self) -> None:
        """The governor gives the turn that was asked for."""
        self._granted = True
        self._wake()

    def look(self) -> None:
        """The run may have become more urgent, or less, while it waits for a turn."""
        self._looks = True
        self._wake()

    def recall(self) -> None:
        """The governor wants what is not submitted back: until it is known what that is, nothing is handed over."""
        if self._places:
            self._recalled = self._seq
            self._actor.recall_nowait(self._number, self._seq)

    async def _nap(self) -> None:
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
                self._rewind(reply.seq)
                continue
            assert isinstance(reply, Fenced)
            del self._places[reply.seq]
            if not self._places:
                self._recalled = 0
            self._done += 1
            self._ready |= dict.fromkeys(reply.ready)
            if reply.next is not None and self._place is None:
                self._enter(reply.next)
            if self._options.on_progress is not None:
                self._options.on_progress(self._done, self._total)

    def _rewind(self, seq: int) -> None:
        """A segment was recalled, and so was all behind it: go on from its start."""
        if seq < self._rewound:
            return
        if self._first or seq >= self._recalled:
            raise RunStopped
        block, start, _ = self._places[seq]
        for later in [number for number in self._places if number >= seq]:
            cost_s = self._places.pop(later)[2]
            self._left_s += cost_s
            self.spent_s -= cost_s
        self._rewound, self._recalled = self._recalled, 0
        self._go_to((block, start))

    def _hear(self) -> None:
        """Take in what was heard after a stop: of it only what is ready counts."""
        for reply in self._replies:
            if isinstance(reply, Fenced):
                self._ready |= dict.fromkeys(reply.ready)
        self._replies.clear()

    def _hand_over(self) -> None:
        """Cut and send the next segment. Not async: nothing may come between the checkpoint and this."""
        if self._first:
            raise RunStopped
        assert isinstance(self._place, tuple)
        block, start = self._place
        piece = self._piece()
        segment = Segment(self._number, self._seq, start, piece.stop)
        self._seq += 1
        self._places[segment.seq] = block, start, piece.cost_s
        self._left_s -= piece.cost_s
        self.spent_s += piece.cost_s
        self._flight.takes_off(segment.seq, piece.cost_s, block.steps[start.step].kind)
        self._observer.handed(self._number, segment.seq, block.steps[start.step].kind)
        self._go_to(cut.advance(block, piece.stop))

        def on_reply(reply: Reply) -> None:
            took_s = reply.gpu_s if isinstance(reply, Fenced) else None
            self._flight.lands(segment.seq, took_s)
            self._observer.answered(self._number, segment.seq, reply)
            self._governor.returned(self._number, 0.0 if isinstance(reply, Dropped) else took_s)
            self._replies.append(reply)
            self._wake()

        self._actor.submit_nowait(segment, on_reply, self._is_news)

    def _piece(self) -> cut.Piece:
        """The next segment."""
        assert isinstance(self._place, tuple)
        block, start = self._place
        piece = self._planned.get(start) if self._flight.pace == 1 else None
        if piece is None:
            stop = cut.cut(block, start, self._policy, self._flight.pace)
            piece = cut.Piece(stop, cut.cost(block, start, stop))
        return piece

    def _is_news(self, reply: Reply) -> bool:
        """Whether the Trio thread must hear of a reply at once. Called on any thread."""
        self._answered += 1
        return (
            self._seq - self._answered <= self._policy.max_in_flight
            or not isinstance(reply, Fenced)
            or reply.next is not None
            or self._eager
            or self._governor.contended
        )
