from __future__ import annotations

import itertools

import numpy as np
import pytest

from trionnx.gpu.errors import InvalidModel

TRANSFORMS = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric")
SCALES = ([1, 1, 2, 2], [1, 1, 0.6, 1.7], [1, 1, 1.3, 0.45], [1, 1, 3, 3])
SIZES = ([1, 2, 3, 9], [1, 2, 10, 1], [1, 2, 7, 6])


def f32(values):
    return np.array(values, np.float32)


def add_grids(cases, by_reference, x, **attrs):
    corners = attrs.get("coordinate_transformation_mode") == "align_corners"
    for scales in SCALES:
        # Where a corner lies in the middle of an element, ONNX Runtime does not do what ONNX's tests say.
        want = by_reference("Resize", [x, None, f32(scales)], 19, **attrs) if corners else None
        cases.add("Resize", x, None, f32(scales), known=(2,), want=want, tol=1e-5, **attrs)
    for sizes in SIZES:
        cases.add("Resize", x, None, None, np.array(sizes), tol=1e-5, **attrs)


def test_nearest(cases, variant, rng, by_reference):
    x = rng.standard_normal((1, 2, 5, 6), np.float32)
    for transform, mode in itertools.product(TRANSFORMS, ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")):
        if mode != "floor" or transform not in ("half_pixel_symmetric", "align_corners"):
            # There scale 0.6 lands on a whole number but for rounding, and the others round otherwise.
            attrs = {"coordinate_transformation_mode": transform, "nearest_mode": mode}
            add_grids(cases, by_reference, x, mode="nearest", **attrs)
    cases.check(opset=19)


def test_linear_and_cubic(cases, variant, rng, by_reference):
    x = rng.standard_normal((1, 2, 5, 6), np.float32)
    for transform, mode in itertools.product(TRANSFORMS, ("linear", "cubic")):
        add_grids(cases, by_reference, x, mode=mode, coordinate_transformation_mode=transform)
    add_grids(cases, by_reference, x, mode="cubic", exclude_outside=1, cubic_coeff_a=-0.5)
    cases.check(opset=19)


def test_linear_in_one_and_three_dimensions(cases, variant, rng):
    cases.add("Resize", rng.standard_normal((2, 3, 7), np.float32), None, None, np.array([2, 3, 12]), mode="linear")
    cube = rng.standard_normal((1, 2, 4, 5, 6), np.float32)
    cases.add("Resize", cube, None, None, np.array([1, 2, 7, 9, 3]), mode="linear")
    cases.check(opset=13)


def test_a_crop_has_a_value_outside(cases, rng):
    x = rng.standard_normal((1, 2, 5, 6), np.float32)
    roi = f32([0, 0, 0.1, -0.2, 1, 1, 0.9, 1.3])
    for mode, sizes in itertools.product(("nearest", "linear"), ([1, 2, 3, 9], [1, 2, 10, 1])):
        cases.add(
            "Resize",
            x,
            roi,
            None,
            np.array(sizes),
            known=(1,),
            tol=1e-5,
            mode=mode,
            extrapolation_value=3.0,
            coordinate_transformation_mode="tf_crop_and_resize",
        )
    cases.check(opset=19)


def test_axes_and_aspect_ratio(cases, rng):
    x = rng.standard_normal((1, 3, 4, 5), np.float32)
    cases.add("Resize", x, None, None, np.array([9, 4]), axes=[2, 3], keep_aspect_ratio_policy="not_larger")
    cases.add(
        "Resize", x, None, None, np.array([9, 4]), axes=[3, 2], keep_aspect_ratio_policy="not_smaller", mode="linear"
    )
    cases.check(opset=18)


def test_leading_axes_and_other_dtypes(cases, variant, rng):
    cases.add("Resize", rng.standard_normal((3, 4, 5), np.float32), None, None, np.array([6, 9, 4]))
    cases.add("Resize", rng.integers(0, 9, (2, 3, 4, 5), np.int32), None, f32([1, 1, 2, 2]), known=(2,))
    cases.check(opset=13)


def test_older_opsets(cases, rng):
    x = rng.standard_normal((1, 3, 4, 5), np.float32)
    for mode, scales in itertools.product(("nearest", "linear"), ([1, 1, 2, 3], [1, 1, 0.6, 0.7])):
        cases.add("Resize", x, f32(scales), known=(1,), mode=mode)
    cases.check(opset=10)


def test_upsample(cases, rng):
    x = rng.standard_normal((1, 3, 4, 5), np.float32)
    for mode in ("nearest", "linear"):
        cases.add("Upsample", x, f32([1, 1, 2, 3]), known=(1,), mode=mode)
    cases.check(opset=9)


def test_upsample_with_scales_as_an_attribute(cases, rng):
    x = rng.standard_normal((1, 3, 4, 5), np.float32)
    for mode in ("nearest", "linear"):
        cases.add("Upsample", x, mode=mode, scales=[1.0, 1.0, 2.0, 3.0])
    cases.check(opset=7)


def test_nothing_to_resize(cases):
    cases.add(
        "Resize",
        np.zeros((0, 2, 3, 3), np.float32),
        None,
        f32([1, 1, 2, 2]),
        known=(2,),
        want=np.zeros((0, 2, 6, 6), np.float32),
    )
    cases.check(opset=13)


def test_a_wrong_node_is_refused_by_name(open_model, parse):
    model = parse(
        "agraph (float[1, 2, 3, 4] x) => (float[a, b, c, d] y) {"
        ' s = Constant <value_floats = [2.0, 2.0]> () [grow] y = Resize (x, "", s) }'
    )
    with pytest.raises(InvalidModel, match=r"'grow'.*scales"):
        open_model(model).run({"x": np.zeros((1, 2, 3, 4), np.float32)})


def test_antialias_and_corners_between_elements(cases, rng, variant, by_reference):
    for shape, scales in (((1, 2, 6, 9), (1, 1, 0.6, 0.3)), ((1, 1, 4, 4), (1, 1, 0.6, 2.0)), ((7,), (0.5,))):
        x, sizes = rng.random(shape, np.float32), np.array(scales, np.float32)
        for attrs in (
            {"mode": "linear", "antialias": 1},
            {"mode": "cubic", "antialias": 1},
            {"mode": "cubic", "antialias": 1, "exclude_outside": 1},
            {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
            {"mode": "cubic", "coordinate_transformation_mode": "align_corners"},
        ):
            want = by_reference("Resize", [x, None, sizes], 19, **attrs)
            cases.add("Resize", x, None, sizes, known=(2,), want=want, tol=1e-5, **attrs)
    cases.check(opset=19)


def test_an_unknown_mode_is_refused_by_name(open_model, parse):
    model = parse('g (float[4] x) => (float[a] y) <int64[1] n = {8}> { [grow] y = Resize<mode = "wobbly">(x, , , n) }')
    with pytest.raises(InvalidModel, match=r"'grow'.*Resize.*wobbly"):
        open_model(model).run({"x": np.zeros(4, np.float32)})
