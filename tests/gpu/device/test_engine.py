from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from trionnx.gpu.device.adapters import DRIVER_LOCK, AdapterInfo, fitting, list_adapters
from trionnx.gpu.errors import InvalidModel, NoAdapter, RunStopped
from trionnx.gpu.seam import Begun, Cursor, Dropped, Fenced, Finished

CHAIN = """g (float[N,16] x) => (float[N,16] y) { a = Relu(x)
b = Transpose<perm=[1,0]>(a) c = Neg(b) d = Transpose<perm=[1,0]>(c) y = Add(d, x) }"""


def fake(index, name, kind):
    return AdapterInfo(index, name, "driver 1.0", "Vulkan", kind, f"{name}{index}")


SOFT, HARD, OTHER = fake(0, "llvmpipe", "software"), fake(1, "Radeon", "hardware"), fake(2, "GeForce", "hardware")


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [(None, HARD), ("", HARD), (0, SOFT), ("2", OTHER), ("geforce", OTHER), ("LLVM", SOFT), ("driver", HARD)],
)
def test_choosing_an_adapter(monkeypatch, selector, chosen):
    monkeypatch.delenv("TRIONNX_ADAPTER", raising=False)
    assert fitting([SOFT, HARD, OTHER], selector)[0] is chosen


def test_the_environment_chooses_where_the_caller_does_not(monkeypatch):
    monkeypatch.setenv("TRIONNX_ADAPTER", "2")
    assert fitting([SOFT, HARD, OTHER]) == [OTHER]
    assert fitting([SOFT, HARD, OTHER], "") == [OTHER]
    assert fitting([SOFT, HARD, OTHER], 0) == [SOFT]


def test_hardware_comes_first(monkeypatch):
    monkeypatch.delenv("TRIONNX_ADAPTER", raising=False)
    assert fitting([SOFT, HARD, OTHER]) == [HARD, OTHER, SOFT]


@pytest.mark.parametrize(("selector", "there"), [("nope", []), (None, []), (None, [SOFT]), (0, [SOFT])])
def test_no_adapter_says_both_ways_to_get_one(monkeypatch, selector, there):
    monkeypatch.delenv("TRIONNX_ADAPTER", raising=False)
    with pytest.raises(NoAdapter, match="mesa-vulkan-drivers") as caught:
        fitting(there, selector, ["hardware"])
    assert "trionnx[cpu]" in str(caught.value)
    assert all(a.name in str(caught.value) for a in there)


@pytest.mark.parametrize("selector", ["nope", 7])
def test_a_selector_that_fits_none_of_them_says_what_there_is(selector):
    with pytest.raises(NoAdapter) as caught:
        fitting([SOFT, HARD], selector)
    assert str(caught.value) == f"no adapter fits {selector!r}; there are: 0: {SOFT}, 1: {HARD}"


def test_adapters_of_no_use_are_dropped_under_the_drivers_lock(monkeypatch):
    """EGL aborts the process where one thread drops an OpenGL adapter while another lists them."""
    import wgpu

    dropped = []

    class OpenGl:
        info = {"backend_type": "OpenGL"}  # noqa: RUF012
        features = frozenset[str]()

        def __del__(self):
            dropped.append(DRIVER_LOCK.locked())

    monkeypatch.setattr(wgpu.gpu, "enumerate_adapters_sync", lambda: [OpenGl(), OpenGl()])
    assert list_adapters() == []
    assert dropped == [True, True]


def test_results_do_not_depend_on_where_a_step_is_cut(open_model, parse, rng):
    driver = open_model(parse(CHAIN))
    x = rng.standard_normal((600, 16), np.float32)
    (whole,) = driver.run({"x": x})
    for units in (1, 2, 3):
        (cut,) = driver.run({"x": x}, units=units)
        assert whole.tobytes() == cut.tobytes()


def test_plans_are_kept_by_shape_and_given_back(open_model, parse, rng):
    driver = open_model(parse(CHAIN))
    device = driver.engine.device
    sizes = []
    for n in [*range(1, 30), *range(1, 30)]:
        x = rng.standard_normal((n, 16), np.float32)
        (y,) = driver.run({"x": x})
        np.testing.assert_allclose(y, -np.maximum(x, 0) + x, atol=1e-6)
        sizes.append(device.bytes)
    assert sizes[-1] <= max(sizes[:29])
    assert len(driver.engine._plans) <= 8


def test_a_stopped_run_submits_nothing_more_and_the_next_is_whole(open_model, parse, rng):
    driver = open_model(parse(CHAIN))
    x = rng.standard_normal((64, 16), np.float32)
    (before,) = driver.run({"x": x})
    block = driver.begin({"x": x})
    assert isinstance(driver.submit(0, Cursor(0, 0), Cursor(0, 1)), Fenced)
    driver.engine.stop(driver.runs)
    assert isinstance(driver.submit(1, Cursor(0, 1), Cursor(0, len(block.steps))), Dropped)
    with pytest.raises(RunStopped):
        driver.read()
    driver.end()
    assert (driver.counts.submitted, driver.counts.finished, driver.counts.dropped) == (1, 1, 1)
    (after,) = driver.run({"x": x})
    assert before.tobytes() == after.tobytes()


def test_outputs_that_need_no_work(open_model, parse):
    driver = open_model(
        parse("g (float[N] x, int64[M] i) => (float[N] x2, int64[M] i2) { x2 = Identity(x) i2 = Identity(i) }")
    )
    x, i = np.arange(3, dtype=np.float32), np.array([2**40, -1])
    x2, i2 = driver.run({"x": x, "i": i})
    np.testing.assert_array_equal(x2, x)
    np.testing.assert_array_equal(i2, i)
    assert not np.shares_memory(i2, i)


def test_a_model_without_nodes_to_run(open_model):
    value = helper.make_tensor("c", TensorProto.FLOAT, [2], [1.0, 2.0])
    node = helper.make_node("Constant", [], ["y"], value=value)
    graph = helper.make_graph([node], "g", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])])
    driver = open_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))
    assert isinstance(driver.begin({}), Finished)
    (y,) = driver.read()
    driver.end()
    np.testing.assert_array_equal(y, [1, 2])


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int64, np.uint8, np.int32, np.bool_])
def test_every_dtype_keeps_its_values(open_model, dtype):
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [helper.make_node("Concat", ["x", "x"], ["y"], axis=0)],
        "g",
        [helper.make_tensor_value_info("x", kind, ["N"])],
        [helper.make_tensor_value_info("y", kind, ["M"])],
    )
    driver = open_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))
    x = np.array([0, 1, 100]).astype(dtype)
    (y,) = driver.run({"x": x})
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, np.concatenate([x, x]))


def test_an_overridable_initialiser(open_model, parse):
    model = parse("g (float[N] x, float[1] b) => (float[N] y) <float[1] b = {3.0}> { y = Add(x, b) }")
    driver = open_model(model)
    x = np.zeros(2, np.float32)
    if any(i.name == "b" for i in driver.loaded.overridable):
        (y,) = driver.run({"x": x, "b": np.array([5], np.float32)})
        np.testing.assert_array_equal(y, [5, 5])
    (y,) = driver.run({"x": x})
    np.testing.assert_array_equal(y, [3, 3])


def test_closing_gives_everything_back_and_refuses_what_comes_after(open_model, parse, rng):
    driver = open_model(parse("g (float[N,8] x, float[8,8] w) => (float[N,8] y) { y = MatMul(x, w) }"))
    driver.run({"x": rng.standard_normal((3, 8), np.float32), "w": rng.standard_normal((8, 8), np.float32)})
    device = driver.engine.device
    assert device.bytes > 0
    driver.close()
    assert device.bytes == 0
    with pytest.raises(RunStopped):
        driver.begin({})


def test_a_load_that_is_stopped_fails_and_leaves_nothing(open_model, parse):
    from trionnx.gpu.device.engine import WebGpuEngine

    engine = WebGpuEngine()
    engine.close(lambda reply: None)
    with pytest.raises(RunStopped):
        open_model(parse(CHAIN), engine=engine)


def test_a_file_that_is_no_model(open_model, tmp_path):
    path = tmp_path / "notes.onnx"
    path.write_text("This is not a model.\n" * 20)
    with pytest.raises(InvalidModel, match=r"notes\.onnx"):
        open_model(path)


def test_a_plan_made_at_load(open_model, parse):
    driver = open_model(parse(CHAIN), input_shapes={"x": (4, 16)})
    made = driver.engine.device.pipelines
    assert made > 0
    begun = driver.begin({"x": np.zeros((4, 16), np.float32)})
    driver.end()
    assert not isinstance(begun, Begun)
    assert driver.engine.device.pipelines == made
    assert onnx.__version__
