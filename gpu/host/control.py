"""If, Loop and Scan on the host: their graphs are walked node by node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..errors import InvalidData
from ..graph.model import Graph, Node, Value
from .room import check_room
from .table import axis_of

__all__ = ["CONTROL", "evaluate_control"]

Evaluate: TypeAlias = Callable[[Node, Sequence[Any], "Mapping[Value, Any]"], list[Any]]

CONTROL = frozenset((("", "If"), ("", "Loop"), ("", "Scan")))
"""The operators of this file, as (domain, name)."""


def evaluate_control(
    node: Node,
    inputs: Sequence[Any],
    outer: Mapping[Value, Any],
    evaluate: Evaluate,
    check: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Compute an If, a Loop, or a Scan.

    Args:
        node: the node.
        inputs: arrays, None where left out.
        outer: what the nested graphs capture, apart from constants.
        evaluate: computes a node of a nested graph from its inputs and what is around it.
        check: called in each turn of a loop; what it raises leaves.

    Raises:
        InvalidData: the values break a rule of the operator.
        OutOfDeviceMemory: there is no room for what a loop collects.
    """
    match node.op:
        case "If":
            taken = node.attrs["then_branch" if _true(node, inputs[0]) else "else_branch"]
            return _run(taken, [], outer, evaluate)
        case "Loop":
            return _loop(node, inputs, outer, evaluate, check)
    return (_scan if node.opset >= 9 else _batched_scan)(node, inputs, outer, evaluate)


def _true(node: Node, condition: Any) -> bool:
    if condition.size != 1:
        raise InvalidData(node.name, f"{node.op}: its condition has {condition.size} elements, not 1")
    return bool(condition.reshape(-1)[0])


def _run(graph: Graph, inputs: Sequence[Any], outer: Mapping[Value, Any], evaluate: Evaluate) -> list[Any]:
    values = {**outer, **dict(zip(graph.inputs, inputs, strict=True))}

    def get(value: Value | None) -> Any:
        if value is None:
            return None
        return values[value] if value.const is None else value.const

    for node in graph.nodes:
        made = evaluate(node, [get(v) for v in node.inputs], values)
        values.update((v, x) for v, x in zip(node.outputs, made, strict=False) if v is not None)
    return [get(v) for v in graph.outputs]


def _loop(
    node: Node, inputs: Sequence[Any], outer: Mapping[Value, Any], evaluate: Evaluate, check: Callable[[], None]
) -> list[Any]:
    body: Graph = node.attrs["body"]
    inputs = [*inputs, *([None] * (2 - len(inputs)))]
    limit = None if inputs[0] is None else int(inputs[0].reshape(-1)[0])
    going = inputs[1] is None or _true(node, inputs[1])
    carried = list(inputs[2:])
    collected: list[list[Any]] = [[] for _ in body.outputs[1 + len(carried) :]]

    def step(i: int, condition: bool) -> list[Any]:
        return _run(body, [np.array(i, np.int64), np.array(condition), *carried], outer, evaluate)

    done, held, asked = 0, 0, 0
    while going and (limit is None or done < limit):
        check()
        condition, *made = step(done, going)
        going, carried = _true(node, condition), made[: len(carried)]
        for items, item in zip(collected, made[len(carried) :], strict=True):
            items.append(item)
            held += getattr(item, "nbytes", 0)
        done += 1
        if held >= 2 * asked:
            asked = held
            check_room(f"node {node.name!r} (Loop)", np.dtype(np.uint8), (held,))
    if collected and not done:
        return [*carried, *_empty(body, len(carried), lambda: step(0, True))]
    return [*carried, *(_stack(node, items, 0) for items in collected)]


def _empty(body: Graph, carried: int, step: Callable[[], list[Any]]) -> list[Any]:
    """What a loop without turns collects: nothing, of the shape that one turn would give."""
    try:
        return [np.empty((0, *x.shape), x.dtype) for x in step()[1 + carried :]]
    except Exception:
        return [np.empty(0, v.dtype or np.float32) for v in body.outputs[1 + carried :]]


def _stack(node: Node, items: list[Any], axis: int) -> Any:
    try:
        return np.stack(items, axis)
    except ValueError:
        shapes = sorted({x.shape for x in items})
        why = f"what its turns give to one output differs in shape: {list(shapes[0])} and {list(shapes[-1])}"
        raise InvalidData(node.name, f"{node.op}: {why}") from None


def _scan(node: Node, inputs: Sequence[Any], outer: Mapping[Value, Any], evaluate: Evaluate) -> list[Any]:
    body: Graph = node.attrs["body"]
    count = node.attrs["num_scan_inputs"]
    states, scanned = list(inputs[: len(inputs) - count]), inputs[len(inputs) - count :]
    results = len(body.outputs) - len(states)
    axes = node.attrs.get("scan_input_axes") or [0] * count
    backwards = node.attrs.get("scan_input_directions") or [0] * count
    out_axes = node.attrs.get("scan_output_axes") or [0] * results
    out_backwards = node.attrs.get("scan_output_directions") or [0] * results
    try:
        slices = [np.moveaxis(x, axis_of(a, x.ndim), 0) for x, a in zip(scanned, axes, strict=True)]
    except ValueError as error:
        raise InvalidData(node.name, f"{node.op}: {error}") from None
    lengths = {len(x) for x in slices}
    if len(lengths) != 1:
        raise InvalidData(node.name, f"{node.op}: its inputs are scanned over {sorted(lengths)} elements")
    slices = [x[::-1] if back else x for x, back in zip(slices, backwards, strict=True)]
    (turns,) = lengths
    collected: list[list[Any]] = [[] for _ in range(results)]
    for i in range(turns):
        turn = [np.ascontiguousarray(x[i]).reshape(x.shape[1:]) for x in slices]
        made = _run(body, [*states, *turn], outer, evaluate)
        states = made[: len(states)]
        for items, item in zip(collected, made[len(states) :], strict=True):
            items.append(item)
    if not turns:
        return [*states, *(np.empty(0, v.dtype or np.float32) for v in body.outputs[len(states) :])]
    stacked = []
    for items, axis, back in zip(collected, out_axes, out_backwards, strict=True):
        ordered = items[::-1] if back else items
        stacked.append(_stack(node, ordered, axis_of(axis, ordered[0].ndim + 1)))
    return [*states, *stacked]


def _batched_scan(
    node: Node, inputs: Sequence[Any], outer: Mapping[Value, Any], evaluate: Evaluate
) -> list[Any]:
    """Scan of opset 8: sequences of several lengths in a batch, padded with zeros; axis 0 is the batch."""
    lengths, *given = inputs
    count, directions = node.attrs["num_scan_inputs"], node.attrs.get("directions")
    attrs = {"body": node.attrs["body"], "num_scan_inputs": count}
    if directions:
        attrs["scan_input_directions"] = directions
    single = Node(node.op, node.domain, 9, node.name, node.inputs[1:], node.outputs, attrs)
    states = len(given) - count
    longest = given[states].shape[1]
    rows: list[list[Any]] = []
    for i in range(len(given[states])):
        length = longest if lengths is None else int(lengths[i])
        if not 0 <= length <= longest:
            raise InvalidData(node.name, f"Scan: sequence {i} is {length} long, of {longest}")
        turn = [x[i] if n < states else x[i, :length] for n, x in enumerate(given)]
        made = _scan(single, turn, outer, evaluate)
        rest = [(0, longest - length)]
        rows.append([x if n < states else np.pad(x, rest + [(0, 0)] * (x.ndim - 1)) for n, x in enumerate(made)])
    return [_stack(node, list(column), 0) for column in zip(*rows, strict=True)]
