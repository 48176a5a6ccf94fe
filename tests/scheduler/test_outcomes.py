"""How a run ends where several things end it: each order of each pair, and many triples, at once and apart."""

from __future__ import annotations

import itertools
import random
import threading
from typing import Any, Literal

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

import trionnx
from trionnx import DeviceHung, DeviceLost, RunTerminated, TerminatePolicy
from trionnx.actors.fake import FakeEngine, FakeModel
from trionnx.gpu.seam import Failed, StepView
from trionnx.scheduler.governor import governor_of

Feed = dict[str, np.ndarray[Any, Any]]
CAUSES = ("cancel", "deadline", "terminate", "close", "shut", "error", "hang")
PAIRS = list(itertools.permutations(CAUSES, 2))
TRIPLES = random.Random(4).sample(list(itertools.permutations(CAUSES, 3)), 70)
SEGMENT_S = 0.005
FAR_S = 1.0
"""Between causes that are far apart: a hang is felt by then, and a drain still goes on."""
SOFT: tuple[Literal["throw_cancel", "stop_submit"], ...] = ("throw_cancel", "stop_submit")


def same(got: list[Any], model: FakeModel, feed: Feed) -> bool:
    expected = model.expected(feed)
    return all(np.array_equal(a, b) for a, b in zip(got, (expected["y"], expected["trace"]), strict=True))


def fail_now(engine: FakeEngine) -> None:
    """The segment that is executing fails, at once."""
    if engine._driver:
        run, _, _, done = engine._driver[0]
        run.stops += 1
        done(Failed(DeviceLost("gone")))


def expected(order: tuple[str, ...], gap_s: float, soft: bool) -> set[str]:
    """A scope outranks all, the outer one first; else what came first. What comes after the end changes nothing.

    The end is when the device is called hung, and when the outputs that were reached have been read.
    """
    if gap_s == FAR_S and (order[0] == "hang" or (order[0] == "terminate" and soft)):
        return {order[0]}
    for scope in ("cancel", "deadline"):
        if scope in order:
            return {scope}
    others = [cause for cause in order if cause != "hang"]  # it is felt long after the others
    if gap_s == 0 and others[0] not in ("terminate", "close"):  # these two come first in their own tick
        return set(others)
    return {others[0]}


async def end_by(order: tuple[str, ...], gap_s: float, on_terminate: Any, feed: Feed) -> None:
    policy = TerminatePolicy(on_terminate=on_terminate, hang_timeout_s=0.25, drain_timeout_s=20)
    model = FakeModel(((StepView("gpu", cost_s=SEGMENT_S),) * 40,), end_s=5.0)
    options, outcome, drained = trionnx.RunOptions(), "", True
    async with trio.open_nursery() as nursery, trionnx.open_scheduler(backend="fake", policy=policy) as scheduler:
        session = await scheduler.load(model)
        engine = model.engines[0]
        with trio.CancelScope() as outer:
            try:
                with trio.fail_after(1000) as inner:

                    def expire() -> None:
                        inner.deadline = trio.current_time()

                    calls: dict[str, Any] = {
                        "cancel": outer.cancel,
                        "deadline": expire,
                        "terminate": options.terminate,
                        "close": session.close,
                        "shut": lambda: nursery.start_soon(scheduler.aclose),
                        "error": lambda: fail_now(engine),
                        "hang": lambda: model.hangs.add("driver"),
                    }

                    async def end() -> None:
                        await trio.sleep(10.5 * SEGMENT_S)
                        for cause in order:
                            calls[cause]()
                            if gap_s:
                                await trio.sleep(gap_s)

                    nursery.start_soon(end)
                    outputs = await session.run(None, feed, options)
                    assert on_terminate == "stop_submit"
                    assert outputs == [None, None]
                    outcome = "terminate"
            except trio.TooSlowError:
                outcome = "deadline"
            except RunTerminated as stopped:
                assert on_terminate == "throw_cancel"
                outcome, drained = "terminate", stopped.drained
            except trio.ClosedResourceError:
                outcome = "shut" if "shut" in order and "close" not in order else "close"
                if {"shut", "close"} <= set(order):
                    outcome = next(cause for cause in order if cause in ("shut", "close"))
            except DeviceLost:
                outcome = "error"
            except DeviceHung:
                outcome = "hang"
        if outer.cancelled_caught:
            outcome = "cancel"

        assert outcome in expected(order, gap_s, on_terminate == "stop_submit")
        hung = "hang" in order and (gap_s < FAR_S or order[0] == "hang")
        assert drained == (not hung) or outcome != "terminate" or on_terminate == "stop_submit"
        assert options.terminated == (outcome == "terminate") or {"cancel", "deadline"} & set(order) or hung
        mark = engine.count("handed")
        await trio.sleep(5 * FAR_S)
        assert engine.count("handed") == mark
        state = governor_of("fake: fake").state
        assert (state.held, state.waiting, state.paused) == ({}, (), frozenset())

        model.hangs.clear()
        again = session.run(None, feed, options)
        if {"close", "shut"} & set(order):
            with pytest.raises(trio.ClosedResourceError):
                await again
        elif hung:
            with pytest.raises(DeviceHung):
                await again
        else:
            assert engine.at_rest
            assert same(await again, model, feed)


@pytest.mark.parametrize("order", [*((cause,) for cause in CAUSES if cause != "hang"), *PAIRS, *TRIPLES])
def test_what_ends_a_run_first_and_what_outranks_it(feed: Feed, order: tuple[str, ...]) -> None:
    for gap_s in (0.0, 0.0001, FAR_S):
        for on_terminate in SOFT:
            trio.run(end_by, order, gap_s, on_terminate, feed, clock=MockClock(autojump_threshold=0))


async def test_a_hang_that_nobody_stops(autojump_clock: MockClock, feed: Feed) -> None:
    """The bound is the policy's, or 8 times what is in flight is estimated to take; plus a twentieth."""
    for cost_s, bound_s in ((0.005, 0.5), (0.1, 8 * 5 * 0.1)):
        model = FakeModel(((StepView("gpu", cost_s=cost_s),) * 40,), hangs={7})
        policy = TerminatePolicy(hang_timeout_s=0.5, drain_timeout_s=100, checkpoint_interval_s=0.1)
        if cost_s == 0.005:
            policy = TerminatePolicy(hang_timeout_s=0.5, drain_timeout_s=100)
        async with trionnx.open_scheduler(backend="fake", policy=policy) as scheduler:
            session = await scheduler.load(model)
            start = trio.current_time()
            with pytest.raises(DeviceHung, match="the device did not finish within"):
                await session.run(None, feed)
            since_s = trio.current_time() - start - 7 * cost_s
            assert bound_s <= since_s <= 1.1 * bound_s + cost_s
            with pytest.raises(DeviceHung, match="load the model anew"):
                await session.run(None, feed)


async def test_steps_on_the_cpu_are_not_called_hung(autojump_clock: MockClock, feed: Feed) -> None:
    model = FakeModel(((StepView("host", cost_s=0.001), StepView("opaque", cost_s=0.001)),), speed=1e6)
    async with trionnx.open_scheduler(backend="fake", policy=TerminatePolicy(hang_timeout_s=0.1)) as scheduler:
        session = await scheduler.load(model)
        assert same(await session.run(None, feed), model, feed)


# --- outputs that were reached ----------------------------------------------------------------------

EARLY = FakeModel(
    ((StepView("gpu", cost_s=SEGMENT_S),) * 6, (StepView("gpu", cost_s=SEGMENT_S),) * 6),
    frozenset({0}),
    early={"trace": (0, 3)},
    read_s=0.002,
)


@given(at=st.integers(0, 700), threaded=st.booleans(), wanted=st.permutations(["trace", "y", "y"]))
def test_outputs_that_were_reached_are_returned(at: int, threaded: bool, wanted: list[str]) -> None:
    """And exactly those: with None for what the segments that finished had not made."""
    feed = {"x": np.arange(3, dtype=np.float32)}
    model = FakeModel(EARLY.blocks, EARLY.dynamic, early=EARLY.early, read_s=EARLY.read_s)
    options = trionnx.RunOptions(policy=TerminatePolicy(on_terminate="stop_submit"))

    def terminate() -> None:
        if not threaded:
            options.terminate()
            return
        thread = threading.Thread(target=options.terminate)
        thread.start()
        thread.join()

    async def main() -> None:
        async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
            session = await scheduler.load(model)

            async def later() -> None:
                await trio.sleep(at / 10_000)
                terminate()

            nursery.start_soon(later)
            got = await session.run(wanted, feed, options)
            nursery.cancel_scope.cancel()
        made, finished = model.expected(feed), model.engines[0].count("finish")
        reached = {"trace": finished > 3, "y": finished == 12}
        for name, value in zip(wanted, got, strict=True):
            assert (value is not None) == reached[name]
            assert value is None or np.array_equal(value, made[name])

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def test_a_stop_that_the_loop_meets_before_its_scope_knows_is_soft_too(
    autojump_clock: MockClock, feed: Feed
) -> None:
    """From another thread: the run's own question comes before the cancel that the thread has sent."""
    model = FakeModel(early={"trace": (0, 1)})
    options = trionnx.RunOptions(policy=TerminatePolicy(on_terminate="stop_submit"))

    def on_progress(done: int, total: int) -> None:
        if done == 4:
            thread = threading.Thread(target=options.terminate)
            thread.start()
            thread.join()

    options.on_progress = on_progress
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        y, trace = await (await scheduler.load(model)).run(None, feed, options)
    assert y is None
    assert np.array_equal(trace, model.expected(feed)["trace"])


async def test_what_on_progress_raises_after_a_terminate_does_not_matter(
    autojump_clock: MockClock, feed: Feed
) -> None:
    model = FakeModel(early={"trace": (0, 1)})
    options = trionnx.RunOptions(policy=TerminatePolicy(on_terminate="stop_submit"))

    def on_progress(done: int, total: int) -> None:
        if done == 4:
            options.terminate()
            raise LookupError

    options.on_progress = on_progress
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        y, trace = await (await scheduler.load(model)).run(None, feed, options)
    assert y is None
    assert trace is not None


async def test_a_cancel_outranks_a_soft_stop_until_its_outputs_are_there(
    autojump_clock: MockClock, feed: Feed
) -> None:
    model = FakeModel(early={"trace": (0, 1)}, read_s=1.0, end_s=1.0)
    policy = TerminatePolicy(on_terminate="stop_submit", drain_timeout_s=5)
    for at, cancelled in ((0.5, True), (1.5, False)):
        options, start = trionnx.RunOptions(policy=policy), trio.current_time()
        async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
            session = await scheduler.load(model)
            with trio.CancelScope(deadline=start + at) as scope:

                async def later(options: trionnx.RunOptions = options) -> None:
                    await trio.sleep(0.022)
                    options.terminate()

                nursery.start_soon(later)
                y, trace = await session.run(None, feed, options)
                assert y is None
                assert trace is not None
            assert scope.cancelled_caught == cancelled
            assert model.engines[-1].at_rest


async def test_a_hang_bounds_a_soft_stop_once(autojump_clock: MockClock, feed: Feed) -> None:
    model = FakeModel(early={"trace": (0, 1)}, hangs={5})
    options = trionnx.RunOptions(policy=TerminatePolicy(on_terminate="stop_submit", drain_timeout_s=3))
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session = await scheduler.load(model)

        async def later() -> None:
            await trio.sleep(1)
            options.terminate()

        nursery.start_soon(later)
        assert await session.run(None, feed, options) == [None, None]
        assert trio.current_time() == pytest.approx(4.0)
        with pytest.raises(DeviceHung):
            await session.run(None, feed)


# --- options that several runs hold -----------------------------------------------------------------


async def test_shared_options_stop_all_their_runs_and_no_other(autojump_clock: MockClock, feed: Feed) -> None:
    """Those that run, that wait for their session and that begin; a finished one and one with other options not."""
    models = [FakeModel(), FakeModel(begin_s=0.5), FakeModel(), FakeModel(speed=0.0)]
    shared, own = trionnx.RunOptions(tag="shared"), trionnx.RunOptions()
    ends: list[str] = []
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        running, beginning, other, quick = [await scheduler.load(model) for model in models]

        async def one(name: str, session: trionnx.Session, options: trionnx.RunOptions) -> None:
            try:
                await session.run(None, feed, options)
                ends.append(f"{name}: outputs")
            except RunTerminated:
                ends.append(f"{name}: terminated")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, "quick", quick, shared)
            await trio.sleep(0.001)
            assert ends == ["quick: outputs"]
            nursery.start_soon(one, "running", running, shared)
            await trio.sleep(0.001)
            nursery.start_soon(one, "waiting", running, shared)
            nursery.start_soon(one, "beginning", beginning, shared)
            nursery.start_soon(one, "other", other, own)
            await trio.sleep(0.02)
            shared.terminate()
        assert sorted(ends[1:]) == ["beginning: terminated", "other: outputs", "running: terminated",
                                    "waiting: terminated"]  # fmt: skip
        assert (shared.terminated, own.terminated) == (True, False)
        for session, model in zip((running, beginning, other, quick), models, strict=True):
            assert same(await session.run(None, feed, shared), model, feed)
