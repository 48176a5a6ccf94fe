from __future__ import annotations

import pytest

from trionnx.gpu.device.adapters import choose_adapter
from trionnx.gpu.device.device import Device
from trionnx.gpu.device.entries import Entries
from trionnx.gpu.device.peak import Peak, Peaks, measure_peak
from trionnx.gpu.errors import RunStopped


@pytest.fixture
def device():
    made = Device(choose_adapter())
    yield made
    made.close()


def test_an_adapter_is_measured_and_nothing_is_left(device):
    held = device.bytes
    peak = measure_peak(device)
    # No device computes as slowly, or is as fast.
    assert 1e8 < peak.flops_per_s < 1e16
    assert 1e7 < peak.bytes_per_s < 1e15
    assert device.bytes == held


def test_a_measurement_can_be_stopped_between_any_two_submissions(device):
    held = device.bytes
    for allowed in (0, 1, 4):
        left = [None] * allowed

        def check(left: list[None] = left) -> None:
            if not left:
                raise RunStopped
            left.pop()

        with pytest.raises(RunStopped):
            measure_peak(device, check)
    assert device.bytes == held


def test_peaks_are_remembered_by_adapter(tmp_path):
    peaks = Peaks(tmp_path / "new")
    assert peaks.get("one") is None
    peaks.put("one", Peak(1e9, 2e9, 3.0))
    peaks.put("two", Peak(4e9, 5e9, 6.0))
    assert Peaks(tmp_path / "new").get("one") == Peak(1e9, 2e9, 3.0)
    assert Peaks(tmp_path / "new").get("two") == Peak(4e9, 5e9, 6.0)
    assert Peaks(tmp_path / "new").get("three") is None


@pytest.mark.parametrize(
    "entry",
    [
        None, [], 7, {}, {"flops_per_s": 1}, {"flops_per_s": "x", "bytes_per_s": 1},
        {"flops_per_s": 0, "bytes_per_s": 1}, {"flops_per_s": 1, "bytes_per_s": -1},
        {"flops_per_s": [], "bytes_per_s": 1}, {"flops_per_s": 1, "bytes_per_s": 1, "more": 1},
    ],
)  # fmt: skip
def test_what_is_no_peak_is_not_remembered(tmp_path, entry):
    Entries(tmp_path / "peaks.json", "adapters").put("one", entry)
    assert Peaks(tmp_path).get("one") is None
