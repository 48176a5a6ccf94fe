from __future__ import annotations

import numpy as np
import pytest

from trionnx.gpu.errors import InvalidInput
from trionnx.gpu.seam import TensorInfo
from trionnx.gpu.shapes import check_shapes

KIND = np.dtype(np.float32)
INPUTS = (
    TensorInfo("x", "tensor(float)", ("n", 3, None), KIND),
    TensorInfo("s", "tensor(float)", (), KIND),
    TensorInfo("any", "tensor(float)", None, KIND),
)


@pytest.mark.parametrize("shapes", [None, {}, {"x": (0, 3, 7)}, {"s": (), "any": ()}, {"any": (1, 2), "x": [5, 3, 1]}])
def test_shapes_that_fit(shapes):
    check_shapes(INPUTS, shapes)


@pytest.mark.parametrize("shape", [(1, 2, 3), (1, 3), (1, 3, 1, 1), ()])
def test_shapes_that_do_not_fit(shape):
    with pytest.raises(InvalidInput, match=r"'x': expected shape \(n, 3, \?\), got \("):
        check_shapes(INPUTS, {"any": (1,), "x": shape})


def test_names_that_are_not_known():
    with pytest.raises(InvalidInput, match="'y': expected an input of the model: 'x', 's', 'any', got a name that"):
        check_shapes(INPUTS, {"y": (1,)})
    with pytest.raises(InvalidInput, match=r"an input of the model: \(it has none\)"):
        check_shapes([], {"y": (1,)})
