from __future__ import annotations

import numpy as np


def test_determinants(cases, rng, variant):
    for shape in ((3, 3), (4, 5, 5), (2, 3, 1, 1), (70, 2, 2), (0, 2, 2), (1, 12, 12)):
        x = rng.standard_normal(shape, np.float32)
        cases.add("Det", x, want=np.linalg.det(x.astype(np.float64)), tol=1e-4)
    x = np.array([[0, 1, 2], [3, 0, 1], [1, 1, 0]], np.float32)
    cases.add("Det", np.stack([x, x * 0, x[[0, 0, 1]]]), want=np.array([7.0, 0, 0]))
    cases.check()
