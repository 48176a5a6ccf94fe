"""Any order of everything that can happen to several sessions on two adapters keeps what is promised.

A program is a list of actions: hypothesis makes it, and shortens it where it finds a fault. It is played on
fake engines by a clock that jumps. More and longer ones, new each time, with

    TRIONNX_SOAK=1 pytest tests/scheduler/test_machine.py
"""

from __future__ import annotations

import contextvars
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

import trionnx
from trionnx import DeviceHung, DeviceLost, InvalidData, InvalidInput, RunTerminated, TerminatePolicy
from trionnx.actors import Actor
from trionnx.actors.fake import FakeEngine, FakeModel
from trionnx.gpu.seam import Failed, Segment, StepView
from trionnx.scheduler.governor import governor_of
from trionnx.scheduler.run import AHEAD, Run

SOAK = os.environ.get("TRIONNX_SOAK") == "1"
SLOTS, ADAPTERS, OPTIONS, MOST = 4, 2, 3, 2
SLOW_S = 3.0
"""More than any drain takes that does not hang, compiling apart."""
HUNG_S = 2.0
"""What a drain takes that hangs."""

STEP = StepView("gpu", cost_s=0.004)
PLANS: tuple[tuple[tuple[tuple[StepView, ...], ...], frozenset[int], dict[str, tuple[int, int]]], ...] = (
    (((STEP,) * 8,), frozenset(), {}),
    (((STEP,) * 4, (StepView("gpu", 60, 0.03, 4), STEP)), frozenset({0}), {"trace": (0, 2)}),
    (((StepView("host", cost_s=0.003), STEP, STEP, StepView("host", cost_s=0.003), STEP),), frozenset(), {}),
    (((StepView("opaque", cost_s=0.02),),), frozenset(), {}),
)
POLICIES = (
    None,
    TerminatePolicy(on_terminate="stop_submit"),
    TerminatePolicy(poll_after="every_op", max_in_flight=1),
    TerminatePolicy(split_into_checkpoints=False),
)
KINDS = (
    *("run", "stream", "run") * 3,
    "load",
    *("cancel", "terminate", "pause", "resume", "close", "wait") * 2,
    *("cancel load", "lose", "hang", "fail", "wrong", "deadline", "shut"),
)
programs = st.lists(
    st.tuples(
        st.sampled_from(KINDS), st.integers(0, 31), st.integers(0, 31), st.sampled_from([0, 0, 0.001, 0.0043, 0.02])
    ),
    min_size=25,
    max_size=200 if SOAK else 60,
)


class Lost(dict[str | int, BaseException]):
    """Failures of an engine whose device is gone: whatever would use it."""

    def pop(self, key: str | int, *default: Any) -> Any:
        return None if key in ("end", "close", "load") else DeviceLost("gone")


@dataclass(eq=False)
class Call:
    """One run, as its caller sees it."""

    slot: Slot
    options: trionnx.RunOptions
    scope: trio.CancelScope
    run: Run | None = None
    cancelled: bool = False
    terminated: bool = False
    stopped_at: float = math.inf
    mark: int = 0
    ended: str = ""

    def stops(self) -> None:
        """Something has been done that ends it."""
        if math.isinf(self.stopped_at):
            self.stopped_at = trio.current_time()
            self.mark = len(self.slot.engine.log)


@dataclass(eq=False)
class Slot:
    """Where a session may be, and what has been done to it."""

    session: trionnx.Session | None = None
    model: FakeModel = field(default_factory=FakeModel)
    loading: trio.CancelScope | None = None
    closed: bool = False
    lost: bool = False
    hung: bool = False
    failed: bool = False

    @property
    def on_gpu(self) -> bool:
        return all(step.kind == "gpu" for block in self.model.blocks for step in block)

    @property
    def engine(self) -> FakeEngine:
        return self.model.engines[-1]


calling: contextvars.ContextVar[Call] = contextvars.ContextVar("calling")


@contextmanager
def watched() -> Iterator[None]:
    """Promise 1, where it is broken: nothing is handed over for a caller who is cancelled, or whose time is over."""
    submit_nowait, init = Actor.submit_nowait, Run.__init__

    def submit(actor: Actor, segment: Segment, *rest: Any) -> None:
        assert trio.current_effective_deadline() > trio.current_time()
        submit_nowait(actor, segment, *rest)

    def made(run: Run, *rest: Any) -> None:
        init(run, *rest)
        calling.get().run = run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Actor, "submit_nowait", submit)
        patch.setattr(Run, "__init__", made)
        yield


class World:
    """A scheduler, its sessions, and the calls that are under way."""

    def __init__(self, nursery: trio.Nursery, scheduler: trionnx.Scheduler) -> None:
        self.nursery, self.scheduler = nursery, scheduler
        self.slots = [Slot() for _ in range(SLOTS)]
        self.options = [trionnx.RunOptions(policy=POLICIES[n]) for n in range(OPTIONS)]
        self.calls: list[Call] = []
        self.shut = False
        self.count = 0

    # --- actions ----------------------------------------------------------------------------------

    def do(self, kind: str, one: int, two: int) -> None:
        slot, options = self.slots[one % SLOTS], self.options[two % OPTIONS]
        call = self.calls[one % len(self.calls)] if self.calls else None
        live = slot.session is not None and not slot.closed
        match kind:
            case "load" if slot.loading is None and not live:
                blocks, dynamic, early = PLANS[two % len(PLANS)]
                slot = self.slots[one % SLOTS] = Slot(loading=trio.CancelScope())
                slot.model = FakeModel(
                    blocks, dynamic, load_s=0.01 * (two % 3), begin_s=0.001 * (two % 2), read_s=0.001 * (one % 2),
                    end_s=0.002 * (two % 2), early=dict(early), adapter=f"adapter {one % ADAPTERS}",
                )  # fmt: skip
                self.nursery.start_soon(self.load, slot)
            case "cancel load" if slot.loading is not None:
                slot.loading.cancel()
            case "run" | "stream" | "deadline" if slot.session is not None:
                if one & 8:
                    options = trionnx.RunOptions(policy=POLICIES[two % len(POLICIES)], priority=two % 3)
                scope = trio.CancelScope()
                if kind == "deadline":
                    scope.deadline = trio.current_time() + 0.001 * two
                call = Call(slot, options, scope)
                self.calls.append(call)
                self.nursery.start_soon(self.stream if kind == "stream" else self.run, call)
            case "wrong" if live:
                self.nursery.start_soon(self.wrong, slot)
            case "cancel" if call is not None:
                call.cancelled = True
                call.stops()
                call.scope.cancel()
            case "terminate":
                for other in self.calls:
                    if other.options is options and other.run in options._runs:
                        other.terminated = True
                        other.stops()
                if one & 1:
                    thread = threading.Thread(target=options.terminate)
                    thread.start()
                    thread.join()
                else:
                    options.terminate()
            case "pause" if call is not None and call.run is not None:
                call.run.pause()
            case "resume" if call is not None and call.run is not None:
                call.run.resume()
            case "close" if slot.session is not None:
                slot.closed = True
                for other in self.calls:
                    if other.slot is slot:
                        other.stops()
                slot.session.close()
            case "lose" if live:
                slot.lost, slot.model.failures = True, Lost()
                if slot.engine._driver:
                    frame, _, _, done = slot.engine._driver[0]
                    frame.stops += 1
                    done(Failed(DeviceLost("gone")))
            case "hang" if live and slot.on_gpu:  # steps on the CPU have no bound
                slot.hung = True
                slot.model.hangs.add("driver")
            case "fail" if live and not slot.lost:
                slot.failed = True
                slot.model.failures[("begin", "read", 0, 3)[two % 4]] = InvalidData("node", "index")
            case "shut" if one == two == 7:
                self.close_all()
                self.nursery.start_soon(self.scheduler.aclose)

    def close_all(self) -> None:
        self.shut = True
        for slot in self.slots:
            slot.closed = True
        for call in self.calls:
            call.stops()

    # --- what goes on in tasks --------------------------------------------------------------------

    async def load(self, slot: Slot) -> None:
        assert slot.loading is not None
        with slot.loading:
            try:
                slot.session = await self.scheduler.load(slot.model)
            except trio.ClosedResourceError:
                assert self.shut
        if slot.session is None:
            assert slot.loading.cancelled_caught or self.shut
            assert all(engine._gone for engine in slot.model.engines), "a load that was left leaves nothing"
        slot.loading = None

    async def wrong(self, slot: Slot) -> None:
        assert slot.session is not None
        with pytest.raises((InvalidInput, trio.ClosedResourceError, DeviceHung)):
            await slot.session.run(None, {"x": np.zeros((2, 2), np.float32)})

    async def run(self, call: Call) -> None:
        async def play(session: trionnx.Session, feed: Any) -> None:
            outputs = await session.run(["y", "trace"], feed, call.options)
            self.check_outputs(call, feed, dict(zip(("y", "trace"), outputs, strict=True)))

        await self.perform(call, play)

    async def stream(self, call: Call) -> None:
        async def play(session: trionnx.Session, feed: Any) -> None:
            got: dict[str, Any] = {"y": None, "trace": None}
            async with session.stream(None, feed, call.options) as items:
                async for name, value in items:
                    assert got[name] is None
                    got[name] = value
            self.check_outputs(call, feed, got)

        await self.perform(call, play)

    async def perform(self, call: Call, play: Callable[[trionnx.Session, Any], Any]) -> None:
        calling.set(call)
        self.count += 1
        feed = {"x": np.full(3, self.count, np.float32)}
        assert call.slot.session is not None
        with call.scope:
            try:
                await play(call.slot.session, feed)
            except Exception as error:
                assert not call.cancelled, "a cancelled scope outranks every error"
                call.ended = type(error).__name__
                self.check_error(call, error)
        if call.scope.cancelled_caught:
            call.ended = "Cancelled"
            assert call.cancelled or trio.current_time() >= call.scope.deadline
        assert call.ended
        event(call.ended)
        self.calls.remove(call)
        self.check_left(call)

    # --- what must be so --------------------------------------------------------------------------

    def check_outputs(self, call: Call, feed: Any, outputs: dict[str, Any]) -> None:
        """Promise 5, and 8: no output is ever made up, and none is missing but after a soft stop."""
        call.ended = "outputs"
        expected = call.slot.model.expected(feed)
        for name, value in outputs.items():
            if value is None:
                policy = call.options.policy
                assert call.terminated
                assert policy is not None
                assert policy.on_terminate == "stop_submit"
                call.ended = "some outputs"
            else:
                assert np.array_equal(value, expected[name])

    def check_error(self, call: Call, error: Exception) -> None:
        """Promises 7 to 9: the error is one that was asked for."""
        slot = call.slot
        match error:
            case trio.ClosedResourceError():
                assert slot.closed
            case RunTerminated():
                assert call.terminated
                assert call.options.terminated
                assert call.options.policy is None or call.options.policy.on_terminate == "throw_cancel"
                assert error.drained or slot.hung
            case DeviceHung():
                assert slot.hung
            case DeviceLost():
                assert slot.lost
            case InvalidData():
                assert slot.failed
            case _:
                raise error

    def check_left(self, call: Call) -> None:
        """Promises 1 and 2: nothing of it is in flight, few segments have finished since, and it took not long."""
        engine, run = call.slot.engine, call.run
        if run is None:
            return
        if not call.slot.hung:
            assert run._number not in engine._runs
            assert trio.current_time() - call.stopped_at < SLOW_S
            later = [line for line in engine.log[call.mark :] if line.run == run._number and line.what == "finish"]
            if not math.isinf(call.stopped_at):
                assert len(later) <= MOST
        else:
            assert trio.current_time() - call.stopped_at < SLOW_S + HUNG_S

    def check_now(self) -> None:
        for number in range(ADAPTERS):
            state = governor_of(f"fake: adapter {number}").state
            assert state.in_flight <= MOST + AHEAD

    async def check_end(self) -> None:
        """Every call ends; then nothing is held, and each session that can be used gives the right outputs."""
        with trio.fail_after(3000):
            while self.calls or any(slot.loading for slot in self.slots):
                for call in self.calls:
                    if call.run is not None:
                        call.run.resume()
                await trio.sleep(5)
        for number in range(ADAPTERS):
            state = governor_of(f"fake: adapter {number}").state
            assert not state.runs | state.paused
        for slot in self.slots:
            if slot.session is None or slot.closed or slot.lost:
                continue
            slot.model.failures.clear()
            feed = {"x": np.ones(2, np.float32)}
            calling.set(Call(slot, self.options[0], trio.CancelScope()))
            try:
                y, trace = await slot.session.run(["y", "trace"], feed)
            except DeviceHung:
                assert slot.hung
                continue
            expected = slot.model.expected(feed)
            assert np.array_equal(y, expected["y"])
            assert np.array_equal(trace, expected["trace"])
            actor = slot.session._actor
            if not slot.hung:
                assert slot.engine.at_rest
                assert not actor._pending
                assert not actor._stops
                assert not slot.session._runs
        assert not any(options._runs for options in self.options)


async def play(program: list[tuple[str, int, int, float]]) -> None:
    async with trio.open_nursery() as nursery:
        async with trionnx.open_scheduler(backend="fake", max_in_flight=MOST) as scheduler:
            world = World(nursery, scheduler)
            for number in range(SLOTS):
                world.do("load", number, program[number][1])
            await trio.sleep(0.1)
            for kind, one, two, gap_s in program:
                world.do(kind, one, two)
                world.check_now()
                await trio.sleep(gap_s)
                world.check_now()
            leaves = bool(program[0][1] & 16)
            if not leaves:
                await world.check_end()
            world.close_all()
        # Whatever was under way has been told, in bounded time.
        await world.check_end()
    for slot in world.slots:
        assert all(engine._gone for engine in slot.model.engines) or slot.hung


@settings(
    max_examples=int(os.environ.get("TRIONNX_SOAK_EXAMPLES", "2000")) if SOAK else 60,
    derandomize=not SOAK,
    phases=list(Phase) if SOAK else [Phase.explicit, Phase.generate],  # making a fault short takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(programs)
def test_any_order_of_anything(program: list[tuple[str, int, int, float]]) -> None:
    with watched():
        trio.run(play, program, clock=MockClock(autojump_threshold=0))
