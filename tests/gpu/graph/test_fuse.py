from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from trionnx.gpu.graph.fuse import broadcast_strides, collapse

A_CHAIN = """g (float[N,C,H,W] x, float[C,1,1] b) => (float[N,C,H,W] y) {
a = Add(x, b) r = Relu(a) t = Mul(r, a) y = Sub(t, x) }"""


def dispatches(driver):
    plan = next(reversed(driver.engine._plans.values()))
    return [s.program.name for s in plan.steps if hasattr(s, "program")]


def test_an_elementwise_chain_is_one_dispatch(open_model, parse, rng):
    driver = open_model(parse(A_CHAIN))
    x, b = rng.standard_normal((2, 3, 5, 7), np.float32), rng.standard_normal((3, 1, 1), np.float32)
    (y,) = driver.run({"x": x, "b": b})
    a = x + b
    np.testing.assert_allclose(y, np.maximum(a, 0) * a - x, rtol=1e-6, atol=1e-6)
    assert len(dispatches(driver)) == 1


def test_widths_do_not_recompile_but_for_whole_fours(open_model, parse, rng):
    driver = open_model(parse(A_CHAIN))
    made = []
    for width in (8, 64, 6, 7, 1, 33, 2, 12):
        x, b = rng.standard_normal((1, 3, 2, width), np.float32), rng.standard_normal((3, 1, 1), np.float32)
        (y,) = driver.run({"x": x, "b": b})
        a = x + b
        np.testing.assert_allclose(y, np.maximum(a, 0) * a - x, rtol=1e-6, atol=1e-6)
        made.append(driver.engine.device.pipelines)
    assert made == [1, 1, 1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("kind", ["float", "int32", "bool"])
@pytest.mark.parametrize(
    ("left", "right"),
    [((3, 5, 8), (8,)), ((3, 5, 8), (3, 1, 8)), ((3, 5, 8), (5, 1)), ((3, 5, 6), (6,)), ((3, 8), (3, 1)),
     ((2, 3, 4, 4), (3, 1, 4)), ((2, 3, 4, 4), (2, 1, 1, 4)), ((4, 8), (8, 4, 1))],
)  # fmt: skip
def test_what_is_repeated_is_read_where_it_lies(open_model, parse, rng, kind, left, right):
    op = "And" if kind == "bool" else "Add"
    shapes = [",".join(map(str, shape)) for shape in (left, right, np.broadcast_shapes(left, right))]
    driver = open_model(
        parse(f"g ({kind}[{shapes[0]}] x, {kind}[{shapes[1]}] y) => ({kind}[{shapes[2]}] z) {{ z = {op}(x, y) }}")
    )
    dtype = {"float": np.float32, "int32": np.int32, "bool": bool}[kind]
    x, y = ((9 * rng.standard_normal(shape)).astype(np.int32).astype(dtype) for shape in (left, right))
    (z,) = driver.run({"x": x, "y": y})
    np.testing.assert_array_equal(z, x & y if kind == "bool" else x + y)


def test_different_constants_share_a_pipeline(open_model, parse, rng):
    driver = open_model(
        parse(
            "g (float[4] x) => (float[4] y, float[4] z)"
            " <float c = {2.5}, float d = {-3.0}> { y = Mul(x, c) z = Mul(x, d) }"
        )
    )
    x = rng.standard_normal(4, np.float32)
    y, z = driver.run({"x": x})
    np.testing.assert_array_equal([y, z], [x * np.float32(2.5), x * np.float32(-3)])
    assert driver.engine.device.pipelines == 1


def test_a_value_that_is_read_twice_is_computed_once_if_it_is_dear(open_model, parse, rng):
    driver = open_model(
        parse(
            "g (float[64,64] x, float[64,64] w) => (float[64,64] y, float[64,64] z)"
            "{ m = MatMul(x, w) a = Relu(m) y = Add(a, x) z = Mul(m, x) }"
        )
    )
    x, w = rng.standard_normal((2, 64, 64), np.float32)
    y, z = driver.run({"x": x, "w": w})
    m = x.astype(np.float64) @ w
    np.testing.assert_allclose(y, np.maximum(m, 0) + x, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(z, m * x, rtol=1e-4, atol=1e-4)
    assert sum("matmul" in name.lower() for name in dispatches(driver)) == 1


def test_an_activation_fuses_onto_the_product_before_it(open_model, parse, rng):
    driver = open_model(
        parse(
            "g (float[M,64] x, float[64,32] w, float[32] b) => (float[M,32] y)"
            " { m = MatMul(x, w) a = Add(m, b) y = Relu(a) }"
        )
    )
    x, w, b = (rng.standard_normal(s, np.float32) for s in ((10, 64), (64, 32), (32,)))
    (y,) = driver.run({"x": x, "w": w, "b": b})
    np.testing.assert_allclose(y, np.maximum(x.astype(np.float64) @ w + b, 0), rtol=1e-4, atol=1e-4)
    assert len(dispatches(driver)) == 1


def test_a_product_that_is_broadcast_up_is_not_computed_again(open_model, parse, rng):
    driver = open_model(
        parse("g (float[1,8] x, float[8,8] w, float[16,8] z) => (float[16,8] y) { m = MatMul(x, w) y = Add(m, z) }")
    )
    x, w, z = (rng.standard_normal(s, np.float32) for s in ((1, 8), (8, 8), (16, 8)))
    (y,) = driver.run({"x": x, "w": w, "z": z})
    np.testing.assert_allclose(y, x @ w + z, rtol=1e-4, atol=1e-4)
    assert len(dispatches(driver)) == 2


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 4096, 4097])
def test_every_size(open_model, parse, rng, size):
    driver = open_model(parse("g (float[N] x, float[1] b) => (float[N] y) { a = Add(x, b) y = Relu(a) }"))
    x, b = rng.standard_normal(size, np.float32), np.ones(1, np.float32)
    (y,) = driver.run({"x": x, "b": b})
    np.testing.assert_array_equal(y, np.maximum(x + b, 0))


@given(nps.mutually_broadcastable_shapes(num_shapes=3, max_dims=5, max_side=4))
def test_collapsed_strides_walk_the_same_elements(shapes):
    out = shapes.result_shape
    strides = [broadcast_strides(s, out) for s in shapes.input_shapes]
    dims, merged = collapse(out, strides)
    assert int(np.prod(dims)) == int(np.prod(out))
    for shape, walked in zip(shapes.input_shapes, merged, strict=True):
        flat = np.arange(int(np.prod(shape))).reshape(shape)
        expected = np.broadcast_to(flat, out).reshape(-1)
        index = np.indices(dims).reshape(len(dims), -1)
        np.testing.assert_array_equal(np.tensordot(walked, index, 1).reshape(-1), expected)


@given(st.data())
def test_collapsing_leaves_no_two_dimensions_that_all_walk_alike(data):
    out = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)))
    dims, (walked,) = collapse(out, [broadcast_strides(out, out)])
    assert len(dims) == 1
    assert len(walked) == 1
