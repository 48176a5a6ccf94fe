from __future__ import annotations

import numpy as np
import pytest

from trionnx.gpu.errors import InvalidModel
from trionnx.gpu.kernels.matmul_registers import TILES, choose_tile

SHAPES = (
    ((5, 7), (7, 9)),
    ((33, 64), (64, 70)),
    ((1, 200), (200, 2)),
    ((40, 120), (120, 361)),
    ((70, 33), (33, 200)),
    ((2, 96), (96, 100)),
    ((64,), (64, 8)),
    ((8, 64), (64,)),
    ((64,), (64,)),
    ((4, 5, 8), (8, 12)),
    ((2, 3, 5, 8), (3, 8, 6)),
    ((2, 1, 5, 8), (1, 3, 8, 36)),
    ((3, 40, 15), (3, 15, 48)),
    ((2, 3, 20, 8), (3, 8, 64)),
    ((5, 8), (3, 8, 4)),
    ((1, 1), (1, 1)),
)


def test_shapes_with_known_and_with_fed_operands(cases, rng, product_variant):
    for left, right in SHAPES:
        a, b = rng.standard_normal(left, np.float32), rng.standard_normal(right, np.float32)
        want = np.matmul(a.astype(np.float64), b.astype(np.float64))
        for known in ((), (1,), (0,)):
            cases.add("MatMul", a, b, known=known, want=want)
    cases.add("MatMul", rng.integers(-9, 9, (6, 5), np.int32), rng.integers(-9, 9, (5, 40), np.int32))
    cases.add("MatMul", np.zeros((3, 0), np.float32), np.zeros((0, 4), np.float32), want=np.zeros((3, 4)))
    cases.add("MatMul", np.zeros((0, 3), np.float32), np.zeros((3, 4), np.float32), want=np.zeros((0, 4)))
    cases.check(opset=13)


def test_gemm(cases, rng, product_variant):
    for a_turned in (0, 1):
        for b_turned in (0, 1):
            for c in (None, (), (1,), (40,), (6, 1), (6, 40)):
                a, b = rng.standard_normal((6, 5), np.float32), rng.standard_normal((5, 40), np.float32)
                extra = [] if c is None else [rng.standard_normal(c, np.float32)]
                want = 0.5 * (a.astype(np.float64) @ b) + (2.0 * extra[0] if extra else 0)
                operands = (a.T.copy() if a_turned else a, b.T.copy() if b_turned else b)
                for known in ((1,), ()):
                    cases.add(
                        "Gemm",
                        *operands,
                        *extra,
                        known=known,
                        want=want,
                        transA=a_turned,
                        transB=b_turned,
                        alpha=0.5,
                        beta=2.0,
                    )
    cases.add("Gemm", a, b, want=a.astype(np.float64) @ b)
    cases.add("Gemm", a, b, extra[0], beta=0.0, want=a.astype(np.float64) @ b)
    cases.check(opset=13)


def test_a_product_takes_its_activation_in(open_model, parse, rng):
    driver = open_model(
        parse(
            "g (float[4,64] x, float[64,64] w, float[64] b) => (float[4,64] y)"
            "{ m = MatMul(x, w) a = Add(m, b) y = Relu(a) }"
        )
    )
    x, w, b = (rng.standard_normal(s, np.float32) for s in ((4, 64), (64, 64), (64,)))
    (y,) = driver.run({"x": x, "w": w, "b": b})
    np.testing.assert_allclose(y, np.maximum(x.astype(np.float64) @ w + b, 0), atol=2e-5)
    plan = next(reversed(driver.engine._plans.values()))
    assert sum(hasattr(step, "program") for step in plan.steps) == 1


def test_products_do_not_depend_on_how_they_are_cut(open_model, parse, rng):
    driver = open_model(parse("g (float[70,130] x, float[130,500] w) => (float[70,500] y) { y = MatMul(x, w) }"))
    feeds = {"x": rng.standard_normal((70, 130), np.float32), "w": rng.standard_normal((130, 500), np.float32)}
    (whole,) = driver.run(feeds)
    for units in (1, 5):
        np.testing.assert_array_equal(driver.run(feeds, units=units)[0], whole)


@pytest.mark.parametrize("subgroup", [0, 4, 8, 16, 32])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 1000), (7, 31), (40, 6625), (512, 512), (2048, 64)])
def test_tiles(m, n, subgroup):
    tile = choose_tile(1, m, n, subgroup)
    if tile.lanes == 1:
        assert tile in TILES
    else:
        assert tile.lanes == subgroup
        assert tile.rows % tile.lanes == 0
        assert tile.rows * tile.columns <= 64


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("y = MatMul(x, z)", r"shapes \[2, 3\] and \[2, 4\] do not multiply"),
        ("y = MatMul(x, s)", "do not multiply"),
        ("y = Gemm(x, z)", "do not multiply"),
        ("y = Gemm<transA = 1>(x, z, b)", "do not broadcast"),
        ("y = Gemm<transA = 1>(x, z, w)", "does not broadcast"),
    ],
)
def test_wrong_graphs_are_refused_with_the_node_named(open_model, parse, body, message):
    model = parse(
        f"g (float[2,3] x, float[2,4] z, float[5] b, float[2,3,4] w) => (float[N,M] y) <float s = {{2.0}}> {{ {body} }}"
    )
    feeds = {"x": np.zeros((2, 3), np.float32), "z": np.zeros((2, 4), np.float32), "b": np.zeros(5, np.float32)}
    feeds["w"] = np.zeros((2, 3, 4), np.float32)
    with pytest.raises(InvalidModel, match=message):
        open_model(model).run(feeds)
