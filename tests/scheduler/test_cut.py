from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trionnx.gpu.policy import TerminatePolicy
from trionnx.gpu.seam import BlockView, Cursor, Finished, StepView
from trionnx.scheduler.cut import SLACK, SLACK_S, Piece, advance, cost, count_segments, cut, pieces

steps = st.builds(
    StepView,
    kind=st.sampled_from(["gpu", "host", "opaque"]),
    units=st.integers(1, 40),
    cost_s=st.one_of(st.just(0.0), st.floats(1e-6, 0.1)),
    multiple=st.integers(1, 12),
)
blocks = st.lists(st.one_of(st.just(StepView("gpu")), steps), min_size=1).map(lambda views: BlockView(0, tuple(views)))
policies = st.builds(
    TerminatePolicy,
    checkpoint_interval_s=st.floats(1e-5, 0.2),
    poll_after=st.sampled_from(["every_subgraph", "every_op"]),
    split_into_checkpoints=st.booleans(),
)


def every(seconds: float, **changes: object) -> TerminatePolicy:
    return replace(TerminatePolicy(checkpoint_interval_s=seconds), **changes)  # type: ignore[arg-type]


def segments(block: BlockView, policy: TerminatePolicy, pace: float = 1.0) -> list[tuple[Cursor, Cursor]]:
    found = []
    place: tuple[BlockView, Cursor] | Finished | None = (block, Cursor(block.activation))
    while isinstance(place, tuple):
        stop = cut(*place, policy, pace)
        found.append((place[1], stop))
        assert place[1] < stop
        place = advance(block, stop)
    assert isinstance(place, Finished)
    return found


def units(block: BlockView, start: Cursor, stop: Cursor) -> list[tuple[int, int]]:
    all_units = [(index, unit) for index, step in enumerate(block.steps) for unit in range(step.units)]
    return [place for place in all_units if start[1:] <= place < stop[1:]]


@given(blocks, policies, st.floats(0.5, 20))
def test_segments_cover_every_unit_once_and_in_order(block: BlockView, policy: TerminatePolicy, pace: float) -> None:
    covered = [unit for start, stop in segments(block, policy, pace) for unit in units(block, start, stop)]
    assert covered == units(block, Cursor(0), Cursor(0, len(block.steps)))


@given(blocks, policies, st.floats(1, 20))
def test_a_segment_fits_the_interval_or_is_one_smallest_part(
    block: BlockView, policy: TerminatePolicy, pace: float
) -> None:
    policy = replace(policy, split_into_checkpoints=True)
    for start, stop in segments(block, policy, pace):
        taken = units(block, start, stop)
        touched = {index for index, _ in taken}
        step = block.steps[start.step]
        smallest = len(touched) == 1 and (step.units == 1 or len(taken) <= step.multiple)
        most = (policy.checkpoint_interval_s + min(SLACK * policy.checkpoint_interval_s, SLACK_S)) / pace
        assert cost(block, start, stop) <= most * (1 + 1e-6) or smallest


@given(blocks, policies)
def test_a_segment_has_one_kind_and_starts_and_stops_at_places_allowed(
    block: BlockView, policy: TerminatePolicy
) -> None:
    for start, stop in segments(block, policy):
        assert len({block.steps[index].kind for index, _ in units(block, start, stop)}) == 1
        if stop.unit:
            step = block.steps[stop.step]
            assert policy.split_into_checkpoints
            assert stop.unit % step.multiple == 0
            assert step.cost_s > policy.checkpoint_interval_s


@given(blocks, policies)
def test_no_segment_could_have_taken_the_next_step_too(block: BlockView, policy: TerminatePolicy) -> None:
    policy = replace(policy, poll_after="every_subgraph", split_into_checkpoints=True)
    for start, stop in segments(block, policy):
        if stop.unit or stop.step == len(block.steps):
            continue
        ahead = block.steps[stop.step]
        if ahead.kind == block.steps[start.step].kind:
            assert cost(block, start, stop) + ahead.cost_s > policy.checkpoint_interval_s * (1 - 1e-9)


@given(blocks, policies)
def test_every_op_takes_one_step_at_most(block: BlockView, policy: TerminatePolicy) -> None:
    policy = replace(policy, poll_after="every_op", split_into_checkpoints=True)
    for start, stop in segments(block, policy):
        assert len({index for index, _ in units(block, start, stop)}) == 1


@given(blocks)
def test_unsplit_a_block_is_cut_where_its_kind_changes_and_nowhere_else(block: BlockView) -> None:
    kinds = [step.kind for step in block.steps]
    changes = sum(a != b for a, b in pairwise(kinds))
    assert len(segments(block, every(1e-5, split_into_checkpoints=False))) == 1 + changes


@given(blocks, policies)
def test_pieces_are_the_segments_and_their_costs(block: BlockView, policy: TerminatePolicy) -> None:
    found = segments(block, policy)
    assert pieces(block, policy) == {start: Piece(stop, cost(block, start, stop)) for start, stop in found}
    assert count_segments(block, policy) == len(found)
    total = sum(cost(block, *segment) for segment in found)
    assert total == pytest.approx(sum(step.cost_s for step in block.steps))


def test_steps_of_round_numbers_fill_the_interval_exactly() -> None:
    block = BlockView(0, (StepView("gpu", cost_s=0.001),) * 12)
    assert [stop.step for _, stop in segments(block, every(0.005))] == [5, 10, 12]


def test_a_segment_ends_where_it_is_nearest_to_the_interval() -> None:
    block = BlockView(0, (StepView("gpu", cost_s=0.0042), StepView("gpu", cost_s=0.0015), StepView("gpu", cost_s=1e-4)))
    assert [stop.step for _, stop in segments(block, every(0.005))] == [2, 3]
    assert [stop.step for _, stop in segments(block, every(0.0049))] == [1, 3]


def test_a_long_step_by_itself_is_cut_into_even_shares_in_multiples() -> None:
    block = BlockView(0, (StepView("gpu", units=100, cost_s=0.1, multiple=2),))
    assert [stop[1:] for _, stop in segments(block, every(0.03))] == [(0, 34), (0, 68), (1, 0)]
    assert [stop[1:] for _, stop in segments(block, every(0.04))] == [(0, 34), (0, 68), (1, 0)]
    assert [stop[1:] for _, stop in segments(block, every(0.046))] == [(0, 50), (1, 0)]
    assert [stop[1:] for _, stop in segments(block, every(0.096))] == [(1, 0)]


def test_a_long_step_fills_up_a_segment_where_half_of_it_is_left() -> None:
    block = BlockView(0, (StepView("gpu", cost_s=0.003), StepView("gpu", units=100, cost_s=0.1, multiple=2)))
    assert cut(block, Cursor(0), every(0.0072)) == Cursor(0, 1, 4)
    assert cut(block, Cursor(0), every(0.0055)) == Cursor(0, 1)


def test_a_step_that_fits_a_segment_of_its_own_is_not_cut() -> None:
    block = BlockView(0, (StepView("gpu", cost_s=0.003), StepView("gpu", units=100, cost_s=0.0045)))
    assert cut(block, Cursor(0), every(0.005)) == Cursor(0, 1)
    assert cut(block, Cursor(0, 1), every(0.005)) == Cursor(0, 2)


def test_slower_than_estimated_means_smaller_segments() -> None:
    block = BlockView(0, (StepView("gpu", cost_s=0.001),) * 10)
    assert [stop.step for _, stop in segments(block, every(0.005), pace=2.5)] == [2, 4, 6, 8, 10]


def test_advance_follows_what_is_static_and_waits_for_what_is_decided() -> None:
    last = BlockView(2, (StepView("gpu"),))
    middle = BlockView(1, (StepView("gpu"),), None)
    first = BlockView(0, (StepView("gpu"), StepView("host")), middle)
    assert advance(first, Cursor(0, 1)) == (first, Cursor(0, 1))
    assert advance(first, Cursor(0, 2)) == (middle, Cursor(1))
    assert advance(middle, Cursor(1, 1)) is None
    assert advance(middle, Cursor(1, 1), last) == (last, Cursor(2))
    assert advance(last, Cursor(2, 1)) == Finished()
    assert count_segments(first, TerminatePolicy()) == 3


@pytest.mark.parametrize("cursor", [Cursor(0, 2), Cursor(1, 0), Cursor(0, 0, 1), Cursor(0, -1)])
def test_a_cursor_that_is_not_in_the_block_is_refused(cursor: Cursor) -> None:
    with pytest.raises(ValueError, match="is not a unit of block 0"):
        cut(BlockView(0, (StepView("gpu"), StepView("gpu"))), cursor, TerminatePolicy())
