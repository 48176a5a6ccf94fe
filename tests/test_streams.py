"""Streams on the real device: early outputs come early, also where values decide what follows."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import trio

import trionnx

LIMIT_S = 300
FINE = trionnx.TerminatePolicy(poll_after="every_op")
FEED = {"x": np.random.default_rng(0).standard_normal((1024, 96)).astype(np.float32)}


def decided():
    """An early output; then a block that the values of x decide; then y."""
    text = """<ir_version: 9, opset_import: ["" : 18]>
    g (float[n, 96] x, float[96, 96] w) => (float[n, 96] early, int64[2, m] places, float[n, 96] y) {
        a = MatMul(x, w) early = Tanh(a)
        b = MatMul(early, w) c = Relu(b)
        zero = Constant<value = float {0.0}>()
        axes = Constant<value = int64[1] {1}>()
        positive = ReduceSum<keepdims = 1>(c, axes)
        big = Greater(positive, zero)
        places = NonZero(big)
        d = MatMul(c, w) e = Tanh(d) f = MatMul(e, w) g = Tanh(f)
        flags = Cast<to = 1>(places)
        sum = ReduceSum<keepdims = 0>(flags)
        y = Add(g, sum)
    }"""
    return onnx.parser.parse_model(text)


WEIGHT = (np.random.default_rng(1).standard_normal((96, 96)) / 10).astype(np.float32)


@pytest.fixture(params=["layers", "decided"])
def model(request, layers):
    return (layers(12, 96, early=2), FEED) if request.param == "layers" else (decided(), {**FEED, "w": WEIGHT})


async def test_early_outputs_come_before_the_end(watched, model):
    source, feed = model
    with trio.fail_after(LIMIT_S):
        async with trionnx.open_scheduler(backend="watched", policy=FINE) as scheduler:
            session = await scheduler.load(source)
            names = [info.name for info in session.get_outputs()]
            right = dict(zip(names, await session.run(None, feed), strict=True))
            (engine,) = watched
            ran_on, order = 0, list[str]()
            async with session.stream(None, feed) as items:
                async for name, value in items:
                    if not order:
                        (run,) = engine._runs.values()  # it goes on
                        ran_on = run.finished
                    order.append(name)
                    assert value.tobytes() == right[name].tobytes()
            assert order == names
            counts = engine.ended[-1]
            assert 0 < ran_on < counts.finished == counts.submitted
            assert counts.counted == counts.on_gpu


async def test_leaving_after_the_first_output_stops_the_run(watched, model):
    source, feed = model
    with trio.fail_after(LIMIT_S):
        async with trionnx.open_scheduler(backend="watched", policy=FINE) as scheduler:
            session = await scheduler.load(source)
            right = [value.tobytes() for value in await session.run(None, feed)]
            whole = watched[0].ended[-1]
            async with session.stream(None, feed) as items:
                async for name, value in items:
                    assert (name, value.tobytes()) == ("early", right[0])
                    break
            counts = watched[0].ended[-1]
            assert counts.finished < whole.finished
            assert counts.counted == counts.on_gpu < whole.on_gpu
            assert not watched[0]._runs
            assert [value.tobytes() for value in await session.run(None, feed)] == right


@pytest.mark.parametrize("at", range(1, 12, 2))
async def test_a_soft_stop_gives_what_is_there_and_it_is_right(watched, model, at):
    source, feed = model
    with trio.fail_after(LIMIT_S):
        async with trionnx.open_scheduler(backend="watched", policy=FINE) as scheduler:
            session = await scheduler.load(source)
            right = [value.tobytes() for value in await session.run(None, feed)]
            policy = trionnx.TerminatePolicy(poll_after="every_op", on_terminate="stop_submit")
            options = trionnx.RunOptions(policy=policy)
            options.on_progress = lambda done, total: options.terminate() if done == at else None
            got = await session.run(None, feed, options)
            for value, expected in zip(got, right, strict=True):
                assert value is None or value.tobytes() == expected
            # In order: what is not there is at the end.
            there = [value is not None for value in got]
            assert there == sorted(there, reverse=True)
            counts = watched[0].ended[-1]
            assert counts.counted == counts.on_gpu
            assert [value.tobytes() for value in await session.run(None, feed)] == right


async def test_what_is_ready_at_the_end_of_a_block_survives_a_stop_there(watched, monkeypatch):
    """The stop comes when values are to decide what follows: that is not planned any more, and nothing is lost."""
    feed = {**FEED, "w": WEIGHT}
    policy = trionnx.TerminatePolicy(split_into_checkpoints=False, on_terminate="stop_submit")
    options = trionnx.RunOptions(policy=policy)
    with trio.fail_after(LIMIT_S):
        async with trionnx.open_scheduler(backend="watched") as scheduler:
            session = await scheduler.load(decided())
            right = await session.run(None, feed)
            (engine,) = watched
            token, original = trio.lowlevel.current_trio_token(), engine._fenced

            def fenced(run, segment, *rest):
                if segment.stop.step == len(run.block.device.calls) and run.block.decision is not None:
                    trio.from_thread.run_sync(options.terminate, trio_token=token)
                original(run, segment, *rest)

            with monkeypatch.context() as patch:
                patch.setattr(engine, "_fenced", fenced)
                early, _, y = await session.run(None, feed, options)
            assert early.tobytes() == right[0].tobytes()
            assert y is None


@pytest.mark.parametrize("way", ["terminate", "cancel", "close", "deadline"])
async def test_what_stops_a_stream(watched, model, way):
    source, feed = model
    outcome, options = "none", trionnx.RunOptions()
    with trio.fail_after(LIMIT_S):
        async with trionnx.open_scheduler(backend="watched", policy=FINE) as scheduler:
            session = await scheduler.load(source)
            await session.run(None, feed)
            with trio.CancelScope() as scope:
                try:
                    async with session.stream(None, feed, options) as items:
                        async for _ in items:
                            if way == "terminate":
                                options.terminate()
                            elif way == "close":
                                session.close()
                            elif way == "cancel":
                                scope.cancel()
                            else:
                                scope.deadline = trio.current_time()
                except trionnx.RunTerminated:
                    outcome = "terminate"
                except trio.ClosedResourceError:
                    outcome = "close"
            if scope.cancelled_caught:
                outcome = "cancel"
            assert outcome == {"deadline": "cancel"}.get(way, way)
            counts = watched[0].ended[-1]
            assert counts.counted == counts.on_gpu
            assert not watched[0]._runs
