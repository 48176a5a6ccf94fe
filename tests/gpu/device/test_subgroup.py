from __future__ import annotations

import numpy as np
import pytest

from trionnx.gpu.device.adapters import choose_adapter
from trionnx.gpu.device.device import Device
from trionnx.gpu.device.subgroup import judge


def test_what_is_measured_is_what_kernels_count_on_and_leaves_no_pipeline():
    device = Device(choose_adapter())
    try:
        assert device.target.subgroup in (0, 4, 8, 16, 32)
        assert device.target.subgroup == 0 or device.target.cpu
        assert device.pipelines == 0
    finally:
        device.close()


LANES = np.arange(32)


@pytest.mark.parametrize(
    ("size", "numbers", "given", "want"),
    [
        (8, LANES % 8, LANES // 8 * 8 + 3, 8),
        (16, LANES % 16, LANES // 16 * 16 + 3, 16),
        (8, LANES % 8, LANES, 0),
        (8, LANES[::-1] % 8, LANES // 8 * 8 + 3, 0),
        (4, LANES % 4, LANES // 4 * 4 + 3, 4),
        (2, LANES % 2, LANES // 2 * 2 + 3, 0),
    ],
    ids=["eight", "sixteen", "no broadcast", "shuffled", "narrow", "a pair"],
)
def test_only_what_works_counts(size, numbers, given, want):
    assert judge(np.stack([np.full(32, size), numbers, given])) == want
