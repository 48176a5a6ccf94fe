"""Runs cancelled at random moments, on the real device: outputs stay right and nothing leaks."""

from __future__ import annotations

import gc
import os
import random

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
