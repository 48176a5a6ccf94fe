"""Dtypes that the device holds in wider ones never lie: what is computed is what the dtype would have given."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from onnx import helper

from trionnx.gpu.graph.tensor import HELD, as_words, from_words

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519, 65520, -65520, 6e-8, 3e-8, 2.9e-8, 6.1e-5, 1e-30, 3.4e38]
HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
INTEGERS = [np.dtype(d) for d in (np.int8, np.uint8, np.int16, np.uint16)]


def model(op, dtypes, out, **attributes):
    inputs = [
        helper.make_tensor_value_info(f"x{n}", helper.np_dtype_to_tensor_dtype(d), None) for n, d in enumerate(dtypes)
    ]
    result = helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(out), None)
    node = helper.make_node(op, [i.name for i in inputs], ["y"], **attributes)
    graph = helper.make_graph([node], "g", inputs, [result])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def compute(open_model, op, arrays, out, **attributes):
    driver = open_model(model(op, [a.dtype for a in arrays], out, **attributes))
    (y,) = driver.run({f"x{n}": a for n, a in enumerate(arrays)})
    assert y.dtype == out
    assert {e.where for e in driver.engine.explain()} <= {"gpu", "view"}
    return y


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_is_numpys_bit_for_bit(open_model, rng, dtype):
    x = (rng.standard_normal(20000) * 10.0 ** rng.integers(-9, 6, 20000)).astype(np.float32)
    x[: len(SPECIAL)] = SPECIAL
    with np.errstate(over="ignore"):
        expected = x.astype(dtype)
    y = compute(open_model, "Cast", [x], dtype, to=helper.np_dtype_to_tensor_dtype(dtype))
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(y.astype(np.float32)), nan)
    np.testing.assert_array_equal(y[~nan].view(np.uint16), expected[~nan].view(np.uint16))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("op", "function"), [("Add", np.add), ("Mul", np.multiply), ("Div", np.divide)])
def test_each_result_of_a_chain_is_rounded(open_model, rng, dtype, op, function):
    a, b = rng.standard_normal((2, 64, 80)).astype(dtype)
    y = compute(open_model, op, [a, b], dtype)
    expected = function(a.astype(np.float32), b.astype(np.float32)).astype(dtype)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_products_are_summed_in_f32_and_rounded_once(open_model, rng, dtype):
    a, b = rng.standard_normal((16, 300)).astype(dtype), rng.standard_normal((300, 8)).astype(dtype)
    y = compute(open_model, "MatMul", [a, b], dtype)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    unit = np.spacing(np.abs(exact).astype(np.float16 if dtype == np.float16 else np.float32))
    bound = unit if dtype == np.float16 else np.abs(exact) / 128
    assert (np.abs(y.astype(np.float64) - exact) <= bound + 1e-3).all()


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(("op", "function"), [("Add", np.add), ("Sub", np.subtract), ("Mul", np.multiply)])
def test_integers_wrap_around(open_model, rng, dtype, op, function):
    info = np.iinfo(dtype)
    a, b = rng.integers(info.min, info.max, (2, 9000), endpoint=True).astype(dtype)
    y = compute(open_model, op, [a, b], dtype)
    np.testing.assert_array_equal(y, function(a, b))


@pytest.mark.parametrize("dtype", [*HALVES, *INTEGERS])
def test_moving_changes_nothing(open_model, rng, dtype):
    x = rng.integers(0, 100, (70, 90)).astype(dtype)
    np.testing.assert_array_equal(compute(open_model, "Transpose", [x], dtype), x.T)
    np.testing.assert_array_equal(compute(open_model, "Concat", [x, x], dtype, axis=1), np.concatenate([x, x], 1))


@pytest.mark.parametrize("dtype", [np.dtype(np.bool_), *HELD])
def test_words_and_back(dtype):
    x = np.array([0, 1, 3, 100]).astype(dtype)
    words = as_words(x)
    assert words.itemsize == 4
    np.testing.assert_array_equal(from_words(bytearray(words.tobytes()), dtype, (4,)), x)


@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.uint64])
def test_wide_dtypes_stay_on_the_host_and_keep_their_bits(open_model, dtype):
    x = np.array([2**40 + 1, 5, 2**52 + 1]).astype(dtype)
    driver = open_model(model("Add", [x.dtype, x.dtype], x.dtype))
    (y,) = driver.run({"x0": x, "x1": x})
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, x + x)


def test_a_function_of_onnx_runs_by_its_body(open_model, rng):
    driver = open_model(model("MeanVarianceNormalization", [np.dtype(np.float32)], np.dtype(np.float32)))
    x = rng.standard_normal((2, 3, 4, 5), np.float32)
    (y,) = driver.run({"x0": x})
    axes = (0, 2, 3)
    np.testing.assert_allclose(y, (x - x.mean(axes, keepdims=True)) / x.std(axes, keepdims=True), atol=1e-4)
    assert all(e.where != "host" for e in driver.engine.explain())
