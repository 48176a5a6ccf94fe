"""Values that stay on the device between runs, on the WebGpu engine itself."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper

from trionnx.gpu.errors import DeviceLost, InvalidInput, RunStopped
from trionnx.gpu.seam import TensorRef

PAIR = "g (float[n,4] a, float[n,4] b) => (float[m,4] y, float[n,4] z) { y = Concat<axis=0>(a, b) z = Sub(a, b) }"


def through(dtype, shape=("n",)):
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    infos = [helper.make_tensor_value_info(name, kind, shape) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", infos[:1], infos[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


ON_DEVICE = [np.float32, np.int32, np.uint32, np.bool_, np.float16, np.int8, np.uint8, np.int16, np.uint16]


@pytest.mark.parametrize("dtype", [*ON_DEVICE, ml_dtypes.bfloat16, np.int64, np.uint64, np.float64, np.object_])
def test_every_dtype_comes_back_as_it_went(open_model, dtype, rng):
    driver = open_model(through(dtype))
    numbers = rng.integers(0, 2, 5)
    x = numbers.astype(str).astype(object) if dtype is np.object_ else numbers.astype(dtype)
    (ref,) = driver.run({"x": x}, keep=("y",))
    assert isinstance(ref, TensorRef)
    assert (ref.dtype, ref.shape) == (x.dtype, (5,))
    (again,) = driver.run({"x": ref}, keep=("y",))
    for y in (*driver.bring(ref, again), *driver.run({"x": again})):
        assert y.dtype == x.dtype
        np.testing.assert_array_equal(y, x)
    device = driver.engine.device
    before = device.uploaded, device.read_back
    driver.run({"x": again}, keep=("y",))
    assert dtype not in ON_DEVICE or (device.uploaded, device.read_back) == before


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 5)])
def test_every_shape_comes_back_as_it_went(open_model, shape, rng):
    driver = open_model(through(np.float32, list(shape)))
    x = rng.standard_normal(shape).astype(np.float32)
    (ref,) = driver.run({"x": x}, keep=("y",))
    assert ref.shape == shape
    (ref,) = driver.run({"x": ref}, keep=("y",))
    np.testing.assert_array_equal(driver.bring(ref)[0], x)


@pytest.fixture
def pair(open_model, parse):
    """Two models on one engine: what makes values of arrays, and what computes with two of them."""
    makes = open_model(parse("g (float[n,4] a) => (float[n,4] y) { y = Neg(a) }"))
    return makes, open_model(parse(PAIR), engine=makes.engine, model=1)


def test_results_do_not_depend_on_where_inputs_lie(pair, rng):
    makes, driver = pair
    arrays = [rng.standard_normal((50, 4)).astype(np.float32) for _ in range(3)]
    refs = [makes.run({"a": -array}, keep=("y",))[0] for array in arrays]
    device = driver.engine.device
    for first in range(3):
        for second in range(3):
            whole = driver.run({"a": arrays[first], "b": arrays[second]})
            for a, b in ((refs[first], refs[second]), (refs[first], arrays[second]), (arrays[first], refs[second])):
                for units in (None, 1):
                    for want, got in zip(whole, driver.run({"a": a, "b": b}, units=units), strict=True):
                        assert want.tobytes() == got.tobytes()
    before = device.uploaded, device.read_back
    y, z = driver.run({"a": refs[0], "b": refs[1]}, keep=("y", "z"))
    assert (device.uploaded, device.read_back) == before
    np.testing.assert_array_equal(driver.bring(y)[0], np.concatenate(arrays[:2]))
    assert device.read_back == before[1] + 100 * 4 * 4
    np.testing.assert_array_equal(driver.bring(z)[0], arrays[0] - arrays[1])


def test_what_is_kept_is_not_written_by_later_runs(pair, rng):
    makes, _ = pair
    arrays = [rng.standard_normal((9, 4)).astype(np.float32) for _ in range(4)]
    refs = [makes.run({"a": array}, keep=("y",))[0] for array in arrays]
    for array, kept in zip(arrays, makes.bring(*refs), strict=True):
        np.testing.assert_array_equal(kept, -array)


def test_memory_is_counted_and_given_back(pair, rng):
    makes, _ = pair
    a = rng.standard_normal((100, 4)).astype(np.float32)
    makes.run({"a": a})
    device = makes.engine.device
    before = device.bytes
    refs = [makes.run({"a": a}, keep=("y",))[0] for _ in range(5)]
    assert device.bytes == before + 5 * 1600
    makes.free(*refs[:2])
    assert device.bytes == before + 3 * 1600
    makes.free(*refs)
    assert device.bytes == before
    makes.begin({"a": a}, keep=("y",))
    makes.end()
    assert device.bytes == before


def test_outputs_of_every_origin_are_kept(open_model, parse, rng):
    driver = open_model(
        parse(
            """g (float[n,4] x, string[k] t) => (float[n,4] same, float[n,4] twin, float[n,4] made, float[n,4] also,
                 float[2] fixed, int64[2] shape, float[4,n] turned, string[k] text, float[e,4] empty) {
                 same = Identity(x) twin = Identity(x) made = Exp(x) also = Identity(made)
                 fixed = Constant<value = float[2] {1.5, 2.5}>() shape = Shape(x) turned = Transpose(made)
                 text = Identity(t) zero = Constant<value = int64[1] {0}>() four = Constant<value = int64[1] {4}>()
                 none = Constant<value = int64[2] {0, 4}>()  empty = ConstantOfShape(none) }"""
        )
    )
    feeds = {"x": rng.standard_normal((3, 4)).astype(np.float32), "t": np.array(["a", "bc"], object)}
    names = tuple(info.name for info in driver.loaded.outputs)
    expected = driver.run(feeds)
    for name, want, got in zip(names, expected, driver.bring(*driver.run(feeds, keep=names)), strict=True):
        assert (want.dtype, want.shape) == (got.dtype, got.shape), name
        np.testing.assert_array_equal(want, got, err_msg=name)
    (x,) = driver.bring(ref := driver.run(feeds, keep=("same",))[0])
    np.testing.assert_array_equal(x, feeds["x"])
    again = driver.bring(*driver.run({**feeds, "x": ref}, keep=names))
    for name, want, got in zip(names, expected, again, strict=True):
        np.testing.assert_array_equal(want, got, err_msg=name)


def test_a_value_that_decides_is_fetched_and_nothing_else(open_model, parse, rng):
    driver = open_model(
        parse(
            """g (bool c, float[n] x) => (float[m] y, bool d) {
                 d = Not(c) a = Add(x, x)
                 y = If(c) <then_branch = t () => (float[n] p) { p = Neg(a) },
                           else_branch = e () => (float[k] q) { q = Concat<axis=0>(a, a) }> }"""
        )
    )
    x = rng.standard_normal(8).astype(np.float32)
    (_, no) = driver.run({"c": np.array(True), "x": x}, keep=("d",))
    (_, yes) = driver.run({"c": no, "x": x}, keep=("d",))
    device = driver.engine.device
    for ref, want in ((yes, -2 * x), (no, np.concatenate([2 * x, 2 * x])), (yes, -2 * x)):
        driver.run({"c": ref, "x": x}, keep=("y",))
        before = device.read_back
        y, _ = driver.run({"c": ref, "x": x}, keep=("y", "d"))
        assert device.read_back == before + 4
        np.testing.assert_array_equal(driver.bring(y)[0], want)


def test_a_host_step_fetches_what_it_reads(open_model, parse, rng):
    driver = open_model(
        parse("g (float[n] x) => (float[n] y, float[k] u) { y = Identity(x) u = Unique<sorted=1>(x) }"),
    )
    x = np.array([3, 1, 3, 2], np.float32)
    ref, unique = driver.run({"x": x}, keep=("y", "u"))
    np.testing.assert_array_equal(driver.run({"x": ref})[1], [1, 2, 3])
    np.testing.assert_array_equal(driver.run({"x": unique})[0], [1, 2, 3])


def test_misuse_is_refused_before_anything_is_submitted(pair, rng):
    makes, driver = pair
    a = rng.standard_normal((5, 4)).astype(np.float32)
    (ref,) = makes.run({"a": a}, keep=("y",))
    (gone,) = makes.run({"a": a}, keep=("y",))
    driver.free(gone)
    for bad, error, says in (
        (replace(ref, actor=99), InvalidInput, "'b': expected a tensor on this session's device, got one on another"),
        (replace(ref, generation=5), DeviceLost, "the tensor for 'b' went with the device that it was on"),
        (gone, InvalidInput, "'b': expected a tensor that is there, got one that was freed"),
        (replace(ref, shape=(5, 3)), InvalidInput, r"'b': expected shape \(n, 4\), got \(5, 3\)"),
    ):
        with pytest.raises(error, match=says):
            driver.run({"a": ref, "b": bad})
        assert driver.counts.submitted == 0
    np.testing.assert_array_equal(driver.run({"a": ref, "b": a})[1], -2 * a)


def test_a_tensor_that_is_freed_during_a_run_lasts_until_its_end(pair, rng):
    makes, driver = pair
    a = rng.standard_normal((5, 4)).astype(np.float32)
    (ref,) = makes.run({"a": -a}, keep=("y",))
    driver.run({"a": ref, "b": ref})
    before = driver.engine.device.bytes
    real = driver.begin

    def begin(*arguments):
        block = real(*arguments)
        driver.free(ref)
        assert driver.engine.device.bytes == before
        return block

    driver.begin = begin
    y, z = driver.run({"a": ref, "b": ref})
    np.testing.assert_array_equal(y, np.concatenate([a, a]))
    assert not z.any()
    assert driver.engine.device.bytes == before - 80


def test_a_model_is_unloaded_with_what_its_runs_kept_and_the_other_goes_on(open_model, parse, rng):
    weights = rng.standard_normal((64, 64)).astype(np.float32)
    model = parse("g (float[n,64] x, float[64,64] w) => (float[n,64] y) { y = MatMul(x, w) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    del model.graph.input[1]
    first = open_model(model)
    second = open_model(model, engine=first.engine, model=1)
    x = rng.standard_normal((3, 64)).astype(np.float32)
    (y,) = first.run({"x": x})
    device = first.engine.device
    alone = device.bytes
    (ref,) = second.run({"x": x}, keep=("y",))
    assert device.bytes >= alone + weights.nbytes + ref.shape[0] * 64 * 4
    assert first.engine.explain(1)
    second.free(models=(1,))
    assert device.bytes <= alone
    assert first.engine.explain(1) == ()
    with pytest.raises(InvalidInput, match="freed"):
        first.run({"x": ref})
    assert first.run({"x": x})[0].tobytes() == y.tobytes()
    with pytest.raises(RunStopped):
        second.run({"x": x})


def test_a_load_beside_ends_where_its_model_is_not_wanted_any_more(open_model, parse):
    driver = open_model(parse(PAIR))
    driver.free(models=(1,))
    with pytest.raises(RunStopped):
        open_model(parse(PAIR), engine=driver.engine, model=1)


def test_each_model_keeps_its_own_plans(pair, rng):
    makes, driver = pair
    for n in range(1, 12):
        a = rng.standard_normal((n, 4)).astype(np.float32)
        makes.run({"a": a})
        driver.run({"a": a, "b": a})
    assert [key[0] for key in makes.engine._plans].count(0) == [key[0] for key in makes.engine._plans].count(1) == 8


def test_closing_gives_kept_values_back(open_model, parse, rng):
    driver = open_model(parse(PAIR))
    a = rng.standard_normal((5, 4)).astype(np.float32)
    driver.run({"a": a, "b": a}, keep=("y", "z"))
    device = driver.engine.device
    driver.close()
    assert device.bytes == 0
