from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trionnx.gpu.errors import InvalidModel
from trionnx.gpu.kernels.reduce import CHUNK, choose_chunk

REDUCTIONS: dict[str, Any] = {
    "ReduceSum": np.sum,
    "ReduceMean": np.mean,
    "ReduceMax": np.max,
    "ReduceMin": np.min,
    "ReduceProd": np.prod,
    "ReduceL1": lambda x, **how: np.sum(np.abs(x), **how),
    "ReduceL2": lambda x, **how: np.sqrt(np.sum(x * x, **how)),
    "ReduceSumSquare": lambda x, **how: np.sum(x * x, **how),
    "ReduceLogSum": lambda x, **how: np.log(np.sum(x, **how)),
    "ReduceLogSumExp": lambda x, **how: np.log(np.sum(np.exp(x), **how)),
}
TOLERANCES = {"ReduceProd": 4e-6, "ReduceLogSum": 1e-5}
SHAPES = (
    ((3, 5, 7), (1,)),
    ((3, 5, 8), (2,)),
    ((4, 5, 8), (0,)),
    ((3, 4, 5, 6), (1, 3)),
    ((3, 4, 5, 6), (0, 1)),
    ((500, 3), (0,)),
    ((7,), None),
    ((3, 1), (1,)),
    ((2, 3, 4), (0, 1, 2)),
    ((4, 300), (-1,)),
)


@pytest.mark.parametrize("op", REDUCTIONS)
def test_axes_by_attribute_and_by_input(cases, rng, variant, op):
    for shape, axes in SHAPES:
        x = 0.9 + 0.2 * rng.random(shape, np.float32)
        for keepdims in (True, False):
            want = REDUCTIONS[op](x.astype(np.float64), axis=axes, keepdims=keepdims)
            attrs = {"keepdims": int(keepdims)}
            inputs = () if axes is None else (np.array(axes, np.int64),)
            cases.add(op, x, *inputs, want=want, tol=TOLERANCES.get(op, 1e-6), **attrs)
    cases.check(opset=18)


def test_versions_with_axes_as_attribute(cases, rng):
    x = rng.standard_normal((3, 4, 5), np.float32)
    for op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceL2"):
        cases.add(op, x, axes=[-2], keepdims=0)
        cases.add(op, x)
    cases.check(opset=11)


def test_integers_and_special_cases(cases, rng):
    x = rng.integers(-9, 9, (3, 5), np.int32)
    for op in ("ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin"):
        cases.add(op, x, np.array([1], np.int64))
    y = rng.standard_normal((3, 4), np.float32)
    nothing = np.zeros(0, np.int64)
    cases.add("ReduceSum", y, nothing, noop_with_empty_axes=1)
    cases.add("ReduceSum", y, nothing)
    cases.add("ReduceSum", np.zeros((0, 3), np.float32), np.array([0], np.int64), want=np.zeros((1, 3)))
    cases.add("ReduceSum", np.zeros((0, 3), np.float32), np.array([1], np.int64), want=np.zeros((0, 1)))
    cases.add("ReduceProd", np.zeros((2, 0), np.float32), np.array([1], np.int64), want=np.ones((2, 1)))
    odd = np.array([[np.nan, 1, 2], [np.inf, 1, -np.inf]], np.float32)
    cases.add("ReduceMax", odd, np.array([1], np.int64), want=np.max(odd, 1, keepdims=True))
    cases.add("ReduceMin", odd, np.array([1], np.int64), want=np.min(odd, 1, keepdims=True))
    cases.add(
        "ReduceLogSumExp",
        np.array([[-np.inf, -np.inf], [1000, 1000]], np.float32),
        np.array([1], np.int64),
        want=np.array([[-np.inf], [1000 + np.log(2)]]),
    )
    cases.check(opset=18)


def test_long_sums_stay_accurate(cases, rng, variant):
    x = rng.random(1_000_003, np.float32) + np.float32(100)
    cases.add("ReduceSum", x, want=np.array([x.sum(dtype=np.float64)]), tol=3e-7)
    y = rng.random((40_001, 4), np.float32)
    cases.add("ReduceMean", y, np.array([0], np.int64), want=y.mean(0, dtype=np.float64)[None], tol=3e-7)
    cases.check(opset=18)


@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize("count", [1, 7, 1000])
@pytest.mark.parametrize("size", [0, 1, 3, 64, 65, 1000, 1_000_000])
def test_chunks_are_whole_and_bounded(count, size, cpu):
    chunk = choose_chunk(count, size, cpu)
    assert 1 <= chunk <= CHUNK
    assert chunk >= size or chunk % 4 == 0


def test_an_axis_out_of_range_is_refused(open_model, parse):
    model = parse("g (float[3,4] x) => (float[3] y) <int64[1] a = {2}> { y = ReduceSum(x, a) }")
    with pytest.raises(InvalidModel, match="axis 2 is out of range"):
        open_model(model).run({"x": np.zeros((3, 4), np.float32)})
