"""Opsets whose semantics differ from today's, and where the reference evaluator errs, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trionnx.gpu.errors import InvalidData
from trionnx.gpu.graph.model import Node
from trionnx.gpu.host.reference import evaluate_host

Array = np.ndarray[Any, Any]
Make = Callable[..., Node]
Oracle = Callable[[Node, Sequence[Any]], list[Array]]

rng = np.random.default_rng(11)
D = rng.standard_normal((2, 3, 4, 5))
F = D.astype(np.float32)
I = rng.integers(-5, 5, (2, 3, 4, 5)).astype(np.int32)  # noqa: E741
U = rng.integers(0, 255, (2, 3, 4, 5)).astype(np.uint8)


def i64(*values: int) -> Array:
    return np.array(values, np.int64)


def f32(*values: float) -> Array:
    return np.array(values, np.float32)


def drawn(*shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


CASES: list[tuple[str, Sequence[Any], int, int, dict[str, Any]]] = []


def case(op: str, inputs: Sequence[Any], opset: int, outputs: int = 1, **attrs: Any) -> None:
    CASES.append((op, inputs, opset, outputs, attrs))


for name in ("Softmax", "LogSoftmax"):
    for x in (D, F):
        for version in (7, 11, 13):
            case(name, [x], version)
            case(name, [x], version, axis=2)
            case(name, [x], version, axis=-1)
for version in (7, 11, 13):
    case("Hardmax", [F], version)
    case("Hardmax", [F], version, axis=2)
case("Upsample", [F], 7, scales=[1.0, 1.0, 2.0, 2.0])
case("Upsample", [U, f32(1, 1, 2, 3)], 9)
case("Upsample", [F, f32(1, 1, 2, 3)], 9, mode="linear")
case("Resize", [F, f32(1, 1, 2, 3)], 10)
case("Resize", [U, f32(1, 1, 0.5, 3)], 10)
case("Resize", [F, f32(1, 1, 0.5, 0.6)], 10, mode="linear")
for name in ("ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"):
    for positive in (D * D, F * F, *([I] if "Log" not in name else [])):
        case(name, [positive], 11, axes=[1, -1])
        case(name, [positive], 11, axes=[1, 2], keepdims=0)
        case(name, [positive], 11)
        case(name, [positive, i64(1)], 18)
        case(name, [positive, i64()], 18, noop_with_empty_axes=1)
for power in (1, 2):
    case("LpNormalization", [F], 7, p=power)
    case("LpNormalization", [D * [[[[0], [1], [2], [3]]]]], 7, p=power, axis=1)
case("RoiAlign", [F, f32(0, 0, 3, 3).reshape(1, 4), i64(0)], 10, output_height=2, output_width=2, sampling_ratio=2)
GRID = rng.uniform(-1.2, 1.2, (2, 3, 3, 2)).astype(np.float32)
for mode in ("bilinear", "nearest", "bicubic"):
    case("GridSample", [F, GRID], 16, mode=mode, padding_mode="zeros")
case("Unique", [np.round(F)], 11, 4)
case("Unique", [np.round(F)], 11, 4, sorted=0)
case("Unique", [np.round(F)], 11, 4, axis=1)
case("Unique", [np.round(F)], 11, 4, axis=1, sorted=0)
case("Unique", [I[:, :1].repeat(2, 1).astype(np.int64)], 11, 4, axis=1, sorted=0)
case("MaxPool", [F.round()], 12, 2, kernel_shape=[2, 2])
case("MaxPool", [F.round()], 12, 2, kernel_shape=[2, 2], storage_order=1)
case("MaxPool", [F.round()], 12, 2, kernel_shape=[2, 2], pads=[1, 1, 1, 1], strides=[2, 2], ceil_mode=1)
case("MaxPool", [F.round()], 12, 2, kernel_shape=[2, 2], dilations=[2, 1])

TIME, BATCH, SIZE, HIDDEN = 5, 3, 4, 2


def recurrent(op: str, gates: int, both: bool = False, states: int = 0, peepholes: bool = False, lengths: bool = False,
              opset: int = 14, **attrs: Any) -> None:
    count = 2 if both else 1
    inputs = [drawn(TIME, BATCH, SIZE), drawn(count, gates * HIDDEN, SIZE), drawn(count, gates * HIDDEN, HIDDEN),
              drawn(count, 2 * gates * HIDDEN), np.array([5, 2, 3], np.int32) if lengths else None]
    inputs += [drawn(count, BATCH, HIDDEN) for _ in range(states)]
    if peepholes:
        inputs += [None] * (7 - len(inputs)) + [drawn(count, 3 * HIDDEN)]
    attrs = {"hidden_size": HIDDEN, **({"direction": "bidirectional"} if both else {}), **attrs}
    case(op, inputs, opset, 3 if op == "LSTM" else 2, **attrs)


for op, gates, states in (("RNN", 1, 1), ("GRU", 3, 1), ("LSTM", 4, 2)):
    recurrent(op, gates)
    recurrent(op, gates, opset=7, direction="reverse")
    recurrent(op, gates, both=True, states=states, lengths=True)
    recurrent(op, gates, lengths=True, direction="reverse", states=states)
    recurrent(op, gates, clip=0.3)
recurrent("RNN", 1, activations=["Relu"])
recurrent("RNN", 1, both=True, activations=["LeakyRelu", "Affine"], activation_alpha=[0.3, 0.5], activation_beta=[0.1])
recurrent("GRU", 3, linear_before_reset=1, lengths=True)
recurrent("GRU", 3, activations=["HardSigmoid", "Softsign"], activation_alpha=[0.3], activation_beta=[0.4])
recurrent("LSTM", 4, peepholes=True, states=2, lengths=True)
recurrent("LSTM", 4, peepholes=True, input_forget=1)
recurrent("LSTM", 4, activations=["Sigmoid", "Elu", "ScaledTanh"], activation_alpha=[0.7, 1.1], activation_beta=[0.9])


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{c[0]}{c[2]}_{n}" for n, c in enumerate(CASES)])
def test_agrees_with_onnxruntime(number, make_node: Make, oracle: Oracle) -> None:
    op, inputs, opset, outputs, attrs = CASES[number]
    made = make_node(op, inputs, opset=opset, outputs=outputs, **attrs)
    got, want = evaluate_host(made, inputs), oracle(made, inputs)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype.kind == "f":
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_floats_are_computed_as_floats_and_stay_what_they_are(dtype, make_node: Make) -> None:
    cell = [drawn(TIME, BATCH, SIZE), drawn(1, 8, SIZE), drawn(1, 8, HIDDEN)]
    cases = [("Softmax", [F], 2e-2), ("LpNormalization", [F], 2e-2), ("ReduceL2", [F], 2e-2), ("LSTM", cell, 3e-2)]
    for op, inputs, tolerance in cases:
        made = make_node(op, inputs, opset=17, hidden_size=HIDDEN)
        narrow = [x.astype(dtype) for x in inputs]
        (wide,), (got,) = evaluate_host(made, [x.astype(np.float32) for x in narrow]), evaluate_host(made, narrow)
        assert got.dtype == dtype
        np.testing.assert_allclose(got.astype(np.float32), wide, rtol=tolerance, atol=tolerance)


def test_layout_1_has_the_batch_first(make_node: Make) -> None:
    x, w, r, h = drawn(TIME, BATCH, SIZE), drawn(2, 6, SIZE), drawn(2, 6, HIDDEN), drawn(2, BATCH, HIDDEN)
    lengths, attrs = np.array([5, 1, 4], np.int32), {"direction": "bidirectional", "hidden_size": HIDDEN}
    usual = make_node("GRU", [x, w, r, None, lengths, h], outputs=2, opset=14, **attrs)
    y, last = evaluate_host(usual, [x, w, r, None, lengths, h])
    turned = [x.swapaxes(0, 1), w, r, None, lengths, h.swapaxes(0, 1)]
    got, got_last = evaluate_host(make_node("GRU", turned, outputs=2, opset=14, layout=1, **attrs), turned)
    np.testing.assert_array_equal(got, y.transpose(2, 0, 1, 3))
    np.testing.assert_array_equal(got_last, last.swapaxes(0, 1))


@pytest.mark.parametrize(("change", "why"), [
    ({"activations": ["Sigmoid"]}, "1 activations for 2"),
    ({"activations": ["Sigmoid", "Wiggle"]}, "activation 'wiggle' is not known"),
    ({"direction": "bidirectional"}, "weights for 1 directions, of bidirectional"),
])
def test_a_broken_recurrent_node_is_invalid_data(change, why, make_node: Make) -> None:
    inputs = [drawn(TIME, BATCH, SIZE), drawn(1, 6, SIZE), drawn(1, 6, HIDDEN)]
    with pytest.raises(InvalidData, match=why):
        evaluate_host(make_node("GRU", inputs, hidden_size=HIDDEN, **change), inputs)


def test_a_sequence_longer_than_the_input_is_invalid_data(make_node: Make) -> None:
    inputs = [drawn(TIME, BATCH, SIZE), drawn(1, 6, SIZE), drawn(1, 6, HIDDEN), None, np.array([1, 6, 2], np.int32)]
    with pytest.raises(InvalidData, match="sequence lengths 1 to 6 in 5 time steps"):
        evaluate_host(make_node("GRU", inputs, hidden_size=HIDDEN), inputs)
