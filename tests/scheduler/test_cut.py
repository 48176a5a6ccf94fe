from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trionnx.gpu.seam import BlockView, Cursor, Finished, StepView
from trionnx.scheduler.cut import advance, cost, count_segments, cut

steps = st.builds(
    StepView,
    kind=st.sampled_from(["gpu", "host", "opaque"]),
    units=st.integers(1, 40),
    cost_s=st.one_of(st.just(0.0), st.floats(1e-6, 0.1)),
    multiple=st.integers(1, 12),
)
blocks = st.lists(st.one_of(st.just(StepView("gpu")), steps), min_size=1).map(lambda views: BlockView(0, tuple(views)))
budgets = st.one_of(st.just(0.0), st.floats(1e-5, 0.2))


def segments(block: BlockView, budget_s: float) -> list[tuple[Cursor, Cursor]]:
    found = []
    place: tuple[BlockView, Cursor] | Finished | None = (block, Cursor(block.activation))
    while isinstance(place, tuple):
        stop = cut(*place, budget_s)
        found.append((place[1], stop))
        assert place[1] < stop
        place = advance(block, stop)
    assert isinstance(place, Finished)
    return found


def units(block: BlockView, start: Cursor, stop: Cursor) -> list[tuple[int, int]]:
    every = [(index, unit) for index, step in enumerate(block.steps) for unit in range(step.units)]
    return [place for place in every if start[1:] <= place < stop[1:]]


@given(blocks, budgets)
def test_segments_cover_every_unit_once_and_in_order(block: BlockView, budget_s: float) -> None:
    covered = [unit for start, stop in segments(block, budget_s) for unit in units(block, start, stop)]
    assert covered == units(block, Cursor(0), Cursor(0, len(block.steps)))


@given(blocks, budgets)
def test_a_segment_fits_the_budget_or_is_one_smallest_part(block: BlockView, budget_s: float) -> None:
    for start, stop in segments(block, budget_s):
        taken = units(block, start, stop)
        touched = {index for index, _ in taken}
        step = block.steps[start.step]
        smallest = len(touched) == 1 and (step.units == 1 or len(taken) <= step.multiple)
        assert cost(block, start, stop) <= budget_s * (1 + 1e-6) or smallest


@given(blocks, budgets)
def test_a_segment_has_one_kind_and_starts_and_stops_at_places_allowed(block: BlockView, budget_s: float) -> None:
    for start, stop in segments(block, budget_s):
        assert len({block.steps[index].kind for index, _ in units(block, start, stop)}) == 1
        if stop.unit:
            step = block.steps[stop.step]
            assert stop.unit % step.multiple == 0
            assert step.cost_s > budget_s


@given(blocks, budgets)
def test_no_segment_could_have_taken_the_next_step_too(block: BlockView, budget_s: float) -> None:
    for start, stop in segments(block, budget_s):
        if stop.unit or stop.step == len(block.steps):
            continue
        ahead = block.steps[stop.step]
        if ahead.kind == block.steps[start.step].kind:
            assert cost(block, start, stop) + ahead.cost_s > budget_s


@given(blocks, budgets)
def test_count_is_the_number_of_segments_from_any_place(block: BlockView, budget_s: float) -> None:
    found = segments(block, budget_s)
    assert count_segments(block, None, budget_s) == len(found)
    for index, (start, _) in enumerate(found):
        assert count_segments(block, start, budget_s) == len(found) - index


@given(blocks, budgets)
def test_cost_of_the_segments_is_the_cost_of_the_block(block: BlockView, budget_s: float) -> None:
    total = sum(cost(block, *segment) for segment in segments(block, budget_s))
    assert total == pytest.approx(sum(step.cost_s for step in block.steps))


def test_steps_of_round_numbers_fill_the_budget_exactly() -> None:
    block = BlockView(0, (StepView("gpu", cost_s=0.001),) * 12)
    assert [stop.step for _, stop in segments(block, 0.005)] == [5, 10, 12]


def test_a_long_step_fills_up_what_is_left_of_a_segment_in_multiples() -> None:
    block = BlockView(0, (StepView("gpu", cost_s=0.003), StepView("gpu", units=100, cost_s=0.1, multiple=2)))
    assert cut(block, Cursor(0), 0.0062) == Cursor(0, 1, 2)
    assert cut(block, Cursor(0, 1, 2), 0.0062) == Cursor(0, 1, 8)
    assert cut(block, Cursor(0, 1, 98), 0.0062) == Cursor(0, 2)


def test_a_step_that_fits_a_segment_of_its_own_is_not_cut() -> None:
    block = BlockView(0, (StepView("gpu", cost_s=0.003), StepView("gpu", units=100, cost_s=0.004)))
    assert cut(block, Cursor(0), 0.005) == Cursor(0, 1)
    assert cut(block, Cursor(0, 1), 0.005) == Cursor(0, 2)


def test_advance_follows_what_is_static_and_waits_for_what_is_decided() -> None:
    last = BlockView(2, (StepView("gpu"),))
    middle = BlockView(1, (StepView("gpu"),), None)
    first = BlockView(0, (StepView("gpu"), StepView("host")), middle)
    assert advance(first, Cursor(0, 1)) == (first, Cursor(0, 1))
    assert advance(first, Cursor(0, 2)) == (middle, Cursor(1))
    assert advance(middle, Cursor(1, 1)) is None
    assert advance(middle, Cursor(1, 1), last) == (last, Cursor(2))
    assert advance(last, Cursor(2, 1)) == Finished()
    assert count_segments(first) == 3


@pytest.mark.parametrize("cursor", [Cursor(0, 2), Cursor(1, 0), Cursor(0, 0, 1), Cursor(0, -1)])
def test_a_cursor_that_is_not_in_the_block_is_refused(cursor: Cursor) -> None:
    with pytest.raises(ValueError, match="is not a unit of block 0"):
        cut(BlockView(0, (StepView("gpu"), StepView("gpu"))), cursor)
