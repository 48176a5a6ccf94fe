"""Loop and Scan of many turns: a block for the body, entered again for each of them.

What is carried from turn to turn lies in places of its own, into which a turn copies what it gave
last of all; so every turn is the same steps. The number of the turn is an array of the run's
frame, and so is the condition. This file does not walk the body (planner.py does).
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

__all__ = ["Changes", "Cycle"]

COST_S = 10e-6


class Changes(Exception):
    """A turn gives what the next one cannot take: another dtype or shape."""


@dataclass(eq=False, slots=True)
class Cycle:
    """A Loop or a Scan whose body is a block.

    Attributes:
        node: it. repeat: its body, the most turns that it takes, where its inputs and outputs lie.
        carried: what the body's inputs are in every turn.
        turn: the number of the turn, in the frame. places: the same as int32, counted from either end.
        stacks: per scan output where its turns are put: a tensor, or the key of a list in the frame.
        rows: dtype and shape of a turn's part of each.
        entry: the walk at the end of the block before the body. home: that block.
    """

    node: Node
    repeat: Repeat
    carried: list[Tensor]
    turn: Tensor
    places: dict[bool, Tensor]
    stacks: list[Tensor | int] = field(default_factory=list)
    rows: list[tuple[np.dtype[Any], tuple[int, ...]]] = field(default_factory=list)
    entry: Any = None
    home: Any = None

    @classmethod
    def begin(cls, plan: Lowering, node: Node, repeat: Repeat, scans: Sequence[Tensor]) -> Cycle:
        """Emit what comes before the first turn.

        Args:
            plan: of the block before the body.
            node: the loop. repeat: what it is.
            scans: tensors like those that a turn gives to the scan outputs.

        Raises:
            NoKernel: what is scanned is too large for the device.
        """
        ways = {way for _, _, way in repeat.given} | {way for _, way in repeat.placing}
        made = cls(node, repeat, [], Tensor(I64, ()), {way: Tensor(I32, (1,)) for way in sorted(ways)})
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
        for tensor in made.places.values():
            plan.new_host(tensor)
        made.carried = [_own(plan, tensor) for tensor in repeat.carried]
        return made

    def inputs(self, plan: Lowering) -> list[Tensor]:
        """What the body's inputs are; emits what makes them."""
        for way, tensor in self.places.items():
            last = self.repeat.turns - 1
            _call(plan, _place(last if way else None), (plan.fetch(self.turn),), (plan.fetch(tensor),))
        if self.repeat.asks:
            return [self.turn, plan.constant(np.array(True)), *self.carried]
        made = list(self.carried)
        for tensor, axis, way in self.repeat.given:
            shape = (*tensor.shape[:axis], *tensor.shape[axis + 1 :])
            if tensor.type is None:
                part = Tensor(tensor.dtype, shape)
                _call(plan, _taken(axis), (tensor, self.places[way]), (plan.new_host(part),))
                made.append(part)
            else:
                one = (*tensor.shape[:axis], 1, *tensor.shape[axis + 1 :])
                made.append(plan.view(picked_rows(plan, tensor, self.places[way], axis, one), shape))
        return made

    def end_turn(self, plan: Lowering, outputs: Sequence[Tensor]) -> tuple[int, ...]:
        """Emit what ends a turn that gave `outputs`; the keys of what decides whether there is another.

        Raises:
            Changes: what is carried has another dtype or shape now.
        """
        condition, outputs = (outputs[0], outputs[1:]) if self.repeat.asks else (None, outputs)
        states = len(self.carried)
        pairs = list(zip(self.carried, outputs[:states], strict=True))
        scans = list(zip(outputs[states:], self.stacks, self.repeat.placing, strict=True))
        if any((a.dtype, a.shape) != (b.dtype, b.shape) for a, b in pairs):
            raise Changes
        if any((t.dtype, t.shape) != row for (t, _, _), row in zip(scans, self.rows, strict=True)):
            raise Changes
        there = [(a, plan.storage(b)) for a, b in pairs if a in plan.placed]
        for tensor, stack, (axis, way) in scans:
            if isinstance(stack, Tensor):
                _put(plan, tensor, self.places[way], stack, axis % (tensor.rank + 1), self.repeat.turns)
        keys = [plan.fetch(self.turn)]
        if condition is not None:
            keys.append(_in_frame(plan, condition))
        own = {plan.placed[a] for a, _ in there}
        moved = []
        for target, source in there:
            if source in own and source is not plan.placed[target]:
                aside = Storage(source.nbytes)
                plan.copy(source, 0, aside, 0, target.size)
                source = aside
            moved.append((target, source))
        for target, source in moved:
            if source is not plan.placed[target]:
                plan.copy(source, 0, plan.placed[target], 0, target.size)
        for tensor, stack, _ in scans:
            if isinstance(stack, int):
                _call(plan, _appended, (stack, tensor), ())
        here = [(plan.fetch(a), _in_frame(plan, b)) for a, b in pairs if a not in plan.placed]
        _call(plan, _next, (keys[0], *(b for _, b in here)), (keys[0], *(a for a, _ in here)))
        return tuple(keys)

    def answer(self, arrays: Sequence[Any]) -> bool | int:
        """Whether there is another turn: True, or how many there were where the outputs' shapes depend on it, else 0."""
        if not arrays:
            return True
        done = int(arrays[0])
        if done < self.repeat.turns and all(a.reshape(-1)[0] for a in arrays[1:]):
            return True
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
        tensors = (*self.carried, *stacks, *(t for t, _, _ in self.repeat.given))
        return {plan.placed[t] for t in tensors if t in plan.placed}


def _call(plan: Lowering, call: Any, inputs: Sequence[Tensor | int], outputs: Sequence[int]) -> None:
    """A host step; its inputs are keys of the frame, or tensors, which are fetched where they are not known."""
    fixed: dict[int, Array] = {}
    keys: list[int | None] = []
    for number, item in enumerate(inputs):
        value = None if isinstance(item, int) else plan.known_value(item)
        if value is not None:
            fixed[number] = value
        keys.append(item if isinstance(item, int) else None if value is not None else plan.fetch(item))
    plan.steps.append(HostCall(call, tuple(keys), tuple(outputs), COST_S, plan.node, fixed))


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


def _next(arrays: Sequence[Any]) -> list[Any]:
    return [arrays[0] + 1, *arrays[1:]]


def _appended(arrays: Sequence[Any]) -> list[Any]:
    arrays[0].append(arrays[1])
    return []


def _place(last: int | None) -> Any:
    def call(arrays: Sequence[Any]) -> list[Array]:
        return [np.array([arrays[0] if last is None else last - arrays[0]], np.int32)]

    return call


def _taken(axis: int) -> Any:
    return lambda arrays: [np.ascontiguousarray(np.take(arrays[0], int(arrays[1][0]), axis))]


def _stacked(axis: int, backward: bool) -> Any:
    return lambda arrays: [np.stack(arrays[0][::-1] if backward else arrays[0], axis)]


def _put(plan: Lowering, tensor: Tensor, place: Tensor, stack: Tensor, axis: int, turns: int) -> None:
    params = {"count": tensor.size, "inner": math.prod(tensor.shape[axis:]), "turns": turns}
    reads = [plan.storage(tensor), plan.storage(place)]
    stored = "u32" if tensor.type == "bool" else str(tensor.type)
    plan.dispatch(_put_kernel(stored), reads, [plan.placed[stack]], params, -(-tensor.size // 64))


@lru_cache
def _put_kernel(kind: str) -> Kernel:
    body = """let i = group * 64u + lane;
if (i < params.count) {
    stack[(i / params.inner * params.turns + u32(place[0])) * params.inner + i % params.inner] = row[i];
}"""
    reads = (Binding("row", kind), Binding("place", "i32"))
    params = tuple((n, "u32") for n in ("count", "inner", "turns"))
    return Kernel("stack_row", body, reads, (Binding("stack", kind),), params, result=None)  # type: ignore[arg-type]
