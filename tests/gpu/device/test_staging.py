"""What the device gives back comes, whichever thread hears of it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from trionnx.gpu.device.staging import Staging
from trionnx.gpu.errors import DeviceLost

MODEL = "g (float[n, 8] x, int64[k] i) => (float[n, 8] y, float[k, 8] z) { y = Exp(x) z = Gather<axis = 0>(y, i) }"


def test_answers_may_come_on_another_thread(open_model, parse, rng):
    """As they do while another device is being opened: wgpu looks for news of all devices then."""
    from wgpu.backends.wgpu_native import lib
    from wgpu.backends.wgpu_native._helpers import get_wgpu_instance

    driver, over, taken = open_model(parse(MODEL)), threading.Event(), 0
    process: Any = lib.wgpuInstanceProcessEvents  # pyright: ignore[reportAttributeAccessIssue]
    instance = get_wgpu_instance()

    def look():
        nonlocal taken
        while not over.is_set():
            process(instance)
            taken += 1

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(300):
            x = rng.standard_normal((5, 8)).astype(np.float32)
            rows = rng.integers(-5, 5, 3)
            y, z = driver.run({"x": x, "i": rows})
            np.testing.assert_allclose(y, np.exp(x), rtol=1e-5)
            np.testing.assert_array_equal(z, y[rows])
    finally:
        over.set()
        thread.join()
    assert taken


def test_no_answer_is_a_device_that_is_lost_not_a_wait_for_ever(open_model, parse, monkeypatch):
    driver = open_model(parse(MODEL))
    feeds = {"x": np.ones((2, 8), np.float32), "i": np.array([0])}
    driver.run(feeds)
    with monkeypatch.context() as patch:
        patch.setattr("trionnx.gpu.device.staging.ANSWER_BOUND_S", 0.01)
        patch.setattr(Staging, "ask", lambda self, nbytes: self._answered.clear())
        with pytest.raises(DeviceLost, match=r"did not give its results back in 0\.01 s"):
            driver.run(feeds)
    y, z = driver.run(feeds)
    np.testing.assert_allclose(y, np.full((2, 8), np.e), rtol=1e-5)
    np.testing.assert_array_equal(z, y[:1])
