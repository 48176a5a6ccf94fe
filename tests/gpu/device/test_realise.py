"""What steps cost, as learned from a device's clock."""

import pytest

from trionnx.gpu.device.realise import SAMPLES, Realised
from trionnx.gpu.seam import BlockView, Cursor, Segment

STEPS = 4
WHOLE = Segment(0, 0, Cursor(0), Cursor(0, STEPS))


def realised(*costs: float) -> Realised:
    zeros, ones = [0] * len(costs), [1] * len(costs)
    return Realised([None] * len(costs), list(costs), zeros, list(zeros), ["gpu"] * len(costs), ones, ones, [], [])


def teach_closely(made: Realised, seconds: list[float]) -> None:
    for _ in range(SAMPLES):
        assert made.unlearned(WHOLE)
        made.learn(WHOLE, range(STEPS + 1), seconds)
    assert not made.unlearned(WHOLE)


def test_what_timestamps_between_steps_add_is_gone_after_the_first_whole_segment():
    made = realised(*[1.0] * STEPS)
    teach_closely(made, [3e-3, 1e-3, 1e-3, 1e-3])
    assert made.expected(WHOLE) == pytest.approx(6e-3)
    assert made.unsure(WHOLE)
    made.learn(WHOLE, (0, STEPS), [3e-3])
    assert made.expected(WHOLE) == pytest.approx(3e-3)
    assert made.costs == pytest.approx([1.5e-3, 0.5e-3, 0.5e-3, 0.5e-3])


def test_segments_are_measured_as_wholes_until_they_are_sure():
    made = realised(*[1.0] * STEPS)
    teach_closely(made, [1e-3] * STEPS)
    for _ in range(SAMPLES):
        assert made.unsure(WHOLE)
        made.learn(WHOLE, (0, STEPS), [4e-3])
    assert not made.unsure(WHOLE)


def test_one_disturbed_measurement_moves_sure_costs_a_little():
    made = realised(*[1.0] * STEPS)
    teach_closely(made, [1e-3] * STEPS)
    for _ in range(10):
        made.learn(WHOLE, (0, STEPS), [4e-3])
    made.learn(WHOLE, (0, STEPS), [8e-3])
    assert made.expected(WHOLE) == pytest.approx(4.8e-3)


def test_a_small_difference_is_let_be():
    made = realised(*[1.0] * STEPS)
    teach_closely(made, [1e-3] * STEPS)
    for _ in range(SAMPLES):
        made.learn(WHOLE, (0, STEPS), [4e-3])
    before = list(made.costs)
    made.learn(WHOLE, (0, STEPS), [4.3e-3])
    assert made.costs == before


def test_a_profile_of_known_steps_teaches_nothing():
    made = realised(*[1.0] * STEPS)
    teach_closely(made, [1e-3] * STEPS)
    before = list(made.costs)
    made.learn(WHOLE, range(STEPS + 1), [5e-3] * STEPS)
    assert made.costs == before


def test_a_part_of_a_step_tells_of_the_whole_step():
    made = realised(1.0)
    made.units[0] = 10
    segment = Segment(0, 0, Cursor(0), Cursor(0, 0, 4))
    made.learn(segment, (0, 1), [2e-3])
    assert made.costs == pytest.approx([5e-3])
    assert made.samples == made.wholes == [1]


def test_the_view_is_the_same_until_what_was_learned_is_told():
    made = realised(*[1.0] * STEPS)
    first = made.view(0, False)
    assert made.view(0, False) is first
    teach_closely(made, [1e-3] * STEPS)
    second = made.view(0, False)
    assert isinstance(second, BlockView)
    assert [step.cost_s for step in second.steps] == pytest.approx([1e-3] * STEPS)
    made.learn(WHOLE, (0, STEPS), [4.1e-3])
    assert made.view(0, False) is second
    made.learn(WHOLE, (0, STEPS), [12e-3])
    third = made.view(0, False)
    assert third is not second
    assert isinstance(third, BlockView)
    assert [step.cost_s for step in third.steps] == pytest.approx(made.costs)
    assert made.view(1, False) is not third
