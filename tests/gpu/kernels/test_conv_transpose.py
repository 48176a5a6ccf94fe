from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trionnx.gpu.errors import InvalidModel

GEOMETRIES: tuple[Any, ...] = (
    ((1, 3, 5, 6), (3, 4, 2, 2), {"strides": [2, 2]}),
    ((2, 4, 5, 6), (4, 3, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1], "group": 2}),
    ((1, 4, 9), (4, 3, 5), {"strides": [3], "dilations": [2], "pads": [1, 2]}),
    ((1, 2, 3, 4, 5), (2, 3, 2, 3, 2), {"strides": [1, 2, 3]}),
    ((1, 3, 5, 6), (3, 4, 3, 3), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ((1, 3, 5, 6), (3, 4, 3, 3), {"strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    ((1, 3, 5, 6), (3, 4, 3, 3), {"strides": [3, 2], "output_shape": [10, 12]}),
    ((1, 3, 3, 3), (3, 2, 3, 3), {"strides": [3, 2], "output_shape": [10, 8], "output_padding": [1, 1]}),
    ((1, 3, 5, 6), (3, 4, 3, 3), {"strides": [2, 2], "auto_pad": "VALID"}),
)


def test_every_geometry(cases, variant, rng):
    for shape, kernel, attrs in GEOMETRIES:
        x, w = (rng.standard_normal(s, np.float32) for s in (shape, kernel))
        cases.add("ConvTranspose", x, w, known=(1,), **attrs)
        b = rng.standard_normal(kernel[1] * attrs.get("group", 1), np.float32)
        cases.add("ConvTranspose", x, w, b, known=(1, 2), **attrs)
    cases.check()


def test_a_wrong_node_is_refused_by_name(open_model, parse):
    graph = "agraph (float[1, 3, 8, 8] x, float[2, 3, 3, 3] w) => (float[a, b, c, d] y)"
    model = parse(f"{graph} {{ [up] y = ConvTranspose (x, w) }}")
    with pytest.raises(InvalidModel, match=r"'up'.*channels"):
        open_model(model).run({"x": np.zeros((1, 3, 8, 8), np.float32), "w": np.zeros((2, 3, 3, 3), np.float32)})
