"""Closing sessions and schedulers, at rest and during loads and runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio
import trio.lowlevel
from trio.testing import MockClock

import trionnx
from trionnx.actors.fake import FakeModel

Feed = dict[str, np.ndarray[Any, Any]]


async def closed_during(run: Any, told: list[str]) -> None:
    try:
        await run()
    except trio.ClosedResourceError:
        told.append("closed")
    except trio.Cancelled:
        told.append("cancelled")
        raise


@pytest.mark.parametrize("at", [0.0, 0.01, 0.03, 0.075])
async def test_closing_a_session_stops_its_runs_with_closed(autojump_clock: MockClock, feed: Feed, at: float) -> None:
    model, told = FakeModel(begin_s=0.02, read_s=0.01), list[str]()
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session, other = await scheduler.load(model), await scheduler.load(FakeModel())
        for _ in range(3):
            nursery.start_soon(closed_during, lambda: session.run(None, feed), told)
        await trio.sleep(at)
        await session.aclose()
        assert told == ["closed"] * 3
        engine = model.engines[0]
        assert engine.at_rest
        assert [line.what for line in engine.log].count("close") == 1
        with pytest.raises(trio.ClosedResourceError, match="the session is closed"):
            await session.run(None, feed)
        with pytest.raises(trio.ClosedResourceError):
            session.explain()
        assert "closed" in repr(session)
        assert len(await other.run(None, feed)) == 2


async def test_closing_without_waiting(autojump_clock: MockClock, feed: Feed) -> None:
    model, told = FakeModel(), list[str]()
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session = await scheduler.load(model)
        nursery.start_soon(closed_during, lambda: session.run(None, feed), told)
        await trio.sleep(0.01)
        session.close()
        session.close()
        assert told == []
        await trio.sleep(1)
        assert told == ["closed"]
        assert model.engines[0].count("close") == 1


async def test_a_session_is_a_resource(autojump_clock: MockClock, feed: Feed) -> None:
    model = FakeModel()
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        async with await scheduler.load(model) as session:
            await session.run(None, feed)
        assert model.engines[0].count("close") == 1
        await trio.aclose_forcefully(await scheduler.load(model))
        await trio.lowlevel.checkpoint()


async def test_a_cancelled_aclose_closes_all_the_same(autojump_clock: MockClock, feed: Feed) -> None:
    model, told = FakeModel(), list[str]()
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session = await scheduler.load(model)
        nursery.start_soon(closed_during, lambda: session.run(None, feed), told)
        await trio.sleep(0.01)
        with trio.CancelScope() as scope:
            scope.cancel()
            await session.aclose()
        assert scope.cancelled_caught
        await trio.sleep(1)
        assert told == ["closed"]
        assert model.engines[0].count("close") == 1


async def test_leaving_the_scheduler_during_runs_elsewhere(autojump_clock: MockClock, feed: Feed) -> None:
    models, told = [FakeModel() for _ in range(3)], list[str]()
    async with trio.open_nursery() as background:
        async with trionnx.open_scheduler(backend="fake") as scheduler:
            sessions = [await scheduler.load(model) for model in models]
            for session in sessions * 2:
                background.start_soon(closed_during, lambda session=session: session.run(None, feed), told)
            await trio.sleep(0.012)
        assert told == ["closed"] * 6
        assert all(model.engines[0].at_rest and model.engines[0].count("close") == 1 for model in models)
        with pytest.raises(trio.ClosedResourceError, match="the scheduler is closed"):
            await scheduler.load(FakeModel())
        with pytest.raises(trio.ClosedResourceError):
            await sessions[0].run(None, feed)


async def test_closing_the_scheduler_within_its_block(autojump_clock: MockClock, feed: Feed) -> None:
    told = list[str]()
    async with trio.open_nursery() as background, trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(FakeModel())
        background.start_soon(closed_during, lambda: session.run(None, feed), told)
        background.start_soon(closed_during, lambda: scheduler.load(FakeModel(load_s=10)), told)
        await trio.sleep(0.012)
        await scheduler.aclose()
        assert told == ["closed"] * 2
        assert trio.current_time() < 1


@pytest.mark.parametrize("tick", range(12))
async def test_closing_at_every_tick_of_a_load(autojump_clock: MockClock, tick: int) -> None:
    async def close_at_tick() -> None:
        model, told, closing = FakeModel(), list[str](), False

        async def load() -> None:
            try:
                await scheduler.load(model)
            except trio.ClosedResourceError:
                told.append("closed")
            else:
                told.append("loaded" if not closing else "loaded too late")

        async with trio.open_nursery() as nursery, trionnx.open_scheduler(backend="fake") as scheduler:
            nursery.start_soon(load)
            for _ in range(tick):
                await trio.lowlevel.checkpoint()
            closing = True
            await scheduler.aclose()
            assert all(engine._gone for engine in model.engines)
        assert told in (["closed"], ["loaded"])

    for _ in range(8):  # the order within a tick is random
        with trio.fail_after(1000):
            await close_at_tick()


async def test_leaving_by_an_exception_gives_that_exception(autojump_clock: MockClock, feed: Feed) -> None:
    model = FakeModel()

    async def main(error: Exception) -> None:
        async with trionnx.open_scheduler(backend="fake") as scheduler:
            await scheduler.load(model)
            raise error

    error = LookupError("x")
    with pytest.raises(LookupError) as caught:
        await main(error)
    assert caught.value is error
    assert error.__context__ is None

    mine = ExceptionGroup("mine", [ValueError("a"), ExceptionGroup("inside", [KeyError("b")])])
    with pytest.raises(ExceptionGroup) as group:
        await main(mine)
    assert repr(group.value) == repr(mine)
    assert [engine.count("close") for engine in model.engines] == [1, 1]


async def test_leaving_by_a_cancel_drains(autojump_clock: MockClock, feed: Feed) -> None:
    model = FakeModel()
    with trio.move_on_after(0.022) as scope:
        async with trionnx.open_scheduler(backend="fake") as scheduler:
            session = await scheduler.load(model)
            await session.run(None, feed)
    assert scope.cancelled_caught
    assert model.engines[0].at_rest
    assert model.engines[0].count("close") == 1
    assert model.engines[0].count("finish") <= 6


async def test_an_engine_that_never_closes_is_abandoned(autojump_clock: MockClock, feed: Feed) -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(FakeModel(hangs={"close"}))
        await session.aclose()
        assert trio.current_time() == pytest.approx(10.0)
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        await scheduler.load(FakeModel(hangs={"close"}))
    assert trio.current_time() == pytest.approx(20.0)


async def test_leaving_is_bounded_where_everything_hangs(autojump_clock: MockClock, feed: Feed) -> None:
    told = list[str]()
    async with trio.open_nursery() as background:
        async with trionnx.open_scheduler(backend="fake") as scheduler:
            for hangs in ({"begin"}, {3}, {"read"}, {"end"}, {"close"}):
                session = await scheduler.load(FakeModel(hangs=set(hangs), adapter=str(hangs)))
                background.start_soon(closed_during, lambda session=session: session.run(None, feed), told)
            background.start_soon(closed_during, lambda: scheduler.load(FakeModel(hangs={"load"})), told)
            await trio.sleep(0.03)
        assert trio.current_time() == pytest.approx(60.03)
    assert told == ["closed"] * 6
