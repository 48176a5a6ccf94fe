from __future__ import annotations

from collections import Counter

import trio
from hypothesis import given
from hypothesis import strategies as st

from trionnx.scheduler.governor import Ask, Hold, Leave, Release, Return, State, decide, governor_of

LIMIT = 3
moves = st.lists(st.tuples(st.sampled_from(["ask", "return", "leave"]), st.integers(0, 5)), max_size=60)


@given(moves)
def test_never_more_than_the_limit_and_never_idle_while_somebody_waits(moves: list[tuple[str, int]]) -> None:
    state, asked, granted = State(), list[int](), list[int]()
    for move, run in moves:
        events: dict[str, Ask | Return | Leave] = {
            "ask": Ask(run, LIMIT),
            "return": Return(run),
            "leave": Leave(run, 0),
        }
        if move == "ask":
            if run in [ask.run for ask in state.waiting]:
                continue
            asked.append(run)
        if move == "leave":
            asked = [other for other in asked if other != run]
            granted = [other for other in granted if other != run]
        state, got = decide(state, events[move])
        granted += got
        held = sum(state.held.values())
        assert held <= LIMIT
        assert held == LIMIT or not state.waiting
    # Turns were granted in the order of asking; who waits is who asked last.
    assert asked == granted + [ask.run for ask in state.waiting]


def test_turns_go_round() -> None:
    state, turns = State(), list[int]()
    for run in (1, 2, 3):
        for _ in range(2):
            state, got = decide(state, Ask(run, 1))
            turns += got
    while state.held:
        (run,) = state.held
        state, got = decide(state, Return(run))
        turns += got
    assert turns == [1, 1, 2, 2, 3, 3]

    state, turns = State(), list[int]()
    for run in (1, 2, 3):
        state, got = decide(state, Ask(run, 1))
        turns += got
    for _ in range(9):
        (run,) = state.held
        state, got = decide(state, Return(run))
        turns += got
        state, got = decide(state, Ask(run, 1))
        turns += got
    assert Counter(turns) == {1: 4, 2: 3, 3: 3}
    assert turns == [1, 2, 3] * 3 + [1]


def test_who_leaves_gives_back_a_turn_that_was_not_used() -> None:
    state, _ = decide(State(), Ask(1, 2))
    state, _ = decide(state, Ask(1, 2))
    state, got = decide(state, Ask(2, 2))
    assert got == ()
    state, got = decide(state, Leave(1, in_flight=1))
    assert got == (2,)
    assert state.held == {1: 1, 2: 1}
    state, got = decide(state, Return(1))
    assert state.held == {2: 1}


def test_an_answer_that_comes_after_all_is_not_counted_twice() -> None:
    state, _ = decide(State(), Ask(1, 1))
    state, _ = decide(state, Leave(1, 0))
    state, _ = decide(state, Return(1))
    assert state == State()


def test_a_higher_priority_goes_first_and_equals_in_the_order_of_asking() -> None:
    state, turns = State(), list[int]()
    for run, priority in ((1, 0), (2, 0), (3, 5), (4, -1), (5, 5)):
        state, got = decide(state, Ask(run, 1, priority))
        turns += got
    while state.held:
        (run,) = state.held
        state, got = decide(state, Return(run))
        turns += got
    assert turns == [1, 3, 5, 2, 4]


def test_who_is_held_gets_no_turn_until_released_and_stops_nobody() -> None:
    state, _ = decide(State(), Hold(1))
    state, got = decide(state, Ask(1, 1, priority=9))
    assert got == ()
    state, got = decide(state, Ask(2, 1))
    assert got == (2,)
    state, got = decide(state, Release(1))
    assert got == ()
    state, got = decide(state, Return(2))
    assert got == (1,)
    state, _ = decide(state, Hold(1))
    state, _ = decide(state, Leave(1, 0))
    assert state == State()


async def test_one_governor_for_each_adapter() -> None:
    assert governor_of("a") is governor_of("a")
    assert governor_of("a") is not governor_of("b")
    assert governor_of("a").new_run() != governor_of("a").new_run()


def test_each_trio_run_has_its_own() -> None:
    async def main() -> object:
        return governor_of("a")

    assert trio.run(main) is not trio.run(main)
