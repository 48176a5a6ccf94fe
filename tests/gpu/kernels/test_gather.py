from __future__ import annotations

import numpy as np
import pytest

from trionnx.gpu.errors import InvalidData


def test_gather(cases, rng, variant):
    x = rng.standard_normal((5, 6, 8), np.float32)
    for fed in ((), (1,)):
        for axis, indices in ((0, [0, -1, 3, 3]), (1, [[0, -1], [3, 2]]), (2, [[[7], [-8]]]), (-1, [1, 2, 3])):
            cases.add("Gather", x, np.array(indices, np.int64), fed=fed, axis=axis)
            cases.add("Gather", x, np.array(indices, np.int32), known=() if fed else (1,), axis=axis)
        cases.add("Gather", x, np.array(-2, np.int64), fed=fed, axis=1)
        cases.add("Gather", x, np.zeros((0, 2), np.int64), fed=fed, axis=1)
        cases.add("Gather", rng.random((5, 6)) < 0.5, np.array([3, 1], np.int64), fed=fed, axis=1)
        cases.add("Gather", rng.random((5, 8)) < 0.5, np.array([3, 1], np.int64), fed=fed)
    cases.check(opset=13)


def test_gather_elements_and_tuples(cases, rng, variant):
    x = rng.standard_normal((4, 5, 6), np.float32)
    for fed in ((), (1,)):
        cases.add("GatherElements", x, rng.integers(-4, 4, (3, 5, 6)), fed=fed)
        cases.add("GatherElements", x, rng.integers(-5, 5, (4, 7, 2)), fed=fed, axis=1)
        cases.add("GatherElements", x, rng.integers(-6, 6, (4, 5, 1)), fed=fed, axis=-1)
        cases.add("GatherND", x, rng.integers(-4, 4, (3, 2, 1)), fed=fed)
        cases.add("GatherND", x, rng.integers(-5, 5, (4, 3, 1)), fed=fed, batch_dims=1)
    cases.add("GatherND", x, rng.integers(-4, 4, (3, 2)))
    cases.add("GatherND", x, rng.integers(-4, 4, (2, 3)))
    cases.add("GatherND", x, rng.integers(-5, 5, (4, 3, 2)), batch_dims=1)
    cases.check(opset=13)


def test_a_known_index_out_of_range_is_refused(open_model, parse):
    for index in (3, -4):
        model = parse(f"g (float[3] x) => (float[2] y) <int64[2] i = {{0, {index}}}> {{ y = Gather(x, i) }}")
        with pytest.raises(InvalidData, match="range"):
            open_model(model).run({"x": np.zeros(3, np.float32)})


def test_an_index_out_of_range_in_a_feed_fails_the_run(open_model, parse, rng):
    driver = open_model(parse("g (float[3,4] x, int64[2] i) => (float[2,4] y) { y = Gather(x, i) }"))
    x = rng.standard_normal((3, 4), np.float32)
    with pytest.raises(InvalidData, match="range"):
        driver.run({"x": x, "i": np.array([0, 3])})
    np.testing.assert_array_equal(driver.run({"x": x, "i": np.array([2, -3])})[0], x[[2, 0]])
