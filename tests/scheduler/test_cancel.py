"""Cancelling a run with Trio's scopes, at every point."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

import trionnx
from trionnx.actors import Actor
from trionnx.actors.fake import FakeModel
from trionnx.gpu.errors import DeviceHung
from trionnx.gpu.seam import Segment, StepView
from trionnx.scheduler.governor import governor_of

Feed = dict[str, np.ndarray[Any, Any]]
BLOCKS = (
    (StepView("gpu", cost_s=0.005),) * 3 + (StepView("host", cost_s=0.003),),
    (StepView("gpu", 60, 0.03, 4), StepView("gpu", cost_s=0.001)),
)


def slow(**changes: Any) -> FakeModel:
    """begin 0 to 20 ms, segments until about 68 ms, read until about 78 ms, end until 80 ms."""
    return FakeModel(BLOCKS, frozenset({0}), begin_s=0.02, read_s=0.01, end_s=0.002, **changes)


def same(got: list[Any], model: FakeModel, feed: Feed) -> bool:
    expected = model.expected(feed)
    return all(np.array_equal(a, b) for a, b in zip(got, (expected["y"], expected["trace"]), strict=True))


def with_clock(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=MockClock(autojump_threshold=0))


class HandOvers:
    """Every segment that is handed to an actor, and those for which the run's scope was cancelled then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.every: list[Segment] = []
        self.after_cancel: list[Segment] = []
        self.cancelled: Callable[[], bool] = lambda: False
        original = Actor.submit_nowait

        def submit_nowait(actor: Actor, segment: Segment, *rest: Any) -> None:
            self.every.append(segment)
            if self.cancelled():
                self.after_cancel.append(segment)
            original(actor, segment, *rest)

        monkeypatch.setattr(Actor, "submit_nowait", submit_nowait)


@settings(max_examples=150)
@given(at=st.integers(0, 850), max_in_flight=st.integers(1, 3), by_deadline=st.booleans(), dynamic=st.booleans())
def test_a_cancel_at_any_time(at: int, max_in_flight: int, by_deadline: bool, dynamic: bool) -> None:
    feed = {"x": np.arange(3, dtype=np.float32)}
    model = slow()
    if not dynamic:
        model.dynamic = frozenset()

    async def main() -> None:
        async with trionnx.open_scheduler(backend="fake", max_in_flight=max_in_flight) as scheduler:
            session = await scheduler.load(model)
            engine = model.engines[0]
            first = await session.run(None, feed)
            assert same(first, model, feed)
            mark = len(engine.log)
            outputs = None

            async def cancel(scope: trio.CancelScope) -> None:
                nonlocal mark
                await trio.sleep(at / 10_000)
                mark = len(engine.log)
                scope.cancel()

            with pytest.MonkeyPatch.context() as patch:
                handed = HandOvers(patch)
                async with trio.open_nursery() as nursery:
                    with trio.CancelScope() as scope:
                        handed.cancelled = lambda: scope.cancel_called
                        if by_deadline:
                            scope.deadline = trio.current_time() + at / 10_000
                        else:
                            nursery.start_soon(cancel, scope)
                        outputs = await session.run(None, feed)
                    left = trio.current_time()
                    nursery.cancel_scope.cancel()

            assert handed.after_cancel == []
            assert engine.at_rest, "the scope was left before everything was drained"
            assert scope.cancelled_caught == (outputs is None)
            if outputs is not None:
                assert same(outputs, model, feed)
            elif not by_deadline:
                later = [line.what for line in engine.log[mark:]]
                assert later.count("finish") <= max_in_flight
            await trio.sleep(1)
            assert all(line.at <= left for line in engine.log)
            assert governor_of("fake: fake").state.held == {}
            again = await session.run(None, feed)
            assert all(np.array_equal(a, b) for a, b in zip(again, first, strict=True))

    with_clock(main)


@pytest.mark.parametrize("tick", range(60))
def test_a_cancel_at_every_tick_of_the_loop(tick: int, feed: Feed) -> None:
    """With an engine that takes no time, the ticks of Trio's loop are all that there is."""
    model = FakeModel(((StepView("gpu"), StepView("host")) * 3,))

    async def main() -> None:
        async with trionnx.open_scheduler(backend="fake") as scheduler:
            session = await scheduler.load(model)
            outputs = None
            with pytest.MonkeyPatch.context() as patch:
                handed = HandOvers(patch)
                with trio.CancelScope() as scope:
                    handed.cancelled = lambda: scope.cancel_called

                    async def cancel() -> None:
                        for _ in range(tick):
                            await trio.lowlevel.checkpoint()
                        scope.cancel()

                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(cancel)
                        outputs = await session.run(None, feed)
            assert handed.after_cancel == []
            assert model.engines[0].at_rest
            if outputs is not None:
                assert same(outputs, model, feed)
            assert same(await session.run(None, feed), model, feed)

    with_clock(main)


async def test_a_cancel_before_the_run_sends_nothing(autojump_clock: MockClock, feed: Feed) -> None:
    model = slow()
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        with trio.CancelScope() as scope:
            scope.cancel()
            await session.run(None, {"wrong": feed["x"]})
        assert scope.cancelled_caught
        assert [line.what for line in model.engines[0].log] == ["load"]


async def test_a_cancel_while_waiting_for_the_session(autojump_clock: MockClock, feed: Feed) -> None:
    model = slow()
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session = await scheduler.load(model)
        nursery.start_soon(session.run, None, feed)
        await wait_all_tasks_blocked()
        start = trio.current_time()
        with trio.move_on_after(0.01) as scope:
            await session.run(None, feed)
        assert scope.cancelled_caught
        assert trio.current_time() - start == pytest.approx(0.01)
        assert session.statistics().queued == 0
        assert same(await session.run(None, feed), model, feed)
        assert model.engines[0].count("begin") == 2


async def test_a_cancel_while_waiting_for_a_turn(autojump_clock: MockClock, feed: Feed) -> None:
    busy, model = FakeModel(((StepView("gpu", cost_s=1.0),) * 9,)), FakeModel()
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        other, session = await scheduler.load(busy), await scheduler.load(model)
        nursery.start_soon(other.run, None, feed)
        await trio.sleep(0.5)
        start = trio.current_time()
        with trio.move_on_after(0.1) as scope:
            await session.run(None, feed)
        assert scope.cancelled_caught
        assert trio.current_time() - start == pytest.approx(0.1)
        assert model.engines[0].count("handed") == 0
        await trio.sleep(2)
        assert busy.engines[0].count("handed") > 3, "a turn was lost"
        nursery.cancel_scope.cancel()


async def test_a_cancel_by_the_run_itself_hands_nothing_more_over(autojump_clock: MockClock, feed: Feed) -> None:
    """Its task is awake then, and has turns to spare: only the checkpoint is in the way."""
    model = FakeModel()
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        engine, before = model.engines[0], 0

        def on_progress(done: int, total: int) -> None:
            nonlocal before
            if done == 3:
                before = engine.count("handed")
                scope.cancel()

        with trio.CancelScope() as scope:
            await session.run(None, feed, trionnx.RunOptions(on_progress=on_progress))
        assert scope.cancelled_caught
        assert engine.count("handed") == before < 10


async def test_a_deadline_that_is_moved_counts_from_the_next_turn_on(autojump_clock: MockClock, feed: Feed) -> None:
    slices = ((StepView("gpu", cost_s=0.005),) * 20,)
    first, second = FakeModel(slices), FakeModel(slices)
    ended: list[int] = []
    async with trionnx.open_scheduler(backend="fake", max_in_flight=1) as scheduler:
        sessions = [await scheduler.load(first), await scheduler.load(second)]
        scopes = [trio.CancelScope(deadline=trio.current_time() + late) for late in (50, 60)]

        async def one(number: int) -> None:
            with scopes[number]:
                await sessions[number].run(None, feed)
                ended.append(number)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, 0)
            nursery.start_soon(one, 1)
            await trio.sleep(0.052)
            assert second.engines[0].count("finish") <= 2
            scopes[0].deadline += 30
        assert ended == [1, 0]
        assert first.engines[0].count("finish") == second.engines[0].count("finish") == 20


@pytest.mark.parametrize(("at", "phase"), [(0.01, "begin"), (0.0735, "read")])
async def test_a_cancel_is_felt_at_once_where_nothing_is_in_flight(
    autojump_clock: MockClock, feed: Feed, at: float, phase: str
) -> None:
    model = slow()
    model.end_s = 0.0
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        start = trio.current_time()
        with trio.move_on_after(at) as scope:
            await session.run(None, feed)
        assert scope.cancelled_caught
        assert trio.current_time() - start == pytest.approx(at)
        assert [line.what for line in model.engines[0].log if line.what not in ("stop", "end")][-1] == phase
        assert same(await session.run(None, feed), model, feed)


async def test_outputs_that_have_been_read_are_returned(autojump_clock: MockClock, feed: Feed) -> None:
    model = FakeModel(end_s=0.5)
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        with trio.move_on_after(0.2) as scope:
            assert same(await session.run(None, feed), model, feed)
        assert scope.cancel_called
        assert not scope.cancelled_caught


async def test_a_timed_out_run_is_told_apart(autojump_clock: MockClock, feed: Feed) -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(slow())
        with pytest.raises(trio.TooSlowError), trio.fail_after(0.03):
            await session.run(None, feed)


async def test_a_deadline_covers_the_wait_and_the_run(autojump_clock: MockClock, feed: Feed) -> None:
    model = slow()
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session = await scheduler.load(model)
        nursery.start_soon(session.run, None, feed)
        await wait_all_tasks_blocked()
        start = trio.current_time()
        with pytest.raises(trio.TooSlowError), trio.fail_after(0.12):
            await session.run(None, feed)
        # A run takes about 80 ms, so that the deadline came in the second half of the wait's successor.
        assert 0.12 <= trio.current_time() - start < 0.15
        assert model.engines[0].count("begin") == 2


async def test_a_deadline_that_has_passed_hands_nothing_over(
    autojump_clock: MockClock, feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop may be late: the scope is not cancelled yet, but its deadline is over."""
    hand_overs = HandOvers(monkeypatch)
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(FakeModel())
        handed = 0

        def on_progress(done: int, total: int) -> None:
            nonlocal handed
            if done == 4:
                autojump_clock.jump(10)
                handed = len(hand_overs.every)

        with trio.move_on_after(1) as scope:
            await session.run(None, feed, trionnx.RunOptions(on_progress=on_progress))
        assert scope.cancelled_caught
        assert len(hand_overs.every) == handed > 0


async def test_what_is_held_back_is_stopped_in_the_instant_of_the_cancel(autojump_clock: MockClock, feed: Feed) -> None:
    model = FakeModel()
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session = await scheduler.load(model)
        nursery.start_soon(session.run, None, feed)
        await trio.sleep(0.012)
        nursery.cancel_scope.cancel()
        assert model.engines[0].log[-1].what == "stop"


async def test_a_run_that_drains_waits_for_no_turn(autojump_clock: MockClock, feed: Feed) -> None:
    model, busy = FakeModel(((StepView("gpu", cost_s=1.0),) * 9,)), FakeModel(((StepView("gpu", cost_s=1.0),) * 9,))
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session, other = await scheduler.load(model), await scheduler.load(busy)
        state = governor_of("fake: fake").state
        with trio.CancelScope() as scope:

            async def watch() -> None:
                nonlocal state
                await trio.sleep(0.1)
                nursery.start_soon(other.run, None, feed)
                await trio.sleep(1.4)
                state = governor_of("fake: fake").state
                assert 2 in [ask.run for ask, _ in state.waiting]
                scope.cancel()
                await wait_all_tasks_blocked()
                state = governor_of("fake: fake").state
                assert 2 not in [ask.run for ask, _ in state.waiting]
                assert len(state.held[2]) <= 2
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await session.run(None, feed)
        assert state.held


async def test_an_enclosing_scope_outranks_an_error(autojump_clock: MockClock, feed: Feed) -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(FakeModel())
        with trio.CancelScope() as scope:

            def on_progress(done: int, total: int) -> None:
                scope.cancel()
                raise LookupError

            await session.run(None, feed, trionnx.RunOptions(on_progress=on_progress))
        assert scope.cancelled_caught


# --- the drain's bound ------------------------------------------------------------------------------


@pytest.mark.parametrize(("cost_s", "bound_s"), [(0.005, 2.0), (0.5, 8 * 5 * 0.5)])
async def test_a_hang_leaves_what_would_have_left_and_the_next_run_is_told(
    autojump_clock: MockClock, feed: Feed, cost_s: float, bound_s: float
) -> None:
    model = FakeModel(((StepView("gpu", cost_s=cost_s),) * 10,), hangs={3})
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        with trio.move_on_after(20) as scope:
            await session.run(None, feed)
        assert scope.cancelled_caught
        assert trio.current_time() == pytest.approx(20 + bound_s)
        with pytest.raises(DeviceHung, match="fake did not finish an earlier run"):
            await session.run(None, feed)
        assert "hung" in repr(session)
        assert governor_of("fake: fake").state.held == {}

        # Others on the same adapter have their turns, and closing does not wait for the device.
        other = FakeModel()
        assert same(await (await scheduler.load(other)).run(None, feed), other, feed)
        before = trio.current_time()
        await session.aclose()
        assert trio.current_time() == before


async def test_runs_that_wait_for_a_session_that_hangs_are_told(autojump_clock: MockClock, feed: Feed) -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(FakeModel(hangs={3}))
        told = []

        async def wait() -> None:
            with pytest.raises(DeviceHung):
                await session.run(None, feed)
            told.append(trio.current_time())

        async with trio.open_nursery() as nursery:
            with trio.move_on_after(1):
                nursery.start_soon(wait)
                nursery.start_soon(wait)
                await session.run(None, feed)
        assert told == [pytest.approx(3.0)] * 2


async def test_no_run_comes_in_between_a_hang_and_its_report(autojump_clock: MockClock, feed: Feed) -> None:
    def on_progress(done: int, total: int) -> None:
        raise LookupError

    model, options = FakeModel(hangs={1}), trionnx.RunOptions(on_progress=on_progress)
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session = await scheduler.load(model)

        async def second() -> None:
            with pytest.raises(DeviceHung), trio.fail_after(1000):
                await session.run(None, feed)

        with trio.move_on_after(1) as scope:
            nursery.start_soon(second)
            await session.run(None, feed, options)
        assert scope.cancelled_caught
    assert model.engines[0].count("begin") == 1


async def test_a_begin_that_cannot_be_left_has_a_longer_bound(autojump_clock: MockClock, feed: Feed) -> None:
    model = FakeModel(hangs={"begin"})
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        with trio.move_on_after(1):
            await session.run(None, feed)
        assert trio.current_time() == pytest.approx(61)
        with pytest.raises(DeviceHung):
            await session.run(None, feed)

    model = FakeModel(hangs={"begin"})
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session = await scheduler.load(model)

        async def compiled() -> None:
            await trio.sleep(30)
            model.hangs.clear()
            model.engines[0]._tell()

        nursery.start_soon(compiled)
        start = trio.current_time()
        with trio.move_on_after(1):
            await session.run(None, feed)
        assert trio.current_time() - start == pytest.approx(30)
        assert same(await session.run(None, feed), model, feed)


async def test_a_hang_after_the_outputs_does_not_cost_them(autojump_clock: MockClock, feed: Feed) -> None:
    model = FakeModel(hangs={"end"})
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        assert same(await session.run(None, feed), model, feed)
        with pytest.raises(DeviceHung):
            await session.run(None, feed)


# --- many -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_two_hundred_runs_cancelled_at_random_eight_at_a_time_on_four_sessions(seed: int) -> None:
    rng = random.Random(seed)
    models = [slow() for _ in range(4)]
    outcomes = {"outputs": 0, "cancelled": 0}

    async def main() -> None:
        async with trionnx.open_scheduler(backend="fake") as scheduler:
            sessions = [await scheduler.load(model) for model in models]
            todo = iter(range(200))

            async def work() -> None:
                for number in todo:
                    feed = {"x": np.full(3, number, np.float32)}
                    which = rng.randrange(4)
                    with trio.move_on_after(rng.uniform(0, 0.6)) as scope:
                        assert same(await sessions[which].run(None, feed), models[which], feed)
                        outcomes["outputs"] += 1
                    outcomes["cancelled"] += scope.cancelled_caught

            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(work)
            assert all(model.engines[0].at_rest for model in models)
            assert governor_of("fake: fake").state.held == {}
            statistics = scheduler.statistics()
            assert statistics.runs == 200
            assert statistics.segments_finished == statistics.segments_submitted
            for session, model in zip(sessions, models, strict=True):
                assert same(await session.run(None, {"x": np.ones(2, np.float32)}), model, {"x": np.ones(2)})

    with_clock(main)
    assert sum(outcomes.values()) == 200
    assert min(outcomes.values()) > 20
