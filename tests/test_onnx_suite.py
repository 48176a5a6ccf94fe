"""The official backend tests of the installed onnx package, through `trionnx.backend` on the webgpu engine.

A sample, spread evenly over the names (and so over the operators), each time; all with TRIONNX_SOAK=1.
Exclusions, each with its reason, and the command that counts them all: benchmarks/onnx_suite.py.
"""

from __future__ import annotations

import os
from itertools import pairwise

import numpy as np
import pytest

import onnx_suite
from trionnx.backend import TrionnxBackend

SAMPLE = 150
SEED = 20260801
WHOLE = 2024
TESTS = onnx_suite.collect()


def sampled() -> list[onnx_suite.Test]:
    """One test out of each of SAMPLE stretches of the list, which one is drawn."""
    if os.environ.get("TRIONNX_SOAK") == "1":
        return TESTS
    rng = np.random.default_rng(SEED)
    edges = np.linspace(0, len(TESTS), SAMPLE + 1).astype(int)
    return [TESTS[int(rng.integers(a, b))] for a, b in pairwise(edges)]


@pytest.mark.parametrize("test", sampled(), ids=lambda test: test.name)
def test_of_the_official_suite(test):
    if test.name in onnx_suite.EXCLUDED:
        pytest.skip(onnx_suite.EXCLUDED[test.name])
    test.call(TrionnxBackend)


def test_all_kinds_of_the_suite_are_there():
    assert len(TESTS) >= WHOLE
    assert {test.kind for test in TESTS} == set(onnx_suite.KINDS.values())
    assert len({test.name for test in TESTS}) == len(TESTS)


def test_every_exclusion_is_a_test_of_the_suite_and_says_why():
    assert set(onnx_suite.EXCLUDED) <= {test.name for test in TESTS}
    assert all(len(reason) > 20 for reason in onnx_suite.EXCLUDED.values())
    assert len(onnx_suite.EXCLUDED) <= WHOLE - 1990


def test_what_fails_is_told_in_a_line():
    (refused,) = onnx_suite.collect(["^test_gradient_of_add$"])
    plain = onnx_suite.Test("gradient", refused.kind, refused.call)
    made = onnx_suite.perform(plain, TrionnxBackend)
    assert (made.status, made.refused) == ("failed", "ai.onnx.preview.training.Gradient")
    (wrong,) = onnx_suite.collect(["^test_loop16_seq_none$"])
    made = onnx_suite.perform(onnx_suite.Test("loop", wrong.kind, wrong.call), TrionnxBackend)
    assert made.reason.startswith("TypeError: Unable to compare")
    assert onnx_suite.perform(wrong, TrionnxBackend).status == "excluded"


@pytest.mark.skipif(os.environ.get("TRIONNX_SOAK") != "1", reason="two minutes; TRIONNX_SOAK=1")
def test_at_least_1400_pass_without_host_steps():
    backend = onnx_suite.options(allow_host_steps=False)
    made = [onnx_suite.perform(test, backend) for test in TESTS]
    assert sum(outcome.status == "passed" for outcome in made) >= 1400
    assert [o.test.name for o in made if o.status == "failed" and not o.refused] == []
