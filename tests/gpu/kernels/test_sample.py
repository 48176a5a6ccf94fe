from __future__ import annotations

import itertools

import numpy as np
import pytest

from trionnx.gpu.errors import InvalidData, InvalidModel

PADDING = ("zeros", "border", "reflection")


@pytest.mark.parametrize("corners", [0, 1])
def test_grids(cases, rng, variant, corners):
    x = rng.standard_normal((2, 11, 5, 4), np.float32)
    grid = rng.uniform(-1.9, 1.9, (2, 3, 6, 2)).astype(np.float32)
    for mode, padding in itertools.product(("bilinear", "nearest", "bicubic"), PADDING):
        cases.add("GridSample", x, grid, mode=mode, padding_mode=padding, align_corners=corners, tol=1e-5)
    cases.check(opset=16)


def test_grids_in_one_and_three_dimensions(cases, rng, by_reference):
    line, cube = rng.standard_normal((2, 3, 7), np.float32), rng.standard_normal((1, 2, 3, 4, 5), np.float32)
    for mode, padding in itertools.product(("linear", "nearest", "cubic"), PADDING):
        for x, grid in ((line, rng.uniform(-1.5, 1.5, (2, 6, 1))), (cube, rng.uniform(-1.3, 1.3, (1, 2, 3, 2, 3)))):
            if mode == "cubic" and (padding == "border" or x is cube):
                continue  # the reference keeps the place within the border, PyTorch the taps; 64 taps compile slowly
            attrs = {"mode": mode, "padding_mode": padding}
            grid = grid.astype(np.float32)
            want = by_reference("GridSample", [x, grid], 20, **attrs)
            cases.add("GridSample", x, grid, want=want, tol=1e-5, **attrs)
    cases.add("GridSample", line, np.zeros((2, 0, 1), np.float32), want=np.zeros((2, 3, 0), np.float32))
    cases.check(opset=20)


def test_regions(cases, rng, variant):
    x = rng.standard_normal((2, 3, 9, 11), np.float32)
    rois = np.array([[0, 0, 8, 8], [1.5, 2.5, 7, 4], [4, 4, 4.2, 4.1], [-3, -2, 14, 12]], np.float32)
    halves = ("half_pixel", "output_half_pixel")
    for fed, mode, ratio, half in itertools.product(((), (2,)), ("avg", "max"), (0, 2), halves):
        cases.add(
            "RoiAlign",
            x,
            rois,
            np.array([0, 1, 1, 0]),
            fed=fed,
            mode=mode,
            sampling_ratio=ratio,
            output_height=3,
            output_width=4,
            spatial_scale=0.8,
            tol=1e-5,
            coordinate_transformation_mode=half,
        )
    cases.check(opset=16)


def test_regions_before_opset_16(cases, rng):
    x, rois = rng.standard_normal((1, 2, 6, 6), np.float32), np.array([[0, 0, 5, 5]], np.float32)
    cases.add("RoiAlign", x, rois, np.array([0]), output_height=2, output_width=2, sampling_ratio=2, tol=1e-5)
    cases.check(opset=10)


def test_windows_added_up(cases, rng, variant, by_reference):
    for image, block, attrs in (
        ((5, 6), (2, 3), {}),
        ((5, 5), (3, 3), {"pads": [1, 1, 1, 1], "strides": [2, 2]}),
        ((7, 6), (2, 2), {"dilations": [2, 1], "strides": [1, 2]}),
        ((9,), (3,), {"pads": [1, 2]}),
        ((4, 3, 5), (1, 2, 3), {}),
    ):
        rank = len(image)
        pads, strides = attrs.get("pads", [0] * 2 * rank), attrs.get("strides", [1] * rank)
        dilations = attrs.get("dilations", [1] * rank)
        blocks = [
            (n + pads[a] + pads[a + rank] - dilations[a] * (block[a] - 1) - 1) // strides[a] + 1
            for a, n in enumerate(image)
        ]
        x = rng.standard_normal((2, 3 * int(np.prod(block)), int(np.prod(blocks))), np.float32)
        arrays = [x, np.array(image), np.array(block)]
        cases.add("Col2Im", *arrays, want=by_reference("Col2Im", arrays, 18, **attrs), **attrs)
    cases.check()


def test_a_region_of_a_picture_that_is_not_there_fails_the_run(open_model, parse):
    model = parse("g (float[1,1,4,4] x, float[1,4] r, int64[1] b) => (float[1,1,1,1] y) { y = RoiAlign(x, r, b) }")
    feeds = {"x": np.zeros((1, 1, 4, 4), np.float32), "r": np.zeros((1, 4), np.float32), "b": np.array([1])}
    with pytest.raises(InvalidData, match="range"):
        open_model(model).run(feeds)


def test_a_wrong_node_is_refused_by_name(open_model, parse):
    model = parse("g (float[1,1,4,4] x, float[1,2,2,3] i) => (float[a,b,c,d] y) { [look] y = GridSample(x, i) }", 20)
    with pytest.raises(InvalidModel, match=r"'look'.*GridSample.*a grid that fits"):
        open_model(model).run({"x": np.zeros((1, 1, 4, 4), np.float32), "i": np.zeros((1, 2, 2, 3), np.float32)})
