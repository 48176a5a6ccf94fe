from __future__ import annotations

import io
import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from trionnx.gpu.cpu import engine as module
from trionnx.gpu.cpu.engine import OrtCpuEngine
from trionnx.gpu.engine import Engine
from trionnx.gpu.errors import (
    InvalidData,
    InvalidInput,
    InvalidModel,
    NoAdapter,
    OutOfDeviceMemory,
    RunStopped,
    UnsupportedOperator,
)
from trionnx.gpu.seam import (
    Begin,
    Begun,
    Closed,
    Counts,
    Cursor,
    Dropped,
    Ended,
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

F, I64 = TensorProto.FLOAT, TensorProto.INT64
WHOLE = Cursor(0), Cursor(0, 1)


def model(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[int, Any]],
    outputs: dict[str, tuple[int, Any]],
    initializers: list[onnx.TensorProto] | None = None,
    domains: tuple[str, ...] = (),
) -> onnx.ModelProto:
    def infos(table: dict[str, tuple[int, Any]]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in table.items()]

    graph = helper.make_graph(nodes, "g", infos(inputs), infos(outputs), initializers or [])
    opsets = [helper.make_opsetid("", 18), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9, producer_name="test")


def node(op: str, *inputs: str, domain: str = "") -> onnx.NodeProto:
    return helper.make_node(op, inputs, ["y"], "n", domain=domain)


def double() -> onnx.ModelProto:
    return model([helper.make_node("Add", ["x", "x"], ["y"], name="add")], {"x": (F, [2, "n"])}, {"y": (F, [2, "n"])})


def endless() -> onnx.ModelProto:
    """A Loop of 2**40 turns."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["going"], ["on"]),
            helper.make_node("Add", ["a", "a"], ["b"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", I64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("a", F, [1]),
        ],
        [helper.make_tensor_value_info("on", TensorProto.BOOL, []), helper.make_tensor_value_info("b", F, [1])],
    )
    turns = helper.make_tensor("turns", I64, [], [2**40])
    always = helper.make_tensor("always", TensorProto.BOOL, [], [True])
    loop = helper.make_node("Loop", ["turns", "always", "x"], ["y"], body=body, name="loop")
    return model([loop], {"x": (F, [1])}, {"y": (F, [1])}, [turns, always])


class Driver:
    """Asks an engine and waits for the answers."""

    def __init__(self, engine: OrtCpuEngine) -> None:
        self.engine = engine
        self.progress: list[Progress] = []

    def ask(self, method: Any, *arguments: Any) -> queue.Queue[Reply]:
        replies: queue.Queue[Reply] = queue.Queue()
        method(*arguments, replies.put)
        return replies

    def answer(self, method: Any, *arguments: Any) -> Reply:
        return self.ask(method, *arguments).get(timeout=30)

    def hold(self, gate: threading.Event) -> None:
        """Keep the engine's thread busy until the gate opens."""

        def wait() -> None:
            assert gate.wait(30)

        self.engine._jobs.put(wait)

    def load(self, source: Any, **options: Any) -> Reply:
        replies: queue.Queue[Reply] = queue.Queue()
        self.engine.load(Load(source, **options), replies.put, self.progress.append)
        return replies.get(timeout=30)

    def run(self, feeds: dict[str, Any], wanted: tuple[str, ...] = ("y",), number: int = 1) -> Reply:
        reply = self.answer(self.engine.begin, Begin(number, feeds, wanted))
        if isinstance(reply, Begun):
            reply = self.answer(self.engine.submit, Segment(number, 0, *WHOLE))
        if isinstance(reply, Fenced):
            reply = self.answer(self.engine.read, Read(number, wanted))
        assert isinstance(self.answer(self.engine.end, number), Ended)
        return reply


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver(OrtCpuEngine(cpu_threads=1))
    yield driver
    assert driver.answer(driver.engine.close) == Closed()
    driver.engine._thread.join(timeout=30)
    assert not driver.engine._thread.is_alive()


def fault(reply: Reply) -> BaseException:
    assert isinstance(reply, Failed), reply
    return reply.error


def test_it_is_an_engine() -> None:
    assert isinstance(OrtCpuEngine, type)
    assert issubclass(OrtCpuEngine, Engine)


@pytest.mark.parametrize("kind", ["path", "str", "bytes", "bytearray", "file", "proto"])
def test_sources(driver: Driver, kind: str, tmp_path: Path) -> None:
    proto = double()
    data = proto.SerializeToString()
    path = tmp_path / "double.onnx"
    path.write_bytes(data)
    sources = {
        "path": path,
        "str": str(path),
        "bytes": data,
        "bytearray": bytearray(data),
        "file": io.BytesIO(data),
        "proto": proto,
    }
    loaded = driver.load(sources[kind])
    assert isinstance(loaded, Loaded)
    assert [(i.name, i.type, i.shape, i.dtype) for i in loaded.inputs] == [
        ("x", "tensor(float)", (2, "n"), np.dtype(np.float32))
    ]
    assert loaded.backend == "cpu"
    assert loaded.providers == ("CPUExecutionProvider",)
    assert loaded.metadata.producer_name == "test"
    assert driver.progress[0].phase == "read"
    assert driver.progress[-1] == Progress("compile", 1, 1)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    reply = driver.run({"x": x})
    assert isinstance(reply, Outputs)
    np.testing.assert_array_equal(reply.values["y"], x + x)


def test_external_data_beside_the_path(driver: Driver, tmp_path: Path) -> None:
    weights = np.arange(3000, dtype=np.float32)
    proto = model(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        {"x": (F, [3000])},
        {"y": (F, [3000])},
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    assert isinstance(driver.load(tmp_path / "m.onnx"), Loaded)
    reply = driver.run({"x": weights})
    assert isinstance(reply, Outputs)
    np.testing.assert_array_equal(reply.values["y"], weights * 2)


def test_one_opaque_step_and_its_counts(driver: Driver) -> None:
    driver.load(double())
    assert [(e.node, e.op, e.where) for e in driver.engine.explain()] == [("add", "Add", "opaque")]
    feeds = {"x": np.ones((2, 4), np.float32)}
    begun = driver.answer(driver.engine.begin, Begin(7, feeds, ("y",)))
    assert isinstance(begun, Begun)
    assert not isinstance(begun.block, Finished)
    (step,) = begun.block.steps
    assert (step.kind, step.units, step.cost_s) == ("opaque", 1, 0.0)
    fenced = driver.answer(driver.engine.submit, Segment(7, 0, *WHOLE))
    assert isinstance(fenced, Fenced)
    assert fenced.ready == ("y",)
    assert driver.answer(driver.engine.end, 7) == Ended(7, Counts(1, 1, 0, most_in_flight=1))
    assert driver.answer(driver.engine.end, 7) == Ended(7, Counts())
    begun = driver.answer(driver.engine.begin, Begin(8, feeds, ("y",)))
    assert isinstance(begun, Begun)
    assert not isinstance(begun.block, Finished)
    assert begun.block.steps[0].cost_s == fenced.gpu_s


@pytest.mark.parametrize(
    ("feeds", "wanted", "name", "message"),
    [
        ({}, "y", "x", "missing"),
        ({"x": np.ones((2, 1))}, "y", "", "tensor(double)"),
        ({"x": np.ones((3, 1), np.float32)}, "y", "x", "Got: 3 Expected: 2"),
        ({"x": np.ones(2, np.float32)}, "y", "x", "Got: 1 Expected: 2"),
        ({"x": np.ones((2, 1), np.float32)}, "z", "z", "Invalid output name"),
    ],
)
def test_invalid_input(driver: Driver, feeds: dict[str, Any], wanted: str, name: str, message: str) -> None:
    driver.load(double())
    error = fault(driver.run(feeds, (wanted,)))
    assert isinstance(error, InvalidInput)
    assert error.name == name
    assert message in str(error)
    assert "\n" not in str(error)
    assert isinstance(driver.run({"x": np.ones((2, 1), np.float32)}, number=2), Outputs)


def test_overridable_initializer(driver: Driver) -> None:
    w = onnx.numpy_helper.from_array(np.array([10], np.float32), "w")
    driver.load(
        model([helper.make_node("Mul", ["x", "w"], ["y"])], {"x": (F, [1]), "w": (F, [1])}, {"y": (F, [1])}, [w])
    )
    x = np.array([3], np.float32)
    for feeds, expected in [({"x": x}, 30), ({"x": x, "w": x}, 9)]:
        reply = driver.run(feeds)
        assert isinstance(reply, Outputs)
        assert reply.values["y"] == expected


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        (b"this is no model", InvalidModel, "no ONNX model"),
        (double().SerializeToString()[:-5], InvalidModel, "the model"),
        (model([node("MatMul", "x", "x")], {"x": (F, [3, 4])}, {"y": (F, None)}), InvalidModel, "Incompatible dim"),
        (
            model([node("Foo", "x")], {"x": (F, [1])}, {"y": (F, [1])}),
            UnsupportedOperator,
            "operator Foo (opset 18) of node 'n'",
        ),
        (
            model([node("Foo", "x", domain="d")], {"x": (F, [1])}, {"y": (F, [1])}, [], ("d",)),
            UnsupportedOperator,
            "operator d.Foo (opset 1) of node 'n'",
        ),
    ],
)
def test_faults_of_a_load(driver: Driver, source: Any, kind: type[Exception], message: str) -> None:
    error = fault(driver.load(source))
    assert isinstance(error, kind)
    assert message in str(error)
    assert "\n" not in str(error)


def test_no_such_file(driver: Driver, tmp_path: Path) -> None:
    error = fault(driver.load(tmp_path / "none.onnx"))
    assert isinstance(error, FileNotFoundError)


def test_input_shapes_for_a_name_that_is_not_there(driver: Driver) -> None:
    assert isinstance(fault(driver.load(double(), input_shapes={"q": (1,)})), InvalidInput)


def test_faults_of_a_run(driver: Driver) -> None:
    node = helper.make_node("Gather", ["x", "i"], ["y"], name="pick")
    driver.load(model([node], {"x": (F, [3]), "i": (I64, ["n"])}, {"y": (F, ["n"])}))
    error = fault(driver.run({"x": np.zeros(3, np.float32), "i": np.array([7])}))
    assert isinstance(error, InvalidData)
    assert error.node == "pick"
    assert "out of data bounds" in str(error)
    reply = driver.run({"x": np.array([4, 5, 6], np.float32), "i": np.array([2])}, number=2)
    assert isinstance(reply, Outputs)
    assert reply.values["y"] == 6


def test_no_memory(driver: Driver) -> None:
    node = helper.make_node("ConstantOfShape", ["s"], ["y"])
    driver.load(model([node], {"s": (I64, [2])}, {"y": (F, ["a", "b"])}))
    assert isinstance(fault(driver.run({"s": np.array([2**22, 2**22])})), OutOfDeviceMemory)


@pytest.mark.parametrize("how", ["stop", "close"])
def test_a_run_is_terminated_in_the_middle(driver: Driver, how: str) -> None:
    driver.load(endless())
    begun = driver.answer(driver.engine.begin, Begin(1, {"x": np.zeros(1, np.float32)}, ("y",)))
    assert isinstance(begun, Begun)
    started = threading.Event()
    session, run = driver.engine._sessions[0], driver.engine._runs[1]

    class Watched:
        def run(self, *arguments: Any) -> Any:
            started.set()
            return session.run(*arguments)

    driver.engine._sessions[0] = Watched()
    replies = driver.ask(driver.engine.submit, Segment(1, 0, *WHOLE))
    assert started.wait(30)
    if how == "close":
        closed = driver.ask(driver.engine.close)
        assert isinstance(fault(replies.get(timeout=30)), RunStopped)
        assert run.counts == Counts(1, 1, 0, most_in_flight=1)
        assert closed.get(timeout=30) == Closed()
        return
    driver.engine.stop(1)
    assert isinstance(fault(replies.get(timeout=30)), RunStopped)
    assert isinstance(fault(driver.answer(driver.engine.read, Read(1, ("y",)))), RunStopped)
    assert driver.answer(driver.engine.end, 1) == Ended(1, Counts(1, 1, 0, most_in_flight=1))


def test_a_stopped_run_submits_nothing(driver: Driver) -> None:
    driver.load(double())
    driver.answer(driver.engine.begin, Begin(1, {"x": np.ones((2, 1), np.float32)}, ("y",)))
    driver.engine.stop(1)
    assert driver.answer(driver.engine.submit, Segment(1, 0, *WHOLE)) == Dropped(1, 0)
    assert driver.answer(driver.engine.end, 1) == Ended(1, Counts(0, 0, 1))
    driver.engine.stop(1)
    assert isinstance(driver.run({"x": np.ones((2, 1), np.float32)}, number=2), Outputs)


def test_stop_reaches_a_begin_that_waits(driver: Driver) -> None:
    driver.load(double())
    gate = threading.Event()
    driver.hold(gate)
    replies = driver.ask(driver.engine.begin, Begin(1, {"x": np.ones((2, 1), np.float32)}, ("y",)))
    driver.engine.stop(1)
    gate.set()
    assert isinstance(fault(replies.get(timeout=30)), RunStopped)
    assert driver.answer(driver.engine.end, 1) == Ended(1, Counts())


def test_close_stops_a_load_and_what_comes_after(driver: Driver) -> None:
    gate = threading.Event()
    driver.hold(gate)
    loading: queue.Queue[Reply] = queue.Queue()
    driver.engine.load(Load(double()), loading.put, driver.progress.append)
    first, second = driver.ask(driver.engine.close), driver.ask(driver.engine.close)
    gate.set()
    assert isinstance(fault(loading.get(timeout=30)), RunStopped)
    assert first.get(timeout=30) == second.get(timeout=30) == Closed()
    assert isinstance(fault(driver.answer(driver.engine.begin, Begin(1, {}, ()))), RunStopped)
    assert driver.answer(driver.engine.end, 1) == Ended(1, Counts())
    assert isinstance(fault(driver.load(double())), RunStopped)


def test_without_onnxruntime(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    error = fault(driver.load(double()))
    assert isinstance(error, NoAdapter)
    assert str(error) == module.MISSING
