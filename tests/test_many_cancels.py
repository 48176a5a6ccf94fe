"""Runs and loads that end in every way at random moments, on the real device: outputs stay right, nothing leaks.

Of all kinds of ends a few are tried each time; a thousand, in a new order each time, with

    TRIONNX_SOAK=1 pytest tests/test_many_cancels.py
"""

from __future__ import annotations

import gc
import os
import random
from collections import Counter

import numpy as np
import onnx
import pytest
import trio

import trionnx
from trionnx.gpu.device.engine import WebGpuEngine
from trionnx.scheduler.backends import register_engine

RUNS = int(os.environ.get("TRIONNX_CANCELS", "200"))
AT_A_TIME, SESSIONS, SIDE, LAYERS = 8, 4, 96, 12
LIMIT_S = 600
SOAK = os.environ.get("TRIONNX_SOAK") == "1"
ENDS = int(os.environ.get("TRIONNX_SOAK_EXAMPLES", "1000")) if SOAK else 60


def small_model(seed):
    rng = np.random.default_rng(seed)
    weights = [(rng.standard_normal((SIDE, SIDE)) / np.sqrt(SIDE)).astype(np.float32) for _ in range(LAYERS)]
    nodes, last = [], "x"
    for n in range(LAYERS):
        nodes.append(onnx.helper.make_node("MatMul", [last, f"w{n}"], [f"m{n}"]))
        nodes.append(onnx.helper.make_node("Tanh", [f"m{n}"], [f"t{n}"]))
        last = f"t{n}"
    graph = onnx.helper.make_graph(
        nodes,
        "small",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", SIDE])],
        [onnx.helper.make_tensor_value_info(last, onnx.TensorProto.FLOAT, ["n", SIDE])],
        [onnx.numpy_helper.from_array(w, f"w{n}") for n, w in enumerate(weights)],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)


@pytest.fixture
def engines(monkeypatch):
    """The engines that sessions are made on, as they are made."""
    from trionnx.scheduler import backends

    made: list[WebGpuEngine] = []

    def factory(**options):
        made.append(WebGpuEngine(**options))
        return made[-1]

    monkeypatch.setattr(backends, "_registered", dict(backends._registered))
    register_engine("watched", factory)
    return made


async def test_runs_cancelled_at_random_moments(engines, record_property):
    dice = random.Random(0)
    feeds = {"x": np.random.default_rng(9).standard_normal((700, SIDE)).astype(np.float32)}
    ended = {"whole": 0, "cancelled": 0}
    with trio.fail_after(LIMIT_S):
        async with trionnx.open_scheduler(backend="watched") as scheduler:
            sessions = [await scheduler.load(small_model(seed)) for seed in range(SESSIONS)]
            right = [(await session.run(None, feeds))[0].tobytes() for session in sessions]
            start = trio.current_time()
            for session in sessions:
                await session.run(None, feeds)
            whole_s = (trio.current_time() - start) / SESSIONS * AT_A_TIME
            at_rest = [engine.device.bytes for engine in engines]
            turns = iter(range(RUNS))

            async def one_after_another():
                for turn in turns:
                    number = turn % SESSIONS
                    with trio.move_on_after(dice.uniform(0, 1.5 * whole_s)) as scope:
                        (output,) = await sessions[number].run(None, feeds)
                        assert output.tobytes() == right[number]
                        ended["whole"] += 1
                    ended["cancelled"] += scope.cancelled_caught

            async with trio.open_nursery() as nursery:
                for _ in range(AT_A_TIME):
                    nursery.start_soon(one_after_another)

            assert sum(ended.values()) == RUNS
            assert ended["cancelled"] > RUNS // 10
            for session, expected in zip(sessions, right, strict=True):
                assert (await session.run(None, feeds))[0].tobytes() == expected
            gc.collect()
            assert [engine.device.bytes for engine in engines] == at_rest
            assert all(not engine._runs for engine in engines)
            totals = scheduler.statistics()
            assert totals.segments_submitted == totals.segments_finished
    assert [engine.device.bytes for engine in engines] == [0] * SESSIONS
    record_property("ended", ended)


async def test_loading_and_closing_again_and_again_returns_to_where_it_was(engines):
    from wgpu.backends.wgpu_native._helpers import generate_report

    def alive():
        gc.collect()
        report = generate_report()["hub"]
        return {kind: report[kind]["allocated"] for kind in ("buffers", "bindGroups", "computePipelines", "devices")}

    feeds = {"x": np.ones((3, SIDE), np.float32)}
    counts = []
    with trio.fail_after(LIMIT_S):
        for turn in range(4):
            async with trionnx.open_scheduler(backend="watched") as scheduler:
                session = await scheduler.load(small_model(0))
                with trio.move_on_after(0.001 * turn):
                    await session.run(None, feeds)
            counts.append(alive())
            engines.clear()
    assert counts[-1] == counts[0]


# --- every kind of end --------------------------------------------------------------------------------

WEIGHT = (np.random.default_rng(1).standard_normal((SIDE, SIDE)) / 10).astype(np.float32)
X = np.random.default_rng(0).standard_normal((400, SIDE)).astype(np.float32)
FINE = trionnx.TerminatePolicy(checkpoint_interval_s=0.001)
SOFT = trionnx.TerminatePolicy(checkpoint_interval_s=0.001, on_terminate="stop_submit")
KINDS = (
    *("whole", "cancel", "deadline", "terminate", "soft", "stream", "leave", "progress", "pause", "pause and cancel"),
    *("wrong", "wrong values", "close", "load", "cancelled load"),
)


def decided_model():
    """GPU, CPU and GPU again; values decide what follows; a row of the input too large is an error of its values."""
    text = f"""<ir_version: 9, opset_import: ["" : 18]>
    g (float[n, {SIDE}] x, float[{SIDE}, {SIDE}] w, int64[k] rows) => (float[n, {SIDE}] early, float[n, {SIDE}] y) {{
        a = MatMul(x, w) early = Tanh(a) b = MatMul(early, w) c = Relu(b)
        places = NonZero(c) flags = Cast<to = 1>(places) sum = ReduceSum<keepdims = 0>(flags)
        taken = Gather<axis = 0>(c, rows) more = ReduceSum<keepdims = 0>(taken)
        d = MatMul(c, w) e = Tanh(d) f = MatMul(e, w) g = Add(f, sum) y = Add(g, more)
    }}"""
    return onnx.parser.parse_model(text)


class Place:
    """A model, and the session on it of the moment."""

    def __init__(self, source, feeds):
        self.source, self.feeds = source, feeds
        self.session, self.right, self.run_s = None, [], 0.0

    async def open(self, scheduler):
        session = await scheduler.load(self.source)
        if not self.right:
            await session.run(None, self.feeds)
            start = trio.current_time()
            self.right = [value.tobytes() for value in await session.run(None, self.feeds)]
            self.run_s = trio.current_time() - start
        self.session = session

    def check(self, outputs, *, some=False):
        for value, right in zip(outputs, self.right, strict=True):
            assert (some and value is None) or value.tobytes() == right


async def one_end(kind, place, scheduler, dice):
    """Have a run, or a load, end in one way, perhaps; what it should have been otherwise is checked. How it ended."""
    session, moment_s = place.session, dice.uniform(0, 6 * place.run_s)
    options = trionnx.RunOptions(policy=SOFT if kind == "soft" else FINE, priority=dice.randrange(3))
    names = [info.name for info in session.get_outputs()]

    async def later(call):
        await trio.sleep(moment_s)
        call()

    async def pause(then):
        await trio.sleep(moment_s)
        paused = tuple(session._runs)  # others' as well
        try:
            for run in paused:
                run.pause()
            await trio.sleep(moment_s)
        finally:
            for run in paused:
                run.resume()
        then()

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            match kind:
                case "cancel":
                    nursery.start_soon(later, scope.cancel)
                case "deadline" | "cancelled load":
                    scope.deadline = trio.current_time() + moment_s
                case "terminate" | "soft":
                    nursery.start_soon(later, options.terminate)
                case "pause":
                    nursery.start_soon(pause, int)
                case "pause and cancel":
                    nursery.start_soon(pause, scope.cancel)
                case "progress":
                    at = dice.randrange(1, 8)
                    options.on_progress = lambda done, total: [][at] if done == at else None
            try:
                if kind in ("load", "cancelled load"):
                    await (await scheduler.load(place.source)).aclose()
                    return "loaded"
                elif kind == "close":
                    await trio.sleep(moment_s)
                    await session.aclose()
                    if place.session is session:
                        await place.open(scheduler)
                    return "closed"
                elif kind == "wrong":
                    await session.run(None, {"x": X[:, :7]}, options)
                elif kind == "wrong values":
                    feeds = place.feeds | ({"rows": np.array([999])} if "rows" in place.feeds else {})
                    place.check(await session.run(None, feeds, options))
                elif kind in ("stream", "leave"):
                    async with session.stream(None, place.feeds, options) as items:
                        async for name, value in items:
                            assert value.tobytes() == place.right[names.index(name)]
                            if kind == "leave":
                                return "left"
                else:
                    place.check(await session.run(None, place.feeds, options), some=kind == "soft")
                nursery.cancel_scope.cancel()
                return "whole"
            except (trionnx.RunTerminated, trionnx.InvalidInput, trionnx.InvalidData, IndexError) as error:
                kinds = {"RunTerminated": "terminate", "InvalidInput": "wrong", "IndexError": "progress"}
                if kind != kinds.get(type(error).__name__, "wrong values"):
                    raise
                nursery.cancel_scope.cancel()
                return type(error).__name__
            except trio.ClosedResourceError:
                assert session._closed
                nursery.cancel_scope.cancel()
                return "closed"
        assert scope.cancelled_caught
        return "cancelled"


async def test_every_kind_of_end_leaves_nothing_behind(watched, layers, left_behind, record_property):
    dice, ended = random.Random(None if SOAK else 5), Counter[str]()
    rows = np.arange(3)
    places = [
        Place(small_model(0), {"x": X}),
        Place(layers(8, SIDE, early=2), {"x": X}),
        Place(decided_model(), {"x": X, "w": WEIGHT, "rows": rows}),
        Place(decided_model(), {"x": X[:200], "w": WEIGHT, "rows": rows}),
    ]
    closed = []

    async def all_of_it(count):
        async with trionnx.open_scheduler(backend="watched", policy=FINE) as scheduler:
            for place in places:
                await place.open(scheduler)
            todo = [KINDS[n % len(KINDS)] for n in range(count)]
            dice.shuffle(todo)
            turns = iter(todo)

            async def work():
                for kind in turns:
                    there = [p for p in places if p.session is not None and not p.session._closed]
                    if kind == "close":  # the last place stays, so that there is always one
                        there = [place for place in there if place is not places[-1]]
                        kind = kind if there else "load"
                    place = dice.choice(there or places[-1:])
                    ended[await one_end(kind, place, scheduler, dice)] += 1
                    for engine in [e for e in watched if not e._thread._thread.is_alive()]:
                        closed.append(engine.device.bytes if engine.device is not None else 0)
                        watched.remove(engine)

            async with trio.open_nursery() as nursery:
                for _ in range(6):
                    nursery.start_soon(work)
            for place in places:
                if place.session is not None and not place.session._closed:
                    place.check(await place.session.run(None, place.feeds))
                place.session = None
            totals = scheduler.statistics()
            assert totals.segments_submitted == totals.segments_finished
            assert all(c.counted == c.on_gpu for engine in watched for c in engine.ended)
            assert all(not engine._runs for engine in watched)

    with trio.fail_after(LIMIT_S if not SOAK else 6 * LIMIT_S):
        await all_of_it(len(KINDS))
        before = left_behind(watched), trio.lowlevel.current_statistics().tasks_living
        ended.clear()
        await all_of_it(ENDS)
        after = left_behind(watched), trio.lowlevel.current_statistics().tasks_living
        assert after == before
    assert not any(closed)
    assert sum(ended.values()) == ENDS
    assert len(ended) >= 7
    record_property("ended", dict(ended))
