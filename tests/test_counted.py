"""What the device itself has executed of a run that was stopped: what was submitted, and nothing later."""

from __future__ import annotations

import queue
import random
from collections import Counter

import numpy as np
import onnx
import pytest
import trio

import trionnx

LIMIT_S = 300
FINE = trionnx.TerminatePolicy(poll_after="every_op")
WEIGHT = (np.random.default_rng(1).standard_normal((96, 96)) / 10).astype(np.float32)
FEED = {"x": np.random.default_rng(0).standard_normal((512, 96)).astype(np.float32), "w": WEIGHT}


def mixed():
    """GPU, CPU and GPU again; and values decide what follows on the CPU."""
    text = """<ir_version: 9, opset_import: ["" : 18]>
    g (float[n, 96] x, float[96, 96] w) => (float[n, 96] y) {
        a = MatMul(x, w) b = Tanh(a) c = MatMul(b, w) d = Relu(c)
        places = NonZero(d)
        doubled = Add(places, places) halved = Sub(doubled, places)
        flags = Cast<to = 1>(halved) sum = ReduceSum<keepdims = 0>(flags)
        e = MatMul(d, w) f = Tanh(e) h = MatMul(f, w) i = Tanh(h) j = MatMul(i, w)
        y = Add(j, sum)
    }"""
    return onnx.parser.parse_model(text)


def counted(engine):
    """What the device's counter is now, once what is in flight has finished."""
    answers = queue.SimpleQueue[int]()
    assert engine._thread.post(lambda: answers.put(engine._executor.counter.read()))
    return answers.get(timeout=LIMIT_S)


@pytest.fixture
def host_calls(monkeypatch):
    """How many segments each run has executed on the CPU, by its number: they ascend."""
    from trionnx.gpu.device.executor import Executor

    calls = Counter[int]()
    original = Executor.compute

    def compute(self, run, block, segment):
        calls[run.request.run] += 1
        return original(self, run, block, segment)

    monkeypatch.setattr(Executor, "compute", compute)
    return calls


@pytest.mark.parametrize("way", ["cancel", "terminate", "close"])
async def test_nothing_of_a_stopped_run_is_executed_later(watched, host_calls, way):
    dice, stopped = random.Random(11), 0
    with trio.fail_after(LIMIT_S):
        async with trionnx.open_scheduler(backend="watched", policy=FINE) as scheduler:
            other = await scheduler.load(mixed())
            for _ in range(2):
                await other.run(None, FEED)  # the costs are known then
            whole = watched[0].ended[-1]
            assert whole.counted == whole.on_gpu == whole.submitted - host_calls[max(host_calls)]
            assert min(whole.on_gpu, host_calls[max(host_calls)]) > 2
            start = trio.current_time()
            (right,) = await other.run(None, FEED)
            run_s = trio.current_time() - start
            session = await scheduler.load(mixed())
            for at in [*range(1, whole.submitted), *(dice.uniform(0, run_s) for _ in range(12))]:
                engine, options = watched[-1], trionnx.RunOptions()
                with trio.CancelScope() as scope:
                    calls = {"cancel": scope.cancel, "terminate": options.terminate, "close": session.close}
                    if isinstance(at, int):
                        options.on_progress = lambda done, total, at=at, calls=calls: (
                            calls[way]() if done == at else None
                        )
                    try:
                        async with trio.open_nursery() as nursery:
                            if not isinstance(at, int):

                                async def later(at=at, calls=calls):
                                    await trio.sleep(at)
                                    calls[way]()

                                nursery.start_soon(later)
                            (output,) = await session.run(None, FEED, options)
                            assert output.tobytes() == right.tobytes()
                            nursery.cancel_scope.cancel()
                    except* (trionnx.RunTerminated, trio.ClosedResourceError):
                        stopped += 1
                stopped += scope.cancelled_caught
                counts, hosts = engine.ended[-1], host_calls.copy()
                assert counts.counted == counts.on_gpu <= counts.submitted == counts.finished
                if way == "close":
                    await session.aclose()
                    await other.run(None, FEED)
                    session = await scheduler.load(mixed())
                else:
                    before = counted(engine)
                    assert before == sum(ended.on_gpu for ended in engine.ended)
                    await other.run(None, FEED)
                    assert counted(engine) == before
                assert all(host_calls[run] == count for run, count in hosts.items())
            (output,) = await session.run(None, FEED)
            assert output.tobytes() == right.tobytes()
    assert stopped > 10


async def test_a_segment_that_is_dropped_is_not_executed(watched):
    """The stop comes between the hand-over and the driver: by the thread, before it submits."""
    with trio.fail_after(LIMIT_S):
        async with trionnx.open_scheduler(backend="watched", policy=FINE) as scheduler:
            session = await scheduler.load(mixed())
            await session.run(None, FEED)
            (engine,) = watched
            token, make_room = trio.lowlevel.current_trio_token(), engine._thread.make_room
            for at in (1, 2, 5):
                rooms = list[int]()
                options = trionnx.RunOptions(policy=trionnx.TerminatePolicy(poll_after="every_op"))

                def room(most, rooms=rooms, at=at, options=options):
                    flying = make_room(most)
                    rooms.append(flying)
                    if len(rooms) == at:
                        trio.from_thread.run_sync(options.terminate, trio_token=token)
                    return flying

                engine._thread.make_room = room
                with pytest.raises(trionnx.RunTerminated):
                    await session.run(None, FEED, options)
                counts = engine.ended[-1]
                assert counts.on_gpu == counts.counted == at - 1
                assert counts.dropped >= 1
                assert len(rooms) == at
