from __future__ import annotations

import numpy as np


def test_norms_of_windows(cases, rng, variant):
    x = rng.standard_normal((2, 3, 8, 9), np.float32)
    for p in (1, 2, 3, 4):
        cases.add("LpPool", x, kernel_shape=[3, 2], strides=[2, 1], p=p, tol=1e-5)
        cases.add("LpPool", x, kernel_shape=[2, 2], dilations=[2, 1], p=p, tol=1e-5)
    cases.add("LpPool", x, kernel_shape=[2, 3], auto_pad="SAME_UPPER", tol=1e-5)
    cases.add("LpPool", rng.standard_normal((2, 3, 9), np.float32), kernel_shape=[3], tol=1e-5)
    cases.check()


def test_norms_of_planes(cases, rng, variant):
    for shape in ((2, 3, 8, 9), (2, 3, 700), (1, 2, 3, 4, 5)):
        for p in (1, 2, 3):
            cases.add("GlobalLpPool", rng.standard_normal(shape, np.float32), p=p, tol=1e-5)
    cases.check()


def test_division_by_the_norm(cases, rng, variant):
    x = rng.standard_normal((3, 4, 5), np.float32)
    x[0] = 0
    for p in (1, 2):
        for axis in (0, 1, -1):
            cases.add("LpNormalization", x, p=p, axis=axis, tol=1e-5)
    cases.check()


def test_response_over_neighbouring_channels(cases, rng, variant):
    for channels, size in ((5, 3), (7, 5), (2, 5), (6, 1)):
        x = rng.standard_normal((2, channels, 4, 3), np.float32)
        cases.add("LRN", x, size=size, tol=1e-5)
        cases.add("LRN", x, size=size, alpha=0.5, beta=0.6, bias=1.5, tol=1e-5)
    cases.check()
