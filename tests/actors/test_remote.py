"""Engines in worker processes, driven without Trio: what they answer."""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from driving import LIMIT_S, PLACES, Driver, X, asked, close, parse, source, toy
from toy import ToyEngine, expected
from trionnx.actors.process import driver_threads
from trionnx.actors.remote import RemoteEngine
from trionnx.gpu.engine import Engine
from trionnx.gpu.errors import DeviceLost, InvalidInput, InvalidModel, OutOfDeviceMemory
from trionnx.gpu.seam import (
    Counts,
    Cursor,
    Dropped,
    Failed,
    Fenced,
    Finished,
    Load,
    Loaded,
    Outputs,
    Progress,
    Read,
    Reply,
    Segment,
)

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> str:
    return PLACES[request.param]


def test_it_is_an_engine() -> None:
    assert issubclass(RemoteEngine, Engine)


# --- what it answers ------------------------------------------------------------------------------


def test_a_worker_answers_as_the_engine_does_here(place: str, open_model: Any, tmp_path: Path) -> None:
    remote = RemoteEngine(place)
    if place == PLACES["toy"]:
        driver = open_model(remote, source(2, 1, 3))
        for n in (0, 1, 5, 400_000):
            x = np.arange(n, dtype=np.float32)
            (y,) = driver.run({"x": x})
            assert y.tobytes() == expected(x, [2, 1, 3]).tobytes()
            assert driver.counts == Counts(6, 6, 0)
        return
    onnx.save(
        parse("(float[N,16] x) => (float[N,16] y, int64[2] s) { a = Relu(x) b = Neg(a) y = Add(b, x) s = Shape(x) }"),
        tmp_path / "m.onnx",
    )
    module, name = place.split(":")
    here = Driver(getattr(sys.modules.get(module) or __import__(module, fromlist=[name]), name)(), tmp_path / "m.onnx")
    there = open_model(remote, tmp_path / "m.onnx")
    try:
        assert there.loaded == here.loaded
        for n in (1, 7, 40_000):
            x = np.random.default_rng(n).standard_normal((n, 16), np.float32)
            for ours, theirs in zip(here.run({"x": x}), there.run({"x": x}), strict=True):
                assert ours.dtype == theirs.dtype
                assert ours.tobytes() == theirs.tobytes()
                assert theirs.flags.writeable
            assert there.counts.submitted == there.counts.finished > 0
        assert remote.explain() == here.engine.explain() != ()
        errors = []
        for driver in (here, there):
            with pytest.raises(InvalidInput) as caught:
                driver.run({})
            errors.append((str(caught.value), vars(caught.value)))
        assert errors[0] == errors[1]
    finally:
        here.close()


@pytest.mark.parametrize("kind", ["bytes", "proto", "file", "missing", "text"])
def test_sources_of_models(kind: str, open_model: Any, tmp_path: Path) -> None:
    weights = onnx.numpy_helper.from_array(np.arange(300_000, dtype=np.float32), "w")
    info = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [300_000]) for name in "xy"]
    node = onnx.helper.make_node("Add", ["x", "w"], ["y"])
    graph = onnx.helper.make_graph([node], "g", info[:1], info[1:], [weights])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    path = tmp_path / "m.onnx"
    engine = RemoteEngine(PLACES["cpu"])
    if kind in ("missing", "text"):
        if kind == "text":
            path.write_text("no model " * 99)
        with pytest.raises(FileNotFoundError if kind == "missing" else InvalidModel, match=r"m\.onnx"):
            open_model(engine, path)
        return
    onnx.save(model, path)
    with path.open("rb") as file:
        driver = open_model(engine, {"bytes": path.read_bytes(), "proto": model, "file": file}[kind])
        (y,) = driver.run({"x": np.ones(300_000, np.float32)})
    np.testing.assert_array_equal(y, np.arange(300_000, dtype=np.float32) + 1)


def test_outputs_that_are_under_way_together_do_not_mix(open_model: Any) -> None:
    driver = open_model(toy(), source(1, lies=("counted",)))
    x = np.arange(60_000, dtype=np.float32)
    driver.begin({"x": x})
    assert isinstance(driver.submit(0, Cursor(0, 0), Cursor(0, 1)), Fenced)
    replies = [asked(driver.engine.read, Read(1, ("y",))) for _ in range(40)]
    outputs = [reply.get(timeout=LIMIT_S) for reply in replies]
    for number, output in enumerate(outputs, 1):
        assert isinstance(output, Outputs)
        np.testing.assert_array_equal(output.values["y"], expected(x, [1]) + number)
    driver.end()


def test_progress_and_settings_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LP_NUM_THREADS", raising=False)
    told: list[Progress] = []
    engine = toy(adapter=3, environment={"TOY": "yes"})
    loaded: queue.SimpleQueue[Reply] = queue.SimpleQueue()
    engine.load(Load(source()), loaded.put, told.append)
    reply = loaded.get(timeout=LIMIT_S)
    assert isinstance(reply, Loaded)
    assert reply.adapter == f"3, {driver_threads()}, yes"
    assert told == [Progress("compile", 0, 2), Progress("compile", 2, 2)]
    assert engine.alive
    assert engine.up
    close(engine)
    assert not engine.alive


def test_errors_of_the_engine_are_those_of_the_request(open_model: Any) -> None:
    kinds = {"lost": DeviceLost, "memory": OutOfDeviceMemory, "input": InvalidInput, "unknown": RuntimeError}
    every, phases = " ".join(kinds), ("begin", "segment 1", "read")
    driver = open_model(toy(), source(faults={**dict.fromkeys(phases, every), "end": " " * 12 + every}))
    for _ in (*phases, "end"):
        for fault, kind in kinds.items():
            with pytest.raises(kind) as caught:
                driver.run({"x": X})
            assert "NotHere: strange" in str(caught.value) or fault != "unknown"
    assert driver.run({"x": X})[0].tobytes() == expected(X, [3]).tobytes()
    engine = toy()
    with pytest.raises(OutOfDeviceMemory, match="no room"):
        Driver(engine, source(faults={"load": "memory"}))
    close(engine)


def test_an_engine_that_cannot_be_made() -> None:
    for engine, kind, message in (
        (toy(adapter="none"), OutOfDeviceMemory, "this adapter has no room"),
        (RemoteEngine("toy:Nothing"), AttributeError, "Nothing"),
        (RemoteEngine("no_such_module:Engine"), ModuleNotFoundError, "no_such_module"),
    ):
        with pytest.raises(kind, match=message):
            Driver(engine, source())
        close(engine)


def test_a_worker_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    engine = toy()
    with pytest.raises(DeviceLost, match=r"could not be started: .*/nowhere/python"):
        Driver(engine, source())
    close(engine)


# --- stop -----------------------------------------------------------------------------------------


def test_stop_overtakes_the_segments_that_wait(open_model: Any) -> None:
    driver = open_model(toy(), source(9, seconds=0.2))
    driver.begin({"x": X})
    replies = [asked(driver.engine.submit, Segment(1, n, Cursor(0, n), Cursor(0, n + 1))) for n in range(6)]
    assert isinstance(replies[0].get(timeout=LIMIT_S), Fenced)
    driver.engine.stop(1)
    after = [reply.get(timeout=LIMIT_S) for reply in replies[1:]]
    assert isinstance(after[0], Fenced | Dropped)
    assert after[2:] == [Dropped(1, n) for n in (3, 4, 5)]
    assert isinstance(asked(driver.engine.read, Read(1, ("y",))).get(timeout=LIMIT_S), Failed)
    driver.end()
    assert driver.counts.submitted == driver.counts.finished <= 2
    assert driver.counts.submitted + driver.counts.dropped == 6
    driver.engine.stop(1)
    (y,) = driver.run({"x": X})
    assert y.tobytes() == expected(X, [9]).tobytes()


def test_a_recall_takes_back_what_waits_and_the_run_goes_on(open_model: Any) -> None:
    driver = open_model(toy(), source(4, seconds=0.2))
    driver.begin({"x": X})
    replies = [asked(driver.engine.submit, Segment(1, n, Cursor(0, n), Cursor(0, n + 1))) for n in range(3)]
    assert isinstance(replies[0].get(timeout=LIMIT_S), Fenced)
    driver.engine.recall(1, 3)
    assert isinstance(second := replies[1].get(timeout=LIMIT_S), Fenced | Dropped)
    assert replies[2].get(timeout=LIMIT_S) == Dropped(1, 2)
    assert isinstance(driver.submit(3, Cursor(0, 1 + isinstance(second, Fenced)), Cursor(0, 4)), Fenced)
    assert driver.read()[0].tobytes() == expected(X, [4]).tobytes()
    driver.end()


def test_a_word_is_enough_for_an_engine_that_looks(open_model: Any) -> None:
    """No message of a stop or a recall is sent: the queue's thread reads the words."""
    model = parse("""(float[N,16] x) => (float[N,16] y)
        { a = Relu(x) b = Transpose<perm=[1,0]>(a) c = Neg(b) y = Transpose<perm=[1,0]>(c) }""")
    engine = RemoteEngine(PLACES["webgpu"])
    driver = open_model(engine, model)
    x = np.random.default_rng(0).standard_normal((64, 16), np.float32)
    (before,) = driver.run({"x": x})

    def unheard(call: Callable[..., None], *arguments: int) -> None:
        vars(engine)["_send"] = lambda data: None
        call(*arguments)
        del vars(engine)["_send"]

    block = driver.begin({"x": x})
    assert isinstance(driver.submit(0, Cursor(0, 0), Cursor(0, 1)), Fenced)
    unheard(engine.recall, driver.runs, 2)
    assert isinstance(driver.submit(1, Cursor(0, 1), Cursor(0, len(block.steps))), Dropped)
    assert isinstance(driver.submit(2, Cursor(0, 1), Cursor(0, 2)), Fenced)
    unheard(engine.stop, driver.runs)
    assert isinstance(driver.submit(3, Cursor(0, 2), Cursor(0, len(block.steps))), Dropped)
    driver.end()
    assert (driver.counts.submitted, driver.counts.finished, driver.counts.dropped) == (2, 2, 2)
    assert driver.run({"x": x})[0].tobytes() == before.tobytes()


# --- what crosses ---------------------------------------------------------------------------------


def test_feeds_that_cannot_cross_fail_alone(open_model: Any) -> None:
    driver = open_model(toy(), source())
    with pytest.raises(TypeError, match="cannot be sent to a worker process"):
        driver.run({"x": object()})
    assert len(driver.run({"x": X})) == 1


def test_without_memfd_it_works_as_well(monkeypatch: pytest.MonkeyPatch, open_model: Any, tmp_path: Path) -> None:
    import tempfile

    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    driver = open_model(toy(), source(2))
    x = np.arange(300_000, dtype=np.float32)
    assert driver.run({"x": x})[0].tobytes() == expected(x, [2]).tobytes()
    assert list(tmp_path.iterdir()) == []


def test_large_memory_is_given_back_after_a_run(open_model: Any) -> None:
    driver = open_model(toy(), source(1))
    x = np.ones(20 << 20, np.float32)
    for _ in range(2):
        (y,) = driver.run({"x": x})
        assert y[0] == y[-1] == 0.5
        assert driver.engine._feeds._file.size() == 0
        before = driver.engine._feeds._end
        assert before == 0


def test_the_toy_is_an_engine() -> None:
    assert issubclass(ToyEngine, Engine)
    assert isinstance(Finished(), Finished)
