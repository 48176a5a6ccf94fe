from __future__ import annotations

import itertools
from typing import Any

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


STATES = {"LSTM": 2, "GRU": 1, "RNN": 1}
ROWS = {"LSTM": 4, "GRU": 3, "RNN": 1}


def add_any(
    cases,
    rng,
    op,
    *,
    direction="forward",
    fed=False,
    lengths=None,
    states=False,
    peepholes=False,
    by_reference=None,
    **attrs,
):
    """A small cell; `fed`: the weights are feeds; `by_reference`: batches come first."""
    time, batch, inputs, hidden = 5, 3, 4, 6
    count = 2 if direction == "bidirectional" else 1
    rows = ROWS[op] * hidden

    def some(*shape):
        return rng.standard_normal(shape, np.float32) / 2

    arrays = [some(time, batch, inputs), some(count, rows, inputs), some(count, rows, hidden), some(count, 2 * rows)]
    arrays += [lengths, *(some(count, batch, hidden) if states else None for _ in range(STATES[op]))]
    if peepholes:
        arrays.append(some(count, 3 * hidden))
    attrs |= {"hidden_size": hidden, "direction": direction}
    want = None
    if by_reference is not None:
        arrays[0] = arrays[0].transpose(1, 0, 2).copy()
        arrays[5:] = [None if a is None else a.transpose(1, 0, 2).copy() for a in arrays[5:]]
        attrs["layout"] = 1
        want = by_reference(op, arrays, 18, 1 + STATES[op], **attrs)
    known = () if fed else (1, 2, 3)
    cases.add(op, *arrays, known=known, outputs=1 + STATES[op], tol=1e-5, want=want, **attrs)


DIRECTIONS = ("forward", "reverse", "bidirectional")


@pytest.mark.parametrize("op", ROWS)
def test_weights_that_only_the_run_knows(cases, rng, variant, op):
    for direction, states in itertools.product(DIRECTIONS, (False, True)):
        add_any(cases, rng, op, direction=direction, fed=True, states=states)
    cases.check()


@pytest.mark.parametrize("op", ROWS)
def test_sequences_of_their_own_lengths(cases, rng, variant, op):
    for direction in DIRECTIONS:
        for lengths in ([5, 2, 1], [3, 5, 4]):
            add_any(cases, rng, op, direction=direction, lengths=np.array(lengths, np.int32), states=True)
    cases.check()


@pytest.mark.parametrize("reset", [0, 1])
def test_resetting_before_and_after_the_product(cases, rng, variant, reset):
    for direction in DIRECTIONS:
        add_any(cases, rng, "GRU", direction=direction, linear_before_reset=reset)
        add_any(cases, rng, "GRU", direction=direction, linear_before_reset=reset, clip=0.3, states=True)
    cases.check()


def test_peepholes_and_clipped_and_coupled_gates(cases, rng, variant):
    for direction in DIRECTIONS:
        add_any(cases, rng, "LSTM", direction=direction, peepholes=True, states=True)
        add_any(cases, rng, "LSTM", direction=direction, clip=0.25)
        add_any(cases, rng, "LSTM", direction=direction, input_forget=1)
    cases.check()


@pytest.mark.parametrize(
    ("name", "alpha", "beta"),
    [
        ("Relu", (), ()),
        ("Sigmoid", (), ()),
        ("Affine", (0.5,), (0.1,)),
        ("LeakyRelu", (0.2,), ()),
        ("ThresholdedRelu", (0.3,), ()),
        ("ScaledTanh", (0.7,), (1.2,)),
        ("HardSigmoid", (0.3,), (0.4,)),
        ("Elu", (0.8,), ()),
        ("Softsign", (), ()),
        ("Softplus", (), ()),
    ],
)
def test_activation_functions(cases, rng, name, alpha, beta):
    given: dict[str, Any] = {"activations": [name]}
    given |= {key: list(value) for key, value in (("activation_alpha", alpha), ("activation_beta", beta)) if value}
    add_any(cases, rng, "RNN", **given)
    add_any(cases, rng, "LSTM", activations=["HardSigmoid", "Tanh", "Relu"])
    add_any(cases, rng, "RNN", direction="bidirectional", activations=["Relu", "Tanh"])
    cases.check()


@pytest.mark.parametrize("op", ROWS)
def test_batch_first(cases, rng, variant, op, by_reference):
    for direction in DIRECTIONS:
        add_any(cases, rng, op, direction=direction, states=True, by_reference=by_reference)
    cases.check()


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
