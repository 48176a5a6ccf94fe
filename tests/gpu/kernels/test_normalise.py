from __future__ import annotations

import numpy as np
import pytest

from trionnx.gpu.errors import InvalidModel
from trionnx.gpu.kernels.softmax import in_steps


def softmax(x, axes, log=False):
    x = x.astype(np.float64)
    x = x - x.max(axes, keepdims=True)
    total = np.exp(x).sum(axes, keepdims=True)
    return x - np.log(total) if log else np.exp(x) / total


SHAPES = ((3, 5, 7), (3, 5, 8), (2, 3, 4, 5), (40, 301), (3, 2000), (3, 2001), (1, 1), (0, 3))


def test_softmax_along_an_axis(cases, rng, variant):
    for shape in SHAPES:
        x = 4 * rng.standard_normal(shape, np.float32)
        for axis in {-1, 0, 1}:
            if x.size:
                cases.add("Softmax", x, want=softmax(x, axis), axis=axis)
                cases.add("LogSoftmax", x, want=softmax(x, axis, log=True), axis=axis)
            else:
                cases.add("Softmax", x, want=x, axis=axis)
    cases.add("Softmax", np.array([[1000, 1001], [-1000, -1000]], np.float32))
    cases.check(opset=13)


def test_softmax_flattened(cases, rng, variant):
    for shape in SHAPES[:-1]:
        x = 4 * rng.standard_normal(shape, np.float32)
        for axis in (0, 1, -1):
            axes = tuple(range(axis % x.ndim, x.ndim))
            cases.add("Softmax", x, want=softmax(x, axes), axis=axis)
            cases.add("LogSoftmax", x, want=softmax(x, axes, log=True), axis=axis)
    cases.add("Softmax", x, want=softmax(x, tuple(range(1, x.ndim))))
    cases.check(opset=11)


def test_few_long_rows_are_shared_out():
    assert in_steps(1, 6625)
    assert not in_steps(40, 6625)
    assert not in_steps(4, 16)


def statistics(x, axes, epsilon):
    mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return mean, 1 / np.sqrt(var + epsilon)


@pytest.mark.parametrize("opset", [7, 9, 14, 15])
def test_batch_normalisation(cases, rng, opset):
    x = rng.standard_normal((2, 5, 4, 3), np.float32)
    scale, b, mean = rng.standard_normal((3, 5), np.float32)
    var = rng.random(5, np.float32)
    shape = (5, 1, 1)
    wide = [v.astype(np.float64).reshape(shape) for v in (scale, b, mean, var)]
    for epsilon in (1e-5, 1e-3):
        want = (x - wide[2]) / np.sqrt(wide[3] + epsilon) * wide[0] + wide[1]
        for known in ((1, 2, 3, 4), ()):
            cases.add("BatchNormalization", x, scale, b, mean, var, known=known, want=want, epsilon=epsilon)
            cases.add(
                "BatchNormalization", x, scale, b, mean, var, known=known, want=want, epsilon=epsilon, momentum=0.5
            )
    flat = (x[..., 0, 0] - wide[2][:, 0, 0]) / np.sqrt(wide[3][:, 0, 0] + 1e-5) * scale + b
    cases.add("BatchNormalization", x[..., 0, 0], scale, b, mean, var, known=(1, 2, 3, 4), want=flat)
    cases.check(opset)


def test_instance_and_layer_normalisation(cases, rng, variant):
    shape: tuple[int, ...]
    for shape in ((2, 5, 4, 3), (2, 5, 16, 16), (3, 2, 129)):
        x = 3 + rng.standard_normal(shape, np.float32)
        scale, b = rng.standard_normal((2, shape[1]), np.float32)
        axes = tuple(range(2, x.ndim))
        mean, inverse = statistics(x.astype(np.float64), axes, 1e-5)
        per = (-1, *[1] * len(axes))
        cases.add("InstanceNormalization", x, scale, b, want=(x - mean) * inverse * scale.reshape(per) + b.reshape(per))
    for shape, axis in (((2, 6, 7), -1), ((2, 6, 256), 1), ((2, 6, 130), 2), ((4, 8), 0)):
        x = 9 + rng.standard_normal(shape, np.float32)
        axes = tuple(range(axis % x.ndim, x.ndim))
        scale, b = rng.standard_normal((2, *shape[axes[0] :]), np.float32)
        mean, inverse = statistics(x.astype(np.float64), axes, 1e-3)
        want = (x - mean) * inverse * scale
        cases.add("LayerNormalization", x, scale, want=want, axis=axis, epsilon=1e-3)
        cases.add("LayerNormalization", x, scale, b, outputs=3, want=[want + b, mean, inverse], axis=axis, epsilon=1e-3)
    cases.check(opset=17)


def test_group_normalisation_of_both_kinds(cases, rng):
    x = 2 + rng.standard_normal((2, 6, 4, 16), np.float32)
    mean, inverse = statistics(x.astype(np.float64).reshape(2, 3, -1), 2, 1e-5)
    plain = (x.reshape(2, 3, -1) - mean) * inverse
    scale, b = rng.standard_normal((2, 6), np.float32)
    want = plain.reshape(x.shape) * scale.reshape(6, 1, 1) + b.reshape(6, 1, 1)
    cases.add("GroupNormalization", x, scale, b, want=want, num_groups=3)
    cases.check(opset=21)
    cases.cases.clear()
    scale, b = scale[:3], b[:3]
    want = (plain * scale.reshape(3, 1) + b.reshape(3, 1)).reshape(x.shape)
    cases.add("GroupNormalization", x, scale, b, want=want, num_groups=3)
    cases.check(opset=18)


def test_rms_normalisation(cases, rng):
    x = 9 + rng.standard_normal((2, 6, 256), np.float32)
    scale = rng.standard_normal(256, np.float32)
    root = np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
    cases.add("RMSNormalization", x, scale, want=x / root * scale)
    cases.check(opset=23)


@pytest.mark.parametrize(
    "body",
    [
        "y = BatchNormalization(x, c, c, c, c)",
        "y = InstanceNormalization(x, c, c)",
        "y = LayerNormalization<axis = 3>(x, c)",
        "y = LayerNormalization(x, c)",
        "y = Softmax<axis = 3>(x)",
    ],
)
def test_wrong_graphs_are_refused_with_the_node_named(open_model, parse, body):
    model = parse(f"g (float[2,3,4] x, float[5] c) => (float[N,M,K] y) {{ {body} }}")
    with pytest.raises(InvalidModel, match=r"node .* \(\w+(Normalization|max)\): "):
        open_model(model).run({"x": np.zeros((2, 3, 4), np.float32), "c": np.ones(5, np.float32)})


def test_softmax_of_rows_that_hold_nan_or_infinity(cases, rng, variant):
    n, i = np.nan, np.inf
    some = np.array([[1, 2, n, 0], [1, i, 0, 0], [-i, -i, -i, -i], [-i, 1, 2, 3], [0, 1, 2, 3]], np.float32)
    long = rng.standard_normal((3, 5000), np.float32)
    long[0, 4000], long[1, 10], long[2, 7] = n, i, -i
    for x, axis in ((some, 1), (some.T.copy(), 0), (some[:, :3].copy(), 1), (long, 1), (long.T.copy(), 0)):
        wide = x.astype(np.float64)
        with np.errstate(all="ignore"):
            e = np.exp(wide - wide.max(axis, keepdims=True))
            want = e / e.sum(axis, keepdims=True)
            cases.add("Softmax", x, axis=axis, want=want, tol=1e-5)
            cases.add("LogSoftmax", x, axis=axis, want=np.log(want), tol=1e-5)
    cases.check()
