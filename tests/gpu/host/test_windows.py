from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from trionnx.gpu.errors import InvalidData
from trionnx.gpu.graph.model import Node
from trionnx.gpu.host.numeric import evaluate

Make = Callable[..., Node]
Oracle = Callable[[Node, Sequence[Any]], list[np.ndarray[Any, Any]]]
rng = np.random.default_rng(11)


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal(shape).astype(np.float32)


def agree(made: Node, inputs: list[Any], oracle: Oracle) -> None:
    got, want = evaluate(made, inputs), oracle(made, inputs)
    assert got is not None
    assert got[0].dtype == want[0].dtype
    assert got[0].shape == want[0].shape
    assert got[0].flags.c_contiguous
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-4)


AUTO = ["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]


@pytest.mark.parametrize("auto_pad", AUTO)
@pytest.mark.parametrize("strides", [[1, 1], [2, 3]])
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_conv(auto_pad: str, strides: list[int], group: int, bias: bool, make_node: Make, oracle: Oracle) -> None:
    inputs = [floats(2, 4, 7, 9), floats(8, 4 // group, 3, 2), floats(8) if bias else None]
    attrs = {"pads": [1, 0, 2, 1]} if auto_pad == "NOTSET" else {}
    agree(make_node("Conv", inputs, strides=strides, group=group, auto_pad=auto_pad, **attrs), inputs, oracle)


def test_conv_over_one_and_three_dimensions_with_dilations(make_node: Make, oracle: Oracle) -> None:
    inputs = [floats(1, 3, 20), floats(2, 3, 5)]
    agree(make_node("Conv", inputs, dilations=[3], strides=[2], pads=[4, 1]), inputs, oracle)
    inputs = [floats(1, 2, 4, 5, 6), floats(3, 2, 2, 3, 2)]
    agree(make_node("Conv", inputs, dilations=[1, 2, 1], pads=[0, 1, 0, 1, 0, 1]), inputs, oracle)
    inputs = [floats(0, 3, 20), floats(2, 3, 5)]
    agree(make_node("Conv", inputs), inputs, oracle)


def test_half_precision_accumulates_in_single(make_node: Make) -> None:
    x, w = np.full((1, 4096, 1), 1, np.float16), np.full((1, 4096, 1), 0.25, np.float16)
    got = evaluate(make_node("Conv", [x, w]), [x, w])
    assert got is not None
    assert got[0].dtype == np.float16
    assert got[0].item() == 1024


@pytest.mark.parametrize(
    "attrs",
    [
        {},
        {"strides": [2, 3]},
        {"strides": [2, 2], "pads": [1, 0, 1, 2]},
        {"strides": [2, 2], "output_padding": [1, 0]},
        {"dilations": [2, 1], "pads": [1, 1, 1, 1]},
        {"strides": [3, 2], "output_shape": [20, 13]},
        {"strides": [3, 2], "output_shape": [20, 13], "auto_pad": "SAME_UPPER"},
        {"strides": [2, 2], "auto_pad": "SAME_LOWER"},
        {"strides": [2, 2], "auto_pad": "VALID"},
    ],
)
@pytest.mark.parametrize("group", [1, 2])
def test_conv_transpose(attrs: dict[str, Any], group: int, make_node: Make, oracle: Oracle) -> None:
    inputs = [floats(2, 4, 7, 6), floats(4, 3, 3, 4), floats(3 * group)]
    agree(make_node("ConvTranspose", inputs, group=group, **attrs), inputs, oracle)


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize("auto_pad", AUTO)
@pytest.mark.parametrize("ceil_mode", [0, 1])
@pytest.mark.parametrize("more", [{}, {"count_include_pad": 1}])
def test_pools(op: str, auto_pad: str, ceil_mode: int, more: dict[str, int], make_node: Make, oracle: Oracle) -> None:
    if op == "MaxPool" and more:
        more = {"storage_order": 0}
    x = floats(2, 3, 8, 9)
    attrs = {"pads": [1, 0, 1, 1]} if auto_pad == "NOTSET" else {}
    made = make_node("MaxPool" if op == "MaxPool" else op, [x], opset=19, kernel_shape=[3, 2], strides=[2, 2],
                     auto_pad=auto_pad, ceil_mode=ceil_mode, **attrs, **more)
    agree(made, [x], oracle)


def test_pools_of_other_ranks_and_dtypes(make_node: Make, oracle: Oracle) -> None:
    x = floats(1, 2, 11)
    agree(make_node("MaxPool", [x], kernel_shape=[3], dilations=[2]), [x], oracle)
    agree(make_node("AveragePool", [x], kernel_shape=[4], strides=[3]), [x], oracle)
    x = floats(1, 2, 4, 4, 4)
    agree(make_node("MaxPool", [x], kernel_shape=[2, 2, 2], strides=[2, 2, 2]), [x], oracle)
    whole = rng.integers(-99, 99, (1, 1, 6, 6)).astype(np.int8)
    agree(make_node("MaxPool", [whole], kernel_shape=[2, 2], pads=[1, 1, 0, 0]), [whole], oracle)


@pytest.mark.parametrize(
    ("op", "inputs", "attrs", "words"),
    [
        ("Conv", [floats(1, 3, 5, 5), floats(2, 4, 3, 3)], {}, "do not fit an input"),
        ("Conv", [floats(1, 3, 2, 5), floats(2, 3, 3, 3)], {}, "a window of 3 over 2 elements of dimension 2"),
        ("Conv", [floats(1, 3, 5, 5), floats(2, 3, 3, 3)], {"strides": [1]}, "do not have 2 dimensions"),
        ("ConvTranspose", [floats(1, 3, 5, 5), floats(4, 3, 3, 3)], {}, "do not fit an input"),
        ("MaxPool", [floats(1, 3, 5, 5)], {"kernel_shape": [3]}, "do not have 2 dimensions"),
    ],
)
def test_what_does_not_fit(op: str, inputs: list[Any], attrs: dict[str, Any], words: str, make_node: Make) -> None:
    with pytest.raises(InvalidData, match=words):
        evaluate(make_node(op, inputs, **attrs), inputs)
