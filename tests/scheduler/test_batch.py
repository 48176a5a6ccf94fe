"""Runs that go together: `batch_wait_s`."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import trionnx
from trionnx.actors.fake import FakeModel
from trionnx.gpu.errors import InvalidData
from trionnx.scheduler.batch import MOST_RUNS

Outputs = dict[int, Any]


def fed(number: int, rows: int = 2) -> dict[str, np.ndarray[Any, Any]]:
    return {"x": np.arange(rows, dtype=np.float32) + 100 * number}


async def put(session: trionnx.Session, made: Outputs, number: int, **options: Any) -> None:
    try:
        made[number] = await session.run(["y"], fed(number, 1 + number % 3), trionnx.RunOptions(**options))
    except Exception as error:
        made[number] = error


def check(model: FakeModel, made: Outputs) -> None:
    for number, outputs in made.items():
        (y,) = outputs
        np.testing.assert_array_equal(y, model.expected(fed(number, 1 + number % 3))["y"])
        assert y.base is None


async def test_runs_within_the_time_go_together(autojump_clock: MockClock) -> None:
    model, made = FakeModel(), Outputs()
    async with trionnx.open_scheduler(backend="fake", batch_wait_s=0.02) as scheduler:
        session = await scheduler.load(model)
        begin = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(put, session, made, number)
                await trio.sleep(0.003)
        assert model.engines[0].count("begin") == 1
        assert session.statistics().runs == 5
        assert trio.current_time() - begin == pytest.approx(0.02 + 0.05)
        check(model, made)
        assert len(made) == 5


async def test_a_run_without_others_goes_by_itself(autojump_clock: MockClock) -> None:
    model, made = FakeModel(), Outputs()
    async with trionnx.open_scheduler(backend="fake", batch_wait_s=0.02) as scheduler:
        session = await scheduler.load(model)
        await put(session, made, 1)
        await put(session, made, 2)
        assert model.engines[0].count("begin") == 2
        check(model, made)


async def test_a_full_batch_waits_no_longer(autojump_clock: MockClock) -> None:
    model, made = FakeModel(), Outputs()
    async with trionnx.open_scheduler(backend="fake", batch_wait_s=60) as scheduler:
        session = await scheduler.load(model)
        begin = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(MOST_RUNS):
                nursery.start_soon(put, session, made, number)
        assert trio.current_time() - begin == pytest.approx(0.05)
        assert model.engines[0].count("begin") == 1
        check(model, made)


async def test_while_the_session_is_busy_a_batch_takes_in_more_and_the_urgent_one_is_next(
    autojump_clock: MockClock,
) -> None:
    """One batch runs and one is ready; what comes meanwhile is not put together yet, however long it waits."""
    model, made, order = FakeModel(), Outputs(), list[int]()

    async def one(number: int, priority: int = 0) -> None:
        await put(session, made, number, priority=priority)
        order.append(number)

    async with trionnx.open_scheduler(backend="fake", batch_wait_s=0.01) as scheduler:
        session = await scheduler.load(model)
        async with trio.open_nursery() as nursery:
            for number in range(4):  # two batches, of 10 segments each: 0.05 s
                nursery.start_soon(one, number)
                if number % 2:
                    await trio.sleep(0.011)
            for number in range(4, 10):
                nursery.start_soon(one, number)
                nursery.start_soon(one, number + 10, 1)
                await trio.sleep(0.004)
        assert model.engines[0].count("begin") == 4
        assert set(order[:2]) == {0, 1}
        assert set(order[2:4]) == {2, 3}
        assert set(order[4:10]) == set(range(14, 20))
        check(model, made)
        assert len(made) == 16


async def test_what_differs_does_not_go_together(autojump_clock: MockClock) -> None:
    model, made = FakeModel(), Outputs()
    seen: list[tuple[int, int]] = []
    async with trionnx.open_scheduler(backend="fake", batch_wait_s=0.02) as scheduler:
        session = await scheduler.load(model)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(put, session, made, 1, priority=1))
            nursery.start_soon(partial(put, session, made, 2))
            nursery.start_soon(partial(put, session, made, 3, on_progress=lambda *of: seen.append(of)))
        assert model.engines[0].count("begin") == 3
        assert seen[-1] == (10, 10)
        async with trio.open_nursery() as nursery:  # "trace" has another first dimension
            for _ in range(2):
                nursery.start_soon(session.run, None, fed(1))
        assert model.engines[0].count("begin") == 5
        check(model, made)


@pytest.mark.parametrize("late", [0.0, 0.03])
async def test_a_run_that_is_cancelled_leaves_the_others(autojump_clock: MockClock, late: float) -> None:
    model, made = FakeModel(), Outputs()
    async with trionnx.open_scheduler(backend="fake", batch_wait_s=0.02) as scheduler:
        session = await scheduler.load(model)
        options = trionnx.RunOptions()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(put, session, made, 0)
            nursery.start_soon(put, session, made, 1)
            with trio.move_on_after(0.01 + late) as scope:
                await session.run(["y"], fed(2), options)
            assert scope.cancelled_caught
            assert trio.current_time() == pytest.approx(0.01 + late)
        assert model.engines[0].count("begin") == 1
        check(model, made)


@pytest.mark.parametrize("late", [0.0, 0.03])
async def test_with_the_last_run_the_batch_stops(autojump_clock: MockClock, late: float) -> None:
    model = FakeModel()
    async with trionnx.open_scheduler(backend="fake", batch_wait_s=0.02) as scheduler:
        session = await scheduler.load(model)
        with trio.move_on_after(0.012 + late):
            async with trio.open_nursery() as nursery:
                for number in range(3):
                    nursery.start_soon(session.run, ["y"], fed(number))
        engine = model.engines[0]
        assert engine.count("begin") == engine.count("end") == (1 if late else 0)
        assert engine.count("driver") == engine.count("finish") < 10
        made = Outputs()
        await put(session, made, 4)
        check(model, made)


async def test_terminate_ends_its_own_run(autojump_clock: MockClock) -> None:
    model, made = FakeModel(), Outputs()
    options, soft = trionnx.RunOptions(), trionnx.RunOptions(policy=trionnx.TerminatePolicy(on_terminate="stop_submit"))
    async with trionnx.open_scheduler(backend="fake", batch_wait_s=0.02) as scheduler:
        session = await scheduler.load(model)

        async def terminated() -> None:
            with pytest.raises(trionnx.RunTerminated):
                await session.run(["y"], fed(9), options)

        async def softly() -> None:
            assert await session.run(["y"], fed(9), soft) == [None]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(put, session, made, 0)
            nursery.start_soon(put, session, made, 1)
            nursery.start_soon(terminated)
            nursery.start_soon(softly)
            await trio.sleep(0.03)
            options.terminate()
            soft.terminate()
        assert options.terminated
        assert soft.terminated
        check(model, made)


async def test_what_a_batch_fails_with_each_run_is_told_by_itself(autojump_clock: MockClock) -> None:
    model, made = FakeModel(failures={3: InvalidData("x", "other values")}), Outputs()
    async with trionnx.open_scheduler(backend="fake", batch_wait_s=0.02) as scheduler:
        session = await scheduler.load(model)
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(put, session, made, number)
        assert model.engines[0].count("begin") == 4  # the failure is told once: by the batch
        check(model, made)


async def test_closing_ends_the_wait(autojump_clock: MockClock) -> None:
    model, made = FakeModel(), Outputs()
    async with trionnx.open_scheduler(backend="fake", batch_wait_s=60) as scheduler:
        session = await scheduler.load(model)
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(put, session, made, number)
            await wait_all_tasks_blocked()
            begin = trio.current_time()
            await session.aclose()
        assert trio.current_time() - begin < 1
        assert all(isinstance(error, trio.ClosedResourceError) for error in made.values())
        assert len(made) == 3


async def test_bad_input_is_refused_before_the_wait(autojump_clock: MockClock) -> None:
    async with trionnx.open_scheduler(backend="fake", batch_wait_s=60) as scheduler:
        session = await scheduler.load(FakeModel())
        begin = trio.current_time()
        for feeds in ({}, {"x": np.zeros((2, 2), np.float32)}, {"x": np.zeros(2)}, {"z": 1.0}):
            with pytest.raises(trionnx.InvalidInput):
                await session.run(["y"], feeds)
        assert trio.current_time() - begin < 1
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError, match="batch_wait_s"):
            async with trionnx.open_scheduler(batch_wait_s=wrong):
                raise AssertionError


async def test_terminate_follows_the_policy_of_the_session_too(autojump_clock: MockClock) -> None:
    model, made = FakeModel(), Outputs()
    policy, options = trionnx.TerminatePolicy(on_terminate="stop_submit"), trionnx.RunOptions()
    async with trionnx.open_scheduler(backend="fake", batch_wait_s=0.02) as scheduler:
        session = await scheduler.load(model, policy=policy)

        async def softly() -> None:
            assert await session.run(["y"], fed(9), options) == [None]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(put, session, made, 0)
            nursery.start_soon(softly)
            await trio.sleep(0.03)
            options.terminate()
        check(model, made)


async def test_terminate_from_a_thread() -> None:
    options = trionnx.RunOptions()
    async with trionnx.open_scheduler(backend="fake", batch_wait_s=3600) as scheduler:
        session = await scheduler.load(FakeModel())
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.run, ["y"], fed(0))
                with pytest.raises(trionnx.RunTerminated):
                    nursery.start_soon(trio.to_thread.run_sync, partial(_terminate_until, options))
                    await session.run(["y"], fed(1), options)
                nursery.cancel_scope.cancel()
        assert scheduler.statistics().runs == 2


def _terminate_until(options: trionnx.RunOptions) -> None:
    while not options.terminated:
        options.terminate()


async def test_numbers_on_the_device() -> None:
    rng = np.random.default_rng(3)
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 18]>\n'
        "g (float[n, 6] x, float[n] b) => (float[n, 6] y) { s = Softmax(x) u = Unsqueeze(b, a) y = Mul(s, u) }".replace(
            "{", "<int64[1] a = {1}> {", 1
        )
    )
    right = 0
    async with trionnx.open_scheduler(backend="webgpu", batch_wait_s=0.05) as scheduler:
        session = await scheduler.load(model)

        async def one(rows: int) -> None:
            nonlocal right
            x, b = rng.standard_normal((rows, 6)).astype(np.float32), rng.standard_normal(rows).astype(np.float32)
            (y,) = await session.run(None, {"x": x, "b": b})
            e = np.exp(x - x.max(1, keepdims=True))
            np.testing.assert_allclose(y, e / e.sum(1, keepdims=True) * b[:, None], rtol=1e-5, atol=1e-6)
            right += 1

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for rows in (3, 1, 5, 2):
                    nursery.start_soon(one, rows)
        assert right == 4
        assert scheduler.statistics().runs == 4
