from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from trionnx.scheduler.turns import Ask, Event, Hold, Leave, Release, Return, State, decide

LIMIT = 2


class World:
    """A governor's state, and runs that use it: each keeps one question open while it has work."""

    def __init__(self, aging_s: float = math.inf) -> None:
        self.state, self.now, self.aging_s = State(), 0.0, aging_s
        self.turns: list[int] = []
        self.recalled: list[int] = []
        self.served = 0

    def feed(self, event: Event) -> None:
        outcome = decide(self.state, event, self.now, self.aging_s)
        self.state = outcome.state
        self.turns += outcome.granted
        self.recalled += outcome.recalled

    def serve(self, asks: list[Ask], turns: int, took_s: float = 0.005) -> Counter[int]:
        """All of them ask anew whenever they have a turn; segments finish in the order of their turns."""
        by_run = {ask.run: ask for ask in asks}
        waiting = {ask.run for ask, _ in self.state.waiting}
        while len(self.turns) < turns:
            for run, ask in by_run.items():
                if run not in waiting:
                    waiting.add(run)
                    before = len(self.turns)
                    self.feed(ask)
                    waiting -= set(self.turns[before:])
            self.now += took_s
            before = len(self.turns)
            self.feed(Return(self.turns[self.served], took_s))
            self.served += 1
            waiting -= set(self.turns[before:])
        return Counter(self.turns[:turns])


kinds = st.sampled_from(["ask", "return", "leave", "hold", "release"])
moves = st.lists(st.tuples(kinds, st.integers(0, 4)), max_size=60)


@given(moves)
def test_never_more_than_the_limit_and_never_idle_while_somebody_may_go(moves: list[tuple[str, int]]) -> None:
    world = World()
    for number, (move, run) in enumerate(moves):
        waits = any(ask.run == run for ask, _ in world.state.waiting)
        if move == "ask" and waits:
            continue
        world.now = float(number)
        ask = Ask(run, LIMIT, priority=run % 2, share=run, cost_s=0.005)
        events: dict[str, Event] = {"ask": ask, "return": Return(run), "leave": Leave(run, 0), "hold": Hold(run)}
        world.feed(events.get(move, Release(run)))
        state = world.state
        assert state.in_flight <= LIMIT
        there = max((priority for run, priority in state.there.items() if run not in state.paused), default=0)
        mayest = [ask for ask, _ in state.waiting if ask.run not in state.paused and ask.priority == there]
        assert state.in_flight == LIMIT or not mayest
        assert all(state.held.values())
        assert state.used or not state.runs


def test_alone_a_run_goes_ahead_and_is_recalled_when_another_comes() -> None:
    world = World()
    for _ in range(6):
        world.feed(Ask(1, LIMIT, ahead=3))
    assert world.turns == [1] * 5
    world.feed(Ask(2, LIMIT, ahead=3, share=2))
    assert (world.turns, world.recalled) == ([1] * 5, [1])
    for _ in range(3):
        world.feed(Return(1, 0.0))
    assert world.turns == [1] * 5, "what is in flight counts"
    world.feed(Return(1, 0.005))
    assert world.turns[5:] == [2]


def test_who_comes_with_a_lower_priority_recalls_nothing() -> None:
    world = World()
    for _ in range(6):
        world.feed(Ask(1, LIMIT, ahead=3, priority=1))
    world.feed(Ask(2, LIMIT, share=2))
    assert world.recalled == []


def test_turns_go_round_among_equals() -> None:
    counts = World().serve([Ask(run, LIMIT, share=run, cost_s=0.005) for run in (1, 2, 3)], 31)
    assert max(counts.values()) - min(counts.values()) <= 1 + LIMIT


def test_a_higher_priority_has_every_turn_while_it_asks() -> None:
    world = World()
    world.feed(Ask(9, LIMIT, share=9))
    counts = world.serve([Ask(1, LIMIT, share=1), Ask(2, LIMIT, priority=1, share=2)], 40)
    assert counts[1] <= 1, "but for the one that was there first"


def test_an_earlier_deadline_goes_first() -> None:
    world = World()
    for run, deadline in ((1, math.inf), (2, 7.0), (3, 5.0), (4, 6.0)):
        world.feed(Ask(run, 1, deadline=deadline, share=run))
    while world.state.held:
        world.feed(Return(next(iter(world.state.held))))
    assert world.turns == [1, 3, 4, 2]


def test_shares_of_time_follow_the_weights_whatever_segments_cost() -> None:
    asks = [Ask(1, LIMIT, share=1, weight=3.0, cost_s=0.005), Ask(2, LIMIT, share=2, weight=1.0, cost_s=0.005)]
    counts = World().serve(asks, 400)
    assert 0.70 <= counts[1] / 400 <= 0.80

    world = World()
    used = {1: 0.0, 2: 0.0}
    took = {1: 0.010, 2: 0.002}
    for served in range(600):
        for ask in asks:
            while all(waiting.run != ask.run for waiting, _ in world.state.waiting):
                world.feed(replace(ask, weight=1.0))
        run = world.turns[served]
        used[run] += took[run]
        world.feed(Return(run, took[run]))
    assert 0.45 <= used[1] / sum(used.values()) <= 0.55


def test_who_comes_late_has_no_credit_for_the_time_before() -> None:
    world = World()
    world.serve([Ask(1, LIMIT, share=1, cost_s=0.005)], 100)
    counts = Counter(world.turns)
    world.serve([Ask(1, LIMIT, share=1, cost_s=0.005), Ask(2, LIMIT, share=2, cost_s=0.005)], 160)
    more = Counter(world.turns) - counts
    assert abs(more[1] - more[2]) <= 4


def test_nobody_starves() -> None:
    world = World(aging_s=0.1)
    counts = world.serve([Ask(1, LIMIT, share=1), Ask(2, LIMIT, priority=5, share=2)], 410)
    assert 18 <= counts[1] <= 22, "2 s went by: a turn each 0.1 s"


def test_who_is_held_gets_no_turn_until_released_and_stops_nobody() -> None:
    world = World()
    world.feed(Hold(1))
    world.feed(Ask(1, 1, priority=9))
    world.feed(Ask(2, 1, share=2))
    assert world.turns == [2]
    world.feed(Release(1))
    assert world.turns == [2]
    world.feed(Return(2))
    assert world.turns == [2, 1]
    world.feed(Hold(1))
    world.feed(Leave(1, 0))
    assert world.state.runs == frozenset()


def test_who_leaves_gives_back_a_turn_that_was_not_used() -> None:
    world = World()
    for run in (1, 3):
        world.feed(Ask(run, LIMIT, share=run))
    world.feed(Ask(2, LIMIT, share=2))
    world.feed(Leave(3, in_flight=0))
    assert world.turns == [1, 3, 2]
    world.feed(Leave(1, in_flight=1))
    assert set(world.state.held) == {1, 2}
    world.feed(Return(1))
    assert set(world.state.held) == {2}


def test_an_answer_that_comes_after_all_is_not_counted_twice() -> None:
    world = World()
    world.feed(Ask(1, 1))
    world.feed(Leave(1, 0))
    world.feed(Return(1))
    assert world.state.runs == frozenset()


def test_while_a_higher_priority_is_there_a_lower_one_waits() -> None:
    """Also when there is room, and while the higher one asks for nothing: until it leaves or is held."""
    world = World()
    high, low = Ask(0, LIMIT, priority=1), Ask(1, LIMIT)
    world.feed(high)
    world.feed(low)
    assert world.turns == [0]
    world.feed(Return(0))
    assert world.turns == [0]
    world.feed(Hold(0))
    assert world.turns == [0, 1]
    world.feed(low)
    world.feed(Release(0))
    world.feed(Return(1))
    world.feed(low)
    assert world.turns == [0, 1, 1]
    world.feed(Return(1))
    assert world.turns == [0, 1, 1], "the higher one is there again"
    world.feed(Leave(0, 0))
    assert world.turns == [0, 1, 1, 1]


def test_a_lower_priority_that_has_starved_has_a_turn_all_the_same() -> None:
    world = World(aging_s=1.0)
    world.feed(Ask(0, LIMIT, priority=1))
    world.feed(Ask(1, LIMIT))
    world.now = 1.0
    world.feed(Ask(0, LIMIT, priority=1))
    assert world.turns == [0, 1]


def test_a_question_that_is_open_is_replaced_and_keeps_its_place() -> None:
    world = World()
    for run in (0, 0, 1, 2):
        world.feed(Ask(run, LIMIT))
    world.now = 5.0
    world.feed(Ask(2, LIMIT, deadline=9.0))
    assert [(ask.run, ask.deadline, since) for ask, since in world.state.waiting] == [(1, math.inf, 0.0), (2, 9.0, 0.0)]
    world.feed(Return(0))
    assert world.turns == [0, 0, 2]
