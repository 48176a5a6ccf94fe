from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import trionnx.gpu.device.device as device_module
from trionnx.gpu.device.adapters import adapter_features, choose_adapter, target_of
from trionnx.gpu.device.device import Device
from trionnx.gpu.device.half import BITS, judge_half

HALVES = BITS.view(np.float16)
NAN = np.isnan(HALVES)


@pytest.mark.parametrize("cpu", [True, False])
def test_a_device_has_f16_where_it_is_offered_wanted_and_right(monkeypatch, cpu):
    info = choose_adapter()
    offered = "shader-f16" in adapter_features(info, f16=True)
    assert target_of(info).f16 == offered
    for wanted in (True, False):
        target = replace(target_of(info), cpu=cpu, f16=wanted)
        monkeypatch.setattr(device_module, "target_of", lambda _, target=target: target)
        device = Device(info)
        try:
            assert device.target.f16 == (offered and wanted)
            assert ("shader-f16" in device.native.features) == (offered and wanted)
            assert device.pipelines == 0
        finally:
            device.close()


def answers():
    wide = np.stack([HALVES.astype(np.float32)] * 2)
    return wide, np.stack([BITS] * 2)


def test_what_is_right_is_found_right_whatever_the_bits_of_nan():
    wide, bits = answers()
    assert judge_half(wide, bits)
    wide[0, NAN], bits[1, NAN] = np.nan, 0x7E01
    assert judge_half(wide, bits)


@pytest.mark.parametrize("value", [6e-8, -6e-8, 6.1e-5, 0.0, -0.0, 1.0, 65504.0, np.inf, -np.inf])
@pytest.mark.parametrize("row", [0, 1])
def test_one_value_that_comes_or_goes_wrong_is_enough(value, row):
    (place,) = np.flatnonzero(np.float16(value).view(np.uint16) == BITS)
    wide, bits = answers()
    wide[row, place] = -wide[row, place]
    assert not judge_half(wide, bits)
    wide, bits = answers()
    bits[row, place] ^= 1
    assert not judge_half(wide, bits)


@pytest.mark.parametrize("lost", [np.inf, 0.0])
def test_nan_must_stay_nan(lost):
    (place,) = np.flatnonzero(BITS == 0x7E00)
    wide, bits = answers()
    wide[1, place] = lost
    assert not judge_half(wide, bits)
    wide, bits = answers()
    bits[0, place] = np.float16(lost).view(np.uint16)
    assert not judge_half(wide, bits)
