from __future__ import annotations

import numpy as np
import pytest

from trionnx.gpu.errors import InvalidData, InvalidModel
from trionnx.gpu.kernels import scatter

REDUCTIONS = ("none", "add", "mul", "max", "min")
PLAIN = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def test_scatter_elements(cases, rng, variant):
    for fed, reduction in ((f, r) for f in ((), (1,)) for r in REDUCTIONS):
        for dtype in (np.float32, np.int32):
            x = rng.integers(-9, 9, (4, 5, 6)).astype(dtype)
            shape: tuple[int, ...]
            for axis, shape in ((0, (3, 5, 6)), (1, (4, 9, 2)), (-1, (2, 1, 3)), (2, (4, 5, 0))):
                indices = rng.integers(-x.shape[axis], x.shape[axis], shape)
                if reduction == "none":
                    size = x.shape[axis]
                    picks = rng.permutation(size)[: min(shape[axis], size)]
                    shape = tuple(len(picks) if a == axis % 3 else n for a, n in enumerate(shape))
                    indices = np.broadcast_to(np.expand_dims(picks, [a for a in range(3) if a != axis % 3]), shape)
                updates = rng.integers(-9, 9, shape).astype(dtype)
                cases.add("ScatterElements", x, indices, updates, fed=fed, axis=axis, reduction=reduction)
    cases.check()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_long_rows_are_sorted_and_keep_their_order(cases, rng, variant, reduction):
    x, updates = rng.random((700,), np.float32), rng.random((900,), np.float32)
    indices = rng.integers(0, 50, 900)
    want = x.copy()
    for i, u in zip(indices, updates, strict=True):
        want[i] = u if reduction == "none" else PLAIN[reduction](want[i], u)
    for fed in ((), (1,)):
        cases.add("ScatterElements", x, indices, updates, fed=fed, want=want, tol=0, reduction=reduction)
        cases.add("ScatterND", x, indices[:, None], updates, fed=fed, want=want, tol=0, reduction=reduction)
    cases.check()


def test_rows_longer_than_a_software_adapter_walks_in_one_go(cases, rng, monkeypatch):
    monkeypatch.setattr(scatter, "MOST_TURNS", 7)
    x, updates = rng.random((3, 5), np.float32), rng.random((30, 5), np.float32)
    indices = rng.integers(0, 3, (30, 5))
    cases.add("ScatterElements", x, indices, updates, reduction="add")
    cases.add("ScatterND", x, indices[:, :1], updates, reduction="add")
    cases.check()


def test_scatter_nd(cases, rng, variant):
    for fed, reduction in ((f, r) for f in ((), (1,)) for r in REDUCTIONS):
        x = rng.random((4, 5, 8), np.float32)
        for depth, count in ((1, 3), (2, 7), (3, 20)):
            inner = x.shape[depth:]
            flat = rng.permutation(int(np.prod(x.shape[:depth])))[:count]
            indices = np.stack(np.unravel_index(flat, x.shape[:depth]), -1)
            if reduction != "none":
                indices = np.concatenate([indices, indices[::-1] - np.array(x.shape[:depth])])
            updates = rng.random((len(indices), *inner), np.float32)
            cases.add("ScatterND", x, indices, updates, fed=fed, reduction=reduction)
    cases.add("ScatterND", x, np.zeros((0, 2), np.int64), np.zeros((0, 8), np.float32))
    cases.add("ScatterND", rng.random((3, 4)) < 0.5, np.array([[2]]), rng.random((1, 4)) < 0.5)
    cases.check()


def test_scatter_of_old_opsets(cases, rng):
    cases.add(
        "Scatter", rng.random((3, 4), np.float32), np.array([[2, 1, 0, -1]]) % 3, rng.random((1, 4), np.float32), axis=0
    )
    cases.check(opset=9)


def test_tensor_scatter(cases, rng):
    x, update = rng.random((2, 3, 6, 4), np.float32), rng.random((2, 3, 2, 4), np.float32)
    for fed in ((), (2,)):
        for mode, starts in (("linear", [1, 4]), ("circular", [5, 2])):
            want = x.copy()
            for b, start in enumerate(starts):
                for k in range(2):
                    want[b, :, (start + k) % 6] = update[b, :, k]
            cases.add("TensorScatter", x, update, np.array(starts), fed=fed, want=want, mode=mode)
    cases.check(opset=24)


def test_compress(cases, rng, variant):
    x = rng.random((3, 4, 5), np.float32)
    for axis, size in ((0, 3), (1, 4), (-1, 5), (None, 60)):
        attrs = {} if axis is None else {"axis": axis}
        for kept in (np.arange(size) % 2 == 0, np.zeros(size, bool), np.ones(size - 1, bool)):
            for known in ((), (1,)):
                cases.add("Compress", x, kept, known=known, **attrs)
    cases.check()


def test_tuples_that_only_the_run_knows(cases, rng, variant):
    x = rng.random((4, 5, 6), np.float32)
    cases.add("GatherND", x, rng.integers(-4, 4, (3, 2)), fed=(1,))
    cases.add("GatherND", x, rng.integers(-5, 5, (4, 3, 2)), fed=(1,), batch_dims=1)
    cases.check()


@pytest.mark.parametrize("op", ["ScatterElements", "ScatterND"])
def test_an_index_out_of_range_fails_the_run(open_model, parse, op):
    shape = "2" if op == "ScatterElements" else "2,1"
    driver = open_model(parse(f"g (float[3] x, int64[{shape}] i, float[2] u) => (float[3] y) {{ y = {op}(x, i, u) }}"))
    i = np.array([0, 3]).reshape([int(n) for n in shape.split(",")])
    with pytest.raises(InvalidData, match="range"):
        driver.run({"x": np.zeros(3, np.float32), "i": i, "u": np.ones(2, np.float32)})
    assert driver.run({"x": np.zeros(3, np.float32), "i": i - 1, "u": np.ones(2, np.float32)})[0].tolist() == [0, 0, 1]


def test_a_wrong_node_is_refused_by_name(open_model, parse):
    model = parse("g (float[3] x, int64[2,1] i, float[3] u) => (float[3] y) { [put] y = ScatterND(x, i, u) }")
    with pytest.raises(InvalidModel, match=r"'put'.*ScatterND.*updates of shape"):
        open_model(model).run(
            {"x": np.zeros(3, np.float32), "i": np.zeros((2, 1), np.int64), "u": np.ones(3, np.float32)}
        )
