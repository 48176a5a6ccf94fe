from __future__ import annotations

import itertools

import numpy as np
import pytest

from trionnx.gpu.errors import InvalidData


def test_running_sums(cases, rng, variant):
    for exclusive, reverse in itertools.product((0, 1), (0, 1)):
        for shape, axis in (
            ((5, 6, 7), 0),
            ((5, 6, 7), 1),
            ((5, 6, 7), -1),
            ((3, 700), 1),
            ((2, 600, 3), 1),
            ((0, 4), 0),
        ):
            x = rng.standard_normal(shape, np.float32)
            cases.add("CumSum", x, np.array(axis), exclusive=exclusive, reverse=reverse)
        cases.add("CumSum", rng.integers(-9, 9, (2, 300), np.int32), np.array(1), exclusive=exclusive, reverse=reverse)
    cases.check()


def test_running_sums_of_long_rows(cases, rng, variant):
    x = rng.random((1, 100_000), np.float32)
    cases.add("CumSum", x, np.array([1]), want=np.cumsum(x, 1, np.float64), tol=1e-6)
    cases.check()


def test_running_products(cases, rng, variant):
    x = rng.random((3, 300), np.float32) + 0.5
    cases.add("CumProd", x, np.array(1), want=np.cumprod(x, 1, np.float64), tol=1e-5)
    want = np.ones((3, 300))
    want[:, :-1] = np.cumprod(x[:, :0:-1], 1, np.float64)[:, ::-1]
    cases.add("CumProd", x, np.array(1), want=want, tol=1e-5, exclusive=1, reverse=1)
    cases.check(opset=26)


def test_one_hot(cases, rng, variant):
    values = np.array([2, 5], np.float32)
    for fed in ((), (0,)):
        for axis in (0, 1, -1):
            cases.add("OneHot", rng.integers(-5, 5, (3, 4)), np.array(5), values, fed=fed, axis=axis)
        cases.add(
            "OneHot",
            np.array([0, 7, -8, -1, 2]),
            np.array([3]),
            np.array([0, 1], np.int32),
            fed=fed,
            want=np.array([[1, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 1]]),
        )
    cases.add(
        "OneHot",
        np.array([1.0, 0.0, -1.0], np.float32),
        np.array(3),
        values,
        want=np.array([[2, 5, 2], [5, 2, 2], [2, 2, 5]]),
    )
    cases.check(opset=13)


def test_triangles(cases, rng, variant):
    x = rng.random((2, 5, 7), np.float32)
    for upper, k in itertools.product((0, 1), (None, -9, -2, 0, 3, 99)):
        cases.add("Trilu", x, *([] if k is None else [np.array(k)]), upper=upper)
    cases.add("Trilu", rng.integers(1, 9, (3, 3), np.int32), want=None)
    cases.add("Trilu", rng.random((4, 4)) < 0.5)
    cases.add("Trilu", np.zeros((0, 4), np.float32))
    cases.check()


def test_reversed_sequences(cases, rng, variant):
    for fed in ((), (1,)):
        cases.add("ReverseSequence", rng.random((5, 3, 2), np.float32), np.array([5, 1, 3]), fed=fed)
        cases.add(
            "ReverseSequence", rng.random((3, 5), np.float32), np.array([5, 1, 3]), fed=fed, batch_axis=0, time_axis=1
        )
    cases.check()


def test_a_sequence_that_is_too_long_fails_the_run(open_model, parse):
    driver = open_model(parse("g (float[4,2] x, int64[2] n) => (float[4,2] y) { y = ReverseSequence(x, n) }"))
    with pytest.raises(InvalidData, match="sequence length"):
        driver.run({"x": np.zeros((4, 2), np.float32), "n": np.array([1, 5])})


def test_eyes(cases, rng):
    for shape, k in (((3, 4), 0), ((4, 3), 1), ((3, 3), -2)):
        cases.add("EyeLike", np.ones(shape, np.float32), k=k)
        cases.add("EyeLike", np.ones(shape, np.int32), k=k, dtype=1)
    cases.check()
