"""Where a walk through a model stands: the graphs it is in, what each value is, who still reads it.

This file knows how values live and die, and nothing of operators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidModel
from ..seam import Explained
from .cycle import Cycle, Lap
from .lowering import Lowering
from .memory import Slots
from .model import Graph, Node, Value
from .repeat import Repeat, go_on
from .tensor import Storage, Tensor

__all__ = ["Scope", "Walk", "captures"]


@dataclass(eq=False, slots=True)
class Scope:
    """A graph being walked: the main one, or one whose outputs become those of `node`.

    Attributes:
        at: the node that is next. repeat: the loop whose body it is. lap: the same, where it is
            not unrolled. turn: of the lap.
    """

    graph: Graph
    at: int = 0
    node: Node | None = None
    repeat: Repeat | None = None
    lap: Lap | None = None
    turn: int = 0


@dataclass(eq=False, slots=True, repr=False)
class Walk:
    """The state of a walk; `fork` copies it where several ways may follow.

    Attributes:
        plan: the block being made. slots: memory of the path.
        constants: the tensor of each constant, shared by all walks of a model.
        scopes: innermost last. env: what each value that is still needed is.
        remaining: how often each value is still going to be read.
        waiting: outputs of the main graph that are not computed yet. results: those that this block computes.
    """

    plan: Lowering
    slots: Slots
    constants: dict[Value, Tensor]
    scopes: list[Scope]
    env: dict[Value, Tensor] = field(default_factory=dict)
    remaining: dict[Value, int] = field(default_factory=dict)
    notes: dict[str, Explained] = field(default_factory=dict)
    waiting: list[Value] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)

    def fork(self) -> Walk:
        """A walk that goes on from here by itself."""
        scopes = [Scope(s.graph, s.at, s.node, s.repeat and s.repeat.fork(), s.lap, s.turn) for s in self.scopes]
        return Walk(
            self.plan.fork(),
            self.slots.fork(),
            self.constants,
            scopes,
            dict(self.env),
            dict(self.remaining),
            dict(self.notes),
            list(self.waiting),
        )

    def tensor(self, value: Value) -> Tensor:
        """What a value is. Raises InvalidModel if nothing has computed it."""
        tensor = self.env.get(value)
        if tensor is not None:
            return tensor
        if value.const is None:
            plan = self.plan
            raise InvalidModel(f"node {plan.node!r} ({plan.op}): nothing computes its input {value.name!r}")
        tensor = self.constants.get(value)
        if tensor is None:
            tensor = self.constants[value] = Tensor(value.const.dtype, value.const.shape, value=value.const)
        return tensor

    def bind(self, value: Value, tensor: Tensor) -> None:
        """A value is computed: this is it. Not kept if nobody will read it."""
        remaining = self.remaining.get(value, 0)
        if remaining:
            self.env[value] = tensor
            self.plan.uses[tensor] = self.plan.uses.get(tensor, 0) + remaining

    def count(self, graph: Graph) -> None:
        """A graph is entered: its nodes will read what they read, and its outputs are read once."""
        for node in graph.nodes:
            for value in _reads(node):
                self._expect(value)
        for value in graph.outputs:
            self._expect(value)

    def enter(self, graph: Graph, node: Node, inputs: Sequence[Tensor | None] = ()) -> None:
        """Go on within a graph that stands for a node: a branch, or the body of a function.

        What the graph reads of those around it, and the node's own inputs, live until it is left.
        """
        self.count(graph)
        for value, tensor in zip(graph.inputs, (t for t in inputs if t is not None), strict=True):
            self.bind(value, tensor)
        self.scopes.append(Scope(graph, node=node))

    def repeat(self, repeat: Repeat, node: Node) -> None:
        """Go on with the first turn of a loop."""
        self.enter(repeat.graph, node, repeat.inputs(self.plan))
        self.scopes[-1].repeat = repeat

    def lap(self, cycle: Cycle, turns: int) -> None:
        """Go on with the first turn of a lap of a loop that is not unrolled."""
        self.plan.node, self.plan.op, self.plan.opset = cycle.node.name, cycle.node.op, cycle.node.opset
        lap = cycle.lap(self.plan, turns)
        self.enter(cycle.repeat.graph, cycle.node, cycle.inputs(self.plan, lap, 0, cycle.carried))
        self.scopes[-1].lap = lap

    def end_turn(self, lap: Lap) -> list[Tensor] | None:
        """A turn of a lap is walked: go on with the next, or, after the last, hand over what is carried on.

        Raises:
            Changes: see `Cycle.end_turn`.
        """
        scope, plan = self.scopes[-1], self.plan
        graph = scope.graph
        carried = lap.cycle.end_turn(plan, lap, scope.turn, [self.tensor(v) for v in graph.outputs])
        if scope.turn + 1 == len(lap.turns):
            return carried
        held = Counter(carried)  # they are read on as the inputs of the next
        plan.uses.update({t: plan.uses.get(t, 0) + n for t, n in held.items()})
        for value in graph.outputs:
            self.consume(value)
        scope.turn, scope.at = scope.turn + 1, 0
        self.count(graph)
        for value, tensor in zip(graph.inputs, lap.cycle.inputs(plan, lap, scope.turn, carried), strict=True):
            self.bind(value, tensor)
        plan.uses.update({t: plan.uses[t] - n for t, n in held.items()})
        return None

    def over(self, cycle: Cycle, done: int) -> None:
        """Go on behind such a loop, after so many turns."""
        self.plan.node, self.plan.op, self.plan.opset = cycle.node.name, cycle.node.op, cycle.node.opset
        for value, tensor in zip(cycle.node.outputs, cycle.outputs(self.plan, done), strict=False):
            if value is not None:
                self.bind(value, tensor)
        self.release(cycle.node)

    def leave(self) -> None:
        """The innermost graph is walked through: its outputs are its node's, unless it is walked again.

        Raises:
            Undecided: whether it is walked again, only the run knows.
        """
        scope = self.scopes[-1]
        node = scope.node
        if node is None:
            self.scopes.pop()
            return
        plan, repeat = self.plan, scope.repeat
        plan.node, plan.op, plan.opset = node.name, node.op, node.opset
        tensors = [self.tensor(v) for v in scope.graph.outputs]
        if repeat is not None:
            again = go_on(plan, repeat, tensors)
            held = Counter(tensors)  # they are read on, by way of `repeat`
            plan.uses.update({t: plan.uses.get(t, 0) + n for t, n in held.items()})
            for value in scope.graph.outputs:
                self.consume(value)
            if again:
                scope.at = 0
                self.count(scope.graph)
                for value, tensor in zip(scope.graph.inputs, repeat.inputs(plan), strict=True):
                    self.bind(value, tensor)
            else:
                tensors = repeat.outputs(plan)
            plan.uses.update({t: plan.uses[t] - n for t, n in held.items()})
            if again:
                return
        self.scopes.pop()
        outputs = node.outputs
        if len(tensors) < len(outputs):  # the body of a function has just those that are read
            outputs = tuple(v for v in outputs if v is not None)
        for output, tensor in zip(outputs, tensors, strict=False):
            if output is not None:
                self.bind(output, tensor)
        if repeat is None:
            for value in scope.graph.outputs:
                self.consume(value)
        self.release(node)

    def release(self, node: Node) -> None:
        """A node is done: it has read its inputs, and what its nested graphs capture."""
        for value in _reads(node):
            self.consume(value)

    def consume(self, value: Value) -> None:
        """A value was read once."""
        self.remaining[value] -= 1
        tensor = self.env.get(value)
        if tensor is not None:
            self.plan.uses[tensor] -= 1
            if not self.plan.uses[tensor] and tensor not in self.plan.placed:
                self.plan.let_go(tensor)
            if self.remaining[value] == 0:
                del self.env[value]

    def _expect(self, value: Value) -> None:
        self.remaining[value] = self.remaining.get(value, 0) + 1
        tensor = self.env.get(value)
        if tensor is not None:
            self.plan.uses[tensor] = self.plan.uses.get(tensor, 0) + 1

    def living(self) -> set[Storage]:
        """Every storage that the rest of the walk may still read."""
        plan = self.plan
        found: set[Storage] = set()
        stack = list(self.env.values())
        for scope in self.scopes:
            if scope.repeat is not None:
                stack += [t for tensors in scope.repeat.scans for t in tensors]
                stack += [t for t, _, _ in scope.repeat.given]
            if scope.lap is not None:
                found |= scope.lap.cycle.storages(plan)
                stack += [t for each in scope.lap.places for t in each.values()]
        seen: set[Tensor] = set()
        while stack:
            tensor = stack.pop()
            if tensor in seen:
                continue
            seen.add(tensor)
            placed = plan.placed.get(tensor)
            if placed is not None:
                found.add(placed)
            elif tensor.pending is not None:
                found.update(tensor.pending.reads)
            elif tensor.apply is not None:
                stack.extend(tensor.apply.args)
        return found


def captures(node: Node) -> list[Value]:
    """What the nested graphs of a node read of the graphs around them."""
    found: dict[Value, None] = {}
    for graph in node.graphs():
        if graph.captures is None:
            own = set(graph.inputs)
            for inner in graph.nodes:
                own.update(v for v in inner.outputs if v is not None)
            reads = [v for inner in graph.nodes for v in _reads(inner)] + graph.outputs
            graph.captures = [v for v in dict.fromkeys(reads) if v not in own and v.const is None]
        found.update(dict.fromkeys(graph.captures))
    return list(found)


def _reads(node: Node) -> list[Value]:
    return [v for v in node.inputs if v is not None and v.const is None] + captures(node)
