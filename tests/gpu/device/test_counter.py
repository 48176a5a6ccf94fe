from __future__ import annotations

import threading

import numpy as np
import pytest

from trionnx.gpu.device.engine import WebGpuEngine
from trionnx.gpu.errors import RunStopped
from trionnx.gpu.seam import Cursor, Dropped, Fenced

MODEL = "g (float[16,16] x) => (float[16,16] y) { a = MatMul(x, x) b = MatMul(a, x) y = MatMul(b, x) }"


@pytest.fixture
def driver(open_model, parse):
    return open_model(parse(MODEL), engine=WebGpuEngine(count=True))


@pytest.fixture
def feeds(rng):
    return {"x": rng.standard_normal((16, 16), np.float32)}


def test_the_device_counts_what_it_executes(driver, feeds):
    for units in (None, 1):
        driver.run(feeds, units=units)
        counts = driver.counts
        assert counts.counted == counts.on_gpu > 0
        assert counts.submitted == counts.finished == counts.on_gpu + 1  # the input is brought by the CPU


def test_it_counts_nothing_of_what_was_dropped(driver, feeds):
    block = driver.begin(feeds)
    assert isinstance(driver.submit(0, Cursor(0, 0), Cursor(0, 1)), Fenced)
    assert isinstance(driver.submit(1, Cursor(0, 1), Cursor(0, 2)), Fenced)
    driver.engine.stop(driver.runs)
    assert isinstance(driver.submit(2, Cursor(0, 2), Cursor(0, len(block.steps))), Dropped)
    driver.end()
    assert (driver.counts.counted, driver.counts.on_gpu, driver.counts.dropped) == (1, 1, 1)


def test_a_run_that_was_stopped_before_it_began_executed_nothing(driver, feeds):
    driver.run(feeds)
    go_on = threading.Event()
    driver.engine._thread.post(go_on.wait)
    begin = driver.engine.begin

    def begin_then_stop(request, done):
        begin(request, done)
        driver.engine.stop(request.run)
        go_on.set()

    driver.engine.begin = begin_then_stop
    with pytest.raises(RunStopped):
        driver.begin(feeds)
    driver.end()
    assert (driver.counts.submitted, driver.counts.counted) == (0, 0)


def test_nothing_is_counted_unasked(open_model, parse, feeds):
    driver = open_model(parse(MODEL))
    driver.run(feeds)
    assert driver.counts.counted is None
