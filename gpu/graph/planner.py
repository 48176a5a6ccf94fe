"""Walks a model with the shapes of its inputs known and makes blocks of steps.

A block ends where planning needs to know what only the run will know: the condition of an If, a
shape that was computed, the size of what a host step gave. The walk stops there, and goes on in
another block, once for each different answer. This file does not know wgpu.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import UNFORESEEN, InvalidData, InvalidInput, InvalidModel, OutOfDeviceMemory, UnsupportedOperator
from ..host.reference import GROWING, evaluate_host, infer_dtypes
from ..host.room import MOST_DIMENSIONS, check_room
from ..kernels.registry import NoKernel, TooLarge, find
from ..seam import Explained
from .block import Block, Decision, Result, describe
from .bodies import body_of
from .cycle import LAP_NODES, Changes, Cycle, Lap
from .lowering import Lowering, Undecided
from .memory import Slots
from .model import Model, Node, Value
from .placement import CARRIES, MOVES, RANDOM, described, is_integral, is_large, is_small, kernel_of, shape_of, types
from .repeat import Repeat, begin
from .steps import HostCall, HostFunction
from .target import Target
from .tensor import Array, Storage, Tensor
from .walk import Scope, Walk, captures

__all__ = ["Planner"]

HOST_COST_S = 100e-6


class Planner:
    """Makes the blocks of one model for one adapter.

    Args:
        model: optimised. target: facts of the adapter.
        allow_host_steps: False: a host step on floats is an UnsupportedOperator.
    """

    def __init__(self, model: Model, target: Target, allow_host_steps: bool = True) -> None:
        self.model, self.target, self.allow_host_steps = model, target, allow_host_steps
        self.explained: tuple[Explained, ...] = ()
        self._constants: dict[Value, Tensor] = {}

    def start(
        self,
        feeds: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
        check: Callable[[], None],
        lying: Mapping[str, Storage] | None = None,
    ) -> Block:
        """The first block for inputs of given dtypes and shapes.

        Args:
            feeds: dtype and shape of each of the graph's inputs, by name.
            check: called between nodes; what it raises is let through.
            lying: how those feeds lie that are on the device already.

        Raises:
            InvalidModel, InvalidInput, UnsupportedOperator: see there.
        """
        walk = Walk(Lowering(self.target), Slots(), self._constants, [Scope(self.model.graph)])
        walk.count(self.model.graph)
        walk.waiting = list(self.model.graph.outputs)
        keys, given = {}, {}
        for value in self.model.graph.inputs:
            dtype, shape = feeds[value.name]
            tensor = Tensor(dtype, tuple(shape))
            if lying is not None and value.name in lying:
                given[value.name] = walk.plan.placed[tensor] = replace(lying[value.name], role="input", fill=None)
            else:
                keys[value.name] = walk.plan.new_host(tensor)
            walk.bind(value, tensor)
        block = self._walk(walk, check)
        block.inputs, block.given = keys, given
        return block

    def resume(self, block: Block, arrays: Sequence[Any], check: Callable[[], None]) -> Block:
        """The block that follows, given the frame's arrays for `block.decision.keys`."""
        decision = block.decision
        assert decision is not None
        answer, known = decision.answer(arrays), block.home.following
        following = known.get(answer)
        if following is not None:
            known.move_to_end(answer)
            return following
        walk = decision.walk.fork()
        if decision.cycle is not None:
            turns = int(answer)  # type: ignore[call-overload]
            if turns > 0:
                walk.lap(decision.cycle, turns)
            else:
                walk.over(decision.cycle, -turns)
        elif decision.kind == "value":
            assert decision.tensor is not None
            walk.plan.known[decision.tensor] = np.array(arrays[0])
        else:
            given = iter(zip(decision.keys, arrays, strict=True))
            for value in decision.outputs:
                if value is not None:
                    key, array = next(given)
                    tensor = Tensor(*describe(array))
                    walk.plan.hosted[tensor] = key
                    walk.bind(value, tensor)
        following = self._walk(walk, check)
        known[answer] = following
        return following

    # --- the walk -----------------------------------------------------------------------------

    def _walk(self, walk: Walk, check: Callable[[], None]) -> Block:
        plan = walk.plan
        try:
            with np.errstate(all="ignore"):
                return self._on(walk, check)
        except (InvalidData, InvalidInput, InvalidModel, OutOfDeviceMemory):
            raise
        except NoKernel as error:
            raise UnsupportedOperator(plan.op, "", plan.opset, plan.node, str(error)) from None
        except MemoryError as error:
            raise OutOfDeviceMemory(_told(plan, error)) from None
        except UNFORESEEN as error:
            raise InvalidModel(_told(plan, error)) from error

    def _on(self, walk: Walk, check: Callable[[], None]) -> Block:
        plan = walk.plan
        while walk.scopes:
            self._settle(walk)
            scope = walk.scopes[-1]
            check()
            try:
                if scope.at == len(scope.graph.nodes):
                    if scope.lap is None:
                        walk.leave()
                        continue
                    ended = self._end_turn(walk, scope.lap, check)
                    if ended is not None:
                        return ended
                    continue
                pending = self._step(walk, scope)
            except Undecided as undecided:
                key = plan.fetch(undecided.tensor)
                return self._end(walk, Decision("value", (key,), walk, tensor=undecided.tensor))
            if pending is not None:
                pending.walk = walk
                return self._end(walk, pending)
        self._settle(walk)
        for value in walk.waiting:
            walk.tensor(value)
        return self._end(walk, None)

    def _settle(self, walk: Walk) -> None:
        """Outputs of the model are made where their node stands, so that they can be had early."""
        for value in [v for v in walk.waiting if v in walk.env or v.const is not None]:
            walk.waiting.remove(value)
            result = self._result(walk, value)
            walk.results[value.name] = len(walk.plan.steps), result

    def _step(self, walk: Walk, scope: Scope) -> Decision | None:
        plan, node = walk.plan, scope.graph.nodes[scope.at]
        plan.node, plan.op, plan.opset = node.name, node.op, node.opset
        plan.outputs = len(node.outputs)
        pending = self._node(walk, node)
        scope.at += 1
        return pending

    def _end(self, walk: Walk, decision: Decision | None) -> Block:
        cycle = None if decision is None else decision.cycle
        kept = cycle.storages(walk.plan) if cycle else set()
        walk.slots.assign(walk.plan.steps, walk.living() | kept)
        walk.slots.hold(kept)
        self.explained = tuple(walk.notes.values())
        block = Block(walk.plan.steps, walk.slots, results=walk.results, decision=decision)
        if cycle is not None and cycle.home is None:
            cycle.home = block
        return block

    def _result(self, walk: Walk, value: Value) -> Result:
        tensor, plan = walk.tensor(value), walk.plan
        known = plan.known_value(tensor)
        if known is not None:
            return Result(known.dtype, known.shape, value=known)
        key = plan.host_key(tensor)
        if key is not None:
            return Result(tensor.dtype, tensor.shape, key=key)
        return Result(tensor.dtype, tensor.shape, storage=plan.words(tensor))

    def _node(self, walk: Walk, node: Node) -> Decision | None:
        plan = walk.plan
        inputs = [None if v is None else walk.tensor(v) for v in node.inputs]
        if node.op == "If" and not node.domain:
            assert inputs[0] is not None
            self._enter(walk, node, bool(plan.value(inputs[0]).reshape(-1)[0]))
            return None
        if node.op in ("Loop", "Scan"):
            around = math.prod(s.repeat.turns for s in walk.scopes if s.repeat is not None)
            repeat = begin(plan, node, inputs, around)
            if repeat is not None and repeat.is_long:
                decision = self._begin_cycle(walk, node, repeat)
                if decision is not None:
                    return decision
            elif repeat is not None and repeat.turns:
                self._note(walk, node, "view", f"{repeat.turns} turns, unrolled: see its body's nodes")
                walk.repeat(repeat, node)
                return None
        return self._plain(walk, node, inputs)

    def _plain(self, walk: Walk, node: Node, inputs: Sequence[Tensor | None]) -> Decision | None:
        depth = len(walk.scopes)
        outputs, decision = self._lower(walk, node, inputs)
        if len(walk.scopes) > depth:
            return None
        if decision is None:
            for value, tensor in zip(node.outputs, outputs, strict=False):
                if value is not None:
                    if tensor is None:
                        raise InvalidModel(f"node {node.name!r} ({node.op}): output {value.name!r} is not computed")
                    if tensor.rank > MOST_DIMENSIONS:
                        raise InvalidModel(f"node {node.name!r} ({node.op}): {tensor.rank} dimensions are too many")
                    walk.bind(value, tensor)
        walk.release(node)
        return decision

    def _lower(
        self, walk: Walk, node: Node, inputs: Sequence[Tensor | None]
    ) -> tuple[Sequence[Tensor | None], Decision | None]:
        plan = walk.plan
        nested = any(True for _ in node.graphs())
        if not node.domain and node.op in ("Shape", "Size") and inputs[0] is not None and inputs[0].dtype != object:
            made = shape_of(node, inputs[0])
            self._note(walk, node, "folded", "known with the shapes of the inputs")
            return [plan.constant(made)], None
        values = [None if t is None else plan.known_value(t) for t in inputs]
        cls = find(node.op, node.domain, node.opset)
        if (
            not nested
            and (node.domain, node.op) not in RANDOM
            and all(v is not None or t is None for v, t in zip(values, inputs, strict=True))
            and not (cls is not None and is_large(node, inputs, values))
        ):
            try:
                folded = evaluate_host(node, values)
            except UnsupportedOperator:
                if cls is None:
                    raise
                folded = [()]  # only the device can
            if all(a is None or isinstance(a, np.ndarray) for a in folded):
                self._note(walk, node, "folded", "known with the shapes of the inputs")
                return [None if a is None else plan.constant(a) for a in folded], None
        why = "no kernel for it yet"
        if node.op in GROWING:
            self._check_room(node, inputs, values)
        if cls is not None and not is_small(plan, node, inputs, values):
            before = len(plan.steps)
            try:
                shown = plan.enter(inputs, lambda: infer_dtypes(node, types(inputs), values))
                narrow = plan.narrowed(inputs[0]) if inputs and inputs[0] and node.op in CARRIES else None
                if narrow is not None:
                    shown[0] = narrow
                lowered = cls.of(node).lower(plan, *shown)
                given = lowered if isinstance(lowered, tuple) else (lowered,)
                if narrow is not None:
                    given = tuple(None if t is None else plan.widen(t) for t in given)
                outputs = plan.leave(given, moves=node.op in MOVES)
            except TooLarge as refusal:
                return self._host(walk, node, inputs, values, str(refusal))
            except NoKernel as refusal:
                why = str(refusal)
            else:
                self._note(walk, node, *kernel_of(plan, inputs, outputs, before))
                return outputs, None
        elif cls is not None:
            why = "small integers, and they are on the host"
        body = None if nested or is_integral(inputs) else body_of(node, inputs)
        if body is not None:
            self._note(walk, node, "gpu", "a function of others: see its nodes")
            walk.enter(body, node, inputs)
            return (), None
        return self._host(walk, node, inputs, values, why)

    def _check_room(self, node: Node, inputs: Sequence[Tensor | None], values: Sequence[Array | None]) -> None:
        """Refuse outputs that are too large for the device, and for the host, too. Raises OutOfDeviceMemory."""
        for made in described(node, inputs, values):
            if made is not None and math.prod(made[1]) * 4 > self.target.max_binding_bytes:
                check_room(f"node {node.name!r} ({node.op})", *made)

    def _host(
        self, walk: Walk, node: Node, inputs: Sequence[Tensor | None], values: Sequence[Array | None], why: str
    ) -> tuple[Sequence[Tensor | None], Decision | None]:
        plan = walk.plan
        if not self.allow_host_steps and any(t is not None and np.issubdtype(t.dtype, np.floating) for t in inputs):
            raise UnsupportedOperator(
                node.op, node.domain, node.opset, node.name, f"host steps are not allowed, and {why}"
            )
        context = list(captures(node))
        outer = [walk.tensor(v) for v in context]
        keys: list[int | None] = []
        fixed: dict[int, Array] = {}
        for index, tensor in enumerate((*inputs, *outer)):
            known = None if tensor is None else plan.known_value(tensor)
            if known is not None:
                fixed[index] = known
            keys.append(None if tensor is None or known is not None else plan.fetch(tensor))
        known_outputs = [None] * len(node.outputs) if outer else described(node, inputs, values)
        tensors: list[Tensor | None] = []
        made: list[int | None] = []
        unknown: list[int] = []
        for value, known_output in zip(node.outputs, known_outputs, strict=False):
            if value is None:
                tensors.append(None)
                made.append(None)
            elif known_output is None:
                tensors.append(None)
                made.append(plan.keys)
                unknown.append(plan.keys)
                plan.keys += 1
            else:
                check_room(f"node {node.name!r} ({node.op})", *known_output)
                tensor = Tensor(np.dtype(known_output[0]), tuple(known_output[1]))
                tensors.append(tensor)
                made.append(plan.new_host(tensor))
        names = [v.name for v in context]
        call = _host_call(node, len(inputs), names)
        plan.steps.append(HostCall(call, tuple(keys), tuple(made), HOST_COST_S, node.name, fixed, op=node.op))
        self._note(walk, node, "host", why)
        if not unknown:
            return tensors, None
        for value, tensor in zip(node.outputs, tensors, strict=False):
            if value is not None and tensor is not None:
                walk.bind(value, tensor)
        outputs = tuple(v if t is None else None for v, t in zip(node.outputs, tensors, strict=False))
        return (), Decision("shape", tuple(unknown), walk, outputs=outputs)

    # --- loops of many turns --------------------------------------------------------------------

    def _begin_cycle(self, walk: Walk, node: Node, repeat: Repeat) -> Decision | None:
        """The end of the block before a loop's body; None: the loop is the host's."""
        plan = walk.plan
        try:
            trial = walk.fork()
            given = self._try_turn(trial, node, repeat)
            scans: Sequence[Tensor] = ()
            lasting: Array | None = None
            if given is not None:
                scans = given[len(given) - len(repeat.placing) :]
                carried = given[repeat.asks : len(given) - len(repeat.placing)]
                if [(t.dtype, t.shape) for t in carried] != [(t.dtype, t.shape) for t in repeat.carried]:
                    return None
                lasting = trial.plan.known_value(given[0]) if repeat.asks else None
            if len(scans) != len(repeat.placing) or any(t.dtype == object for t in scans):
                return None
            cycle = Cycle.begin(plan, node, repeat, scans)
        except NoKernel:
            return None
        for value in captures(node):
            tensor = walk.tensor(value)
            if plan.is_lazy(tensor):
                plan.words(tensor)
        cycle.entry = walk
        if given is not None and (not repeat.asks or (lasting is not None and lasting.all())):
            cycle.most = max(1, min(LAP_NODES // max(1, len(repeat.graph.nodes)), 64, repeat.turns))
        most = "" if repeat.turns > 1 << 60 else f" up to {repeat.turns} times"
        self._note(walk, node, "view", f"a block of its own, entered{most}: see its body's nodes")
        return Decision("turn", (plan.fetch(cycle.turn),), walk, cycle=cycle)

    def _try_turn(self, walk: Walk, node: Node, repeat: Repeat) -> list[Tensor] | None:
        """What the first turn gives, so far as dtypes and shapes go; None where only the run will know."""
        walk.lap(Cycle.begin(walk.plan, node, repeat, ()), 1)
        depth = len(walk.scopes)
        try:
            while True:
                scope = walk.scopes[-1]
                if scope.at < len(scope.graph.nodes):
                    if self._step(walk, scope) is not None:
                        return None
                elif len(walk.scopes) == depth:
                    return [walk.tensor(v) for v in scope.graph.outputs]
                else:
                    walk.leave()
        except Undecided:
            return None

    def _end_turn(self, walk: Walk, lap: Lap, check: Callable[[], None]) -> Block | None:
        cycle, plan = lap.cycle, walk.plan
        node, outputs = cycle.node, cycle.repeat.graph.outputs
        plan.node, plan.op, plan.opset = node.name, node.op, node.opset
        try:
            carried = walk.end_turn(lap)
            if carried is None:
                return None
            keys = cycle.end_lap(plan, lap, walk.tensor(outputs[0]) if cycle.repeat.asks else None, carried)
        except Changes:
            walk = cycle.entry.fork()
            decision = self._plain(walk, node, [None if v is None else walk.tensor(v) for v in node.inputs])
            if decision is None:
                return self._walk(walk, check)
            decision.walk = walk
            return self._end(walk, decision)
        cycle.entry.notes.update(walk.notes)
        return self._end(walk, Decision("turn", keys, cycle.entry, cycle=cycle))

    def _enter(self, walk: Walk, node: Node, condition: bool) -> None:
        graph = node.attrs["then_branch" if condition else "else_branch"]
        self._note(walk, node, "folded" if not walk.plan.steps else "view", f"{'then' if condition else 'else'} branch")
        walk.enter(graph, node)

    # --- notes ----------------------------------------------------------------------------------

    def _note(self, walk: Walk, node: Node, where: str, why: str) -> None:
        walk.notes[node.name] = Explained(node.name, node.op, where, why)


def _host_call(node: Node, count: int, names: Sequence[str]) -> HostFunction:
    def call(arrays: Sequence[Array | None], check: Callable[[], None]) -> Sequence[Any]:
        context = dict(zip(names, arrays[count:], strict=True)) if names else None
        return evaluate_host(node, arrays[:count], context, check)

    return call


def _told(plan: Lowering, error: BaseException) -> str:
    what = str(error).strip().partition("\n")[0][:200] or type(error).__name__
    return f"node {plan.node!r} ({plan.op}): {what}"
