"""Loops whose body is a block that is entered again, against the same loops unrolled and on the host."""

from __future__ import annotations

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

import trionnx.gpu.graph.planner as planner_module
import trionnx.gpu.graph.repeat as repeat_module
from trionnx.gpu.errors import InvalidData, RunStopped
from trionnx.gpu.seam import BlockView, Cursor, Dropped, Fenced


@pytest.fixture(params=[0, 8, 512], ids=["a turn a lap", "some turns", "many turns"])
def rolled(request, monkeypatch):
    """No loop is short; laps that end with the loop, or before it."""
    monkeypatch.setattr(repeat_module, "MOST_NODES", 0)
    monkeypatch.setattr(planner_module, "LAP_NODES", request.param)


def is_cycle(driver, op="Loop"):
    return any(e.op == op and e.where == "view" and "a block of its own" in e.why for e in driver.engine.explain())


X = np.array([1.0, 2.0, -3.0], np.float32)
LOOPS = {
    "a sum": "w = Add(v, x) k2 = Identity(k)",
    "a value around it that is computed in place": "w = Add(v, d) k2 = Identity(k)",
    "the number of the turn": "f = Cast<to=1>(i) w = Add(v, f) k2 = Identity(k)",
    "a condition on what it computes": "w = Add(v, x) m = ReduceMax<keepdims=0>(w) k2 = Less(m, limit)",
    "a condition on the number": "w = Mul(v, half) k2 = Less(i, three)",
    "a condition that is false": "w = Add(v, x) k2 = Not(k)",
    "a branch in it": """w = If(odd) <then_branch = t () => (float[3] p) { p = Add(v, x) },
        else_branch = e () => (float[3] q) { q = Mul(v, half) }> k2 = Identity(k)""",
    "a branch by what it computes": """m = ReduceMax<keepdims=0>(v) o = Less(m, limit) w = If(o) <
        then_branch = t () => (float[3] p) { p = Add(v, x) }, else_branch = e () => (float[3] q) { q = Mul(v, half) }
        > k2 = Identity(k)""",
    "a shape by the number": """one = Constant<value = int64[1] {1}>() j = Reshape(i, one) b = Add(j, one)
        z = Constant<value = int64[1] {0}>() c = Slice(v, z, b) m = ReduceMax<keepdims=1>(c) w = Add(v, m)
        k2 = Identity(k)""",
}
BODY = """g (float[3] x, int64 n) => (float[3] y) {
    d = Mul(x, x) yes = Constant<value = bool {1}>() half = Constant<value = float {0.5}>()
    limit = Constant<value = float {7.0}>() three = Constant<value = int64 {3}>()
    y = Loop(n, yes, x) <body = b (int64 i, bool k, float[3] v) => (bool k2, float[3] w) { BODY }>
}"""


@pytest.mark.parametrize("what", LOOPS)
def test_a_loop(open_model, parse, rolled, what):
    body = LOOPS[what].replace("If(odd)", "If(k)")
    model = parse(BODY.replace("BODY", body))
    driver = open_model(model)
    oracle = ReferenceEvaluator(model)
    for turns in (1, 6, 2, 6):
        feeds = {"x": X, "n": np.array(turns)}
        (want,) = oracle.run(None, feeds)
        for units in (None, 1):
            (y,) = driver.run(feeds, units=units)
            np.testing.assert_allclose(y, np.asarray(want), rtol=1e-5)
    assert is_cycle(driver)


def test_what_is_carried_may_change_places_and_stay_on_the_host(open_model, parse, rolled):
    model = parse("""g (float[2] a, float[2] b, int64[2] c, int32 d, int64 n) =>
        (float[2] p, float[2] q, int64[2] r, int32 s, bool t) {
        yes = Constant<value = bool {1}>() wide = Constant<value = int64[2] {4294967296, 1}>()
        one = Constant<value = int32 {1}>()
        p, q, r, s, t = Loop(n, yes, a, b, c, d, yes) <body = g (int64 i, bool k, float[2] a0, float[2] b0, int64[2] c0,
            int32 d0, bool e0) => (bool k1, float[2] b1, float[2] a1, int64[2] c1, int32 d1, bool e1) {
            k1 = Identity(k) b1 = Identity(b0) a1 = Add(a0, b0) c1 = Add(c0, wide) d1 = Add(d0, one) e1 = Not(e0)
        }> }""")
    driver = open_model(model)
    feeds = {
        "a": np.array([1, 2], np.float32),
        "b": np.array([3, 5], np.float32),
        "c": np.array([1, -1]),
        "d": np.array(40, np.int32),
        "n": np.array(7),
    }
    for got, right in zip(driver.run(feeds), list(ReferenceEvaluator(model).run(None, feeds)), strict=True):
        want = np.asarray(right)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    assert is_cycle(driver)


def test_what_is_carried_may_just_change_places_or_not_at_all(open_model, parse, rolled):
    model = parse("""g (float[4] a, float[4] b, float[4] c, float[4] d, int64 n) =>
        (float[4] p, float[4] q, float[4] r, float[4] s) { yes = Constant<value = bool {1}>()
        p, q, r, s = Loop(n, yes, a, b, c, d) <body = g (int64 i, bool k, float[4] a0, float[4] b0, float[4] c0,
            float[4] d0) => (bool k1, float[4] a1, float[4] b1, float[4] c1, float[4] d1) {
            k1 = Identity(k) a1 = Identity(b0) b1 = Identity(a0) c1 = Identity(c0)
            e = Softmax(c0) f = Add(d0, e) h = ReduceMax(f) j = Softmax(f) l = Add(j, h) d1 = Sub(l, f)
        }> }""")
    driver = open_model(model)
    a, b, c, d = np.random.default_rng(3).standard_normal((4, 4)).astype(np.float32)
    for turns in (1, 2, 7):
        want = d

        def softmax(x):
            return np.exp(x - x.max()) / np.exp(x - x.max()).sum()

        for _ in range(turns):
            f = want + softmax(c)
            want = softmax(f) + f.max() - f
        got = driver.run({"a": a, "b": b, "c": c, "d": d, "n": np.array(turns)})
        for one, right in zip(got, [b, a] if turns % 2 else [a, b], strict=False):
            np.testing.assert_array_equal(one, right)
        np.testing.assert_array_equal(got[2], c)
        np.testing.assert_allclose(got[3], want, rtol=1e-4, atol=1e-5)


def test_what_turns_gave_outlives_them(open_model, parse, rolled):
    """Nothing else takes the memory of a scan output between two laps, or before it is read."""
    model = parse("""g (float[64] a, float[64] b, int64 n) => (float[64] p, float[64] q, float[A,64] s) {
        yes = Constant<value = bool {1}>() p, q, s = Loop(n, yes, a, b) <body = g (int64 i, bool k, float[64] a0,
            float[64] b0) => (bool k1, float[64] a1, float[64] b1, float[64] c) {
            k1 = Identity(k) a1 = Identity(b0) b1 = Identity(a0) c = Neg(a0) }> }""")
    driver = open_model(model)
    a, b = np.random.default_rng(3).standard_normal((2, 64)).astype(np.float32)
    for turns in (1, 2, 9):
        *_, s = driver.run({"a": a, "b": b, "n": np.array(turns)})
        np.testing.assert_array_equal(s, [(-a, -b)[t % 2] for t in range(turns)])


def test_what_is_carried_on_the_host_may_come_from_the_device(open_model, parse, rolled):
    model = parse("""g (float[2] f, int64 n) => (int32[2] p, int32[2] q) { a = Cast<to=6>(f) b = Add(a, a)
        yes = Constant<value = bool {1}>() c = Constant<value = int32[2] {40, 50}>()
        p, q = Loop(n, yes, c, b) <body = g (int64 i, bool k, int32[2] p0, int32[2] q0) =>
            (bool k1, int32[2] p1, int32[2] q1) { k1 = Identity(k) p1 = Identity(q0) q1 = Add(p0, q0) }> }""")
    driver = open_model(model)
    for turns in (1, 2, 9):
        p, q = np.array([40, 50]), np.array([2, 4])
        for _ in range(turns):
            p, q = q, p + q
        got = driver.run({"f": np.array([1, 2], np.float32), "n": np.array(turns)})
        np.testing.assert_array_equal(got, [p, q])
    assert is_cycle(driver)


@pytest.mark.parametrize("turns", [1, 5, 9])
@pytest.mark.parametrize("limit", [1e9, 20.0, -1e9])
def test_scan_outputs_of_a_loop(open_model, parse, rolled, turns, limit):
    model = parse(f"""g (float[3] x, int64 n) => (float[3] y, float[A,3] s, int64[B] t, bool[C,3] u) {{
        yes = Constant<value = bool {{1}}>() l = Constant<value_float = {limit}>()
        y, s, t, u = Loop(n, yes, x) <body = b (int64 i, bool k, float[3] v) =>
            (bool k2, float[3] w, float[3] e, int64 f, bool[3] h) {{
            w = Add(v, x) e = Mul(w, w) f = Mul(i, i) h = Greater(w, x) m = ReduceMax<keepdims=0>(w) k2 = Less(m, l)
        }}> }}""")
    driver = open_model(model)
    feeds = {"x": X, "n": np.array(turns)}
    for _ in range(2):
        y, s, t, u = map(np.asarray, ReferenceEvaluator(model).run(None, feeds))
        right = (y, s, t.reshape(-1), u)  # there the number of the turn is no scalar
        for got, want in zip(driver.run(feeds), right, strict=True):
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            np.testing.assert_allclose(got, want, rtol=1e-6)
    assert is_cycle(driver)


@pytest.mark.parametrize(
    ("dtype", "axis", "backward"),
    [("float", 0, 0), ("float", 1, 1), ("float16", 0, 1), ("int64", 1, 0), ("int64", 0, 1), ("double", 1, 1)],
)
def test_scans(open_model, parse, rolled, rng, axis, backward, dtype):
    model = parse(f"""g ({dtype}[3] s, {dtype}[A,B] x, {dtype}[3,A,2] z) =>
        ({dtype}[3] t, {dtype}[C,D] y, {dtype}[3,E,2] q) {{
        t, y, q = Scan (s, x, z) <num_scan_inputs=2, scan_input_axes=[{axis}, 1],
            scan_input_directions=[{backward}, 0], scan_output_axes=[{axis}, 1], scan_output_directions=[{backward}, 0],
            body = b ({dtype}[3] v, {dtype}[3] r, {dtype}[3,2] u) => ({dtype}[3] w, {dtype}[3] o, {dtype}[3,2] p)
            {{ w = Add(v, r) o = Mul(w, r) p = Add(u, u) }}> }}""")
    driver = open_model(model)
    kind = {"float": np.float32, "double": np.float64}.get(dtype, np.dtype(dtype))
    s, x, z = ((rng.standard_normal(n) * 4).astype(kind) for n in ((3,), (5, 3), (3, 5, 2)))
    feeds = {"s": s, "x": np.ascontiguousarray(x.T) if axis else x, "z": z}
    short = open_model(model)
    got = driver.run(feeds)
    state, made = s, []
    for row in x[::-1] if backward else x:
        state = state + row
        made.append(state * row)
    tol = 1e-2 if dtype == "float16" else 1e-5
    np.testing.assert_allclose(got[0], state, rtol=tol, atol=tol)
    np.testing.assert_allclose(got[1], np.stack(made[::-1] if backward else made, axis), rtol=tol, atol=tol)
    np.testing.assert_array_equal(got[2], z + z)
    assert [g.dtype for g in got] == [np.dtype(kind)] * 3
    assert is_cycle(driver, "Scan")
    assert short is not driver


NESTED = """g (float[3] x, int64 n, int64 m) => (float[3] y, float[A,3] s) {
    yes = Constant<value = bool {1}>() l = Constant<value = float {50.0}>()
    y = Loop(n, yes, x) <body = b (int64 i, bool k, float[3] v) => (bool k2, float[3] w) {
        h = Add(v, x) w = Loop(m, k, h) <body = c (int64 j, bool q, float[3] p) => (bool q2, float[3] o) {
            f = Cast<to=1>(i) g = Add(p, f) o = Add(g, v) t = ReduceMax<keepdims=0>(o) q2 = Less(t, l) }>
        k2 = Identity(k) }>
    s = Unsqueeze(y, z) z = Constant<value = int64[1] {0}>()
}"""


def test_a_loop_in_a_loop(open_model, parse, rolled):
    model = parse(NESTED)
    driver = open_model(model)
    for n, m in ((3, 4), (1, 1), (4, 2), (3, 4)):
        feeds = {"x": X, "n": np.array(n), "m": np.array(m)}
        y, v = driver.run(feeds)[0], X
        for i in range(n):
            o = v + X
            for _ in range(m):
                o = o + np.float32(i) + v
                if o.max() >= 50:
                    break
            v = o
        np.testing.assert_allclose(y, v, rtol=1e-5)
    assert sum("a block of its own" in e.why for e in driver.engine.explain()) == 2


def test_a_shape_that_changes_makes_it_the_hosts(open_model, parse, rolled):
    grow = "g (float[A] x, int64 n) => (float[B] y) { yes = Constant<value = bool {1}>() y = Loop(n, yes, x) <"
    grow += "body = b (int64 i, bool k, float[C] v) => (bool k2, float[D] w) { k2 = Identity(k) BODY }> }"
    always = parse(grow.replace("BODY", "w = Concat<axis=0>(v, v)"))
    later = parse(grow.replace("BODY", """m = ReduceMax<keepdims=0>(v) l = Constant<value = float {9.0}>() u = Add(v, v)
        o = Less(m, l) w = If(o) <then_branch = t () => (float[E] p) { p = Identity(u) },
        else_branch = e () => (float[F] q) { q = Concat<axis=0>(v, v) }>"""))
    for model in (always, later):
        driver = open_model(model)
        for turns in (2, 5, 2):
            feeds = {"x": X, "n": np.array(turns)}
            (y,) = driver.run(feeds)
            (want,) = ReferenceEvaluator(model).run(None, feeds)
            np.testing.assert_array_equal(y, np.asarray(want))


LONG = """g (float[3] x, int64 n) => (float[3] y) {
    yes = Constant<value = bool {1}>() s = Constant<value = float {0.999}>()
    y = Loop(n, yes, x) <body = b (int64 i, bool k, float[3] v) => (bool k2, float[3] w) { k2 = Identity(k)
        a = Mul(v, s) w = Add(a, x) }>
}"""


def blocks(driver):
    """Every block that the plans hold."""
    found, left = [], list(driver.engine._plans.values())
    while left:
        found.append(left.pop())
        left += found[-1].following.values()
    return found


def test_thousands_of_turns_take_a_few_blocks(open_model, parse):
    driver = open_model(parse(LONG))
    device = driver.engine.device
    driver.run({"x": X, "n": np.array(1400)})
    size, made = device.bytes, device.pipelines
    (y,) = driver.run({"x": X, "n": np.array(2800)})
    want = X
    for _ in range(2800):
        want = want * np.float32(0.999) + X
    np.testing.assert_allclose(y, want, rtol=1e-5)
    # One that ends by the number of turns; for each number what comes before, long and short laps, what comes after.
    assert len(blocks(driver)) == 1 + 2 * 4
    assert device.bytes <= 2 * size
    assert device.pipelines == made


def test_a_loop_without_a_count_ends_by_its_condition(open_model, parse):
    driver = open_model(parse("""g (float[1] x) => (float[1] y) { yes = Constant<value = bool {1}>()
        one = Constant<value = float {1.0}>() l = Constant<value = float {500.0}>() y = Loop("", yes, x) <
        body = b (int64 i, bool k, float[1] v) => (bool k2, float[1] w) { w = Add(v, one) c = Less(w, l)
        k2 = Squeeze(c) }> }""".replace('""', "")))
    (y,) = driver.run({"x": np.zeros(1, np.float32)})
    assert y[0] == 500


def test_it_is_stopped_between_two_laps_and_the_next_run_is_whole(open_model, parse, rolled):
    driver = open_model(parse(LONG))
    feeds = {"x": X, "n": np.array(300)}
    (before,) = driver.run(feeds)
    block, seq = driver.begin(feeds), 0
    for _ in range(4):
        for index in range(len(block.steps)):
            here = Cursor(block.activation, index)
            reply = driver.submit(seq, here, here._replace(step=index + 1))
            seq += 1
            assert isinstance(reply, Fenced)
        assert isinstance(reply.next, BlockView)
        assert reply.next.activation == block.activation + 1
        block = reply.next
    driver.engine.stop(driver.runs)
    here = Cursor(block.activation, 0)
    assert isinstance(driver.submit(seq, here, here._replace(step=1)), Dropped)
    with pytest.raises(RunStopped):
        driver.read()
    driver.end()
    (after,) = driver.run(feeds)
    assert before.tobytes() == after.tobytes()


def test_an_index_out_of_range_in_a_later_turn(open_model, parse, rolled):
    model = parse("""g (float[5] x, float[1] f, int64 n) => (float[1] y) { yes = Constant<value = bool {1}>()
        y = Loop(n, yes, f) <body = b (int64 k, bool c, float[1] v) => (bool d, float[1] w) {
        i = Cast<to=6>(v) w = Gather(x, i) d = Identity(c) }> }""")
    driver = open_model(model)
    feeds = {"x": np.array([1, 2, 3, 4, 0], np.float32), "f": np.zeros(1, np.float32), "n": np.array(33)}
    (y,) = driver.run(feeds)
    np.testing.assert_array_equal(y, [3])
    assert is_cycle(driver)
    with pytest.raises(InvalidData, match="index 9 is out of range for dimension 0 of size 5"):
        driver.run(feeds | {"x": np.array([1, 2, 3, 9, 0], np.float32)})
    (y,) = driver.run(feeds)
    np.testing.assert_array_equal(y, [3])
