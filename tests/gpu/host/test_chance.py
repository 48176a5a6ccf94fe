"""Random numbers: of the right kind, the same for a seed, and others without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from trionnx.gpu.errors import InvalidData
from trionnx.gpu.graph.model import Node
from trionnx.gpu.host.numeric import evaluate

Array = np.ndarray[Any, Any]
Make = Callable[..., Node]

X = np.full((50, 40), 0.25, np.float32)


def drawn(made: Node, *inputs: Any) -> Array:
    got = evaluate(made, list(inputs))
    assert got is not None
    out: Array = got[0]
    return out


CASES = [
    ("RandomNormal", [], {"shape": [50, 40], "mean": 3.0, "scale": 2.0}, 3.0, 2.0),
    ("RandomNormalLike", [X], {"mean": -1.0}, -1.0, 1.0),
    ("RandomUniform", [], {"shape": [50, 40], "low": -2.0, "high": 4.0}, 1.0, 6 / 12**0.5),
    ("RandomUniformLike", [X], {}, 0.5, 1 / 12**0.5),
    ("Bernoulli", [X], {}, 0.25, 0.1875**0.5),
]


@pytest.mark.parametrize(("op", "inputs", "attrs", "mean", "deviation"), CASES, ids=[c[0] for c in CASES])
def test_a_distribution(op, inputs, attrs, mean, deviation, make_node: Make) -> None:
    made = make_node(op, inputs, seed=7.0, **attrs)
    first, again = drawn(made, *inputs), drawn(make_node(op, inputs, seed=7.0, **attrs), *inputs)
    assert (first.dtype, first.shape) == (np.float32, (50, 40))
    np.testing.assert_array_equal(first, again)
    assert abs(first.mean() - mean) < deviation / 10
    assert abs(first.std() - deviation) < deviation / 10
    assert (first != drawn(make_node(op, inputs, seed=8.0, **attrs), *inputs)).any()
    free = make_node(op, inputs, **attrs)
    assert (drawn(free, *inputs) != drawn(free, *inputs)).any()
    half = make_node(op, inputs, dtype=onnx.TensorProto.FLOAT16, **attrs)
    assert drawn(half, *inputs).dtype == np.float16


def test_any_number_can_be_a_seed(make_node: Make) -> None:
    seen = {drawn(make_node("RandomUniform", [], shape=[1], seed=seed)).item() for seed in (0.0, 0.5, -1.0, 1e20)}
    assert len(seen) == 4


def test_shapes_without_elements_or_dimensions(make_node: Make) -> None:
    assert drawn(make_node("RandomNormal", [], shape=[3, 0])).shape == (3, 0)
    assert drawn(make_node("RandomUniform", [], shape=[])).shape == ()


def test_multinomial_draws_classes_as_often_as_they_are_likely(make_node: Make) -> None:
    logs = np.log(np.array([[1, 3, 6], [8, 1, 1]], np.float32))
    got = drawn(make_node("Multinomial", [logs], sample_size=4000, seed=3.0), logs)
    assert (got.dtype, got.shape) == (np.int32, (2, 4000))
    shares = np.array([np.bincount(row, minlength=3) / 4000 for row in got])
    np.testing.assert_allclose(shares, [[0.1, 0.3, 0.6], [0.8, 0.1, 0.1]], atol=0.03)
    wide = make_node("Multinomial", [logs], dtype=onnx.TensorProto.INT64)
    assert (drawn(wide, logs).dtype, drawn(wide, logs).shape) == (np.int64, (2, 1))
    with pytest.raises(InvalidData, match="1 dimensions, not 2"):
        drawn(wide, logs[0])


def test_dropout_in_training_scales_what_it_keeps(make_node: Make) -> None:
    ratio, training = np.array(0.75, np.float32), np.array(True)
    for dtype in (np.float32, np.float16, np.float64):
        x = np.ones((50, 40), dtype)
        got = evaluate(make_node("Dropout", [x, ratio, training], opset=13, outputs=2, seed=1), [x, ratio, training])
        assert got is not None
        y, mask = got
        assert (y.dtype, mask.dtype) == (dtype, np.bool_)
        assert 0.2 < mask.mean() < 0.3
        np.testing.assert_array_equal(y, np.where(mask, 4, 0))
