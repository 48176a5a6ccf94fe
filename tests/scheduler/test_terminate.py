"""Stopping a run by its handle, and every order of the three ways to stop one."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import trionnx
from trionnx.actors import Actor
from trionnx.actors.fake import FakeModel
from trionnx.gpu.errors import DeviceLost, RunTerminated
from trionnx.gpu.seam import Segment

Feed = dict[str, np.ndarray[Any, Any]]


def same(got: list[Any], model: FakeModel, feed: Feed) -> bool:
    expected = model.expected(feed)
    return all(np.array_equal(a, b) for a, b in zip(got, (expected["y"], expected["trace"]), strict=True))


async def after(seconds: float, *calls: Any) -> None:
    await trio.sleep(seconds)
    for call in calls:
        call()


@pytest.mark.parametrize("at", [0.0, 0.01, 0.02, 0.021, 0.035, 0.0349, 0.0699, 0.075])
async def test_terminate_in_every_phase(autojump_clock: MockClock, feed: Feed, at: float) -> None:
    """begin 0 to 20 ms, segments until 70 ms, read until 80 ms."""
    model = FakeModel(begin_s=0.02, read_s=0.01)
    options = trionnx.RunOptions()
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session = await scheduler.load(model)
        nursery.start_soon(after, at, options.terminate)
        with pytest.raises(RunTerminated) as caught:
            await session.run(None, feed, options)
        engine = model.engines[0]
        assert engine.at_rest
        assert caught.value.drained
        assert caught.value.segments_done == engine.count("finish")
        assert caught.value.segments_total == (10 if at > 0.02 else 0)
        assert options.terminated
        # A later run with the same options starts afresh.
        assert same(await session.run(None, feed, options), model, feed)
        assert options.terminated


async def test_terminate_while_waiting_for_the_session(autojump_clock: MockClock, feed: Feed) -> None:
    options = trionnx.RunOptions()
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session = await scheduler.load(FakeModel())
        nursery.start_soon(session.run, None, feed)
        nursery.start_soon(after, 0.01, options.terminate)
        await wait_all_tasks_blocked()
        with pytest.raises(RunTerminated, match="terminated after 0 of 0 segments"):
            await session.run(None, feed, options)
        assert trio.current_time() == pytest.approx(0.01)


async def test_terminate_before_and_after_a_run_does_nothing(autojump_clock: MockClock, feed: Feed) -> None:
    model, options = FakeModel(), trionnx.RunOptions()
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        options.terminate()
        assert same(await session.run(None, feed, options), model, feed)
        options.terminate()
        assert not options.terminated


async def test_terminate_stops_every_run_that_holds_the_options(autojump_clock: MockClock, feed: Feed) -> None:
    options, stopped = trionnx.RunOptions(), []
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        sessions = [await scheduler.load(FakeModel()) for _ in range(2)]

        async def one(session: trionnx.Session) -> None:
            with pytest.raises(RunTerminated):
                await session.run(None, feed, options)
            stopped.append(session)

        for session in sessions * 2:
            nursery.start_soon(one, session)
        nursery.start_soon(after, 0.02, options.terminate)
    assert len(stopped) == 4


async def test_terminate_once_the_outputs_have_been_read(autojump_clock: MockClock, feed: Feed) -> None:
    model, options = FakeModel(end_s=1.0), trionnx.RunOptions()
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session = await scheduler.load(model)
        nursery.start_soon(after, 0.5, options.terminate)
        assert same(await session.run(None, feed, options), model, feed)
        assert not options.terminated


async def test_terminate_during_the_drain_of_a_cancel(autojump_clock: MockClock, feed: Feed) -> None:
    options = trionnx.RunOptions()
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session = await scheduler.load(FakeModel(end_s=1.0))
        nursery.start_soon(after, 0.5, options.terminate)
        with trio.move_on_after(0.02) as scope:
            await session.run(None, feed, options)
        assert scope.cancelled_caught


async def test_terminate_from_on_progress(autojump_clock: MockClock, feed: Feed) -> None:
    model = FakeModel()
    options = trionnx.RunOptions()
    options.on_progress = lambda done, total: options.terminate() if done == 4 else None
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        with pytest.raises(RunTerminated):
            await session.run(None, feed, options)
        assert model.engines[0].count("handed") <= 4 + 5


async def test_a_terminate_that_the_loop_has_not_heard_of_yet(
    autojump_clock: MockClock, feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another thread: nothing is handed over any more, and what is held back is stopped already."""
    model, options = FakeModel(), trionnx.RunOptions()
    handed: list[bool] = []
    last = ""
    original = Actor.submit_nowait

    def submit_nowait(actor: Actor, segment: Segment, *rest: Any) -> None:
        handed.append(options.terminated)
        original(actor, segment, *rest)

    def on_progress(done: int, total: int) -> None:
        nonlocal last
        if done == 4:
            thread = threading.Thread(target=options.terminate)
            thread.start()
            thread.join()
            last = model.engines[0].log[-1].what

    monkeypatch.setattr(Actor, "submit_nowait", submit_nowait)
    options.on_progress = on_progress
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        with pytest.raises(RunTerminated):
            await session.run(None, feed, options)
    assert last == "stop"
    assert handed
    assert not any(handed)


async def test_a_run_that_hangs_when_terminated_says_so(autojump_clock: MockClock, feed: Feed) -> None:
    options = trionnx.RunOptions()
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session = await scheduler.load(FakeModel(hangs={3}))
        nursery.start_soon(after, 1.0, options.terminate)
        with pytest.raises(RunTerminated, match="after 3 of 10 segments; the device did not finish") as caught:
            await session.run(None, feed, options)
        assert not caught.value.drained
        assert trio.current_time() == pytest.approx(3.0)


async def test_an_error_that_came_first_is_raised(autojump_clock: MockClock, feed: Feed) -> None:
    options = trionnx.RunOptions()
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session = await scheduler.load(FakeModel(failures={2: DeviceLost("gone")}, end_s=1.0))
        nursery.start_soon(after, 0.5, options.terminate)
        with pytest.raises(DeviceLost):
            await session.run(None, feed, options)
        assert not options.terminated


WAYS = ("cancel", "terminate", "close")


@pytest.mark.parametrize("gap_s", [0.0, 0.0001, 0.3])
@pytest.mark.parametrize("order", [p for n in (1, 2, 3) for p in itertools.permutations(WAYS, n)])
async def test_every_order_of_cancel_terminate_and_close(
    autojump_clock: MockClock, feed: Feed, order: tuple[str, ...], gap_s: float
) -> None:
    """A cancelled scope outranks everything, else the first of terminate and close wins."""
    options, outcome = trionnx.RunOptions(), ""
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session = await scheduler.load(FakeModel(end_s=1.0))
        with trio.CancelScope() as scope:
            calls = {"cancel": scope.cancel, "terminate": options.terminate, "close": session.close}

            async def stop() -> None:
                await trio.sleep(0.02)
                for way in order:
                    calls[way]()
                    if gap_s:
                        await trio.sleep(gap_s)

            nursery.start_soon(stop)
            try:
                await session.run(None, feed, options)
            except RunTerminated:
                outcome = "terminate"
            except trio.ClosedResourceError:
                outcome = "close"
        if scope.cancelled_caught:
            outcome = "cancel"
    assert outcome == ("cancel" if "cancel" in order else order[0])
    first = next((way for way in order if way != "cancel"), "")
    assert options.terminated == (first == "terminate")


def test_terminate_from_another_thread_wakes_every_wait(feed: Feed) -> None:
    model, options = FakeModel(begin_s=1e6), trionnx.RunOptions()
    started = threading.Event()

    def terminate() -> None:
        started.wait()
        options.terminate()

    async def main() -> None:
        async with trionnx.open_scheduler(backend="fake") as scheduler:
            session = await scheduler.load(model)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, terminate)
                nursery.start_soon(begun)
                with pytest.raises(RunTerminated):
                    await session.run(None, feed, options)
            model.begin_s = 0
            model.speed = 0
            assert same(await session.run(None, feed, options), model, feed)

    async def begun() -> None:
        await wait_all_tasks_blocked()
        started.set()

    trio.run(main)
    assert options.terminated


def test_terminate_after_the_trio_run_is_over_does_nothing(feed: Feed) -> None:
    options = trionnx.RunOptions()

    async def main() -> None:
        async with trionnx.open_scheduler(backend="fake") as scheduler:
            session = await scheduler.load(FakeModel(speed=0))
            await session.run(None, feed, options)

    trio.run(main)
    options.terminate()
    assert not options.terminated


def test_onnxruntimes_spelling_says_what_to_call() -> None:
    options = trionnx.RunOptions()
    with pytest.raises(AttributeError, match=r"call options\.terminate\(\)"):
        options.terminate = True  # type: ignore[method-assign, assignment]
    with pytest.raises(AttributeError):
        options.terminated = True  # type: ignore[misc]
    with pytest.raises(AttributeError):
        options.log_severity_level = 3  # type: ignore[attr-defined]
