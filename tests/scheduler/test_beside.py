"""Models beside each other on one queue: `load(..., beside=session)`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import trionnx
from trionnx.actors.fake import FakeModel
from trionnx.gpu.seam import StepView

Feed = dict[str, np.ndarray[Any, Any]]


async def closed_during(what: Callable[[], Awaitable[Any]], told: list[str]) -> None:
    try:
        await what()
    except trio.ClosedResourceError:
        told.append("closed")


def parse(body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]>\n{body}')


async def test_runs_of_both_take_turns_on_one_queue(autojump_clock: MockClock, feed: Feed) -> None:
    first, second = FakeModel(), FakeModel(blocks=((StepView("gpu", cost_s=0.005),) * 3,))
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        one = await scheduler.load(first)
        two = await scheduler.load(second, beside=one)
        three = await scheduler.load(second, beside=two)
        (engine,) = first.engines
        assert second.engines == [engine, engine]
        sessions = (one, two, three)

        async def run(session: trionnx.Session, model: FakeModel) -> None:
            outputs = await session.run(None, feed)
            for name, output in zip(("y", "trace"), outputs, strict=True):
                np.testing.assert_array_equal(output, model.expected(feed)[name])

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                for session, model in zip(sessions, (first, second, second), strict=True):
                    nursery.start_soon(run, session, model)
            await wait_all_tasks_blocked()
            assert sum(session.statistics().queued for session in sessions) == 8
        under_way = 0
        for line in engine.log:
            under_way += (line.what == "begin") - (line.what == "end")
            assert under_way in (0, 1)
        assert [session.statistics().segments_finished for session in sessions] == [30, 9, 9]
        assert scheduler.statistics().runs == 9


@pytest.mark.parametrize("first", [0, 1])
async def test_closing_one_keeps_the_other(autojump_clock: MockClock, feed: Feed, first: int) -> None:
    model = FakeModel()
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        one = await scheduler.load(model)
        sessions = [one, await scheduler.load(model, beside=one)]
        engine = model.engines[0]
        goes, stays = sessions[first], sessions[1 - first]
        async with trio.open_nursery() as nursery:
            told: list[str] = []
            nursery.start_soon(stays.run, None, feed)
            nursery.start_soon(closed_during, partial(goes.run, None, feed), told)
            await trio.sleep(0.01)
            await goes.aclose()
            await goes.aclose()
            assert told == ["closed"]
            assert engine.count("close") == 0
            assert list(engine.models) == [1 - first]
        assert stays.statistics().segments_finished == 10
        with pytest.raises(trio.ClosedResourceError, match="the session is closed"):
            await goes.run(None, feed)
        with pytest.raises(trio.ClosedResourceError):
            await scheduler.load(model, beside=goes)
        another = await scheduler.load(model, beside=stays)
        await stays.aclose()
        assert engine.count("close") == 0
        assert len(await another.run(None, feed)) == 2
        await another.aclose()
        assert engine.count("close") == 1
        assert scheduler.statistics().runs >= 2


async def test_a_load_waits_for_the_queue_and_a_cancelled_one_leaves_nothing(
    autojump_clock: MockClock, feed: Feed
) -> None:
    model, slow = FakeModel(), FakeModel(load_s=1.0)
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        one = await scheduler.load(model)
        engine = model.engines[0]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.run, None, feed)
            await trio.sleep(0.001)
            two = await scheduler.load(model, beside=one)
            assert engine.times("load")[1] >= engine.times("end")[0]
        for limit_s in (0.0, 0.1, 0.3, 0.9):
            with trio.move_on_after(limit_s) as scope:
                await scheduler.load(slow, beside=two)
            assert scope.cancelled_caught
            assert list(engine.models) == [0, 1]
            assert len(await one.run(None, feed)) == 2
        phases: list[str] = []
        three = await scheduler.load(slow, beside=two, on_progress=lambda phase, done, total: phases.append(phase))
        assert phases == ["compile"] * 5
        assert len(await three.run(None, feed)) == 2


async def test_a_load_that_fails_leaves_the_others_as_they_are(autojump_clock: MockClock, feed: Feed) -> None:
    model = FakeModel()
    broken = FakeModel(failures={"load": trionnx.InvalidModel("broken")})
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        one = await scheduler.load(model)
        with pytest.raises(trionnx.InvalidModel, match="broken"):
            await scheduler.load(broken, beside=one)

        def fail(phase: str, done: int, total: int) -> None:
            raise ValueError(phase)

        with pytest.raises(ValueError, match="compile"):
            await scheduler.load(FakeModel(), beside=one, on_progress=fail)
        assert list(model.engines[0].models) == [0]
        assert len(await one.run(None, feed)) == 2


async def test_the_last_one_may_leave_during_a_load(autojump_clock: MockClock, feed: Feed) -> None:
    slow, sessions = FakeModel(load_s=1.0), []
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        one = await scheduler.load(FakeModel())

        async def load() -> None:
            sessions.append(await scheduler.load(slow, beside=one))

        start = trio.current_time()
        nursery.start_soon(load)
        await trio.sleep(0.5)
        await one.aclose()  # the queue's thread is loading until then
        assert trio.current_time() == start + 1.0
        await trio.sleep(1)
        assert len(await sessions[0].run(None, feed)) == 2


async def test_a_scheduler_closed_during_a_load_beside(autojump_clock: MockClock) -> None:
    model = FakeModel()
    told: list[str] = []
    async with trio.open_nursery() as nursery, trionnx.open_scheduler(backend="fake") as scheduler:
        one = await scheduler.load(model)
        load = partial(scheduler.load, FakeModel(load_s=100), beside=one)
        nursery.start_soon(closed_during, load, told)
        await trio.sleep(0.5)
    assert told == ["closed"]
    assert model.engines[0]._gone
    assert trio.current_time() < 10


async def test_what_beside_takes(autojump_clock: MockClock) -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler, trionnx.open_scheduler(backend="fake") as other:
        one = await scheduler.load(FakeModel())
        with pytest.raises(ValueError, match="its back end, adapter, isolation and memory are taken"):
            await scheduler.load(FakeModel(), beside=one, backend="fake")
        with pytest.raises(ValueError, match="its back end, adapter, isolation and memory are taken"):
            await scheduler.load(FakeModel(), beside=one, adapter=0)
        with pytest.raises(ValueError, match="its back end, adapter, isolation and memory are taken"):
            await scheduler.load(FakeModel(), beside=one, isolation="process")
        with pytest.raises(ValueError, match="another scheduler"):
            await other.load(FakeModel(), beside=one)
        with pytest.raises(TypeError, match="beside is a session or None, not str"):
            await scheduler.load(FakeModel(), beside="one")  # type: ignore[arg-type]


async def test_a_device_that_hangs_takes_all_of_them(autojump_clock: MockClock, feed: Feed) -> None:
    model = FakeModel(hangs={"driver"})
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        one = await scheduler.load(model)
        two = await scheduler.load(FakeModel(), beside=one)
        with pytest.raises(trionnx.DeviceHung):
            await one.run(None, feed)
        with pytest.raises(trionnx.DeviceHung):
            await two.run(None, feed)
        with pytest.raises(trionnx.DeviceHung):
            await scheduler.load(FakeModel(), beside=two)
        await two.aclose()
        await one.aclose()


@pytest.mark.parametrize("backend", ["webgpu", "cpu"])
async def test_each_model_is_its_own(backend: str) -> None:
    async with trionnx.open_scheduler(backend=backend) as scheduler:
        one = await scheduler.load(parse("g (float[n] x) => (float[n] y) { y = Exp(x) }"))
        two = await scheduler.load(
            parse("g (float[n] a, float[n] b) => (float[n] sum, float[n] y) { sum = Add(a, b) y = Neg(a) }"),
            beside=one,
            input_shapes={"a": (4,), "b": (4,)},
        )
        x = np.arange(4, dtype=np.float32)
        np.testing.assert_array_equal((await two.run(None, {"a": x, "b": x}))[0], 2 * x)
        np.testing.assert_allclose((await one.run(None, {"x": x}))[0], np.exp(x), rtol=1e-6)
        assert [info.name for info in two.get_inputs()] == ["a", "b"]
        assert [line.op for line in one.explain()] == ["Exp"]
        assert {line.op for line in two.explain()} == {"Add", "Neg"}
        assert (two.backend, two.adapter) == (one.backend, one.adapter)
        with pytest.raises(trionnx.InvalidModel):
            await scheduler.load(b"no model", beside=one)
        await one.aclose()
        np.testing.assert_array_equal((await two.run(["y"], {"a": x, "b": x}))[0], -x)
