"""Loop and Scan, unrolled: each turn walks the body again, with the number of the turn known.

So shapes and counters fold as everywhere, and what the body computes on floats is dispatches. A
condition that only the run knows ends a block per turn. Loops that would make too many steps are
not unrolled (cycle.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..kernels.move import slices
from ..kernels.registry import find
from .lowering import Lowering
from .model import Graph, Node
from .steps import HostCall
from .tensor import Array, Tensor

__all__ = ["Repeat", "begin", "go_on"]

MOST_NODES = 4096
"""Nodes that all turns of a loop, and of those around it, may walk together."""


@dataclass(eq=False, slots=True)
class Repeat:
    """A Loop or Scan under way.

    Attributes:
        graph: its body. turn: the one that is being walked, of `turns`.
        carried: values handed from turn to turn. scans: per scan output, what each turn gave.
        given: scan inputs with their axis and direction (Scan only).
        placing: per scan output its axis and direction.
        asks: whether a turn's first output says if there is another (Loop only).
        around: how often it is walked itself: the turns of the loops around it.
    """

    graph: Graph
    turns: int
    carried: list[Tensor]
    scans: list[list[Tensor]]
    given: tuple[tuple[Tensor, int, bool], ...] = ()
    placing: tuple[tuple[int, bool], ...] = ()
    asks: bool = False
    turn: int = 0
    around: int = 1

    @property
    def is_long(self) -> bool:
        """Whether unrolling it would make too many steps."""
        return self.around * self.turns * max(1, len(self.graph.nodes)) > MOST_NODES

    def fork(self) -> Repeat:
        """A copy that goes on by itself."""
        return Repeat(
            self.graph, self.turns, list(self.carried), [list(s) for s in self.scans],
            self.given, self.placing, self.asks, self.turn, self.around,
        )  # fmt: skip

    def inputs(self, plan: Lowering) -> list[Tensor]:
        """What the body's inputs are in this turn."""
        if self.asks:
            return [plan.constant(np.array(self.turn)), plan.constant(np.array(True)), *self.carried]
        made = list(self.carried)
        for tensor, axis, backward in self.given:
            at = self.turns - 1 - self.turn if backward else self.turn
            made.append(_taken(plan, tensor, axis, at))
        return made

    def outputs(self, plan: Lowering) -> list[Tensor]:
        """The node's outputs, after the last turn."""
        made = list(self.carried)
        for tensors, (axis, backward) in zip(self.scans, self.placing, strict=True):
            made.append(_stacked(plan, tensors[::-1] if backward else tensors, axis))
            for tensor in tensors:
                plan.uses[tensor] -= 1
        return made


def begin(plan: Lowering, node: Node, inputs: Sequence[Tensor | None], around: int = 1) -> Repeat | None:
    """Start a Loop or a Scan; None: it is the host's to run.

    Args:
        plan: the plan.
        node: the node.
        inputs: its inputs.
        around: how often it is walked itself: the turns of the loops around it.

    Raises:
        Undecided: the number of turns, or the first condition, is only known at run time.
    """
    graph: Any = node.attrs.get("body")
    if not isinstance(graph, Graph) or node.domain or any(t is not None and t.dtype == object for t in inputs):
        return None
    if node.op == "Loop":
        return _begin_loop(plan, node, graph, inputs, around)
    if node.op == "Scan" and node.opset >= 9:
        return _begin_scan(node, graph, inputs, around)
    return None


def _begin_loop(
    plan: Lowering, node: Node, graph: Graph, inputs: Sequence[Tensor | None], around: int
) -> Repeat | None:
    count, condition, *carried = inputs
    if any(t is None for t in carried):
        return None
    turns = np.iinfo(np.int64).max if count is None else max(0, int(plan.value(count).reshape(-1)[0]))
    if condition is not None and not plan.value(condition).reshape(-1)[0]:
        turns = 0
    scans = len(graph.outputs) - 1 - len(carried)
    if turns == 0 and scans:
        return None
    kept = [t for t in carried if t is not None]
    placing = ((0, False),) * scans
    return Repeat(graph, turns, kept, [[] for _ in range(scans)], placing=placing, asks=True, around=around)


def _begin_scan(node: Node, graph: Graph, inputs: Sequence[Tensor | None], around: int) -> Repeat | None:
    given = [t for t in inputs if t is not None]
    count = node.attrs["num_scan_inputs"]
    states = len(given) - count
    scans = len(graph.outputs) - states
    axes = node.attrs.get("scan_input_axes") or [0] * count
    ways = node.attrs.get("scan_input_directions") or [0] * count
    out_axes = node.attrs.get("scan_output_axes") or [0] * scans
    out_ways = node.attrs.get("scan_output_directions") or [0] * scans
    scanned = tuple(
        (t, axis % max(1, t.rank), bool(way)) for t, axis, way in zip(given[states:], axes, ways, strict=True)
    )
    turns = {t.shape[axis] for t, axis, _ in scanned}
    if len(turns) != 1 or 0 in turns or len(given) != len(inputs):
        return None
    (length,) = turns
    placing = tuple((axis, bool(way)) for axis, way in zip(out_axes, out_ways, strict=True))
    return Repeat(graph, length, given[:states], [[] for _ in range(scans)], scanned, placing, around=around)


def go_on(plan: Lowering, repeat: Repeat, outputs: Sequence[Tensor]) -> bool:
    """A turn is walked, and gave `outputs`. Whether there is another.

    Raises:
        Undecided: only the run knows; call again with the same outputs then.
    """
    again = True
    if repeat.asks:
        again = bool(plan.value(outputs[0]).reshape(-1)[0])
        outputs = outputs[1:]
    states = len(repeat.carried)
    repeat.carried = list(outputs[:states])
    for tensors, tensor in zip(repeat.scans, outputs[states:], strict=True):
        tensors.append(tensor)
        plan.uses[tensor] = plan.uses.get(tensor, 0) + 1
    repeat.turn += 1
    return again and repeat.turn < repeat.turns


def _taken(plan: Lowering, tensor: Tensor, axis: int, at: int) -> Tensor:
    shape = (*tensor.shape[:axis], *tensor.shape[axis + 1 :])
    value = plan.known_value(tensor)
    if value is not None:
        return plan.constant(np.ascontiguousarray(np.take(value, at, axis)))
    if tensor.type is None:
        return _on_host(plan, [tensor], tensor.dtype, shape, lambda arrays: np.take(arrays[0], at, axis))
    return plan.view(slices(plan, tensor, {axis: slice(at, at + 1)}), shape)


def _stacked(plan: Lowering, tensors: Sequence[Tensor], axis: int) -> Tensor:
    first = tensors[0]
    axis %= first.rank + 1
    shape = (*first.shape[:axis], len(tensors), *first.shape[axis:])
    values = [plan.known_value(t) for t in tensors]
    if all(v is not None for v in values):
        return plan.constant(np.stack([v for v in values if v is not None], axis))
    if first.type is None:
        return _on_host(plan, tensors, first.dtype, shape, lambda arrays: np.stack(arrays, axis))
    concat: Any = find("Concat", "", 13)
    one = (*first.shape[:axis], 1, *first.shape[axis:])
    made: Tensor = concat(axis=axis).lower(plan, *(plan.view(t, one) for t in tensors))
    return made


def _on_host(plan: Lowering, tensors: Sequence[Tensor], dtype: Any, shape: Sequence[int], compute: Any) -> Tensor:
    values = [plan.known_value(t) for t in tensors]
    keys = tuple(None if v is not None else plan.fetch(t) for t, v in zip(tensors, values, strict=True))
    fixed = {n: v for n, v in enumerate(values) if v is not None}
    made = Tensor(dtype, tuple(shape))
    target = plan.new_host(made)

    def call(arrays: Sequence[Array | None], _: Callable[[], None]) -> list[Array]:
        return [np.ascontiguousarray(compute(arrays))]

    plan.steps.append(HostCall(call, keys, (target,), 50e-6, plan.node, fixed))
    return made
