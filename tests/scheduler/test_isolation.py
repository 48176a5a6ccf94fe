"""What is promised holds in a worker process, too: on the real device, on the CPU, on an engine from outside."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import trio

import toy
import trionnx
from trionnx.actors.remote import RemoteEngine
from trionnx.scheduler import Session
from trionnx.scheduler.run import AHEAD

BACKENDS = ("webgpu", "cpu", "toy")
SIDE, LAYERS = 96, 12
CANCELS = 60 if os.environ.get("TRIONNX_SOAK") == "1" else 8
LIMIT_S = 300
TOY = {"blocks": [20, 20], "seconds": 0.002, "lies": [], "faults": {}}


def small_model(seed: int = 0) -> onnx.ModelProto:
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


def work(backend: str) -> tuple[Any, dict[str, Any]]:
    """A source, and feeds for it."""
    if backend == "toy":
        return TOY, {"x": np.arange(9, dtype=np.float32)}
    return small_model(), {"x": np.random.default_rng(9).standard_normal((1500, SIDE)).astype(np.float32)}


def remote(session: Session) -> RemoteEngine:
    engine = session._actor._engine
    assert isinstance(engine, RemoteEngine)
    return engine


def gone(pid: int | None) -> bool:
    try:
        os.kill(pid or 0, 0)
    except ProcessLookupError:
        return True
    return False


class HandOvers:
    """Counts what a session hands over once it must not."""

    def __init__(self, session: Session) -> None:
        self.late, self.over = 0, False
        submit = session._actor.submit_nowait

        def counted(*arguments: Any) -> None:
            self.late += self.over
            submit(*arguments)

        vars(session._actor)["submit_nowait"] = counted


@pytest.fixture(autouse=True)
def _toys(engines: dict[str, Any]) -> None:
    trionnx.register_engine("toy", toy.ToyEngine)


# --- promises -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
async def test_cancelled_runs_leave_the_session_as_it_was(backend: str) -> None:
    """Promises 1, 2 and 5: nothing more is handed over, what is in flight finishes, outputs stay bit for bit."""
    dice, model, ended = random.Random(backend), *work(backend)[:1], {"whole": 0, "cancelled": 0}
    feeds = work(backend)[1]
    with trio.fail_after(LIMIT_S):
        async with trionnx.open_scheduler(backend=backend) as scheduler:
            here = await scheduler.load(model)
            there = await scheduler.load(model, isolation="process")
            pid = remote(there).pid
            assert (there.backend, there.get_inputs()) == (here.backend, here.get_inputs())
            assert there.adapter == here.adapter or backend == "toy"
            (right,) = await here.run(None, feeds)
            for _ in range(2):
                start = trio.current_time()
                (output,) = await there.run(None, feeds)
                whole_s = trio.current_time() - start
                assert output.tobytes() == right.tobytes()
            assert [(e.node, e.where) for e in there.explain()] == [(e.node, e.where) for e in here.explain()]
            hand_overs = HandOvers(there)
            for _ in range(CANCELS):
                async with trio.open_nursery() as nursery:
                    with trio.CancelScope() as scope:

                        async def cancel(scope: trio.CancelScope = scope) -> None:
                            await trio.sleep(dice.uniform(0, whole_s))
                            scope.cancel()
                            hand_overs.over = True

                        nursery.start_soon(cancel)
                        await there.run(None, feeds)
                        ended["whole"] += 1
                    nursery.cancel_scope.cancel()
                ended["cancelled"] += scope.cancelled_caught
                hand_overs.over = False
                (output,) = await there.run(None, feeds)
                assert output.tobytes() == right.tobytes()
            assert hand_overs.late == 0
            assert ended["cancelled"] > 0
            numbers = there.statistics()
            assert numbers.runs == 2 + 2 * CANCELS
            assert numbers.segments_submitted == numbers.segments_finished > 0
            assert remote(there)._holders == set()
    assert gone(pid)


async def test_a_terminated_run_says_so_and_drains() -> None:
    options = trionnx.RunOptions(on_progress=lambda done, total: options.terminate() if done == 3 else None)
    async with trionnx.open_scheduler(backend="toy", isolation="process") as scheduler:
        session = await scheduler.load(TOY)
        with pytest.raises(trionnx.RunTerminated) as caught:
            await session.run(None, work("toy")[1], options)
        assert caught.value.drained
        # Two in flight, and answers on their way: of what was handed over ahead.
        assert 3 <= caught.value.segments_done <= 3 + 2 + AHEAD < caught.value.segments_total
        assert len(await session.run(None, work("toy")[1])) == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", ["session", "scheduler"])
async def test_closing_during_a_run_ends_the_process(backend: str, what: str) -> None:
    """Promise 7."""
    model, feeds = work(backend)
    told = []
    with trio.fail_after(LIMIT_S):
        async with (
            trio.open_nursery() as background,
            trionnx.open_scheduler(backend=backend, isolation="process") as scheduler,
        ):
            session = await scheduler.load(model)
            pid = remote(session).pid
            begun = trio.Event()

            async def run_on() -> None:
                while True:
                    await session.run(None, feeds, trionnx.RunOptions(on_progress=lambda *_: begun.set()))

            async def run() -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await run_on()
                told.append("closed")

            background.start_soon(run)
            await begun.wait()
            if what == "session":
                await session.aclose()
                assert gone(pid)
        assert told == ["closed"]
    assert gone(pid)


async def test_a_cancelled_load_leaves_no_process() -> None:
    before = set(os.listdir("/proc/self/fd"))
    async with trionnx.open_scheduler(backend="toy", isolation="process") as scheduler:
        for seconds in (0, 0.02, 0.2):
            with trio.move_on_after(seconds) as scope:
                await scheduler.load({**TOY, "faults": {"load": ["hang"]}})
            assert scope.cancelled_caught
    assert len(os.listdir("/proc/self/fd")) <= len(before)


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["webgpu", "toy"])
async def test_a_worker_that_dies_costs_its_session_alone(backend: str) -> None:
    model, feeds = work(backend)
    with trio.fail_after(LIMIT_S):
        async with trionnx.open_scheduler(backend=backend, isolation="process") as scheduler:
            session, other = await scheduler.load(model), await scheduler.load(model)
            (right,) = await other.run(None, feeds)
            pid = remote(session).pid
            assert pid is not None

            def strike(done: int, total: int) -> None:
                if done == 2:
                    os.kill(pid, signal.SIGKILL)

            async with trio.open_nursery() as nursery:
                outputs: list[Any] = []

                async def elsewhere() -> None:
                    outputs.extend(await other.run(None, feeds))

                nursery.start_soon(elsewhere)
                with pytest.raises(trionnx.DeviceLost, match="the worker process was ended by SIGKILL"):
                    await session.run(None, feeds, trionnx.RunOptions(on_progress=strike))
            assert outputs[0].tobytes() == right.tobytes()
            with pytest.raises(trionnx.DeviceLost):
                await session.run(None, feeds)
            assert gone(pid)
            assert not remote(session).alive
            await session.aclose()
            again = await scheduler.load(model)
            assert (await again.run(None, feeds))[0].tobytes() == right.tobytes()


async def test_a_worker_that_dies_during_a_load() -> None:
    async with trionnx.open_scheduler(backend="toy", isolation="process") as scheduler:
        with pytest.raises(trionnx.DeviceLost, match="SIGABRT"):
            await scheduler.load({**TOY, "faults": {"load": ["abort"]}})
        assert len(await (await scheduler.load(TOY)).run(None, work("toy")[1])) == 1


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "kind"), [("fork", ValueError), ("", ValueError), (1, TypeError), (True, TypeError)])
async def test_an_isolation_that_is_none(value: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match='isolation is "thread" or "process", not'):
        async with trionnx.open_scheduler(isolation=value):
            raise AssertionError
    async with trionnx.open_scheduler(backend="toy") as scheduler:
        with pytest.raises(kind, match='isolation is "thread" or "process", not'):
            await scheduler.load(TOY, isolation=value)


async def test_a_load_says_otherwise_than_its_scheduler() -> None:
    async with trionnx.open_scheduler(backend="toy", isolation="process") as scheduler:
        assert isinstance((await scheduler.load(TOY))._actor._engine, RemoteEngine)
        assert isinstance((await scheduler.load(TOY, isolation="thread"))._actor._engine, toy.ToyEngine)


def nested() -> Callable[..., Any]:
    return lambda **options: toy.ToyEngine(**options)


@pytest.mark.parametrize("factory", [nested(), lambda **options: toy.ToyEngine(**options)])
async def test_an_engine_that_no_other_process_can_make(factory: Any) -> None:
    trionnx.register_engine("mine", factory)
    async with trionnx.open_scheduler(backend="mine", isolation="process") as scheduler:
        with pytest.raises(ValueError, match="'mine' cannot run in a worker process"):
            await scheduler.load(TOY)
        assert len(await (await scheduler.load(TOY, isolation="thread")).run(None, work("toy")[1])) == 1
        with pytest.raises(ValueError, match="'fake' lives by Trio's clock"):
            await scheduler.load(None, backend="fake")
