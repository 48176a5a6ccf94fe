"""Small graphs that other engines were publicly reported to get wrong, with values worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest

from trionnx.backend import TrionnxBackend, TrionnxBackendRep
from trionnx.gpu.errors import InvalidData, InvalidModel

f32, i64 = np.float32, np.int64


def counting(*shape: int) -> np.ndarray[Any, Any]:
    """0, 1, 2, ... in a shape."""
    return np.arange(np.prod(shape), dtype=f32).reshape(shape)


@pytest.fixture
def prepare(request) -> Iterator[Any]:
    opened: list[TrionnxBackendRep] = []

    def prepare_one(text: str, opset: int = 18) -> TrionnxBackendRep:
        model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : {opset}]>\n{text}')
        opened.append(TrionnxBackend.prepare(model))
        return opened[-1]

    yield prepare_one
    for rep in opened:
        rep.close()


SAME = (
    "g (float[1,1,4,4] x, float[1,1,3,3] w) => (float[1,1,2,2] y)"
    ' { y = Conv <auto_pad="%s", strides=[2,2]> (x, w) }'
)
IMAGE = [counting(1, 1, 4, 4), np.ones((1, 1, 3, 3), f32)]
CASES = {
    # SAME on an even length pads one element: at the end, or with SAME_LOWER at the start.
    "convolution padded to the same size, more at the end": (
        SAME % "SAME_UPPER", 18, IMAGE, [[[[45, 39], [66, 50]]]], 1e-6),
    "convolution padded to the same size, more at the start": (
        SAME % "SAME_LOWER", 18, IMAGE, [[[[10, 24], [51, 90]]]], 1e-6),
    "powers of negative numbers are exact": (
        "g (float[1,2] x, float[1,2] p) => (float[1,2] y) { y = Pow (x, p) }", 13,
        [np.array([[-2000, -8]], f32), np.array([[2, 3]], f32)], [[4e6, -512]], 0),
    "a vector of one element is added everywhere": (
        "g (float[4,6] x, float[1] b) => (float[4,6] y) { y = Add (x, b) }", 18,
        [counting(4, 6), np.ones(1, f32)], counting(4, 6) + 1, 0),
    "transposed convolution in one dimension with output padding": (
        "g (float[1,1,3] x, float[1,1,3] w) => (float[1,1,6] y)"
        " { y = ConvTranspose <strides=[2], pads=[1,1], output_padding=[1]> (x, w) }", 18,
        [counting(1, 1, 3) + 1, np.ones((1, 1, 3), f32)], [[[1, 3, 2, 5, 3, 3]]], 0),
    "softmax of the most negative floats": (
        "g (float[1,2] x) => (float[1,2] y) { y = Softmax <axis=-1> (x) }", 18,
        [np.full((1, 2), np.finfo(f32).min, f32)], [[0.5, 0.5]], 1e-6),
    "tanh far from zero": (
        "g (float[3] x) => (float[3] y) { y = Tanh (x) }", 18, [np.array([1000, -1000, 89], f32)], [1, -1, 1], 1e-6),
    "negative indices that only the run knows": (
        "g (float[10] x, int64[3] i) => (float[3] y) { y = Gather <axis=0> (x, i) }", 18,
        [counting(10), np.array([-1, -9, -10], i64)], [9, 1, 0], 0),
    "nothing plus something is nothing": (
        "g (float[2,N] x, float[2,1] b) => (float[2,N] y) { y = Add (x, b) }", 18,
        [np.zeros((2, 0), f32), np.ones((2, 1), f32)], np.zeros((2, 0)), 0),
    "whole matrices gathered by index tuples": (
        "g (float[3,2,2] x, int64[2,1] i) => (float[2,2,2] y) { y = GatherND (x, i) }", 18,
        [counting(3, 2, 2), np.array([[2], [0]], i64)], [[[8, 9], [10, 11]], [[0, 1], [2, 3]]], 0),
    "nearest neighbours, 300 times as many": (
        "g (float[1,1,1,72] x, float[4] s) => (float[1,1,1,M] y) { y = Resize <mode=\"nearest\","
        " coordinate_transformation_mode=\"asymmetric\", nearest_mode=\"floor\"> (x, , s) }", 18,
        [counting(1, 1, 1, 72), np.array([1, 1, 1, 300], f32)], counting(72).repeat(300).reshape(1, 1, 1, -1), 0),
    # The padding of three counts, what a window reaches beyond it does not: 39 / 7.
    "an average over padding with a rounded-up number of windows": (
        "g (float[1,1,9] x) => (float[1,1,3] y) { y = AveragePool <kernel_shape=[7], strides=[3], pads=[0,3],"
        " ceil_mode=1, count_include_pad=1> (x) }", 19, [counting(1, 1, 9) + 1], [[[4, 39 / 7, 4]]], 1e-5),
    "an image of one colour, normalised, is the bias": (
        "g (float[1,1,256,256] x, float[1] s, float[1] b) => (float[1,1,256,256] y)"
        " { y = InstanceNormalization (x, s, b) }", 18,
        [np.full((1, 1, 256, 256), 16, f32), np.ones(1, f32), np.full(1, 0.5, f32)], np.full((1, 1, 256, 256), 0.5),
        1e-5),
}


@pytest.mark.parametrize("name", CASES)
def test_the_value_is_right(name, prepare):
    text, opset, feeds, expected, tolerance = CASES[name]
    (got,) = prepare(text, opset).run(feeds)
    want = np.array(expected, f32)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def test_a_slice_of_step_zero_is_an_error(prepare):
    rep = prepare(
        "g (float[4] x, int64[1] s, int64[1] e, int64[1] a, int64[1] t) => (float[K] y) { y = Slice (x, s, e, a, t) }"
    )
    with pytest.raises((InvalidData, InvalidModel), match="Slice"):
        rep.run([counting(4), np.array([0], i64), np.array([4], i64), np.array([0], i64), np.array([0], i64)])
