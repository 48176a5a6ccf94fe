"""Indices that the GPU computed and that are out of range: InvalidData at the fence, and nothing else comes of it."""

from __future__ import annotations

import queue
from itertools import pairwise

import numpy as np
import pytest

from trionnx.gpu.errors import InvalidData, RunStopped
from trionnx.gpu.seam import Cursor, Dropped, Failed, Fenced, Finished, Reply, Segment

PICK = """g (float[5,4] x, float[N] f) => (float[N,4] y) {
i = Cast<to=6>(f) y = Gather(x, i) }"""
THEN_MORE = """g (float[5,4] x, float[N] f) => (float[N,4] y) {
i = Cast<to=6>(f) a = Gather(x, i) b = Transpose<perm=[1,0]>(a) c = Neg(b) y = Transpose<perm=[1,0]>(c) }"""
X = np.arange(20, dtype=np.float32).reshape(5, 4)


def numbers(count, **put):
    """Indices as floats, all good but those that are put somewhere."""
    made = np.arange(count, dtype=np.float32) % 10 - 5
    for place, value in put.items():
        made[int(place[1:])] = value
    return made


def culprit(model, op="Gather"):
    next(n for n in model.graph.node if n.op_type == op).name = "culprit"
    return model


def kinds(block):
    return {step.kind for step in block.steps}


def refuse(driver, feeds, message, **run):
    with pytest.raises(InvalidData) as caught:
        driver.run(feeds, **run)
    assert str(caught.value) == f"node 'culprit': {message}"
    assert caught.value.node == "culprit"


@pytest.mark.parametrize("bad", [5, 7, -6, 2**24, -(2**31), 2**31 - 128])
def test_it_is_flagged_in_the_words_of_the_host(open_model, parse, bad):
    driver = open_model(culprit(parse(PICK)))
    f = numbers(100)
    block = driver.begin({"x": X, "f": f})
    assert [step.kind for step in block.steps].count("host") == 2  # the two feeds
    driver.end()
    (before,) = driver.run({"x": X, "f": f})
    np.testing.assert_array_equal(before, X[f.astype(int)])
    message = f"index {bad} is out of range for dimension 0 of size 5"
    refuse(driver, {"x": X, "f": numbers(100, _17=bad)}, message)
    (after,) = driver.run({"x": X, "f": f})
    assert before.tobytes() == after.tobytes()
    fed = open_model(culprit(parse("g (float[5,4] x, int32[N] i) => (float[N,4] y) { y = Gather(x, i) }")))
    refuse(fed, {"x": X, "i": np.array([0, bad, 1], np.int32)}, message)


def test_of_several_it_always_names_the_same_however_the_step_is_cut(open_model, parse):
    driver = open_model(culprit(parse(PICK)))
    good, bad = {"x": X, "f": numbers(1000)}, {"x": X, "f": numbers(1000, _3=9, _400=11, _999=8)}
    (whole,) = driver.run(good)
    for units in (None, 1, 2, 5):
        refuse(driver, bad, "index 11 is out of range for dimension 0 of size 5", units=units)
        (cut,) = driver.run(good, units=units)
        assert whole.tobytes() == cut.tobytes()


def test_nothing_is_read_outside_of_the_dimension(open_model, parse, monkeypatch):
    """The flag unseen, a row of the dimension is what an index out of range gets."""
    monkeypatch.setattr("trionnx.gpu.device.flags.Watch.check", lambda self: None)
    driver = open_model(parse(PICK))
    (y,) = driver.run({"x": X, "f": numbers(4, _0=5, _1=-6, _2=-(2**31), _3=2**30)})
    np.testing.assert_array_equal(y, X[[4, 0, 0, 4]])


def gpu_part(driver, feeds):
    """Begin a run and do its uploads; the block, and the number of its first step on the GPU."""
    block = driver.begin(feeds)
    first = [step.kind for step in block.steps].index("gpu")
    for step in range(first):
        assert isinstance(driver.submit(step, Cursor(0, step), Cursor(0, step + 1)), Fenced)
    assert kinds(block) == {"host", "gpu"}
    return block, first


def hand_over(driver, places, seq):
    """Submit from place to place, waiting for nothing in between; the replies in the order of their coming."""
    answers: queue.SimpleQueue[Reply] = queue.SimpleQueue()
    for number, (start, stop) in enumerate(pairwise(places), seq):
        driver.engine.submit(Segment(driver.runs, number, start, stop), answers.put)
    return [answers.get(timeout=60) for _ in places[1:]]


def test_what_is_in_flight_behind_it_is_finished_or_dropped(open_model, parse):
    driver = open_model(culprit(parse(THEN_MORE)))
    good, bad = {"x": X, "f": numbers(300)}, {"x": X, "f": numbers(300, _299=6)}
    (before,) = driver.run(good)
    for _ in range(3):
        block, first = gpu_part(driver, bad)
        steps = range(first, len(block.steps))
        places = [Cursor(0, step, unit) for step in steps for unit in range(block.steps[step].units)]
        replies = hand_over(driver, [*places, Cursor(0, len(block.steps))], first)
        failed = [n for n, r in enumerate(replies) if isinstance(r, Failed)]
        assert len(failed) == 1
        failure = replies[failed[0]]
        assert isinstance(failure, Failed)
        assert isinstance(failure.error, InvalidData)
        assert all(isinstance(r, Fenced) for r in replies[: failed[0]])
        rest = replies[failed[0] + 1 :]
        assert sum(isinstance(r, Fenced) for r in rest) <= 1  # two are in flight at most
        assert sum(isinstance(r, Dropped) for r in rest) >= len(rest) - 1 > 0
        driver.end()
        assert driver.counts.dropped == sum(isinstance(r, Dropped) for r in rest)
        (after,) = driver.run(good)
        assert before.tobytes() == after.tobytes()


def test_a_run_that_is_stopped_leaves_no_flag_behind(open_model, parse):
    driver = open_model(culprit(parse(PICK)))
    good, bad = {"x": X, "f": numbers(300)}, {"x": X, "f": numbers(300, _2=6, _299=7)}
    (before,) = driver.run(good)
    _, first = gpu_part(driver, bad)
    check = first + 1  # the cast is first
    assert isinstance(driver.submit(first, Cursor(0, first), Cursor(0, check, 2)), Fenced)
    driver.engine.stop(driver.runs)
    assert isinstance(driver.submit(check, Cursor(0, check, 2), Cursor(0, check + 1)), Dropped)
    with pytest.raises(RunStopped):
        driver.read()
    driver.end()
    (after,) = driver.run(good, units=1)
    assert before.tobytes() == after.tobytes()


BRANCH = """g (float[5] x, float[1] f) => (float[1] y) {
i = Cast<to=6>(f) v = Gather(x, i) l = Constant<value = float {2.0}>() c = Less(v, l)
y = If(c) <then_branch = t () => (float[1] a) { a = Neg(x0) }, else_branch = e () => (float[1] b) { b = Exp(x0) }>
}"""


def test_no_decision_is_made_of_what_was_read_there(open_model, parse):
    model = culprit(parse(BRANCH.replace("x0", "f")))
    driver = open_model(model)
    x = np.arange(5, dtype=np.float32)
    for f, wanted in ((1.0, -1.0), (3.0, np.exp(np.float32(3)))):
        (y,) = driver.run({"x": x, "f": np.array([f], np.float32)})
        np.testing.assert_allclose(y, [wanted], rtol=1e-6)
    plans = driver.engine._plans
    (block,) = plans.values()
    made = len(block.following)
    refuse(driver, {"x": x, "f": np.array([5], np.float32)}, "index 5 is out of range for dimension 0 of size 5")
    assert len(block.following) == made
    (y,) = driver.run({"x": x, "f": np.array([1], np.float32)})
    np.testing.assert_array_equal(y, [-1])


def test_nothing_is_planned_for_a_run_that_has_failed(open_model, parse):
    model = parse("""g (float[5,4] x, float[N] f, bool c) => (float[N,4] y, float[N,2] v, float[K,L] w) {
        k = Constant<value = int64[1] {2}>() w, o = TopK(x, k)
        i = Cast<to=6>(f) a = Gather(x, i) v, p = TopK(a, k) y = If(c) <
            then_branch = t () => (float[N,4] m) { m = Neg(a) }, else_branch = e () => (float[N,4] n) { n = Exp(a) }>
    }""")
    driver = open_model(culprit(model))
    for bad in (False, True):
        f = numbers(4, _1=8) if bad else numbers(4)
        block = driver.begin({"x": X, "f": f, "c": np.array(True)})
        check = [n for n, step in enumerate(block.steps) if step.kind == "host"][-1]
        check += 2  # behind the upload of f: the cast, the check
        for n in range(check):
            driver.submit(n, Cursor(0, n), Cursor(0, n + 1))
        replies = hand_over(driver, [Cursor(0, n) for n in (check, check + 1, len(block.steps))], check)
        assert isinstance(replies[0], Failed if bad else Fenced)
        assert isinstance(replies[1], Fenced)  # it was in flight
        driver.end()
        (made,) = driver.engine._plans.values()
        assert len(made.following) == (0 if bad else 1)
        while made.following:
            driver.engine._realiser.forget(made.following.popitem()[1])


LOOP = """g (float[5] x, float[1] f, bool go) => (float[1] y) {
n = Constant<value = int64 {50}>()
y = Loop(n, go, f) <body = b (int64 k, bool c, float[1] v) => (bool d, float[1] w) {
    i = Cast<to=6>(v) w = Gather(x, i)
    l = Constant<value = float[1] {3.5}>() e = Less(w, l) s = Squeeze(e) d = Identity(s)
}> }"""


def test_each_turn_of_a_loop_checks_its_own(open_model, parse):
    driver = open_model(culprit(parse(LOOP), "Loop"))
    x, go = np.array([1, 2, 3, 4, 0], np.float32), np.array(True)
    (y,) = driver.run({"x": x, "f": np.zeros(1, np.float32), "go": go})
    np.testing.assert_array_equal(y, [4])
    with pytest.raises(InvalidData, match="index -6 is out of range for dimension 0 of size 5"):
        driver.run({"x": np.array([1, 2, -6, 0, 0], np.float32), "f": np.zeros(1, np.float32), "go": go})
    (y,) = driver.run({"x": x, "f": np.zeros(1, np.float32), "go": go})
    np.testing.assert_array_equal(y, [4])


def test_flags_cost_nothing_where_nothing_is_checked_and_are_given_back(open_model, parse):
    plain = open_model(parse("g (float[5,4] x, int32[N] i) => (float[N,4] y) { a = Gather(x, i) y = Neg(a) }"))
    plain.run({"x": X, "i": np.zeros(3, np.int32)})
    (block,) = plain.engine._plans.values()
    assert block.device.flags is None
    driver = open_model(parse(PICK))
    for _ in range(3):
        driver.run({"x": X, "f": numbers(30)})
    (block,) = driver.engine._plans.values()
    assert len(block.device.flags._idle) == 1
    device = driver.engine.device
    driver.close()
    assert device.bytes == 0


@pytest.fixture
def many(open_model, parse):
    """Seven checks in one block."""
    names = [f"y{n}" for n in range(7)]
    lines = " ".join(f"i{n} = Add(i, k{n}) y{n} = Gather(x, i{n})" for n in range(7))
    consts = " ".join(f"k{n} = Constant<value = int32[1] {{{n}}}>()" for n in range(7))
    outs = ", ".join(f"float[N,4] {n}" for n in names)
    body = f"{{ t = Transpose(x) i = Cast<to=6>(f) {consts} {lines} }}"
    return open_model(culprit(parse(f"g (float[5,4] x, float[N] f) => ({outs}, float[4,5] t) {body}")))


def test_many_checks_in_one_block(many):
    f = np.array([-5, -4, -2], np.float32)
    for n, y in enumerate(many.run({"x": X, "f": f})[:7]):
        np.testing.assert_array_equal(y, X[f.astype(int) + n])
    with pytest.raises(InvalidData, match="index 5 is out of range"):
        many.run({"x": X, "f": np.array([0, 1], np.float32)})
    refuse(many, {"x": X, "f": np.array([-9], np.float32)}, "index -9 is out of range for dimension 0 of size 5")


def test_a_segment_that_is_not_submitted_keeps_no_memory(many):
    device = many.engine.device
    for value in (-9, -2, -9):
        block, first = gpu_part(many, {"x": X, "f": np.array([value], np.float32)})
        hand_over(many, [Cursor(0, n) for n in range(first, len(block.steps) + 1)], first)
        many.end()
    assert many.counts.dropped > 0
    many.close()
    assert device.bytes == 0


INT64 = {
    "ArgMax": "i = ArgMax<axis = 1, keepdims = 0>(s) y = Gather(x, i)",
    "ArgMax, then Flatten": "a = ArgMax<axis = 1>(s) z = Flatten<axis = 0>(a) i = Squeeze(z) y = Gather(x, i)",
    "ArgMax, then Cast": "a = ArgMax<axis = 1, keepdims = 0>(s) i = Cast<to = 6>(a) y = Gather(x, i)",
    "Cast": "f = ReduceMax<axes = [1], keepdims = 0>(s) a = Cast<to = 6>(f) i = Cast<to = 7>(a) y = Gather(x, i)",
}


@pytest.mark.parametrize("how", INT64)
def test_int64_that_the_gpu_made_stays_there(open_model, parse, how):
    model = f"g (float[5,4] x, float[N,M] s) => (float[N,4] y) {{ {INT64[how]} }}"
    driver = open_model(culprit(parse(model, opset=17)))
    s = np.array([[0, 4, 1], [2, 0, 1], [0, 1, 3]], np.float32)
    wanted = X[s.max(1).astype(int)] if how == "Cast" else X[s.argmax(1)]
    block = driver.begin({"x": X, "s": s})
    assert [step.kind for step in block.steps].count("host") == 2
    driver.end()
    for units in (None, 1):
        (y,) = driver.run({"x": X, "s": s}, units=units)
        np.testing.assert_array_equal(y, wanted)
    s = np.array([[0, 0, 0, 0, 0, 0, 7]] * 2, np.float32)
    bad = 7 if how == "Cast" else 6
    refuse(driver, {"x": X, "s": s}, f"index {bad} is out of range for dimension 0 of size 5")


def test_int64_goes_to_the_host_once_it_is_wanted_there(open_model, parse, rng):
    model = parse("""g (float[N,M] s) => (float[N,K] v, int64[N,K] i, float[N,K] p, int64[N,K] j, int64[K,N] t) {
        k = Constant<value = int64[1] {3}>() v, i = TopK(s, k) p = GatherElements<axis = 1>(s, i)
        t = Transpose<perm = [1,0]>(i) o = Constant<value = int64 {10}>() j = Add(i, o)
    }""")
    driver = open_model(model)
    s = rng.standard_normal((6, 40)).astype(np.float32)
    v, i, p, j, t = driver.run({"s": s})
    order = np.argsort(-s, 1, kind="stable")[:, :3]
    np.testing.assert_array_equal(i, order)
    np.testing.assert_array_equal(v, np.take_along_axis(s, order, 1))
    np.testing.assert_array_equal(p, v)
    np.testing.assert_array_equal(j, order + 10)
    np.testing.assert_array_equal(t, order.T)
    assert {x.dtype for x in (i, j, t)} == {np.dtype(np.int64)}
    assert {n.op: n.where for n in driver.engine.explain()} == {
        "TopK": "gpu",
        "GatherElements": "gpu",
        "Add": "host",
        "Transpose": "gpu",
    }


def test_a_dimension_of_no_elements(open_model, parse):
    driver = open_model(culprit(parse(PICK.replace("[5,4]", "[M,4]"))))
    refuse(driver, {"x": X[:0], "f": np.zeros(2, np.float32)}, "index 0 is out of range for dimension 0 of size 0")
    (y,) = driver.run({"x": X[:0], "f": np.zeros(0, np.float32)})
    assert y.shape == (0, 4)
    assert isinstance(driver.begin({"x": X[:0], "f": np.zeros(0, np.float32)}), Finished)
    driver.end()
