"""Fold what scales and shifts the channels of a convolution into its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..model import Graph, Node, Value
from .uses import count_uses, graphs_of

__all__ = ["fold_affine"]

Array = np.ndarray[Any, Any]


def fold_affine(graph: Graph, check: Callable[[], None] = lambda: None) -> int:
    """Fold BatchNormalization, Mul, Add, Sub and Div after Conv or ConvTranspose; returns how many.

    1. The convolution's weights and bias are constants of float32 or float64, its result is read
       by that one node only and is no output, and both nodes are of one graph.
    2. BatchNormalization in its inference form with constant parameters and one result that is read.
    3. Mul, Add, Sub, Div with a constant of the same dtype: a single element, or one per channel
       ([C, 1, 1] or [1, C, 1, 1] for images). Not a constant divided by the convolution.
    4. Computed in float64, rounded once to the weights' dtype. Not done where that gives
       something that is not finite.
    5. The convolution makes the other node's result, under its name; several fold in a row.
    """
    uses = count_uses(graph)
    folded = 0
    for inner in graphs_of(graph):
        makers: dict[Value, Node] = {}
        kept: list[Node] = []
        for node in inner.nodes:
            check()
            conv, affine = _match(node, makers, uses)
            if conv is not None and affine is not None and _apply(conv, node, *affine):
                result = node.outputs[0]
                assert result is not None
                makers[result] = conv
                folded += 1
                continue
            kept.append(node)
            if node.op in ("Conv", "ConvTranspose") and not node.domain and node.outputs[0] is not None:
                makers[node.outputs[0]] = node
        inner.nodes[:] = kept
    return folded


def _match(
    node: Node, makers: dict[Value, Node], uses: dict[Value, int]
) -> tuple[Node | None, tuple[Array | float, Array | float] | None]:
    """The convolution before a node, and (scale, shift), scalars or one per channel, of its channels."""
    if node.domain or node.op not in ("BatchNormalization", "Mul", "Add", "Sub", "Div"):
        return None, None
    for i, value in enumerate(node.inputs[:2]):
        conv = None if value is None else makers.get(value)
        if conv is None or value is None:
            continue
        weights = conv.inputs[1] if len(conv.inputs) > 1 else None
        bias = conv.inputs[2] if len(conv.inputs) > 2 else None
        if weights is None or weights.const is None or (bias is not None and bias.const is None):
            return None, None
        if uses[value] != 1 or weights.const.dtype not in (np.float32, np.float64) or weights.const.ndim < 3:
            return None, None
        if node.op == "BatchNormalization":
            return conv, _normalisation(node, uses) if i == 0 else None
        return conv, _arithmetic(node, i, weights.const, _channels(conv, weights.const))
    return None, None


def _channels(conv: Node, weights: Array) -> int:
    return int(weights.shape[0] if conv.op == "Conv" else weights.shape[1] * conv.attrs.get("group", 1))


def _normalisation(node: Node, uses: dict[Value, int]) -> tuple[Array, Array] | None:
    if node.attrs.get("training_mode") or node.attrs.get("spatial", 1) != 1:
        return None
    if any(v is not None and uses.get(v) for v in node.outputs[1:]) or node.outputs[0] is None:
        return None
    parameters = [v.const.astype(np.float64) for v in node.inputs[1:5] if v is not None and v.const is not None]
    if len(parameters) != 4:
        return None
    scale, shift, mean, variance = parameters
    with np.errstate(all="ignore"):
        factor = scale / np.sqrt(variance + node.attrs.get("epsilon", 1e-5))
        return factor, shift - mean * factor


def _arithmetic(node: Node, place: int, weights: Array, channels: int) -> tuple[Array | float, Array | float] | None:
    other = node.inputs[1 - place] if len(node.inputs) == 2 else None
    if other is None or other.const is None or other.const.dtype != weights.dtype or node.outputs[0] is None:
        return None
    constant, rank = other.const, weights.ndim
    if constant.size != 1:
        shape = (1,) * (rank - constant.ndim) + constant.shape
        if shape != (1, channels, *(1,) * (rank - 2)):
            return None
    elif constant.ndim > rank:
        return None
    c = constant.reshape(-1).astype(np.float64)
    match node.op, place:
        case "Mul", _:
            return c, 0.0
        case "Add", _:
            return 1.0, c
        case "Sub", 0:
            return 1.0, -c
        case "Sub", 1:
            return -1.0, c
        case "Div", 0 if c.all():
            return 1.0 / c, 0.0
    return None


def _apply(conv: Node, node: Node, scale: Array | float, shift: Array | float) -> bool:
    """Change the convolution's weights and bias, and have it make the node's result."""
    source, weights = conv.inputs[0], conv.inputs[1]
    assert weights is not None
    assert weights.const is not None
    old, channels = weights.const, _channels(conv, weights.const)
    factor, offset = (np.broadcast_to(np.asarray(x, np.float64), (channels,)) for x in (scale, shift))
    bias = conv.inputs[2] if len(conv.inputs) > 2 else None
    start = 0.0 if bias is None or bias.const is None else bias.const.astype(np.float64)
    rest = (1,) * (old.ndim - 2)
    with np.errstate(all="ignore"):
        if conv.op == "Conv":
            made = (old * factor.reshape(channels, 1, *rest)).astype(old.dtype)
        else:
            groups = conv.attrs.get("group", 1)
            parts = old.reshape(groups, -1, *old.shape[1:])
            made = (parts * factor.reshape(groups, 1, -1, *rest)).astype(old.dtype).reshape(old.shape)
        moved = (start * factor + offset).astype(old.dtype)
    if not (np.isfinite(made).all() and np.isfinite(moved).all()):
        return False
    name = f"{conv.name}/{node.name}"
    conv.inputs = source, Value(f"{name}/weights", old.dtype, made), Value(f"{name}/bias", old.dtype, moved)
    conv.outputs = (node.outputs[0],)
    return True
