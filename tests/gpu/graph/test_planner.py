from __future__ import annotations

import numpy as np
import pytest

from trionnx.gpu.errors import InvalidData, InvalidModel, RunStopped, UnsupportedOperator
from trionnx.gpu.graph.planner import Planner
from trionnx.gpu.graph.read import read_model
from trionnx.gpu.graph.target import CPU_LIKE

F = np.dtype(np.float32)


def nothing() -> None:
    pass


def plan(model, **shapes):
    planner = Planner(read_model(model), CPU_LIKE)
    inputs = {i.name: (i.dtype or F, shapes[i.name]) for i in planner.model.inputs}
    return planner, planner.start(inputs, nothing)


def test_shape_arithmetic_leaves_no_step(parse):
    model = parse(
        "g (float[N,C,H,W] x) => (float[N,M] y) <int64[1] minus = {-1}, int64[1] zero = {0}, int64[1] one = {1}>"
        "{ s = Shape(x) n = Slice(s, zero, one) d = Concat<axis=0>(n, minus) y = Reshape(x, d) }"
    )
    _, block = plan(model, x=(2, 3, 4, 5))
    assert [type(s).__name__ for s in block.steps] == ["Upload"]
    assert block.results["y"][1].shape == (2, 60)


def test_a_condition_that_is_fed_ends_a_block_and_each_answer_is_planned_once(parse):
    model = parse(
        "g (float[3] x, bool c) => (float[3] y) {"
        "y = If (c) <then_branch = t () => (float[3] a) { a = Relu(x) },"
        "else_branch = e () => (float[3] b) { b = Neg(x) }> }"
    )
    planner, first = plan(model, x=(3,), c=())
    assert not first.results
    yes = planner.resume(first, [np.array(True)], nothing)
    no = planner.resume(first, [np.array(False)], nothing)
    assert yes is not no
    assert planner.resume(first, [np.array(True)], nothing) is yes
    assert yes.results


@pytest.mark.parametrize("condition", [True, False])
def test_branches_read_values_around_them_and_give_outputs(open_model, parse, rng, condition):
    driver = open_model(
        parse(
            "g (float[3] x, bool c) => (float[3] y, float[3] z) { w = Add(x, x)"
            "u, z = If (c) <"
            "then_branch = t () => (float[3] a, float[3] w2) { a = Relu(w) w2 = Neg(w) },"
            "else_branch = e () => (float[3] b, float[3] d) { b = Mul(w, x) d = Identity(b) }>"
            "y = Sub(u, x) }"
        )
    )
    x = rng.standard_normal(3, np.float32)
    y, z = driver.run({"x": x, "c": np.array(condition)})
    w = x + x
    a, b = (np.maximum(w, 0), -w) if condition else (w * x, w * x)
    np.testing.assert_allclose(y, a - x, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(z, b, rtol=1e-6, atol=1e-6)


def test_nested_branches(open_model, parse):
    driver = open_model(
        parse(
            "g (float[2] x, bool c, bool d) => (float[2] y) { y = If (c) <"
            "then_branch = t () => (float[2] a) { a = If (d) <"
            "then_branch = tt () => (float[2] p) { p = Add(x, x) },"
            "else_branch = te () => (float[2] q) { q = Mul(x, x) }> },"
            "else_branch = e () => (float[2] b) { b = Identity(x) }> }"
        )
    )
    x = np.array([3, 5], np.float32)
    expected = {(1, 1): x + x, (1, 0): x * x, (0, 1): x, (0, 0): x}
    for (c, d), value in [*expected.items(), *expected.items()]:
        (y,) = driver.run({"x": x, "c": np.array(bool(c)), "d": np.array(bool(d))})
        np.testing.assert_array_equal(y, value)


def test_a_shape_that_values_decide(open_model, parse, rng):
    driver = open_model(parse("g (float[N] x) => (float[M] y) { n = NonZero(x) f = Cast<to=1>(n) y = Relu(f) }"))
    for count in (3, 0, 5, 3):
        x = np.zeros(8, np.float32)
        x[:count] = 1
        (y,) = driver.run({"x": x})
        np.testing.assert_array_equal(y, np.arange(count, dtype=np.float32)[None])


def test_a_reshape_whose_shape_is_fed(open_model, parse):
    driver = open_model(parse("g (float[A,B] x, int64[R] s) => (float[C,D] y) { r = Reshape(x, s) y = Add(r, r) }"))
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    for shape in ([4, 3], [2, -1], [12, 1]):
        (y,) = driver.run({"x": x, "s": np.array(shape)})
        np.testing.assert_array_equal(y, 2 * x.reshape(shape))


def test_loops_run_on_the_host_with_values_around_them(open_model, parse):
    driver = open_model(
        parse(
            "g (float[2] x, int64 n) => (float[2] y) <bool yes = {1}> { d = Add(x, x) y = Loop (n, yes, x) <"
            "body = b (int64 i, bool c, float[2] v) => (bool k, float[2] w) { k = Identity(c) w = Add(v, d) }> }"
        )
    )
    x = np.array([1, 2], np.float32)
    (y,) = driver.run({"x": x, "n": np.array(3)})
    np.testing.assert_array_equal(y, x + 3 * (x + x))


def test_host_steps_on_floats_can_be_refused(parse):
    model = read_model(parse("g (float[N] x) => (float[M] y) { n = NonZero(x) y = Cast<to=1>(n) }"))
    planner = Planner(model, CPU_LIKE, allow_host_steps=False)
    with pytest.raises(UnsupportedOperator, match="NonZero"):
        planner.start({"x": (F, (3,))}, nothing)


def test_an_index_out_of_range_names_the_node(open_model, parse):
    driver = open_model(parse("g (float[10] x, int64[3] i) => (float[3] y) { y = Gather<axis=0>(x, i) }"))
    x = np.arange(10, dtype=np.float32)
    with pytest.raises(InvalidData, match=r"Gather.*10"):
        driver.run({"x": x, "i": np.array([0, 10, 1])})
    (y,) = driver.run({"x": x, "i": np.array([-1, -9, -10])})
    np.testing.assert_array_equal(y, [9, 1, 0])


def test_shapes_that_do_not_broadcast_name_the_node(parse):
    with pytest.raises(InvalidModel, match=r"Add_0.*\[2\].*\[3\]"):
        plan(parse("g (float[N] x, float[M] z) => (float[K] y) { y = Add(x, z) }"), x=(2,), z=(3,))


def test_planning_can_be_stopped_between_nodes(parse):
    model = read_model(parse("g (float[N] x) => (float[N] y) { a = Relu(x) b = Neg(a) y = Abs(b) }"))
    asked = []

    def check() -> None:
        asked.append(1)
        if len(asked) == 2:
            raise RunStopped

    with pytest.raises(RunStopped):
        Planner(model, CPU_LIKE).start({"x": (F, (3,))}, check)


def test_every_node_is_explained(parse):
    model = parse(
        "g (float[N,4] x) => (float[M] y, int64[2] s) { r = Relu(x) y = Flatten(r) n = NonZero(r) s = Shape(n) }"
    )
    planner, _ = plan(model, x=(2, 4))
    where = {e.op: e.where for e in planner.explained}
    assert where["Relu"] == "gpu"
    assert where["Flatten"] == "view"
    assert where["NonZero"] == "host"
    assert all(e.why for e in planner.explained)


LOOP = """g (float[2,3] x, int64 n, bool c) => (float[2,3] y, float[A,2,3] z) { d = Add(x, x) y, z = Loop (n, c, x) <
body = b (int64 i, bool k, float[2,3] v) => (bool k2, float[2,3] w, float[2,3] s) {
f = Cast<to=1>(i) a = Add(v, d) w = Mul(a, f) s = Relu(w) t = ReduceMax<keepdims=0>(w) k2 = Less(t, limit) }> }"""


def right_loop(x, turns, limit):
    v, scans, d = x, [], x + x
    for i in range(turns):
        v = (v + d) * np.float32(i)
        scans.append(np.maximum(v, 0))
        if v.max() >= limit:
            break
    return v, np.stack(scans)


@pytest.mark.parametrize(("turns", "limit"), [(1, 1e9), (5, 1e9), (5, 20.0), (3, -1.0)])
def test_loops_are_unrolled_and_stop_where_values_say(open_model, parse, turns, limit):
    text = LOOP.replace("limit", "l").replace("f = Cast", f"l = Constant<value_float={limit}>() f = Cast")
    driver = open_model(parse(text))
    x = np.array([[1, -2, 3], [4, 0, -6]], np.float32)
    for _ in range(2):
        y, z = driver.run({"x": x, "n": np.array(turns), "c": np.array(True)})
        expected_y, expected_z = right_loop(x, turns, limit)
        np.testing.assert_allclose(y, expected_y, rtol=1e-6)
        np.testing.assert_allclose(z, expected_z, rtol=1e-6)
    where = {e.op: e.where for e in driver.engine.explain()}
    assert where["Add"] == where["Mul"] == "gpu"
    assert where["Loop"] != "host"


def test_a_loop_of_no_turns(open_model, parse):
    driver = open_model(
        parse(
            "g (float[2] x, int64 n) => (float[2] y) <bool yes = {1}> { y = Loop (n, yes, x) <"
            "body = b (int64 i, bool c, float[2] v) => (bool k, float[2] w) { k = Identity(c) w = Add(v, v) }> }"
        )
    )
    x = np.array([1, 2], np.float32)
    for turns in (0, 2, 0):
        (y,) = driver.run({"x": x, "n": np.array(turns)})
        np.testing.assert_array_equal(y, x * 2**turns)


@pytest.mark.parametrize("backward", [0, 1])
@pytest.mark.parametrize("axis", [0, 1])
def test_scans(open_model, parse, rng, axis, backward):
    driver = open_model(
        parse(
            f"g (float[3] s, float[A,B] x) => (float[3] t, float[C,D] y) {{ t, y = Scan (s, x) <num_scan_inputs=1,"
            f" scan_input_axes=[{axis}], scan_input_directions=[{backward}], scan_output_axes=[{axis}],"
            f" scan_output_directions=[{backward}],"
            " body = b (float[3] v, float[3] r) => (float[3] w, float[3] o) { w = Add(v, r) o = Mul(w, r) }> }"
        )
    )
    x, s = rng.standard_normal((5, 3), np.float32), rng.standard_normal(3, np.float32)
    state, made = s, []
    for row in x[::-1] if backward else x:
        state = state + row
        made.append(state * row)
    expected = np.stack(made[::-1] if backward else made, axis)
    t, y = driver.run({"s": s, "x": np.ascontiguousarray(x.T) if axis else x})
    np.testing.assert_allclose(t, state, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert all(e.where != "host" for e in driver.engine.explain())


def test_what_no_shader_can_see_in_one_piece_is_the_hosts(open_model, parse, monkeypatch):
    from dataclasses import replace

    import trionnx.gpu.device.device as device_module
    from trionnx.gpu.device import adapters

    real = adapters.target_of
    monkeypatch.setattr(device_module, "target_of", lambda info: replace(real(info), max_binding_bytes=4096))
    driver = open_model(
        parse(
            "g (float[N] x, float[1] b) => (float[N] y, float[M] z)"
            " { a = Add(x, b) y = Relu(a) z = Concat<axis=0>(b, b) }"
        )
    )
    b = np.ones(1, np.float32)
    for size, where in ((1024, "gpu"), (1025, "host")):
        x = np.arange(size, dtype=np.float32) - 500
        y, z = driver.run({"x": x, "b": b})
        np.testing.assert_array_equal(y, np.maximum(x + 1, 0))
        np.testing.assert_array_equal(z, [1, 1])
        assert {e.op: e.where for e in driver.engine.explain()}["Relu"] == where


def test_what_a_value_told_one_block_does_not_reach_another(open_model, parse):
    driver = open_model(
        parse(
            "g (int32[N,2] x, int32[2] s) => (int32[M,2] y, int32[N,2] z)"
            " <int32[2] e = {9999, 2}, int32[2] a = {0, 1}> { y = Slice(x, s, e, a) z = Add(x, s) }"
        )
    )
    x = np.arange(20000, dtype=np.int32).reshape(10000, 2)
    for s in ([3, 0], [7, 0], [3, 0]):
        y, z = driver.run({"x": x, "s": np.array(s, np.int32)})
        np.testing.assert_array_equal(y, x[s[0] : 9999])
        np.testing.assert_array_equal(z, x + np.array(s, np.int32))
