"""Loop and Scan of many turns: a block for a lap of the body, entered again and again.

A lap is one turn, or several where nothing but their number says how many there are. What is
carried from lap to lap lies in places of its own, into which a lap copies what it gave last of
all; so every lap is the same steps. The number of the turn is an array of the run's frame, and so
is the condition. This file does not walk the body (planner.py does).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from ..kernels.gather import picked_rows
from ..kernels.kernel import Binding, Kernel
from ..kernels.move import slices
from .lowering import Lowering
from .model import Node
from .repeat import Repeat
from .steps import HostCall
from .tensor import I32, I64, Array, Storage, Tensor

__all__ = ["Changes", "Cycle", "Lap"]

COST_S = 10e-6
LAP_NODES = 512
"""Nodes that the turns of a lap may walk together."""


class Changes(Exception):
    """A turn gives what the next one cannot take: another dtype or shape."""


@dataclass(frozen=True, slots=True)
class Lap:
    """A lap being walked: the number of each of its turns, as int64 and as int32 counted from either end."""

    cycle: Cycle
    turns: tuple[Tensor, ...]
    places: tuple[dict[bool, Tensor], ...]


@dataclass(eq=False, slots=True)
class Cycle:
    """A Loop or a Scan whose body is a block.

    Attributes:
        node: it. repeat: its body, the most turns that it takes, where its inputs and outputs lie.
        carried: what the body's inputs are at the start of every lap.
        homes: where those of them lie that are on the device from lap to lap; the others are in the frame.
        turn: the number of the turn then, in the frame.
        most: turns of a lap, at most.
        stacks: per scan output where its turns are put: a tensor, or the key of a list in the frame.
        rows: dtype and shape of a turn's part of each.
        entry: the walk at the end of the block before the body. home: that block.
    """

    node: Node
    repeat: Repeat
    carried: list[Tensor]
    turn: Tensor
    most: int = 1
    homes: dict[Tensor, Storage] = field(default_factory=dict)
    stacks: list[Tensor | int] = field(default_factory=list)
    rows: list[tuple[np.dtype[Any], tuple[int, ...]]] = field(default_factory=list)
    entry: Any = None
    home: Any = None

    @classmethod
    def begin(cls, plan: Lowering, node: Node, repeat: Repeat, scans: Sequence[Tensor]) -> Cycle:
        """Emit what comes before the first turn.

        Args:
            plan: of the block before the body.
            node: the loop.
            repeat: what it is.
            scans: tensors like those that a turn gives to the scan outputs.

        Raises:
            NoKernel: what is scanned is too large for the device.
        """
        made = cls(node, repeat, [], Tensor(I64, ()))
        for tensor, _, _ in repeat.given:
            if tensor.type is not None:
                plan.storage(tensor)
        for tensor, (axis, _) in zip(scans, repeat.placing, strict=False):
            axis %= tensor.rank + 1
            shape = (*tensor.shape[:axis], repeat.turns, *tensor.shape[axis:])
            made.rows.append((tensor.dtype, tensor.shape))
            made.stacks.append(-1 if tensor.type is None else plan.new(tensor.dtype, shape))
        for number, stack in enumerate(made.stacks):
            if isinstance(stack, int):
                made.stacks[number] = key = plan.keys
                plan.keys += 1
                _call(plan, lambda _: [[]], (), (key,))
        _call(plan, lambda _: [np.array(0)], (), (plan.new_host(made.turn),))
        made.carried = [_own(plan, tensor) for tensor in repeat.carried]
        made.homes = {t: plan.placed[t] for t in made.carried if t in plan.placed}
        return made

    def lap(self, plan: Lowering, count: int) -> Lap:
        """Emit what a lap begins with, where its turns' numbers are worked out."""
        ways = sorted({way for _, _, way in self.repeat.given} | {way for _, way in self.repeat.placing})
        turns = (self.turn, *(Tensor(I64, ()) for _ in range(count - 1)))
        places = tuple({way: Tensor(I32, (1,)) for way in ways} for _ in turns)
        last = self.repeat.turns - 1

        def numbers(arrays: Sequence[Any]) -> list[Array]:
            first = int(arrays[0])
            made: list[Array] = [np.array(n) for n in range(first + 1, first + count)]
            at = [last - n if way else n for n in range(first, first + count) for way in ways]
            return made + [np.array([n], np.int32) for n in at]

        there = [tensor for each in places for tensor in each.values()]
        if there or count > 1:
            _call(plan, numbers, (self.turn,), [plan.new_host(t) for t in (*turns[1:], *there)])
        for tensor in there:
            plan.storage(tensor)
        return Lap(self, turns, places)

    def inputs(self, plan: Lowering, lap: Lap, number: int, carried: Sequence[Tensor]) -> list[Tensor]:
        """What the body's inputs are in a turn of a lap; emits what makes them."""
        if self.repeat.asks:
            return [lap.turns[number], plan.constant(np.array(True)), *carried]
        made = list(carried)
        for tensor, axis, way in self.repeat.given:
            shape = (*tensor.shape[:axis], *tensor.shape[axis + 1 :])
            if tensor.type is None:
                part = Tensor(tensor.dtype, shape)
                _call(plan, _taken(axis), (tensor, lap.places[number][way]), (plan.new_host(part),))
                made.append(part)
            else:
                one = (*tensor.shape[:axis], 1, *tensor.shape[axis + 1 :])
                made.append(plan.view(picked_rows(plan, tensor, lap.places[number][way], axis, one), shape))
        return made

    def end_turn(self, plan: Lowering, lap: Lap, number: int, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Put away what a turn of a lap gave to the scan outputs; what it gave to be carried on.

        Raises:
            Changes: what is carried has another dtype or shape now.
        """
        outputs = outputs[self.repeat.asks :]
        carried, scans = list(outputs[: len(self.carried)]), outputs[len(self.carried) :]
        if any((a.dtype, a.shape) != (b.dtype, b.shape) for a, b in zip(self.carried, carried, strict=True)):
            raise Changes
        if any((t.dtype, t.shape) != row for t, row in zip(scans, self.rows, strict=True)):
            raise Changes
        for tensor, stack, (axis, way) in zip(scans, self.stacks, self.repeat.placing, strict=True):
            if isinstance(stack, int):
                _call(plan, _appended, (stack, tensor), ())
            else:
                _put(plan, tensor, lap.places[number][way], stack, axis % (tensor.rank + 1), self.repeat.turns)
        return carried

    def end_lap(
        self, plan: Lowering, lap: Lap, condition: Tensor | None, carried: Sequence[Tensor]
    ) -> tuple[int, ...]:
        """Emit what ends a lap; the keys of what decides whether there is another."""
        pairs = list(zip(self.carried, carried, strict=True))
        there = [(self.homes[a], b, plan.storage(b)) for a, b in pairs if a in self.homes]
        own = set(self.homes.values())
        wanted = [*([] if condition is None else [condition]), *(b for a, b in pairs if a not in self.homes)]
        if any(plan.known_value(t) is None and plan.host_key(t) is None and plan.words(t) in own for t in wanted):
            for tensor in wanted:  # before something else is copied there
                _in_frame(plan, tensor)
        moved = []
        for home, tensor, source in there:
            if source is home:
                continue
            if source in own:
                aside = Storage(source.nbytes)
                plan.copy(source, 0, aside, 0, tensor.size)
                source = aside
            moved.append((home, tensor.size, source))
        for home, size, source in moved:
            plan.copy(source, 0, home, 0, size)
        keys = [_in_frame(plan, tensor) for tensor in wanted]
        asked, given = (keys[:1], keys[1:]) if condition is not None else ([], keys)
        turn, taken = plan.fetch(self.turn), [plan.fetch(a) for a, _ in pairs if a not in self.homes]
        _call(plan, _on(len(lap.turns)), (turn, *given), (turn, *taken))
        return (turn, *asked)

    def answer(self, arrays: Sequence[Any]) -> int:
        """How many turns the next lap has, by number and condition; 0 or less where there is none.

        Less: minus the turns that were taken, where the outputs' shapes depend on them.
        """
        done = int(arrays[0])
        left = self.repeat.turns - done
        if left > 0 and all(a.reshape(-1)[0] for a in arrays[1:]):
            return self.most if left >= self.most else 1
        return -done if self.stacks else 0

    def outputs(self, plan: Lowering, done: int) -> list[Tensor]:
        """The node's outputs after so many turns."""
        made = list(self.carried)
        for (dtype, shape), stack, (axis, way) in zip(self.rows, self.stacks, self.repeat.placing, strict=True):
            axis %= len(shape) + 1
            if isinstance(stack, Tensor):
                whole = done == self.repeat.turns
                made.append(stack if whole else slices(plan, stack, {axis: slice(0, done)}))
            else:
                tensor = Tensor(dtype, (*shape[:axis], done, *shape[axis:]))
                _call(plan, _stacked(axis, way), (stack,), (plan.new_host(tensor),))
                made.append(tensor)
        return made

    def storages(self, plan: Lowering) -> set[Storage]:
        """What must outlive a turn."""
        stacks = [s for s in self.stacks if isinstance(s, Tensor)]
        tensors = (*stacks, *(t for t, _, _ in self.repeat.given))
        return {*self.homes.values(), *(plan.placed[t] for t in tensors if t in plan.placed)}


def _call(plan: Lowering, call: Any, inputs: Sequence[Tensor | int], outputs: Sequence[int]) -> None:
    """A host step; its inputs are keys of the frame, or tensors, which are fetched where they are not known."""
    fixed: dict[int, Array] = {}
    keys: list[int | None] = []
    for number, item in enumerate(inputs):
        value = None if isinstance(item, int) else plan.known_value(item)
        if value is not None:
            fixed[number] = value
        keys.append(item if isinstance(item, int) else None if value is not None else plan.fetch(item))
    plan.steps.append(
        HostCall(lambda arrays, _: call(arrays), tuple(keys), tuple(outputs), COST_S, plan.node, fixed, op=plan.op)
    )


def _in_frame(plan: Lowering, tensor: Tensor) -> int:
    """The key of a tensor in the frame, known ones too."""
    if plan.known_value(tensor) is None:
        return plan.fetch(tensor)
    key = plan.keys
    plan.keys += 1
    _call(plan, list, (tensor,), (key,))
    return key


def _own(plan: Lowering, tensor: Tensor) -> Tensor:
    """A place of its own for what is carried, filled with what the first turn gets."""
    known, small = plan.known_value(tensor), tensor.size <= 64 and tensor.dtype.kind in "iub"
    if tensor.type is None or (small and (known is not None or plan.host_key(tensor) is not None)):
        made = Tensor(tensor.dtype, tensor.shape)
        _call(plan, list, (tensor,), (plan.new_host(made),))
        return made
    source, made = plan.storage(tensor), plan.new(tensor.dtype, tensor.shape)
    plan.copy(source, 0, plan.placed[made], 0, tensor.size)
    return made


def _on(turns: int) -> Any:
    return lambda arrays: [arrays[0] + turns, *arrays[1:]]


def _appended(arrays: Sequence[Any]) -> list[Any]:
    arrays[0].append(arrays[1])
    return []


def _taken(axis: int) -> Any:
    return lambda arrays: [np.ascontiguousarray(np.take(arrays[0], int(arrays[1][0]), axis))]


def _stacked(axis: int, backward: bool) -> Any:
    return lambda arrays: [np.stack(arrays[0][::-1] if backward else arrays[0], axis)]


def _put(plan: Lowering, tensor: Tensor, place: Tensor, stack: Tensor, axis: int, turns: int) -> None:
    params = {"count": tensor.size, "inner": math.prod(tensor.shape[axis:]), "turns": turns}
    reads = [plan.storage(tensor), plan.storage(place)]
    stored = "u32" if tensor.type == "bool" else str(tensor.type)
    plan.dispatch(
        _put_kernel(stored), reads, [plan.placed[stack]], params, -(-tensor.size // 64), touches=2 * tensor.size + 1
    )


@lru_cache
def _put_kernel(kind: str) -> Kernel:
    body = """let i = group * 64u + lane;
if (i < params.count) {
    stack[(i / params.inner * params.turns + u32(place[0])) * params.inner + i % params.inner] = row[i];
}"""
    reads = (Binding("row", kind), Binding("place", "i32"))
    params = tuple((n, "u32") for n in ("count", "inner", "turns"))
    return Kernel("stack_row", body, reads, (Binding("stack", kind),), params, result=None)  # type: ignore[arg-type]
