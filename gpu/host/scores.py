"""What the classifiers and regressors of ai.onnx.ml do with their scores at the end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .table import Array

__all__ = ["labels_of", "transform", "two_columns"]


def transform(name: str, scores: Array) -> Array:
    """A `post_transform` of rows of scores, float32.

    Raises:
        ValueError: there is no such transform.
    """
    function = _TRANSFORMS.get(name)
    if function is None:
        raise ValueError(f"post_transform {name!r} is not known")
    return function(scores.astype(np.float32, copy=False)).astype(np.float32, copy=False)


def two_columns(name: str, score: Array, probability: bool) -> Array:
    """One score per row for the second of two classes becomes one for each class.

    Args:
        name: the `post_transform`.
        score: one dimension.
        probability: the two add up to 1 (where there is no transform); else to 0.
    """
    score = score.astype(np.float32, copy=False)
    if name == "LOGISTIC":
        return np.stack([_logistic(-score), _logistic(score)], 1)
    pair = np.stack([1 - score if probability else -score, score], 1)
    return pair if name in ("NONE", "PROBIT") else transform(name, pair)


def labels_of(attrs: dict[str, object], ints: str) -> Array:
    """The class labels of a classifier: `classlabels_strings`, or those in the attribute `ints`."""
    strings = attrs.get("classlabels_strings")
    return np.array(strings, object) if strings else np.array(attrs.get(ints) or (), np.int64)


def _logistic(scores: Array) -> Array:
    small = np.exp(-np.abs(scores))
    return np.asarray(np.where(scores >= 0, 1 / (1 + small), small / (1 + small)).astype(np.float32))


def _softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def _softmax_zero(scores: Array) -> Array:
    """Softmax over what is not zero; zeros stay zero, as in ONNX Runtime."""
    most = scores.max(-1, keepdims=True)
    there = np.abs(scores) > 1e-7
    powers = np.where(there, np.exp(scores - most), scores * np.exp(-most))
    total = powers.sum(-1, keepdims=True)
    return np.asarray(np.where(total == 0, 0.5, powers / np.where(total == 0, 1, total)))


def _probit(scores: Array) -> Array:
    """The inverse of the normal distribution, by Winitzki's approximation of erf's inverse."""
    x = 2 * scores.astype(np.float64) - 1
    log = np.log((1 - x) * (1 + x))
    v = 2 / (np.pi * 0.147) + 0.5 * log
    return np.asarray(np.sqrt(2) * np.sign(x) * np.sqrt(np.sqrt(v * v - log / 0.147) - v))


_TRANSFORMS: dict[str, Callable[[Array], Array]] = {
    "NONE": lambda scores: scores,
    "LOGISTIC": _logistic,
    "SOFTMAX": _softmax,
    "SOFTMAX_ZERO": _softmax_zero,
    "PROBIT": _probit,
}
