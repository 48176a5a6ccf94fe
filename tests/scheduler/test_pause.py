"""Suspending a run at the edge of a segment, on an engine that plays its part by Trio's clock."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import trionnx
from trionnx import RunTerminated, TerminatePolicy
from trionnx.actors.fake import FakeModel
from trionnx.gpu.seam import StepView
from trionnx.scheduler.governor import governor_of
from trionnx.scheduler.run import Run

Feed = dict[str, np.ndarray[Any, Any]]
SEGMENT_S = 0.005


def model(steps: int = 40, **changes: Any) -> FakeModel:
    return FakeModel(((StepView("gpu", cost_s=SEGMENT_S),) * steps,), **changes)


def same(got: list[Any], model: FakeModel, feed: Feed) -> bool:
    expected = model.expected(feed)
    return all(np.array_equal(a, b) for a, b in zip(got, (expected["y"], expected["trace"]), strict=True))


def run_of(session: trionnx.Session, number: int = 0) -> Run:
    return sorted(session._runs, key=lambda run: run._number)[number]


async def test_a_paused_run_goes_on_where_it_was(autojump_clock: MockClock, feed: Feed) -> None:
    played, others = model(), model(60)
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session, other = await scheduler.load(played), await scheduler.load(others)
        engine = played.engines[0]
        got: list[Any] = []

        async def one() -> None:
            got.extend(await session.run(None, feed))

        nursery.start_soon(one)
        await trio.sleep(10.5 * SEGMENT_S)
        handed = engine.count("handed")
        run_of(session).pause()
        await trio.sleep(1)
        assert engine.count("handed") == handed, "a paused run hands nothing over"
        finished = engine.count("finish")
        assert finished == engine.count("driver") == 12, "what the device has goes on"
        assert engine.count("drop") == handed - finished, "the rest is taken back"
        assert not got
        # The other session has the adapter for itself, and more than a paused run's time is no hang.
        start = trio.current_time()
        assert same(await other.run(None, feed), others, feed)
        assert trio.current_time() - start == pytest.approx(60 * SEGMENT_S)
        await trio.sleep(1000)
        run_of(session).resume()
        start = trio.current_time()
        while not got:  # noqa: ASYNC110
            await trio.sleep(SEGMENT_S)
        assert trio.current_time() - start == pytest.approx((40 - finished) * SEGMENT_S, abs=2 * SEGMENT_S)
    assert same(got, played, feed)


@pytest.mark.parametrize("way", ["cancel", "deadline", "terminate", "soft", "close", "shut"])
@pytest.mark.parametrize("when", ["before", "begin", "amid"])
async def test_a_paused_run_is_left_at_once(autojump_clock: MockClock, feed: Feed, way: str, when: str) -> None:
    """Whatever stops it, and whether it had begun, or held segments, or nothing yet."""
    policy = TerminatePolicy(on_terminate="stop_submit" if way == "soft" else "throw_cancel")
    played, options = model(begin_s=0.2), trionnx.RunOptions(policy=policy)
    ended = -1.0
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session = await scheduler.load(played)
        blocker = trio.CancelScope()

        async def block() -> None:
            with blocker:
                await session.run(None, feed)

        async def stop() -> None:
            await trio.sleep({"before": 0.01, "begin": 0.1, "amid": 0.252}[when])
            run_of(session, when == "before").pause()
            await trio.sleep(5 if when == "amid" else 0.05)
            if way == "cancel":
                scope.cancel()
            elif way == "deadline":
                scope.deadline = trio.current_time()
            elif way in ("terminate", "soft"):
                options.terminate()
            elif way == "close":
                session.close()
            else:
                nursery.start_soon(scheduler.aclose)

        if when == "before":
            nursery.start_soon(block)
            await wait_all_tasks_blocked()
        nursery.start_soon(stop)
        outcome = "outputs"
        with trio.CancelScope() as scope:
            try:
                assert await session.run(None, feed, options) == [None, None]
                outcome = "soft"
            except RunTerminated:
                outcome = "terminate"
            except trio.ClosedResourceError:
                outcome = "close"
            ended = trio.current_time()
        if scope.cancelled_caught:
            outcome, ended = "cancel", trio.current_time()
        assert outcome == {"deadline": "cancel", "shut": "close"}.get(way, way)
        assert ended == pytest.approx({"before": 0.06, "begin": 0.15, "amid": 5.252}[when])
        blocker.cancel()
    assert not governor_of("fake: fake").state.runs | governor_of("fake: fake").state.paused


async def test_a_pause_that_comes_too_late_or_is_given_back_early_changes_nothing(
    autojump_clock: MockClock, feed: Feed
) -> None:
    played = model(10, end_s=1.0)
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session = await scheduler.load(played)
        runs: list[Run] = []

        async def fiddle() -> None:
            await trio.sleep(2.2 * SEGMENT_S)
            runs.append(run_of(session))
            for _ in range(3):
                runs[0].pause()
                runs[0].pause()
                runs[0].resume()
            await trio.sleep(0.5)
            runs[0].pause()  # it drains

        nursery.start_soon(fiddle)
        assert same(await session.run(None, feed), played, feed)
        assert trio.current_time() == pytest.approx(10 * SEGMENT_S + 1.0)
        runs[0].pause()
        runs[0].resume()
        assert not governor_of("fake: fake").state.runs | governor_of("fake: fake").state.paused
        assert same(await session.run(None, feed), played, feed)


async def test_pausing_again_and_again_changes_no_output(autojump_clock: MockClock, feed: Feed) -> None:
    played = FakeModel(
        ((StepView("gpu", 60, 0.03, 4), StepView("host", cost_s=0.003)), (StepView("gpu", cost_s=0.004),) * 5),
        frozenset({0}),
    )
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session = await scheduler.load(played)

        async def fiddle() -> None:
            while True:
                await trio.sleep(0.0037)
                for run in session._runs:
                    run.pause()
                await trio.sleep(0.2)
                for run in session._runs:
                    run.resume()

        nursery.start_soon(fiddle)
        for _ in range(3):
            assert same(await session.run(None, feed), played, feed)
        assert trio.current_time() > 0.3
        nursery.cancel_scope.cancel()


async def test_a_paused_stream_goes_on(autojump_clock: MockClock, feed: Feed) -> None:
    played = model(early={"trace": (0, 3)})
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(played)
        async with session.stream(None, feed) as items:
            names = [(await anext(items))[0]]
            run_of(session).pause()
            with trio.move_on_after(10) as scope:
                await anext(items)
            assert scope.cancelled_caught, "only the wait was left"
            run_of(session).resume()
            async for name, value in items:
                names.append(name)
                assert np.array_equal(value, played.expected(feed)[name])
        assert names == ["trace", "y"]
