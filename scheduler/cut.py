"""Cutting blocks into segments: pure functions, without Trio, without state.

Rules: a segment lies within one block and never mixes kinds of steps; it takes whole steps while
their estimated time fits the budget; a step that is longer than the budget by itself is cut
inside, in multiples of its `StepView.multiple`; every segment holds at least one unit.
"""

from __future__ import annotations

from ..gpu.seam import BlockView, Cursor, Finished

__all__ = ["BUDGET_S", "advance", "cost", "count_segments", "cut"]

BUDGET_S = 0.005
"""Estimated seconds on the device that a segment aims at."""


def cut(block: BlockView, cursor: Cursor, budget_s: float = BUDGET_S) -> Cursor:
    """Where a segment that starts at `cursor` stops.

    Args:
        block: the block that the cursor is in.
        cursor: the next unit to submit, not the block's end.
        budget_s: seconds that the segment may take, by the steps' own estimates.

    Returns:
        The first unit behind the segment: greater than `cursor`, at most the block's end.

    Raises:
        ValueError: `cursor` is not in the block, or is its end.
    """
    steps, index, unit = block.steps, cursor.step, cursor.unit
    if cursor.activation != block.activation or not (0 <= index < len(steps) and 0 <= unit < steps[index].units):
        raise ValueError(f"{cursor} is not a unit of block {block.activation} with {len(steps)} steps")
    kind, left_s = steps[index].kind, budget_s * (1 + 1e-9)  # so that five steps of 1 ms fit 5 ms
    while index < len(steps) and steps[index].kind == kind:
        step = steps[index]
        unit_s = step.cost_s / step.units
        rest_s = unit_s * (step.units - unit)
        if rest_s > left_s:
            first = (index, unit) == (cursor.step, cursor.unit)
            if step.units > 1 and step.cost_s > budget_s:
                unit = min(step.units, unit + _part(left_s / unit_s, step.multiple, at_least_one=first))
            elif first:
                unit = step.units
            if unit < step.units:
                return Cursor(block.activation, index, unit)
            return Cursor(block.activation, index + 1)
        left_s -= rest_s
        index, unit = index + 1, 0
    return Cursor(block.activation, index)


def _part(fits: float, multiple: int, *, at_least_one: bool) -> int:
    count = int(fits) // multiple
    return max(count, 1 if at_least_one else 0) * multiple


def advance(
    block: BlockView, stop: Cursor, decided: BlockView | Finished | None = None
) -> tuple[BlockView, Cursor] | Finished | None:
    """Where the run goes on behind a segment.

    Args:
        block: the block that the segment was cut from.
        stop: the segment's stop.
        decided: what the engine decided at the block's end, where it did.

    Returns:
        The block and the cursor of the next unit; `Finished`; or None where the block's end is
        reached and what follows is not decided yet.
    """
    if stop.step < len(block.steps):
        return block, stop
    then = decided if block.then is None else block.then
    return (then, Cursor(then.activation)) if isinstance(then, BlockView) else then


def count_segments(block: BlockView | Finished | None, cursor: Cursor | None = None, budget_s: float = BUDGET_S) -> int:
    """How many segments are left from `cursor` (None: the block's start) to the end of what is known."""
    count = 0
    while isinstance(block, BlockView):
        place: tuple[BlockView, Cursor] | Finished | None = (block, cursor or Cursor(block.activation))
        while isinstance(place, tuple) and place[0] is block:
            place = advance(block, cut(*place, budget_s))
            count += 1
        block, cursor = block.then, None
    return count


def cost(block: BlockView, start: Cursor, stop: Cursor) -> float:
    """Estimated seconds of the units in [start, stop), both in this block."""
    total = 0.0
    for index in range(start.step, min(stop.step + 1, len(block.steps))):
        step = block.steps[index]
        begin = start.unit if index == start.step else 0
        end = stop.unit if index == stop.step else step.units
        total += step.cost_s * (end - begin) / step.units
    return total
