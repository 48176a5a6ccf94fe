"""Who is next in one session: the most urgent run, by what it is when the queue is free."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

import trionnx
from trionnx.actors.fake import FakeModel
from trionnx.gpu.seam import StepView
from trionnx.scheduler.governor import Governor
from trionnx.scheduler.line import Errand, Line
from trionnx.scheduler.turns import Ask

Feed = dict[str, np.ndarray[Any, Any]]


def long(segments: int) -> FakeModel:
    """5 ms a segment."""
    return FakeModel(((StepView("gpu", cost_s=0.005),) * segments,))


class Caller:
    """Who waits in a line: how urgent it is, and what it was told."""

    def __init__(self, number: int, priority: int = 0, due: float = math.inf, share: int = 0) -> None:
        self.number, self.priority, self.due, self.share = number, priority, due, share
        self.looks = 0

    def claim(self) -> Ask:
        return Ask(self.number, 1, priority=self.priority, deadline=self.due, share=self.share)

    def look(self) -> None:
        self.looks += 1


class Queue:
    """A line, who came through it, and a first one who has it until `opened`."""

    def __init__(self, aging_s: float = math.inf) -> None:
        self.governor = Governor()
        self.governor.aging_s = aging_s
        self.line = Line(self.governor)
        self.order: list[int] = []
        self.opened = trio.Event()
        self.first = Caller(-1)

    async def hold(self) -> None:
        async with self.line.turn(self.first):
            await self.opened.wait()

    async def come(self, caller: Caller, takes_s: float = 0.0) -> None:
        async with self.line.turn(caller):
            self.order.append(caller.number)
            await trio.sleep(takes_s)


places = st.tuples(st.integers(-1, 1), st.sampled_from([1.0, 2.0, math.inf]), st.booleans())


@settings(max_examples=60, deadline=None)
@given(st.lists(places, min_size=1, max_size=8))
def test_priority_then_deadline_then_arrival_and_who_is_cancelled_leaves(works: list[tuple[int, float, bool]]) -> None:
    async def main() -> None:
        queue = Queue()
        scopes = [trio.CancelScope() for _ in works]

        async def come(number: int) -> None:
            priority, due, _ = works[number]
            with scopes[number]:
                await queue.come(Caller(number, priority, due), 0.1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(queue.hold)
            await wait_all_tasks_blocked()
            for number in range(len(works)):
                nursery.start_soon(come, number)
                await wait_all_tasks_blocked()
            stay = [number for number, work in enumerate(works) if work[2]]
            for number in set(range(len(works))) - set(stay):
                scopes[number].cancel()
            await wait_all_tasks_blocked()
            assert len(queue.line) == len(stay)
            first = queue.line.first
            queue.opened.set()
        rank = sorted(stay, key=lambda number: (-works[number][0], works[number][1], number))
        assert queue.order == rank
        assert (first is None) == (not rank)
        assert first is None or works[rank[0]][:2] == (first.priority, first.deadline)
        assert queue.line.first is None
        async with queue.line.turn(Caller(99)):  # it is free again
            pass

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def test_a_deadline_that_moves_meanwhile_counts(autojump_clock: MockClock) -> None:
    queue = Queue()
    late, soon, other = Caller(0, due=9.0), Caller(1, due=5.0), Caller(2, due=7.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.hold)
        await wait_all_tasks_blocked()
        for caller in (soon, other, late):
            nursery.start_soon(queue.come, caller, 1.0)
            await wait_all_tasks_blocked()
        late.due, other.due = 6.0, 8.0
        queue.opened.set()
    assert queue.order == [1, 0, 2], "they look whenever one is through"


async def test_among_equals_the_share_that_used_less_goes_first(autojump_clock: MockClock) -> None:
    queue = Queue()
    governor = queue.governor

    class Taker(Caller):
        remaining_s = 0.0

        def granted(self) -> None: ...

        def recall(self) -> None: ...

    governor.ask(Taker(7), Ask(7, 9, share=7, cost_s=1.0))
    governor.ask(Taker(8), Ask(8, 9, share=8, cost_s=0.1))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.hold)
        await wait_all_tasks_blocked()
        for caller in (Caller(0, share=8), Caller(1, share=7)):
            nursery.start_soon(queue.come, caller)
            await wait_all_tasks_blocked()
        queue.opened.set()
    assert queue.order == [1, 0]


async def test_one_that_waited_too_long_goes_first_each_aging_s(autojump_clock: MockClock) -> None:
    """Of a backlog of old runs one goes in a second; the urgent ones have the rest."""
    queue = Queue(aging_s=1.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.hold)
        await wait_all_tasks_blocked()
        for number in range(3):
            nursery.start_soon(queue.come, Caller(number), 0.4)
            await wait_all_tasks_blocked()
        await trio.sleep(2.0)
        for number in range(10, 16):
            nursery.start_soon(queue.come, Caller(number, priority=1), 0.4)
            await wait_all_tasks_blocked()
        queue.opened.set()
    assert queue.order == [0, 10, 11, 1, 12, 13, 2, 14, 15]


async def test_the_holder_hears_of_who_is_more_urgent(autojump_clock: MockClock) -> None:
    queue = Queue()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.hold)
        await wait_all_tasks_blocked()
        for number, priority, looks in ((0, 0, 1), (1, 1, 2), (2, 0, 2), (3, 1, 2), (4, 2, 3)):
            nursery.start_soon(queue.come, Caller(number, priority))
            await wait_all_tasks_blocked()
            assert queue.first.looks == looks
        queue.opened.set()


async def test_a_copy_waits_by_its_callers_deadline(autojump_clock: MockClock) -> None:
    queue = Queue()
    told: list[str] = []

    async def copy() -> None:
        with trio.fail_after(60):
            async with queue.line.turn(Errand(5)):
                told.append("copied")
                assert not queue.order

    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.hold)
        await wait_all_tasks_blocked()
        nursery.start_soon(queue.come, Caller(0))
        nursery.start_soon(copy)
        await wait_all_tasks_blocked()
        queue.opened.set()
    assert (told, queue.order) == (["copied"], [0])


# --- in a session --------------------------------------------------------------------------------


@contextmanager
def named(told: list[str], name: str, scope: AbstractContextManager[Any]) -> Iterator[None]:
    with scope:
        yield
        told.append(name)


async def test_runs_of_a_session_go_by_priority_and_deadline(autojump_clock: MockClock, feed: Feed) -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(long(10))
        told: list[str] = []

        async def run(name: str, scope: Callable[[], AbstractContextManager[Any]], priority: int = 0) -> None:
            with named(told, name, scope()):
                await session.run(None, feed, trionnx.RunOptions(priority=priority))

        async with trio.open_nursery() as nursery:
            for name, scope, priority in (
                ("first", nullcontext, 0),
                ("batch", nullcontext, 0),
                ("due in 9", lambda: trio.fail_after(9), 0),
                ("due in 5", lambda: trio.fail_after(5), 0),
                ("urgent", nullcontext, 1),
            ):
                nursery.start_soon(run, name, scope, priority)
                await wait_all_tasks_blocked()
            assert session.statistics().queued == 4
        assert told == ["first", "urgent", "due in 5", "due in 9", "batch"]
        assert session.statistics().queued == 0


async def test_a_run_is_as_urgent_as_what_waits_for_it(autojump_clock: MockClock, feed: Feed) -> None:
    """A batch run of another session stands back while an urgent run waits for this session's batch run."""
    async with trionnx.open_scheduler(backend="fake", max_in_flight=1) as scheduler:
        shared, other = await scheduler.load(long(20)), await scheduler.load(long(20))
        ends: dict[str, float] = {}

        async def run(name: str, session: trionnx.Session, priority: int) -> None:
            await session.run(None, feed, trionnx.RunOptions(priority=priority))
            ends[name] = trio.current_time()

        begin = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, "batch", shared, 0)
            nursery.start_soon(run, "middle", other, 1)
            await trio.sleep(0.001)
            nursery.start_soon(run, "urgent", shared, 2)
        assert sorted(ends, key=lambda name: ends[name]) == ["batch", "urgent", "middle"]
        assert ends["urgent"] - begin == pytest.approx(0.205, abs=0.011)


@pytest.mark.parametrize("moves", [True, False])
async def test_a_deadline_that_moves_while_a_run_waits_for_its_turn(
    autojump_clock: MockClock, feed: Feed, moves: bool
) -> None:
    """The second waits behind an earlier deadline; once its own is brought forward it has the turns."""
    async with trionnx.open_scheduler(backend="fake", max_in_flight=1, aging_s=60) as scheduler:
        first, second = await scheduler.load(long(100)), await scheduler.load(long(20))
        told: list[str] = []
        scope = trio.CancelScope(deadline=trio.current_time() + 50)

        async def run(name: str, session: trionnx.Session, around: AbstractContextManager[Any]) -> None:
            with named(told, name, around):
                await session.run(None, feed)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, "first", first, trio.move_on_after(10))
            nursery.start_soon(run, "second", second, scope)
            await trio.sleep(0.1)
            if moves:
                scope.deadline = trio.current_time() + 0.2
        assert told == (["second", "first"] if moves else ["first", "second"])


async def test_a_run_that_waits_is_cancelled_at_once_and_costs_nothing(autojump_clock: MockClock, feed: Feed) -> None:
    model = long(10)
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.run, None, feed)
            await trio.sleep(0.02)
            with trio.move_on_after(0.001) as scope:
                await session.run(None, feed, trionnx.RunOptions(priority=1))
            assert scope.cancelled_caught
            assert trio.current_time() == scope.deadline
            assert len({line.run for line in model.engines[0].log if line.run >= 0}) == 1
