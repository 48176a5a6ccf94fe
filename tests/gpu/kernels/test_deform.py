from __future__ import annotations

import numpy as np


def test_deformed_convolutions(cases, rng, variant, by_reference):
    def some(*shape):
        return rng.standard_normal(shape, np.float32)

    for masked, attrs, out in (
        (True, {"pads": [1, 1, 1, 1], "kernel_shape": [2, 2]}, (6, 7)),
        (False, {"strides": [2, 1], "kernel_shape": [2, 2]}, (2, 5)),
        (True, {"group": 2, "offset_group": 2, "dilations": [2, 1], "kernel_shape": [2, 2]}, (3, 5)),
    ):
        groups = offsets = 2 if "group" in attrs else 1
        arrays = [
            some(2, 4, 5, 6),
            some(6, 4 // groups, 2, 2),
            some(2, offsets * 8, *out) / 2,
            some(6),
            some(2, offsets * 4, *out) if masked else None,
        ]
        cases.add("DeformConv", *arrays, want=by_reference("DeformConv", arrays, 19, **attrs), tol=2e-5, **attrs)
    cases.check(opset=19)
