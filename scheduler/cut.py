"""Cutting blocks into segments: pure functions, without Trio, and a table of what they made.

Rules: a segment lies within one block and never mixes kinds of steps; it takes whole steps, and
ends where its estimated time is nearest to the policy's interval; a step that by itself is longer
than that, by more than `SLACK` of it or `SLACK_S`, is cut inside, in multiples of its `StepView.multiple`; every
segment holds at least one unit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..gpu.policy import TerminatePolicy
from ..gpu.seam import BlockView, Cursor, Finished, StepView

__all__ = ["KEPT", "SLACK", "SLACK_S", "Piece", "PieceTable", "advance", "cost", "count_segments", "cut", "pieces"]

SLACK, SLACK_S = 0.5, 0.005
"""How far a segment may be estimated over the interval: a part of it, and at most so many seconds."""
KEPT = 32
"""Blocks whose segments are remembered."""


class Piece(NamedTuple):
    """A segment to be: where it stops, and its estimated seconds."""

    stop: Cursor
    cost_s: float


def cut(block: BlockView, cursor: Cursor, policy: TerminatePolicy, pace: float = 1.0) -> Cursor:
    """Where a segment that starts at `cursor` stops.

    Args:
        block: the block that the cursor is in.
        cursor: the next unit to submit, not the block's end.
        policy: how large a segment is to be.
        pace: how many times longer than estimated the steps take, as the run has seen.

    Returns:
        The first unit behind the segment: greater than `cursor`, at most the block's end.

    Raises:
        ValueError: `cursor` is not in the block, or is its end.
    """
    steps, index, unit = block.steps, cursor.step, cursor.unit
    if cursor.activation != block.activation or not (0 <= index < len(steps) and 0 <= unit < steps[index].units):
        raise ValueError(f"{cursor} is not a unit of block {block.activation} with {len(steps)} steps")
    kind = steps[index].kind
    if not policy.split_into_checkpoints:
        while index < len(steps) and steps[index].kind == kind:
            index += 1
        return Cursor(block.activation, index)
    budget_s = policy.checkpoint_interval_s / pace
    most_s = budget_s + min(SLACK * budget_s, SLACK_S / pace)
    spent_s = 0.0
    stop = len(steps) if policy.poll_after == "every_subgraph" else index + 1
    while index < stop and steps[index].kind == kind:
        step = steps[index]
        rest_s = step.cost_s / step.units * (step.units - unit)
        if spent_s + rest_s > most_s or spent_s + (spent_s + rest_s) > 2 * budget_s * (1 + 1e-9):
            first = (index, unit) == (cursor.step, cursor.unit)
            if step.units > 1 and step.cost_s > most_s:
                unit += _share(step, unit, budget_s, most_s) if first else _fill(step, budget_s, budget_s - spent_s)
            elif first:
                unit = step.units
            if unit < step.units:
                return Cursor(block.activation, index, unit)
            return Cursor(block.activation, index + 1)
        spent_s += rest_s
        index, unit = index + 1, 0
    return Cursor(block.activation, index)


def _fill(step: StepView, budget_s: float, left_s: float) -> int:
    """How many units of a long step go behind others into a segment: none where little is left of it."""
    if left_s < budget_s / 2:
        return 0
    return int(left_s / (step.cost_s / step.units)) // step.multiple * step.multiple


def _share(step: StepView, unit: int, budget_s: float, most_s: float) -> int:
    """How many units of a long step, from `unit` on, a segment starts with: an even share of them."""
    unit_s, units = step.cost_s / step.units, step.units - unit
    shares = max(1, round(unit_s * units / budget_s), math.ceil(unit_s * units / most_s - 1e-9))
    even = -(-units // (shares * step.multiple)) * step.multiple
    fit = max(1, int(most_s / unit_s) // step.multiple) * step.multiple
    return min(units, even, fit)


def pieces(block: BlockView, policy: TerminatePolicy) -> dict[Cursor, Piece]:
    """The segments of a whole block, by where they start."""
    made: dict[Cursor, Piece] = {}
    start = Cursor(block.activation)
    while start.step < len(block.steps):
        stop = cut(block, start, policy)
        made[start] = Piece(stop, cost(block, start, stop))
        start = stop
    return made


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


def count_segments(block: BlockView | Finished | None, policy: TerminatePolicy) -> int:
    """How many segments there are from the block's start to the end of what is known."""
    count = 0
    while isinstance(block, BlockView):
        count += len(pieces(block, policy))
        block = block.then
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


class PieceTable:
    """The segments of the blocks that a session has run lately: cut once per plan, not per run."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, TerminatePolicy], tuple[BlockView, dict[Cursor, Piece]]] = {}

    def of(self, policy: TerminatePolicy, block: BlockView) -> dict[Cursor, Piece]:
        """The segments of a block, by where they start."""
        key = id(block), policy
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= KEPT:
                del self._made[next(iter(self._made))]
            found = self._made[key] = block, pieces(block, policy)
        return found[1]
