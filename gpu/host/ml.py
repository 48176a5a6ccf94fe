"""Operators of ai.onnx.ml for which the reference evaluator is wrong or missing."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..graph.model import Node
from .table import Array, Inputs, op

__all__: list[str] = []

_ML = "ai.onnx.ml"


@op("ZipMap", domain=_ML)
def _zip_map(node: Node, inputs: Inputs) -> list[Any]:
    labels = node.attrs.get("classlabels_int64s") or node.attrs["classlabels_strings"]
    rows = inputs[0].reshape(-1, len(labels))
    return [[dict(zip(labels, row.tolist(), strict=True)) for row in rows]]


@op("LinearClassifier", domain=_ML)
def _linear_classifier(node: Node, inputs: Inputs) -> list[Array] | None:
    """Two classes or more; coefficients beyond classes x features are not read, as in ONNX Runtime."""
    attrs, x = node.attrs, inputs[0]
    bias = np.array(attrs.get("intercepts", ()), np.float32)
    transform = _TRANSFORMS.get(attrs.get("post_transform", "NONE"))
    if bias.size < 2 or transform is None:
        return None
    x = x.reshape(1, -1) if x.ndim == 1 else x
    wanted = bias.size * x.shape[1]
    weights = np.array(attrs["coefficients"], np.float32)
    if weights.size < wanted:
        raise ValueError(f"{weights.size} coefficients for {bias.size} classes of {x.shape[1]} features")
    scores = x.astype(np.float32) @ weights[:wanted].reshape(bias.size, -1).T + bias
    best = scores.argmax(1)
    if attrs.get("classlabels_strings"):
        labels = np.array(attrs["classlabels_strings"], object)[best]
    else:
        labels = np.array(attrs["classlabels_ints"], np.int64)[best]
    return [labels, transform(scores)]


def _logistic(scores: Array) -> Array:
    small = np.exp(-np.abs(scores))
    return np.where(scores >= 0, 1 / (1 + small), small / (1 + small)).astype(np.float32)


def _softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))


_TRANSFORMS = {"NONE": lambda scores: scores, "LOGISTIC": _logistic, "SOFTMAX": _softmax}
