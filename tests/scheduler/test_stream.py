"""Outputs as they come, on an engine that plays its part by Trio's clock."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

import trionnx
from trionnx import DeviceHung, DeviceLost, InvalidData, InvalidInput, RunTerminated, TerminatePolicy
from trionnx.actors.fake import FakeModel
from trionnx.gpu.seam import StepView
from trionnx.scheduler.governor import governor_of

Feed = dict[str, np.ndarray[Any, Any]]
SEGMENT_S = 0.005
SOFT = TerminatePolicy(on_terminate="stop_submit")


def early(**changes: Any) -> FakeModel:
    """trace is there after 20 ms, y after 60 ms; values decide that there is a second block."""
    step = StepView("gpu", cost_s=SEGMENT_S)
    return FakeModel(((step,) * 6, (step,) * 6), frozenset({0}), early={"trace": (0, 3)}, **changes)


def is_right(name: str, value: Any, model: FakeModel, feed: Feed) -> bool:
    return bool(np.array_equal(value, model.expected(feed)[name]))


async def test_each_output_comes_when_it_is_made(autojump_clock: MockClock, feed: Feed) -> None:
    model, times = early(), []
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        async with session.stream(None, feed) as items:
            async for name, value in items:
                assert is_right(name, value, model, feed)
                times.append((name, round(trio.current_time(), 6), model.engines[0].count("finish")))
        assert model.engines[0].at_rest
    # trace is read behind what was in flight when its segment was done.
    (first, first_s, first_done), (last, last_s, last_done) = times
    assert (first, last) == ("trace", "y")
    assert 4 * SEGMENT_S <= first_s <= 9 * SEGMENT_S
    assert 4 <= first_done < 12
    assert last_s == pytest.approx(12 * SEGMENT_S)
    assert last_done == 12


async def test_only_what_is_wanted_comes_and_each_once(autojump_clock: MockClock, feed: Feed) -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(early())
        for wanted in (["y"], ["trace"], ["trace", "y", "trace"], None):
            async with session.stream(wanted, feed) as items:
                names = [name async for name, _ in items]
            assert names == [name for name in ("trace", "y") if wanted is None or name in wanted]
        assert session.statistics().runs == 4


async def test_a_slow_reader_holds_nothing_up(autojump_clock: MockClock, feed: Feed) -> None:
    model = early()
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        async with session.stream(None, feed) as items:
            await trio.sleep(10)
            assert model.engines[0].times("finish")[-1] == pytest.approx(12 * SEGMENT_S)
            assert model.engines[0].at_rest
            assert [name async for name, _ in items] == ["trace", "y"]
            assert [name async for name, _ in items] == []


@pytest.mark.parametrize("priority", [1, 0, -1])
@pytest.mark.parametrize("quarters", range(30))
async def test_another_run_may_come_at_any_moment(
    autojump_clock: MockClock, feed: Feed, quarters: int, priority: int
) -> None:
    """Also while an output is read: what is recalled then is answered before the stream looks again."""
    step = StepView("gpu", cost_s=SEGMENT_S)
    model = FakeModel(((step,) * 24,), early={"trace": (0, 3)}, read_s=3.5 * SEGMENT_S)
    other = FakeModel(((StepView("gpu", cost_s=SEGMENT_S / 2),),))
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        streaming, running = await scheduler.load(model), await scheduler.load(other)

        async def come() -> None:
            await trio.sleep((2.05 + quarters / 4) * SEGMENT_S)
            assert len(await running.run(None, feed, trionnx.RunOptions(priority=priority))) == 2

        nursery.start_soon(come)
        with trio.fail_after(1):
            async with streaming.stream(None, feed) as items:
                got = [(name, is_right(name, value, model, feed)) async for name, value in items]
    assert got == [("trace", True), ("y", True)]


@pytest.mark.parametrize("at", [0, 1, 2])
async def test_leaving_early_stops_the_run(autojump_clock: MockClock, feed: Feed, at: int) -> None:
    model = early()
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        async with session.stream(None, feed) as items:
            for _ in range(at):
                await anext(items)
        engine = model.engines[0]
        assert engine.at_rest
        assert engine.count("finish") <= (0, 10, 12)[at]
        assert governor_of("fake: fake").state.held == {}
        mark = len(engine.log)
        await trio.sleep(1)
        assert len(engine.log) == mark
        assert len(await session.run(None, feed)) == 2


@pytest.mark.parametrize(
    ("failures", "names"),
    [({"begin": DeviceLost("gone")}, []), ({11: InvalidData("n", "index")}, ["trace"]), ({"read": ValueError()}, [])],
)
async def test_an_error_comes_out_of_the_loop(
    autojump_clock: MockClock, feed: Feed, failures: dict[str | int, BaseException], names: list[str]
) -> None:
    (error,) = failures.values()
    cause = error.__cause__ = LookupError("what was behind it")
    got = []
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(early(failures=failures))
        async with session.stream(None, feed) as items:
            with pytest.raises(type(error)) as caught:
                async for name, _ in items:
                    got.append(name)
            assert caught.value is error
            assert caught.value.__cause__ is cause
        assert got == names
        with pytest.raises(InvalidInput):
            async with session.stream(["nothing"], feed):
                raise AssertionError("nothing was to be streamed")


async def test_an_error_that_nobody_catches_leaves_the_block_as_it_is(autojump_clock: MockClock, feed: Feed) -> None:
    error = DeviceLost("gone")
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(early(failures={5: error}))
        with pytest.raises(DeviceLost) as caught:
            async with session.stream(None, feed) as items:
                async for _ in items:
                    pass
        assert caught.value is error


async def test_a_hang_comes_out_of_the_loop(autojump_clock: MockClock, feed: Feed) -> None:
    async with trionnx.open_scheduler(backend="fake", policy=TerminatePolicy(hang_timeout_s=1)) as scheduler:
        session = await scheduler.load(early(hangs={8}))
        async with session.stream(None, feed) as items:
            assert (await anext(items))[0] == "trace"
            with pytest.raises(DeviceHung):
                await anext(items)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("after", [0, 1])
async def test_terminate(autojump_clock: MockClock, feed: Feed, soft: bool, after: int) -> None:
    model, options = early(), trionnx.RunOptions(policy=SOFT if soft else None)
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        async with session.stream(None, feed, options) as items:
            for _ in range(after):
                await anext(items)
            options.terminate()  # also before the run has taken its first step
            assert options.terminated
            if soft:
                assert [name async for name, _ in items] == []
            else:
                with pytest.raises(RunTerminated):
                    await anext(items)
        assert model.engines[0].at_rest
        assert model.engines[0].count("finish") < 12


async def test_a_soft_stop_brings_what_was_reached_and_not_read_yet(autojump_clock: MockClock, feed: Feed) -> None:
    model, options = early(), trionnx.RunOptions(policy=SOFT)
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session = await scheduler.load(model)

        async def later() -> None:
            await trio.sleep(3.5 * SEGMENT_S)
            options.terminate()

        nursery.start_soon(later)
        async with session.stream(None, feed, options) as items:
            got = [(name, value) async for name, value in items]
        assert [name for name, _ in got] == ["trace"]
        assert is_right(*got[0], model, feed)


@pytest.mark.parametrize("what", ["session", "scheduler"])
async def test_closing(autojump_clock: MockClock, feed: Feed, what: str) -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(early())
        async with session.stream(None, feed) as items:
            await anext(items)
            await (session if what == "session" else scheduler).aclose()
            with pytest.raises(trio.ClosedResourceError, match="closed"):
                await anext(items)


@pytest.mark.parametrize("at", [0.0, 0.001, 0.022, 0.031, 0.058])
@pytest.mark.parametrize("inside", [False, True])
async def test_a_cancel_is_felt_by_the_block_and_by_the_loop(
    autojump_clock: MockClock, feed: Feed, at: float, inside: bool
) -> None:
    model = early()
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        start = trio.current_time()
        with trio.CancelScope() as outer:
            if not inside:
                outer.deadline = start + at
            async with session.stream(None, feed) as items:
                with trio.CancelScope() as inner:
                    if inside:
                        inner.deadline = start + at
                    async for _ in items:
                        pass
        assert (outer.cancelled_caught, inner.cancelled_caught) == (not inside, inside)
        assert model.engines[0].at_rest
        assert model.engines[0].count("finish") <= at / SEGMENT_S + 2
        assert trio.current_time() - start <= at + 2 * SEGMENT_S + 1e-9
        assert len(await session.run(None, feed)) == 2


async def test_a_deadline_is_told_apart(autojump_clock: MockClock, feed: Feed) -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(early())
        with pytest.raises(trio.TooSlowError), trio.fail_after(0.03):
            async with session.stream(None, feed) as items:
                async for _ in items:
                    pass


MINE = ExceptionGroup("mine", [ValueError("a"), ExceptionGroup("inside", [KeyError("b")])])


@pytest.mark.parametrize(
    "error", [LookupError("mine"), MINE, KeyboardInterrupt(), BaseExceptionGroup("x", [SystemExit()])]
)
@pytest.mark.parametrize("when", ["at once", "in the loop", "after it", "during a cancel"])
async def test_what_the_block_raises_leaves_it_as_it_is(
    autojump_clock: MockClock, feed: Feed, error: BaseException, when: str
) -> None:
    model = early()
    error.__context__ = None
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        with trio.CancelScope() as scope:
            with pytest.raises(type(error)) as caught:
                async with session.stream(None, feed) as items:
                    if when == "at once":
                        raise error
                    if when == "during a cancel":
                        scope.cancel()
                        try:
                            await anext(items)
                        except trio.Cancelled:
                            raise error from None
                    async for _ in items:
                        if when == "in the loop":
                            raise error
                    raise error
            assert repr(caught.value) == repr(error)  # Trio rebuilds groups
        assert model.engines[0].at_rest


async def test_what_the_scheduler_s_block_raises_during_a_cancel_leaves_it_as_it_is(
    autojump_clock: MockClock, feed: Feed
) -> None:
    with trio.CancelScope() as scope, pytest.raises(LookupError, match="mine"):
        async with trionnx.open_scheduler(backend="fake") as scheduler:
            session = await scheduler.load(early())
            try:
                scope.cancel()
                await session.run(None, feed)
            finally:
                raise LookupError("mine")


async def test_a_cancelled_block_raises_cancelled_and_no_group(autojump_clock: MockClock, feed: Feed) -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(early())
        with trio.CancelScope() as scope:
            with pytest.raises(trio.Cancelled):
                async with session.stream(None, feed) as items:
                    scope.cancel()
                    await anext(items)
            await trio.lowlevel.checkpoint()
        assert scope.cancelled_caught


async def test_two_streams_of_a_session_come_one_after_the_other(autojump_clock: MockClock, feed: Feed) -> None:
    model = early()
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        async with session.stream(None, feed) as one, session.stream(None, feed) as two:
            for items in (one, two):
                assert [name async for name, _ in items] == ["trace", "y"]


async def test_every_order_of_what_ends_a_stream(autojump_clock: MockClock, feed: Feed) -> None:
    for order in itertools.permutations(("leave", "terminate", "close"), 2):
        options, model = trionnx.RunOptions(), early()
        async with trionnx.open_scheduler(backend="fake") as scheduler:
            session = await scheduler.load(model)
            error: type[Exception] | None = None
            async with session.stream(None, feed, options) as items:
                await anext(items)
                for way in order:
                    if way == "leave":
                        break
                    (options.terminate if way == "terminate" else session.close)()
                else:
                    try:
                        await anext(items)
                    except Exception as caught:
                        error = type(caught)
            first = {"terminate": RunTerminated, "close": trio.ClosedResourceError}.get(order[0])
            assert error is (None if "leave" in order else first)
            assert not model.engines[0]._driver
            assert governor_of("fake: fake").state.held == {}
