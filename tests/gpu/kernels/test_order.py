from __future__ import annotations

import itertools

import numpy as np
import pytest

from trionnx.gpu.errors import InvalidModel


def values(rng, shape):
    return rng.integers(-4, 4, shape).astype(np.float32)


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
def test_places_of_the_best(cases, rng, variant, op):
    for keep, last in itertools.product((0, 1), (0, 1)):
        for shape, axis in (
            ((5, 6, 7), 0),
            ((5, 6, 7), 1),
            ((5, 6, 7), -1),
            ((2, 900), 1),
            ((3000, 2), 0),
            ((0, 4), 1),
        ):
            cases.add(op, values(rng, shape), axis=axis, keepdims=keep, select_last_index=last)
    cases.add(op, rng.integers(-99, 99, (5, 6), np.int32))
    cases.check()


def test_nan_is_larger_than_all_else(cases, variant):
    x = np.array([[1, np.nan, np.inf], [-np.inf, -1, -np.nan], [-0.0, 0.0, -1]], np.float32)
    cases.add("ArgMax", x, axis=1, keepdims=0, want=np.array([1, 2, 0]))
    cases.add("ArgMin", x, axis=1, keepdims=0, want=np.array([0, 0, 2]))
    cases.add(
        "TopK",
        x,
        np.array([3]),
        outputs=2,
        want=[[[np.nan, np.inf, 1], [np.nan, -1, -np.inf], [0, 0, -1]], [[1, 2, 0], [2, 1, 0], [0, 1, 2]]],
    )
    cases.check()


def test_hardmax(cases, rng, variant):
    for shape, axis in (((3, 4, 5), -1), ((3, 4, 5), 1), ((2, 900), 1), ((0, 4), 1)):
        cases.add("Hardmax", values(rng, shape), axis=axis)
    cases.check()


def test_hardmax_before_opset_13(cases, rng, variant):
    for axis in (0, 1, 2):
        cases.add("Hardmax", values(rng, (3, 4, 5)), axis=axis)
    cases.check(opset=11)


@pytest.mark.parametrize("largest", [0, 1])
def test_top_k(cases, rng, variant, largest):
    for shape, axis, ks in (
        ((3, 4, 5), -1, (0, 1, 5)),
        ((3, 4, 5), 1, (3,)),
        ((7, 2), 0, (7,)),
        ((2, 1000), 1, (1, 10, 300, 1000)),
        ((300, 3), 0, (5, 257)),
        ((2, 257), 1, (257,)),
        ((1, 5000), 1, (600,)),
        ((1, 769), 1, (700,)),
    ):
        for k in ks:
            x = values(rng, shape)
            order = np.argsort(-x if largest else x, axis, kind="stable")
            places = np.take(order, np.arange(k), axis)
            want = [np.take_along_axis(x, places, axis), places]
            cases.add("TopK", x, np.array([k]), outputs=2, axis=axis, largest=largest, want=want)
    cases.add("TopK", rng.integers(-99, 99, (4, 50), np.int32), np.array([7]), outputs=2, largest=largest)
    cases.check()


def test_top_k_of_old_opsets(cases, rng):
    x = rng.permutation(40).astype(np.float32).reshape(4, 10)
    cases.add("TopK", x, k=3, outputs=2, want=[-np.sort(-x)[:, :3], np.argsort(-x)[:, :3]])
    cases.check(opset=9)


def test_too_large_a_k_is_refused_by_name(open_model, parse):
    model = parse("g (float[3] x) => (float[4] y, int64[4] i) <int64[1] k = {4}> { [best] y, i = TopK(x, k) }")
    with pytest.raises(InvalidModel, match=r"'best'.*TopK.*k of at most"):
        open_model(model).run({"x": np.zeros(3, np.float32)})
