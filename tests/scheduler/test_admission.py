"""Deadlines that are met because the earliest goes first, and runs that are refused because none could be."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

import trionnx
from trionnx.actors.fake import FakeModel
from trionnx.gpu.seam import StepView

Feed = dict[str, np.ndarray[Any, Any]]


def long(segments: int) -> FakeModel:
    """5 ms a segment."""
    return FakeModel(((StepView("gpu", cost_s=0.005),) * segments,))


async def timed(session: trionnx.Session, feed: Feed, within_s: float, told: list[Any]) -> None:
    """One run; tells "met", "late" or what refused it."""
    with trio.move_on_after(within_s) as scope:
        try:
            await session.run(None, feed)
            told.append("met")
        except trionnx.RunRefused as error:
            told.append(error)
    if scope.cancelled_caught:
        told.append("late")


@pytest.mark.parametrize(("deadlines", "outcome"), [((1.0, 0.15), ["met", "met"]), ((1.0, math.inf), ["met", "late"])])
async def test_the_earliest_deadline_first_meets_what_first_come_misses(
    autojump_clock: MockClock, feed: Feed, deadlines: tuple[float, float], outcome: list[str]
) -> None:
    """0.3 s of work comes first, then 0.1 s that are due in 0.15 s; told of no deadline, the second comes too late."""
    async with trionnx.open_scheduler(backend="fake", max_in_flight=1) as scheduler:
        first, second = await scheduler.load(long(60)), await scheduler.load(long(20))
        told: tuple[list[Any], list[Any]] = [], []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(timed, first, feed, deadlines[0], told[0])
            await trio.sleep(0.02)
            begin = trio.current_time()
            await timed(second, feed, deadlines[1], told[1])
            if trio.current_time() - begin > 0.15:
                told[1][:] = ["late"]
        assert [*told[0], *told[1]] == outcome


async def test_what_cannot_be_in_time_is_refused_at_once(autojump_clock: MockClock, feed: Feed) -> None:
    model = long(20)
    async with trionnx.open_scheduler(backend="fake", admission=True) as scheduler:
        session = await scheduler.load(model)
        told: list[Any] = []
        await timed(session, feed, 0.05, told)
        assert told.pop() == "late", "what is not known is tried"
        await timed(session, feed, 1.0, told)
        await timed(session, feed, 0.1001, told)
        assert told == ["met", "met"]
        handed, before = model.engines[0].count("handed"), trio.current_time()
        await timed(session, feed, 0.099, told)
        assert model.engines[0].count("handed") == handed
        assert trio.current_time() == before
        refused = told.pop()
        assert isinstance(refused, trionnx.RunRefused)
        assert refused.needed_s == pytest.approx(0.1)
        assert refused.left_s == pytest.approx(0.099)
        assert "0.1 s" in str(refused)
        soft = trionnx.RunOptions(policy=trionnx.TerminatePolicy(on_terminate="stop_submit"))
        async with trio.open_nursery() as nursery:  # a part is not what a run takes
            nursery.start_soon(session.run, None, feed, soft)
            await trio.sleep(0.02)
            soft.terminate()
        await timed(session, feed, 0.099, told)
        assert isinstance(told.pop(), trionnx.RunRefused)
        told.clear()
        async with trio.open_nursery() as nursery:  # a queue of three takes 0.3 s
            for within_s in (0.25, 0.25, 0.25):
                nursery.start_soon(timed, session, feed, within_s, told)
        assert sorted(map(str, told))[:2] == ["met", "met"]
        told.clear()
        await timed(session, {"x": np.zeros(9, np.float32)}, 0.01, told)
        assert told == ["late"], "other shapes, another time"
    with pytest.raises(TypeError, match="admission"):
        async with trionnx.open_scheduler(admission=1):  # type: ignore[arg-type]
            raise AssertionError


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 40), st.booleans()), min_size=1, max_size=5))
def test_of_those_that_are_refused_none_could_be_met_and_of_the_others_all_are(
    works: list[tuple[int, int, bool]],
) -> None:
    """On one adapter: a run is late exactly where it needs longer, with what is due before it."""

    async def main() -> None:
        async with trionnx.open_scheduler(backend="fake", max_in_flight=1, admission=True) as scheduler:
            sessions = [await scheduler.load(long(segments)) for segments, _, _ in works]
            feed = {"x": np.zeros(2, np.float32)}
            for session in sessions:
                await session.run(None, feed)
            told: list[list[Any]] = [[] for _ in works]
            busy_s, expected = 0.0, []
            order = sorted(range(len(works)), key=lambda n: works[n][1])
            async with trio.open_nursery() as nursery:
                for n in order:  # the most urgent first, so that what is admitted stays so
                    segments, due, _ = works[n]
                    within_s = 0.005 * due + 0.0025
                    fits = busy_s + 0.005 * segments <= within_s
                    busy_s += 0.005 * segments if fits else 0.0
                    expected.append(fits)
                    nursery.start_soon(timed, sessions[n], feed, within_s, told[n])
                    await trio.testing.wait_all_tasks_blocked()
            assert [told[n] == ["met"] for n in order] == expected
            assert all(told[n] == ["met"] or isinstance(told[n][0], trionnx.RunRefused) for n in order)

    trio.run(main, clock=MockClock(autojump_threshold=0))
