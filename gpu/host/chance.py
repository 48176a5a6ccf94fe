"""Random numbers.

The generator is NumPy's `RandomState` (Mersenne twister), started from the attribute `seed`: a node with
a seed gives the same numbers in every run, on every machine; without one it draws anew each time.
ONNX prescribes no generator: other engines give other numbers for the same seed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from ..graph.model import Node
from .table import Array, Inputs, op

__all__: list[str] = []


def _state(node: Node) -> np.random.RandomState:
    seed = node.attrs.get("seed")
    if seed is None or seed != seed:
        return np.random.RandomState()
    if float(seed).is_integer() and 0 <= seed < 1 << 32:
        return np.random.RandomState(int(seed))
    return np.random.RandomState(int(np.float32(seed).view(np.uint32)))


def _dtype(node: Node, default: Any) -> np.dtype[Any]:
    code = node.attrs.get("dtype")
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(code) if code else default)


@op("RandomNormal", "RandomNormalLike")
def _normal(node: Node, inputs: Inputs) -> list[Array]:
    shape = inputs[0].shape if inputs else tuple(node.attrs["shape"])
    dtype = _dtype(node, inputs[0].dtype if inputs else np.float32)
    drawn = _state(node).standard_normal(shape)
    return [np.asarray(drawn * node.attrs.get("scale", 1.0) + node.attrs.get("mean", 0.0)).astype(dtype)]


@op("RandomUniform", "RandomUniformLike")
def _uniform(node: Node, inputs: Inputs) -> list[Array]:
    """Numbers of low <= y < high."""
    shape = inputs[0].shape if inputs else tuple(node.attrs["shape"])
    dtype = _dtype(node, inputs[0].dtype if inputs else np.float32)
    low, high = node.attrs.get("low", 0.0), node.attrs.get("high", 1.0)
    return [np.asarray(_state(node).uniform(0.0, 1.0, shape) * (high - low) + low).astype(dtype)]


@op("Bernoulli")
def _bernoulli(node: Node, inputs: Inputs) -> list[Array]:
    x = inputs[0]
    return [np.asarray(_state(node).uniform(0.0, 1.0, x.shape) < x).astype(_dtype(node, x.dtype))]


@op("Multinomial")
def _multinomial(node: Node, inputs: Inputs) -> list[Array]:
    """Class numbers, drawn for each row of logarithms of probabilities [batch, classes] -> [batch, sample_size]."""
    logs = inputs[0].astype(np.float64)
    if logs.ndim != 2:
        raise ValueError(f"the input has {logs.ndim} dimensions, not 2")
    powers = np.exp(logs - logs.max(1, keepdims=True)).cumsum(1)
    drawn = _state(node).uniform(0.0, 1.0, (len(logs), node.attrs.get("sample_size", 1))) * powers[:, -1:]
    return [(drawn[:, :, None] >= powers[:, None, :]).sum(2).astype(_dtype(node, np.int32))]


@op("Dropout")
def _dropout(node: Node, inputs: Inputs) -> list[Array]:
    """In training (opset 12 on) each element is 0 with probability `ratio`, else x / (1 - ratio)."""
    x = inputs[0]
    ratio = float(inputs[1].reshape(-1)[0]) if len(inputs) > 1 and inputs[1] is not None else 0.5
    training = len(inputs) > 2 and inputs[2] is not None and bool(inputs[2].all())
    if node.opset < 12 or not training or ratio == 0:
        mask = np.ones(x.shape, np.bool_ if node.opset >= 10 else x.dtype)
        return [x, mask][: len(node.outputs)]
    kept = _state(node).uniform(0.0, 1.0, x.shape) >= ratio
    return [np.where(kept, x / np.array(1 - ratio, x.dtype), np.zeros((), x.dtype)), kept][: len(node.outputs)]
