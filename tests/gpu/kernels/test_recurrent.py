from __future__ import annotations

import itertools

import numpy as np
import pytest

from trionnx.gpu.errors import InvalidModel

SIZES = ((1, 1, 128, 128), (5, 2, 3, 7), (6, 5, 8, 20), (3, 1, 5, 4), (4, 9, 6, 3))
GATES = {"LSTM": 4, "GRU": 3}


def add_cell(cases, rng, op, sizes, direction, bias=True, states=0):
    time, batch, inputs, hidden = sizes
    count = 2 if direction == "bidirectional" else 1
    rows = GATES[op] * hidden

    def some(*shape):
        return rng.standard_normal(shape, np.float32) / 2

    extra = {"linear_before_reset": 1} if op == "GRU" else {}
    weights = some(count, rows, inputs), some(count, rows, hidden), some(count, 2 * rows) if bias else None
    initial = [some(count, batch, hidden) for _ in range(states)]
    cases.add(
        op,
        some(time, batch, inputs),
        *weights,
        None,
        *initial,
        known=(1, 2, 3),
        tol=1e-5,
        outputs=3 if op == "LSTM" else 2,
        hidden_size=hidden,
        direction=direction,
        **extra,
    )


@pytest.mark.parametrize("op", GATES)
def test_every_direction_and_size(cases, variant, rng, op):
    for sizes, direction in itertools.product(SIZES, ("forward", "reverse", "bidirectional")):
        add_cell(cases, rng, op, sizes, direction)
    cases.check()


@pytest.mark.parametrize("op", GATES)
def test_initial_states_and_bias_are_optional(cases, variant, rng, op):
    for sizes, bias, states in itertools.product(SIZES[:3], (False, True), range(1 + (2 if op == "LSTM" else 1))):
        add_cell(cases, rng, op, sizes, "bidirectional", bias, states)
    cases.check()


def test_large_sums_do_not_overflow(cases, variant, rng):
    x = np.full((3, 1, 4), 1e4, np.float32) * np.array([1, -1, 1], np.float32).reshape(3, 1, 1)
    w, r = rng.standard_normal((1, 16, 4), np.float32), rng.standard_normal((1, 16, 4), np.float32)
    cases.add("LSTM", x, w, r, known=(1, 2), outputs=3, hidden_size=4)
    cases.check()


def test_what_has_no_kernel_runs_on_the_host(cases, rng):
    x, w, r = (rng.standard_normal(s, np.float32) / 2 for s in ((3, 2, 4), (1, 12, 4), (1, 12, 4)))
    cases.add("GRU", x, w, r, known=(1, 2), outputs=2, hidden_size=4)
    x, w, r = (rng.standard_normal(s, np.float32) / 2 for s in ((3, 2, 4), (1, 16, 4), (1, 16, 4)))
    cases.add("LSTM", x, w, r, outputs=3, hidden_size=4)
    cases.check(host=["GRU", "LSTM"])


def test_steps_are_dispatches(open_model, parse, rng):
    model = parse(
        "agraph (float[20, 1, 4] x, float[1, 16, 4] w, float[1, 16, 4] r) => (float[20, 1, 1, 4] y) {"
        " k = Identity (w) y, h, c = LSTM <hidden_size = 4> (x, w, r) }"
    )
    from onnx import numpy_helper

    for name in ("w", "r"):
        tensor = numpy_helper.from_array(rng.standard_normal((1, 16, 4), np.float32), name)
        model.graph.initializer.append(tensor)
    del model.graph.input[1:]
    block = open_model(model).begin({"x": rng.standard_normal((20, 1, 4), np.float32)})
    assert sum(step.kind == "gpu" for step in block.steps) >= 21


def test_a_wrong_node_is_refused_by_name(open_model, parse):
    model = parse(
        "agraph (float[2, 1, 4] x, float[1, 16, 5] w, float[1, 16, 4] r) => (float[a, b, c, d] y) {"
        " [cell] y = LSTM <hidden_size = 4> (x, w, r) }"
    )
    feeds = {"x": (2, 1, 4), "w": (1, 16, 5), "r": (1, 16, 4)}
    with pytest.raises(InvalidModel, match=r"'cell'.*LSTM.*W of shape"):
        open_model(model).run({name: np.zeros(shape, np.float32) for name, shape in feeds.items()})
