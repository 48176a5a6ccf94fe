"""Long sums: llvmpipe silently leaves a loop after 65535 turns, so no kernel may take more."""

from __future__ import annotations

import numpy as np
import pytest

LONG = 1_000_000


@pytest.mark.parametrize(
    ("op", "value"),
    [
        ("ReduceSum", LONG),
        ("ReduceMean", 1),
        ("ReduceMax", 1),
        ("ReduceL2", 1000),
        ("ReduceLogSumExp", np.log(LONG) + 1),
    ],
)
def test_reductions(open_model, parse, op, value):
    driver = open_model(parse(f"g (float[N] x) => (float[1] y) {{ y = {op}(x) }}"))
    (y,) = driver.run({"x": np.ones(LONG, np.float32)})
    np.testing.assert_allclose(y, [value], rtol=1e-6)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (8, 8)])
def test_products(open_model, parse, m, n):
    driver = open_model(parse("g (float[M,K] x, float[K,N] w) => (float[M,N] y) { y = MatMul(x, w) }"))
    k = 300_001
    (y,) = driver.run({"x": np.ones((m, k), np.float32), "w": np.ones((k, n), np.float32)})
    np.testing.assert_allclose(y, np.full((m, n), k), rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 33])
def test_softmax(open_model, parse, rows):
    driver = open_model(parse("g (float[M,N] x) => (float[M,N] y) { y = Softmax<axis=-1>(x) }"))
    (y,) = driver.run({"x": np.ones((rows, 100_001), np.float32)})
    np.testing.assert_allclose(y, np.full((rows, 100_001), 1 / 100_001), rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize(
    "node", ["LayerNormalization<axis=-1>(x, s)", "InstanceNormalization(x3, c, z)"], ids=["layer", "instance"]
)
def test_norms(open_model, parse, rows, node):
    size = 100_001
    driver = open_model(
        parse(
            f"g (float[1,M,N] x3, float[N] s, float[M] c, float[M] z) => (float[1,M,N] y)"
            f" {{ x = Identity(x3) y = {node} }}"
        )
    )
    x = np.broadcast_to(np.arange(size, dtype=np.float32), (1, rows, size))
    ones = np.ones(size, np.float32)
    (y,) = driver.run({"x3": x.copy(), "s": ones, "c": np.ones(rows, np.float32), "z": np.zeros(rows, np.float32)})
    expected = (x - x.mean(-1, keepdims=True, dtype=np.float64)) / x.std(-1, keepdims=True, dtype=np.float64)
    np.testing.assert_allclose(y, expected, atol=1e-4)
