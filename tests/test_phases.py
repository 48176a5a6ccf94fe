"""A cancel is felt in every phase of a load and of a run, on the real device; and a run that is paused goes on."""

from __future__ import annotations

import contextlib
import random
from collections import Counter

import numpy as np
import onnx
import pytest
import trio
from onnx import TensorProto, helper, numpy_helper
from trio.testing import wait_all_tasks_blocked

import trionnx
from trionnx.gpu.device.device import PIECE, Device
from trionnx.gpu.host import numeric

LIMIT_S = 300
SIDE = 1088


def varied_model():
    """Eight pipelines and more, and 19 MiB of weights, each more than a piece of an upload."""
    rng = np.random.default_rng(0)
    nodes, weights, last = [], [], "x"
    for n, op in enumerate(["Tanh", "Softplus", "Erf", "HardSwish"]):
        weight = (rng.standard_normal((SIDE, SIDE)) / np.sqrt(SIDE)).astype(np.float32)
        weights.append(numpy_helper.from_array(weight, f"w{n}"))
        nodes += [
            helper.make_node("MatMul", [last, f"w{n}"], [f"m{n}"]),
            helper.make_node(op, [f"m{n}"], [f"a{n}"]),
            helper.make_node(("Softmax", "LpNormalization")[n % 2], [f"a{n}"], [f"s{n}"], axis=-1),
            helper.make_node("Transpose", [f"s{n}"], [f"u{n}"], perm=[1, 0]),
            helper.make_node("Add", [f"u{n}", f"u{n}"], [f"v{n}"]),
            helper.make_node("Transpose", [f"v{n}"], [f"t{n}"], perm=[1, 0]),
        ]
        last = f"t{n}"
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8, SIDE]) for name in ("x", last)]
    graph = helper.make_graph(nodes, "varied", infos[:1], infos[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.fixture(scope="module")
def varied(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "varied.onnx"
    path.write_bytes(varied_model().SerializeToString())
    return path


FEED = {"x": np.random.default_rng(1).standard_normal((8, SIDE)).astype(np.float32)}


async def test_a_load_cancelled_at_twenty_random_moments_leaves_nothing(watched, varied, left_behind):
    dice = random.Random(7)
    phases = Counter[str]()
    with trio.fail_after(LIMIT_S):
        async with trionnx.open_scheduler(backend="watched") as scheduler:
            for _ in range(2):  # the second one shows how long a load takes whose shaders the driver has
                start = trio.current_time()
                session = await scheduler.load(varied)
                load_s = trio.current_time() - start
                (right,) = await session.run(None, FEED)
                await session.aclose()
                del session
            before = left_behind(watched)
            for _ in range(20):
                phase = "none"

                def on_progress(now, done, total):
                    nonlocal phase
                    phase = now

                with trio.move_on_after(dice.uniform(0, load_s)) as scope:
                    await (await scheduler.load(varied, on_progress=on_progress)).aclose()
                    phase = "whole"
                phases[phase] += 1
                assert scope.cancelled_caught == (phase != "whole")
                assert all(engine.device is None or engine.device.bytes == 0 for engine in watched)
            assert left_behind(watched) == before
            session = await scheduler.load(varied)
            (again,) = await session.run(None, FEED)
            assert again.tobytes() == right.tobytes()
            await session.aclose()
            del session
            assert left_behind(watched) == before
    assert len(phases) > 2


@pytest.mark.parametrize("at", ["read", "optimise", "plan", "compile", "upload"])
async def test_a_load_cancelled_in_each_phase(watched, varied, at):
    async with trionnx.open_scheduler(backend="watched") as scheduler:
        with trio.fail_after(LIMIT_S), trio.CancelScope() as scope:

            def on_progress(phase, done, total):
                if phase == at:
                    scope.cancel()

            await scheduler.load(varied, on_progress=on_progress)
        assert scope.cancelled_caught
        (engine,) = watched
        assert engine.device is None or engine.device.bytes == 0
        session = await scheduler.load(varied)
        assert np.isfinite((await session.run(None, FEED))[0]).all()


def cancel(scope, token):
    """From the engine's thread; when this returns the engine has been told."""
    trio.from_thread.run_sync(scope.cancel, trio_token=token)
    trio.from_thread.run(wait_all_tasks_blocked, trio_token=token)


@contextlib.contextmanager
def cancelled_at(monkeypatch, owner, name, call, scope, spot):
    """Have the `call`-th call of a method cancel the scope, from the engine's thread, before it does its work."""
    count = Counter[str]()
    original = getattr(owner, name)
    token = trio.lowlevel.current_trio_token()

    def counted(*arguments):
        count["calls"] += 1
        if count["calls"] == call:
            cancel(scope, token)
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, counted)
        yield count
    assert scope.cancelled_caught, spot


async def stopped_at(monkeypatch, owner, name, call, session, feed):
    """How many calls of a method a run makes that is cancelled during the `call`-th."""
    scope = trio.CancelScope()
    with cancelled_at(monkeypatch, owner, name, call, scope, name) as count, trio.fail_after(LIMIT_S), scope:
        await session.run(None, feed)
    return count["calls"]


async def test_a_cancel_is_felt_between_two_pipelines_of_a_run(watched, varied, monkeypatch):
    model = onnx.load(varied)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    async with trionnx.open_scheduler(backend="watched") as scheduler:
        session = await scheduler.load(model)
        assert await stopped_at(monkeypatch, Device, "compile", 2, session, FEED) == 2
        assert watched[0].device.bytes < 1 << 17
        assert np.isfinite((await session.run(None, FEED))[0]).all()


async def test_a_cancel_is_felt_between_two_weights_and_two_pieces_of_one(watched, varied, monkeypatch):
    pieces = list[int]()

    def in_pieces(device, buffer, offset, array, check):
        if array.nbytes <= PIECE:
            return write(device, buffer, offset, array, check)

        def checked():
            pieces.append(array.nbytes)
            if len(pieces) == 2:
                cancel(scope, token)
            check()

        return write(device, buffer, offset, array, checked)

    write, token = Device.write, trio.lowlevel.current_trio_token()
    model = onnx.load(varied)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    async with trionnx.open_scheduler(backend="watched") as scheduler:
        session = await scheduler.load(model)
        (right,) = await (await scheduler.load(model)).run(None, FEED)
        with monkeypatch.context() as patch, trio.fail_after(LIMIT_S), trio.CancelScope() as scope:
            patch.setattr(Device, "write", in_pieces)
            await session.run(None, FEED)
        assert scope.cancelled_caught
        assert len(pieces) == 2, "the second question was answered, and there was no third"
        assert watched[0].device.bytes < 1 << 17, "what was uploaded is given back"
        assert (await session.run(None, FEED))[0].tobytes() == right.tobytes()


LONG_LOOP = """g (float[3] x) => (float[m] y) <int64 turns = {20000}, bool go = {1}, float[1] one = {1}> {
  y = Loop(turns, go, x) <body = body (int64 i, bool c, float[n] a) => (bool d, float[k] b) {
    d = Identity(c)
    b = Concat<axis = 0>(a, one)
  }>
}"""
"""What it carries grows in each turn: only the host does that."""
ON_HOST = """g (int64[n] x) => (int64[n] y) {
  a = Mul(x, x) b = BitwiseXor(a, x) c = Mod(b, a) d = Max(c, x) e = Sub(d, b) y = Mul(e, e)
}"""


async def test_a_cancel_is_felt_between_two_turns_of_a_long_loop_on_the_host(parse, monkeypatch):
    feed = {"x": np.array([1, 2, 3], np.float32)}
    async with trionnx.open_scheduler(backend="webgpu") as scheduler:
        session = await scheduler.load(parse(LONG_LOOP))
        assert await stopped_at(monkeypatch, numeric, "evaluate", 1000, session, feed) == 1000
        assert [line.where for line in session.explain() if line.op == "Loop"] == ["host"]
        statistics = session.statistics()
        assert statistics.segments_submitted == statistics.segments_finished > 0


async def test_a_cancel_is_felt_between_two_nodes_on_the_host(parse, monkeypatch):
    feed = {"x": np.arange(1, 20_000)}
    async with trionnx.open_scheduler(backend="webgpu") as scheduler:
        session = await scheduler.load(parse(ON_HOST))
        (right,) = await session.run(None, feed)
        assert {line.where for line in session.explain()} == {"host"}
        assert await stopped_at(monkeypatch, numeric, "evaluate", 3, session, feed) == 3
        assert np.array_equal((await session.run(None, feed))[0], right)


@pytest.fixture
def parse():
    def parse_one(body):
        return onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]>\n{body}')

    return parse_one


async def test_a_cancel_is_felt_between_two_pieces_of_a_large_output(parse, monkeypatch):
    model = parse("g (float[n, 1] x, float[1, m] z) => (float[n, m] y) { y = Add(x, z) }")
    feed = {"x": np.ones((2048, 1), np.float32), "z": np.arange(4096, dtype=np.float32)[None]}
    async with trionnx.open_scheduler(backend="webgpu") as scheduler:
        session = await scheduler.load(model)
        assert await stopped_at(monkeypatch, Device, "_read_piece", 3, session, feed) == 3 < 2048 * 4096 * 4 / PIECE
        np.testing.assert_array_equal((await session.run(None, feed))[0], feed["x"] + feed["z"])


async def test_a_cancel_is_felt_while_an_early_output_is_read(layers, monkeypatch):
    feed = {"x": np.ones((20_000, 64), np.float32)}  # 4.9 MiB: two pieces
    scope = trio.CancelScope()
    async with trionnx.open_scheduler(backend="webgpu") as scheduler:
        session = await scheduler.load(layers(8, 64, early=1))
        (right, _) = await session.run(None, feed)
        with cancelled_at(monkeypatch, Device, "_read_piece", 1, scope, "read") as count, scope:
            async with session.stream(None, feed) as items:
                async for _ in items:
                    raise AssertionError("the cancel was not felt")
        assert count["calls"] == 1
        assert (await session.run(None, feed))[0].tobytes() == right.tobytes()


@pytest.mark.parametrize("most", [1, 2, 3])
async def test_a_cancel_while_the_device_works_costs_what_is_in_flight(watched, layers, monkeypatch, most):
    """From a fence on, by the queue's thread: at most `max_in_flight` - 1 further fences come, and no submission."""
    feed = {"x": np.ones((512, 96), np.float32)}
    policy = trionnx.TerminatePolicy(poll_after="every_op")
    async with trionnx.open_scheduler(backend="watched", policy=policy, max_in_flight=most) as scheduler:
        session = await scheduler.load(layers(12, 96))
        (right,) = await session.run(None, feed)
        (engine,) = watched
        fences = await stopped_at(monkeypatch, engine._thread, "_fence", 5, session, feed)
        assert fences <= 5 + most - 1
        counts = engine.ended[-1]
        assert counts.counted == counts.on_gpu == fences
        assert counts.submitted == counts.finished
        assert counts.dropped > 0
        assert (await session.run(None, feed))[0].tobytes() == right.tobytes()


# --- pausing ----------------------------------------------------------------------------------------


async def test_a_paused_run_lets_another_session_pass_and_gives_the_same_bits(layers):
    feed = {"x": np.random.default_rng(3).standard_normal((512, 96)).astype(np.float32)}
    policy = trionnx.TerminatePolicy(poll_after="every_op")
    with trio.fail_after(LIMIT_S):
        async with trionnx.open_scheduler(backend="webgpu", policy=policy) as scheduler:
            session, other = [await scheduler.load(layers(12, 96, seed=seed)) for seed in (0, 1)]
            right, others = [(await one.run(None, feed))[0].tobytes() for one in (session, other)]
            for options in (trionnx.RunOptions(), trionnx.RunOptions(priority=9)):
                paused, got, told = trio.Event(), list[bytes](), list[int]()

                def on_progress(done, total, told=told, paused=paused):
                    told.append(done)
                    if done == 4:
                        (run,) = session._runs
                        run.pause()
                        paused.set()

                options.on_progress = on_progress

                async def one(options=options, got=got):
                    got.append((await session.run(None, feed, options))[0].tobytes())

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(one)
                    await paused.wait()
                    for _ in range(2):
                        assert (await other.run(None, feed))[0].tobytes() == others
                    assert not got
                    done = len(told)
                    await wait_all_tasks_blocked()
                    assert len(told) == done, "while it is paused nothing of it is executed"
                    (run,) = session._runs
                    run.resume()
                assert got == [right]


@pytest.mark.parametrize("way", ["cancel", "terminate", "close"])
async def test_a_paused_run_is_stopped_like_any_other(watched, layers, way):
    feed = {"x": np.ones((512, 96), np.float32)}
    policy = trionnx.TerminatePolicy(poll_after="every_op")
    options = trionnx.RunOptions(policy=policy)
    outcome = "none"
    with trio.fail_after(LIMIT_S):
        async with trionnx.open_scheduler(backend="watched") as scheduler:
            session = await scheduler.load(layers(12, 96))
            with trio.CancelScope() as scope:
                calls = {"cancel": scope.cancel, "terminate": options.terminate, "close": session.close}
                paused = trio.Event()

                def on_progress(done, total):
                    if done == 4:
                        (run,) = session._runs
                        run.pause()
                        paused.set()

                options.on_progress = on_progress
                try:
                    async with trio.open_nursery() as nursery:

                        async def stop():
                            await paused.wait()
                            await wait_all_tasks_blocked()
                            calls[way]()

                        nursery.start_soon(stop)
                        await session.run(None, feed, options)
                except* trionnx.RunTerminated:
                    outcome = "terminate"
                except* trio.ClosedResourceError:
                    outcome = "close"
            if scope.cancelled_caught:
                outcome = "cancel"
            assert outcome == way
            assert not watched[0]._runs
            counts = watched[0].ended[-1]
            assert counts.counted == counts.on_gpu < 12
