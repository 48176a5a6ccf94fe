"""DeviceTensor: who owns what stays on a device, and when it is given back."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

import trionnx
from trionnx.actors.fake import FakeEngine, FakeModel
from trionnx.gpu.seam import StepView, TensorInfo

X = np.arange(4, dtype=np.float64)
INPUTS = (TensorInfo("x", "tensor(double)", ("n",), np.dtype(np.float64)),)


def fake(**how: Any) -> FakeModel:
    return FakeModel(inputs=INPUTS, **how)


async def made(session: trionnx.Session, x: Any = X) -> trionnx.DeviceTensor:
    binding = session.io_binding()
    if isinstance(x, trionnx.DeviceTensor):
        binding.bind_input("x", x)
    else:
        binding.bind_cpu_input("x", x)
    binding.bind_output("y", "device")
    await session.run_with_iobinding(binding)
    (tensor,) = binding.get_outputs()
    assert isinstance(tensor, trionnx.DeviceTensor)
    return tensor


def held(model: FakeModel) -> int:
    (engine,) = set(model.engines)
    return len(engine.kept)


async def test_it_says_what_it_is(autojump_clock: MockClock) -> None:
    model = fake()
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        tensor = await made(session)
        assert (tensor.name, str(tensor.dtype), tensor.shape, tensor.nbytes) == ("y", "float64", (4,), 32)
        assert (tensor.backend, tensor.adapter, tensor.closed) == ("fake", "fake", False)
        assert repr(tensor) == "<trionnx.DeviceTensor 'y': float64[4] on fake>"
        expected = model.expected({"x": X})["y"]
        np.testing.assert_array_equal(await tensor.numpy(), expected)
        (await tensor.numpy())[:] = 0
        np.testing.assert_array_equal(await tensor.numpy(), expected)
        again, _ = await session.run(None, {"x": tensor})
        np.testing.assert_array_equal(again, model.expected({"x": expected})["y"])
        with pytest.raises(BufferError, match=r"await tensor.numpy\(\)"):
            np.from_dlpack(tensor)
        np.testing.assert_array_equal(np.from_dlpack(await tensor.numpy()), expected)


async def test_it_is_given_back_by_every_way_out(autojump_clock: MockClock) -> None:
    model = fake()
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        tensor = await made(session)
        with await made(session) as other:
            assert held(model) == 2
            assert session.statistics().tensors == 2
            assert scheduler.statistics().tensor_bytes == 64
        await made(session)
        gc.collect()
        await trio.sleep(0.01)
        assert held(model) == 1
        tensor.close()
        tensor.close()
        await trio.sleep(0.01)
        assert held(model) == session.statistics().tensors == 0
        for gone in (tensor, other):
            assert gone.closed
            assert repr(gone).endswith("closed>")
            with pytest.raises(trio.ClosedResourceError, match="the tensor is closed"):
                await gone.numpy()
            with pytest.raises(trio.ClosedResourceError, match="the tensor that is fed to 'x' is closed"):
                await session.run(None, {"x": gone})


async def test_one_that_is_collected_in_another_thread_is_given_back_on_this_one(autojump_clock: MockClock) -> None:
    model = fake()
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        bag = [await made(session)]
        gc.collect()
        engine, threads = model.engines[0], []
        free = engine.free
        engine.free = lambda *a: (threads.append(threading.current_thread()), free(*a))  # type: ignore[method-assign, assignment, func-returns-value]
        thread = threading.Thread(target=bag.clear)
        thread.start()
        thread.join()
        assert (bag, threads) == ([], [])
        await trio.sleep(0.01)
        assert threads == [threading.current_thread()]
        assert held(model) == 0
    bag = []


async def test_one_that_outlives_its_scheduler_goes_in_silence() -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        tensor = await made(await scheduler.load(fake(speed=0)))
    assert tensor.closed
    with pytest.raises(trio.ClosedResourceError, match="the session is closed"):
        await tensor.numpy()
    tensor.close()
    kept: list[trionnx.DeviceTensor] = []

    async def elsewhere() -> None:
        async with trionnx.open_scheduler(backend="fake") as scheduler:
            kept.append(await made(await scheduler.load(fake(speed=0))))

    await trio.to_thread.run_sync(trio.run, elsewhere)
    with pytest.raises(RuntimeError, match="a tensor can only be used in the Trio run that made it"):
        await kept[0].numpy()
    with pytest.raises(RuntimeError, match="a tensor can only be used"):
        kept[0].close()
    kept.clear()
    gc.collect()


async def test_it_goes_with_the_session_that_made_it(autojump_clock: MockClock) -> None:
    model = fake()
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        one = await scheduler.load(model)
        two = await scheduler.load(model, beside=one)
        first, second = await made(one), await made(two)
        await made(two, first)
        gc.collect()
        await one.aclose()
        assert held(model) == 1
        assert first.closed
        assert not second.closed
        with pytest.raises(trio.ClosedResourceError, match="the session is closed"):
            await two.run(None, {"x": first})
        assert len(await two.run(None, {"x": second})) == 2
        await two.aclose()
        assert held(model) == 0


async def test_it_can_be_closed_while_a_run_reads_it_or_waits_to(autojump_clock: MockClock) -> None:
    model = fake()
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session = await scheduler.load(model)
        tensor = await made(session)
        array = await tensor.numpy()
        results: list[Any] = []

        async def run() -> None:
            try:
                results.append((await session.run(None, {"x": tensor}))[0])
            except trio.ClosedResourceError as error:
                results.append(str(error))

        nursery.start_soon(run)
        await trio.sleep(0.01)
        nursery.start_soon(run)
        await trio.sleep(0.001)
        tensor.close()
        await trio.sleep(1)
        assert held(model) == 0
        np.testing.assert_array_equal(results[0], model.expected({"x": array})["y"])
        assert results[1] == "the tensor that is fed to 'x' is closed"


async def test_closing_in_the_instant_of_the_hand_over_does_not_overtake_the_run(autojump_clock: MockClock) -> None:
    model = fake(speed=0)
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session = await scheduler.load(model)
        for ticks in range(6):
            tensor = await made(session)
            expected = model.expected({"x": await tensor.numpy()})["y"]
            results: list[Any] = []

            async def run(tensor: Any = tensor, results: list[Any] = results) -> None:
                with contextlib.suppress(trio.ClosedResourceError):
                    results.append((await session.run(None, {"x": tensor}))[0])

            nursery.start_soon(run)
            for _ in range(ticks):
                await trio.lowlevel.checkpoint()
            tensor.close()
            await trio.sleep(1)
            assert all(np.array_equal(result, expected) for result in results)
        assert results


async def test_a_copy_waits_for_the_queue_and_its_cancel_is_felt_at_once(autojump_clock: MockClock) -> None:
    model = fake(read_s=1.0)
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session = await scheduler.load(model)
        tensor = await made(session)
        start = trio.current_time()
        with trio.move_on_after(0.5) as scope:
            await tensor.numpy()
        assert scope.cancelled_caught
        assert trio.current_time() == start + 0.5
        nursery.start_soon(session.run, None, {"x": X})
        await trio.sleep(0.001)
        engine = model.engines[0]
        array = await tensor.numpy()
        assert engine.times("read")[-1] >= engine.times("end")[-1]
        np.testing.assert_array_equal(array, model.expected({"x": X})["y"])


async def test_a_copy_that_hangs_costs_the_session(autojump_clock: MockClock) -> None:
    model = fake()
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        tensor = await made(session)
        model.read_s = 1000.0
        with pytest.raises(trionnx.DeviceHung, match="did not give a tensor back in time"):
            await tensor.numpy()
        with pytest.raises(trionnx.DeviceHung):
            await session.run(None, {"x": tensor})


async def test_closing_the_session_during_a_copy(autojump_clock: MockClock) -> None:
    model = fake(read_s=1.0)
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session = await scheduler.load(model)
        tensor = await made(session)

        async def close() -> None:
            await trio.sleep(0.5)
            await session.aclose()

        nursery.start_soon(close)
        with pytest.raises(trio.ClosedResourceError):
            await tensor.numpy()


async def test_a_tensor_of_another_session_is_refused(autojump_clock: MockClock) -> None:
    model = fake()
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        one, two = await scheduler.load(model), await scheduler.load(fake(adapter="other"))
        tensor = await made(one)
        says = "'x': expected a tensor of this session or of one that was loaded beside it, got one of a session apart"
        with pytest.raises(trionnx.InvalidInput, match=f"{says}, on fake"):
            await two.run(None, {"x": tensor})
        three = await scheduler.load(FakeModel(), beside=one)
        with pytest.raises(trionnx.InvalidInput, match=r"'x': expected float32 of shape \(n\), got float64 of shape"):
            await three.run(None, {"x": tensor})
        assert [line.what for line in model.engines[0].log].count("begin") == 1


@pytest.mark.parametrize("seed", range(3))
async def test_runs_that_are_stopped_anywhere_leave_no_tensor(autojump_clock: MockClock, seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = ((StepView("gpu", cost_s=0.005),) * 4,)
    model = fake(blocks=blocks, begin_s=0.004, read_s=0.006, end_s=0.003, early={"trace": (0, 1)})
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        engine: FakeEngine = model.engines[0]
        expected = model.expected({"x": X})["y"]
        whole = 0
        for number in range(60):
            binding = session.io_binding()
            binding.bind_cpu_input("x", X)
            binding.bind_output("y", "device")
            binding.bind_output("trace", "device")
            policy = trionnx.TerminatePolicy(on_terminate="stop_submit" if number % 3 == 2 else "throw_cancel")
            options = trionnx.RunOptions(policy=policy)
            async with trio.open_nursery() as nursery:
                scope = trio.CancelScope()

                async def stop(way: int = number % 3, options: Any = options, scope: Any = scope) -> None:
                    await trio.sleep(float(rng.uniform(0, 0.05)))
                    scope.cancel() if way == 0 else options.terminate()

                nursery.start_soon(stop)
                with scope, contextlib.suppress(trionnx.RunTerminated):
                    await session.run_with_iobinding(binding, options)
            tensors = [tensor for tensor in binding.get_outputs() if tensor is not None]
            whole += len(tensors) == 2
            assert len(engine.kept) == session.statistics().tensors == len(tensors)
            if len(tensors) == 2:
                np.testing.assert_array_equal(await tensors[0].numpy(), expected)
            for tensor in tensors:
                tensor.close()
            await trio.sleep(0.01)
            assert len(engine.kept) == 0
        assert 0 < whole < 60
