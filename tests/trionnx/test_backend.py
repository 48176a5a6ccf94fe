from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import numpy as np
import onnx
import pytest
import trio
from onnx import TensorProto, helper

import trionnx
from trionnx import backend
from trionnx.backend import TrionnxBackend
from trionnx.gpu.errors import InvalidInput, InvalidModel, NoAdapter, UnsupportedOperator

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def model(*nodes: onnx.NodeProto, opset: int = 18) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in ("a", "b")],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


ADD = model(helper.make_node("Add", ["a", "b"], ["y"]))


def test_a_model_is_prepared_and_run():
    rep = backend.prepare(ADD)
    assert rep.backend == "webgpu"
    assert rep.adapter
    for inputs in ([X, X], (X, X), {"b": X, "a": X}):
        (got,) = rep.run(inputs)
        np.testing.assert_array_equal(got, X + X)
    assert isinstance(rep.run([X, X]), tuple)
    rep.close()
    rep.close()
    with pytest.raises(trio.ClosedResourceError):
        rep.run([X, X])


def test_a_model_is_run_once():
    (got,) = backend.run_model(ADD, [X, 2 * X], device="CPU")
    np.testing.assert_array_equal(got, 3 * X)
    (got,) = TrionnxBackend.run_model(ADD.SerializeToString(), [X, X])
    np.testing.assert_array_equal(got, 2 * X)


def test_the_cpu_engine_by_name():
    rep = backend.prepare(ADD, backend="cpu")
    assert rep.backend == "cpu"
    np.testing.assert_array_equal(rep.run([X, X])[0], 2 * X)
    rep.close()


def test_a_node_is_run():
    (got,) = backend.run_node(helper.make_node("Add", ["a", "b"], ["y"]), [X, X])
    np.testing.assert_array_equal(got, 2 * X)
    (got,) = backend.run_node(helper.make_node("Neg", ["a"], ["y"]), X)
    np.testing.assert_array_equal(got, -X)
    (got,) = backend.run_node(helper.make_node("Mul", ["a", "a"], ["y"]), {"a": X})
    np.testing.assert_array_equal(got, X * X)
    values, places = backend.run_node(
        helper.make_node("TopK", ["x", "k"], ["v", "i"], axis=1), [X, np.array([1])], outputs_info=None
    )
    assert (values.tolist(), places.tolist(), places.dtype) == ([[2], [5]], [[2], [2]], np.int64)


def test_a_node_of_an_older_opset_and_of_another_domain():
    squeeze = helper.make_node("Squeeze", ["x"], ["y"], axes=[0])
    (got,) = backend.run_node(squeeze, [X[None]], opset_version=11)
    np.testing.assert_array_equal(got, X)
    scaler = helper.make_node("Scaler", ["x"], ["y"], domain="ai.onnx.ml", offset=[1.0], scale=[2.0])
    (got,) = backend.run_node(scaler, [X])
    np.testing.assert_array_equal(got, (X - 1) * 2)


def test_a_node_that_gives_a_sequence():
    (got,) = backend.run_node(helper.make_node("SequenceConstruct", ["a", "b"], ["s"]), [X, X + 1])
    assert isinstance(got, list)
    np.testing.assert_array_equal(got[1], X + 1)


def test_a_node_without_an_input_that_it_needs():
    with pytest.raises(InvalidInput, match="'b'"):
        backend.run_node(helper.make_node("Add", ["a", "b"], ["y"]), [X])


async def test_in_a_running_trio_app_it_waits_and_the_app_goes_on():
    (got,) = backend.run_model(ADD, [X, X])
    np.testing.assert_array_equal(got, 2 * X)
    (got,) = await trio.to_thread.run_sync(backend.run_model, ADD, [X, X])
    np.testing.assert_array_equal(got, 2 * X)
    async with trionnx.open_scheduler(backend="webgpu") as scheduler:
        session = await scheduler.load(ADD)
        (got,) = await session.run(None, {"a": X, "b": X})
    np.testing.assert_array_equal(got, 2 * X)


def test_from_many_threads_at_once():
    rep = backend.prepare(ADD)
    got: dict[int, np.ndarray] = {}

    def work(number: int) -> None:
        got[number] = rep.run([X, number * X])[0]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rep.close()
    for number in range(8):
        np.testing.assert_array_equal(got[number], (number + 1) * X)


def test_what_is_garbage_is_closed():
    rep = backend.prepare(ADD)
    session, loop = rep._session, rep._loop
    gone = weakref.ref(rep)
    assert session in loop.call(sessions)
    del rep
    gc.collect()
    assert gone() is None
    loop.call(lambda scheduler: session.aclose())
    assert session not in loop.call(sessions)


async def sessions(scheduler):
    return list(scheduler._sessions.values())


def test_errors_come_as_they_are():
    rep = backend.prepare(ADD)
    with pytest.raises(InvalidInput, match="'a': expected float32"):
        rep.run([X.astype(np.float64), X])
    with pytest.raises(InvalidInput, match="at most 2, got 3"):
        rep.run([X, X, X])
    with pytest.raises(InvalidInput, match="'b'"):
        rep.run([X, None])
    with pytest.raises(TypeError, match="unexpected keyword argument 'precision'"):
        rep.run([X, X], precision=3)
    rep.close()
    with pytest.raises(TypeError, match="unexpected keyword argument 'precision'"):
        backend.prepare(ADD, precision=3)
    with pytest.raises(ValueError, match="back end 'gpu' is not known"):
        backend.prepare(ADD, backend="gpu")
    with pytest.raises(NoAdapter, match="no adapter fits 'voodoo'"):
        backend.prepare(ADD, adapter="voodoo")


def test_a_model_that_breaks_the_rules():
    with pytest.raises(InvalidModel, match="Conv"):
        backend.prepare(model(helper.make_node("Conv", ["a"], ["y"])))


def test_an_unknown_operator_is_named_with_its_node():
    odd = model(helper.make_node("Frobnicate", ["a"], ["y"], name="odd"))
    with pytest.raises(UnsupportedOperator, match=r"operator Frobnicate \(opset 18\) of node 'odd'"):
        backend.run_model(odd, [X, X])


def test_host_steps_can_be_forbidden():
    scaler = helper.make_node("Scaler", ["c"], ["y"], domain="ai.onnx.ml", offset=[1.0], scale=[2.0])
    mixed = model(helper.make_node("Add", ["a", "b"], ["c"]), scaler)
    mixed.opset_import.add(domain="ai.onnx.ml", version=1)
    np.testing.assert_array_equal(backend.run_model(mixed, [X, X])[0], 4 * X - 2)
    with pytest.raises(UnsupportedOperator, match=r"operator ai.onnx.ml.Scaler .*host steps are not allowed"):
        backend.run_model(mixed, [X, X], allow_host_steps=False)


def test_devices(monkeypatch):
    monkeypatch.setattr(backend, "_nvidia", lambda: (3, 5))
    assert backend.supports_device("CPU")
    assert backend.supports_device("CUDA")
    assert backend.supports_device("CUDA:1")
    assert not backend.supports_device("CUDA:2")
    assert not backend.supports_device("TPU")
    assert backend._adapter_of("CUDA:1") == 5
    assert backend._adapter_of("CPU") is None
    with pytest.raises(NoAdapter, match="there are 2 NVIDIA GPUs"):
        backend.prepare(ADD, "CUDA:2")
    with pytest.raises(ValueError, match="device 'TPU' is not known"):
        backend.prepare(ADD, "TPU")


def test_a_wait_that_is_interrupted_stops_the_request(monkeypatch):
    rep = backend.prepare(ADD)
    felt, entered = threading.Event(), threading.Event()

    class Interrupted(threading.Event):
        def wait(self, timeout=None):
            assert entered.wait(20)
            raise KeyboardInterrupt

    async def forever(scheduler):
        entered.set()
        try:
            await trio.sleep_forever()
        finally:
            felt.set()

    events = iter([Interrupted()])
    monkeypatch.setattr(threading, "Event", lambda: next(events))
    with pytest.raises(KeyboardInterrupt):
        rep._loop.call(forever)
    monkeypatch.undo()
    assert felt.wait(20)
    np.testing.assert_array_equal(rep.run([X, X])[0], 2 * X)
    rep.close()


def test_a_call_from_its_own_loop_is_refused():
    rep = backend.prepare(ADD)

    async def inside(scheduler):
        return rep.run([X, X])

    with pytest.raises(RuntimeError, match="waits for the very thread"):
        rep._loop.call(inside)
    rep.close()


PROGRAM = """
import numpy as np, onnx.parser
from trionnx import backend
model = onnx.parser.parse_model('<ir_version: 9, opset_import: ["" : 18]> g (float[3] x) => (float[3] y) {y = Exp (x)}')
rep = backend.prepare(model)
print(rep.run([np.zeros(3, np.float32)])[0].tolist())
"""


def test_a_plain_program_ends_by_itself_and_says_nothing(tmp_path):
    made = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert (made.returncode, made.stdout) == (0, "[1.0, 1.0, 1.0]\n")
    assert "Traceback" not in made.stderr
