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


CONSTANT = "(int64[2] i) => (float[2] y) <float16[2] h = {1, 2}> { g = Gather(h, i) y = Cast<to=1>(g) }"
CAST = "(float[2] x) => (float[2] y) { h = Cast<to=10>(x) y = Cast<to=1>(h) }"
BRANCH = """(bool c, float[2] x) => (float[2] y) {
    y = If(c) <
        then_branch = t () => (float[2] a) { h = Cast<to=10>(x) a = Cast<to=1>(h) },
        else_branch = e () => (float[2] b) { b = Neg(x) }
    >
}"""


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("(float16[2] x) => (float16[2] y) { y = Neg(x) }", True),
        ("(float16[2] x) => (float[2] y) { y = Cast<to=1>(x) }", True),
        (CONSTANT, True),
        (CAST, True),
        (BRANCH, True),
        ("(float[2] x) => (float[2] y) { y = Neg(x) }", False),
        ("(float[2] x) => (int64[2] y) { y = Cast<to=7>(x) }", False),
        ("(bfloat16[2] x) => (bfloat16[2] y) { y = Neg(x) }", False),
    ],
)
def test_the_feature_is_asked_for_where_a_model_has_float16(open_model, parse, body, want):
    device = open_model(parse(f"g {body}")).engine.device
    offered = "shader-f16" in adapter_features(device.info, f16=True)
    assert ("shader-f16" in device.native.features) == device.target.f16 == (offered and want)
