from __future__ import annotations

import numpy as np
import pytest

from trionnx.gpu.errors import InvalidModel

WINDOWS = (
    {"kernel_shape": [2, 2], "strides": [2, 2]},
    {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
    {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [0, 0, 1, 1]},
    {"kernel_shape": [3, 2], "strides": [2, 3], "ceil_mode": 1},
    {"kernel_shape": [3, 3], "strides": [3, 2], "ceil_mode": 1, "pads": [1, 1, 1, 1]},
    {"kernel_shape": [5, 5], "pads": [2, 2, 2, 2]},
    {"kernel_shape": [2, 2], "dilations": [2, 3]},
    {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
    {"kernel_shape": [2, 2], "auto_pad": "SAME_LOWER"},
    {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "VALID"},
    {"kernel_shape": [13, 13], "pads": [6, 6, 6, 6]},
)


def test_windows_in_two_dimensions(cases, variant, rng):
    for window in WINDOWS:
        for shape in ((1, 3, 17, 19), (2, 2, 13, 14)):
            x = rng.standard_normal(shape, np.float32)
            cases.add("MaxPool", x, **window)
            for padded in (0, 1):
                cases.add("AveragePool", x, count_include_pad=padded, **window)
    cases.check(opset=19)


def test_one_and_three_dimensions(cases, variant, rng):
    line, cube = rng.standard_normal((2, 3, 17), np.float32), rng.standard_normal((2, 3, 7, 8, 9), np.float32)
    for op in ("MaxPool", "AveragePool"):
        cases.add(op, line, kernel_shape=[3], strides=[2])
        cases.add(op, cube, kernel_shape=[3, 2, 3], strides=[2, 1, 2], pads=[1, 0, 1, 1, 1, 1])
    cases.check(opset=11)


def test_a_window_over_everything_is_a_global_pool(cases, variant, rng):
    cases.add("AveragePool", rng.standard_normal((1, 3, 7, 7), np.float32), kernel_shape=[7, 7])
    cases.add("AveragePool", rng.standard_normal((1, 3, 8, 7), np.float32), kernel_shape=[8, 7], strides=[3, 3])
    cases.check()


def test_global_pools_of_any_rank(cases, variant, rng):
    shapes = ((1, 3, 7, 7), (2, 5, 8, 4), (1, 2, 1000), (2, 3, 4, 5, 6), (2, 3, 1, 1), (1, 40, 13, 13), (0, 3, 2, 2))
    for shape in shapes:
        x = rng.standard_normal(shape, np.float32)
        axes = tuple(range(2, x.ndim))
        cases.add("GlobalAveragePool", x, want=x.astype(np.float64).mean(axis=axes, keepdims=True), tol=1e-6)
        cases.add("GlobalMaxPool", x, want=x.max(axis=axes, keepdims=True), tol=0)
    cases.check()


def test_the_mean_of_many_elements_is_accurate(cases, variant, rng):
    for size in (1_000_000, 999_999):
        x = rng.random((1, 2, size), np.float32)
        cases.add("GlobalAveragePool", x, want=x.astype(np.float64).mean(axis=2, keepdims=True), tol=3e-7)
    cases.check()


def test_minus_infinity_and_nan(cases, variant):
    x = np.full((1, 2, 4, 6), -np.inf, np.float32)
    cases.add("MaxPool", x, want=np.full((1, 2, 2, 3), -np.inf), kernel_shape=[2, 2], strides=[2, 2])
    cases.add("GlobalMaxPool", x, want=np.full((1, 2, 1, 1), -np.inf))
    x = x.copy()
    x[0, 1, 1, 1] = np.nan
    want = np.full((1, 2, 2, 3), -np.inf)
    want[0, 1, 0, 0] = np.nan
    cases.add("MaxPool", x, want=want, kernel_shape=[2, 2], strides=[2, 2])
    cases.check()


def test_indices_are_left_to_the_host(cases, rng):
    x = rng.standard_normal((1, 2, 6, 6), np.float32)
    cases.add("MaxPool", x, outputs=2, kernel_shape=[2, 2], strides=[2, 2])
    cases.check(host=["MaxPool"])


@pytest.mark.parametrize(
    "attrs", ["kernel_shape = [2]", "kernel_shape = [9, 9]", "kernel_shape = [2, 2], strides = [0, 1]"]
)
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_a_wrong_node_is_refused_by_name(open_model, parse, op, attrs):
    model = parse(f"agraph (float[1, 3, 8, 8] x) => (float[a, b, c, d] y) {{ [pool] y = {op} <{attrs}> (x) }}")
    with pytest.raises(InvalidModel, match=f"'pool'.*{op}"):
        open_model(model).run({"x": np.zeros((1, 3, 8, 8), np.float32)})


def test_places_of_maxima(cases, rng, variant):
    for shape, attrs in (
        ((2, 3, 9), {"kernel_shape": [3], "strides": [2]}),
        ((2, 3, 7, 6), {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]}),
        ((1, 2, 5, 6), {"kernel_shape": [2, 2], "dilations": [2, 3], "ceil_mode": 1, "strides": [2, 2]}),
        ((1, 2, 5, 6, 4), {"kernel_shape": [2, 3, 2]}),
    ):
        for order in (0, 1):
            x = rng.integers(-4, 4, shape).astype(np.float32)
            cases.add("MaxPool", x, outputs=2, storage_order=order, **attrs)
    cases.add("MaxPool", np.full((1, 1, 3), -np.inf, np.float32), outputs=2, kernel_shape=[2], want=[
        np.full((1, 1, 2), -np.inf), np.array([[[0, 1]]])])
    cases.check()


def test_unpooling(cases, rng, variant):
    x = rng.standard_normal((2, 3, 2, 3), np.float32)
    places = np.stack([rng.permutation(24)[:6].reshape(2, 3) for _ in range(6)]).reshape(2, 3, 2, 3)
    places += np.arange(6).reshape(2, 3, 1, 1) * 24
    for fed in ((), (1,)):
        flat = np.zeros(144, np.float32)
        flat[places.reshape(-1)] = x.reshape(-1)
        want = flat.reshape(2, 3, 4, 6)
        cases.add("MaxUnpool", x, places, fed=fed, kernel_shape=[2, 2], strides=[2, 2], want=want)
        larger = np.zeros((2, 3, 5, 7), np.float32)
        larger[:, :, :4, :6] = want
        shape = np.array(larger.shape)
        cases.add("MaxUnpool", x, places, shape, fed=fed, kernel_shape=[2, 2], strides=[2, 2], want=larger)
    cases.check()


def test_a_window_larger_than_its_input(cases, rng):
    for op in ("MaxPool", "AveragePool", "LpPool"):
        for shape, attrs in (((1, 2, 1, 1), {}), ((1, 2, 1, 5), {}), ((1, 2, 2, 3), {"pads": [0, 1, 0, 0]})):
            kernel = [3, 2] if shape[2] == 2 else [2, 2]
            cases.add(op, rng.random(shape, np.float32), kernel_shape=kernel, strides=[2, 2], tol=1e-5, **attrs)
    cases.check()
