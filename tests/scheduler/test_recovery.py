"""A session comes up in time or fails clearly; what gets stuck is left alone, and the next request works."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

import toy
import trionnx
from trionnx.actors.fake import FakeModel
from trionnx.actors.probe import _process, cache_folder
from trionnx.actors.remote import RemoteEngine
from trionnx.gpu.device import adapters
from trionnx.gpu.device.adapters import DRIVER_LOCK, AdapterInfo, one_at_a_time
from trionnx.gpu.device.drivers import variables
from trionnx.gpu.device.verdicts import Survey, Verdict
from trionnx.gpu.errors import DeviceHung, NoAdapter, SessionInitTimeout
from trionnx.scheduler import backends, recovery
from trionnx.scheduler.backends import Choice, retreat
from trionnx.scheduler.isolation import variables_of
from trionnx.scheduler.recovery import MOST_STARTS, WINDOW_S, Fault, Health

KILLS = 100 if os.environ.get("TRIONNX_SOAK") == "1" else 2
TOY: dict[str, Any] = {"blocks": [8], "seconds": 0.001, "lies": [], "faults": {}}
FEED = {"x": np.arange(3, dtype=np.float32)}


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> list[Fault]:
    """In the place of `recover`: all that arrives there; nothing is recovered."""
    heard: list[Fault] = []
    monkeypatch.setattr(recovery, "recover", heard.append)
    return heard


# --- the race -------------------------------------------------------------------------------------


async def test_a_load_that_never_returns_fails_in_time_and_is_not_waited_for(
    autojump_clock: MockClock, faults: list[Fault]
) -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        with pytest.raises(SessionInitTimeout) as caught:
            await scheduler.load(FakeModel(hangs={"load"}), init_timeout_s=20)
        assert trio.current_time() == pytest.approx(20)
    assert trio.current_time() == pytest.approx(20)
    assert (caught.value.phase, caught.value.bound_s) == ("compile", 20)
    assert str(caught.value) == "the session was not there after 20.0 s, in phase 'compile'"
    assert isinstance(caught.value, TimeoutError)
    assert [(fault.error, fault.backend) for fault in faults] == [(caught.value, "fake")]


async def test_a_session_that_arrives_late_is_given_back_and_the_next_load_works(autojump_clock: MockClock) -> None:
    late, model = FakeModel(hangs={"load"}), FakeModel()
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        with pytest.raises(SessionInitTimeout):
            await scheduler.load(late, init_timeout_s=2)
        (engine,) = late.engines
        assert vars(engine)["_gone"] is False
        session = await scheduler.load(model)
        late.hangs.clear()
        engine._tell()
        await trio.sleep(0.001)
        assert engine._gone
        assert len(await session.run(["y"], {"x": [1]})) == 1
        assert len(late.engines) == 1


async def test_a_load_just_in_time(autojump_clock: MockClock, faults: list[Fault]) -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        await scheduler.load(FakeModel(load_s=19.99), init_timeout_s=20)
    assert not faults


async def test_the_wait_for_the_queue_does_not_count(autojump_clock: MockClock, faults: list[Fault]) -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        one = await scheduler.load(FakeModel(begin_s=30))
        nursery.start_soon(one.run, ["y"], {"x": [1]})
        await trio.sleep(1)
        await scheduler.load(FakeModel(load_s=5), beside=one, init_timeout_s=6)
        assert trio.current_time() > 35
    assert not faults


async def test_a_model_beside_that_takes_too_long_leaves_the_other_one_as_it_is(
    autojump_clock: MockClock, faults: list[Fault]
) -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        one = await scheduler.load(FakeModel())
        with pytest.raises(SessionInitTimeout, match="in phase 'compile'"):
            await scheduler.load(FakeModel(load_s=100), beside=one, init_timeout_s=5)
        assert trio.current_time() == pytest.approx(5)
        assert len(await one.run(["y"], {"x": [1]})) == 1
        with pytest.raises(SessionInitTimeout):
            await scheduler.load(FakeModel(hangs={"load"}), beside=one, init_timeout_s=5)
        assert trio.current_time() < 5 + 1 + 5 + 10 + 1
    assert [type(fault.error) for fault in faults] == [SessionInitTimeout, SessionInitTimeout, DeviceHung]


@pytest.mark.parametrize(("value", "kind"), [(0, ValueError), (-1, ValueError), ("2", TypeError), (True, TypeError)])
async def test_a_bound_that_is_none(value: Any, kind: type[Exception]) -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        with pytest.raises(kind, match="init_timeout_s is "):
            await scheduler.load(FakeModel(), init_timeout_s=value)


async def test_a_fence_that_never_comes_arrives_at_recovery_once(
    autojump_clock: MockClock, faults: list[Fault]
) -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(FakeModel(hangs={"driver"}))
        for _ in range(2):
            with pytest.raises(DeviceHung):
                await session.run(["y"], {"x": [1]})
    assert [(type(fault.error), fault.backend) for fault in faults] == [(DeviceHung, "fake")]


# --- the next request -----------------------------------------------------------------------------


@pytest.mark.usefixtures("engines")
async def test_after_a_hang_loads_go_to_fresh_workers_with_one_thread(
    monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    monkeypatch.setattr(recovery, "MOST_STARTS", 2)
    trionnx.register_engine("toy", toy.ToyEngine)
    async with trionnx.open_scheduler(backend="toy") as scheduler:
        before = await scheduler.load(TOY)
        with pytest.raises(SessionInitTimeout, match=r"after 0\.2 s, in phase 'compile'"):
            await scheduler.load({**TOY, "faults": {"load": ["hang"]}}, init_timeout_s=0.2)
        for _ in range(2):
            session = await scheduler.load(TOY)
            assert isinstance(session._actor._engine, RemoteEngine)
            assert session.adapter == "None, 1, None"
            (y,) = await session.run(None, FEED)
            assert y.tobytes() == toy.expected(FEED["x"], [8]).tobytes()
        for _ in range(2):
            with pytest.raises(NoAdapter, match=r"'toy' is given up .*in phase 'compile'.*2 fresh workers"):
                await scheduler.load(TOY)
        assert len(await before.run(None, FEED)) == 1


@pytest.mark.usefixtures("engines")
async def test_a_worker_that_hangs_is_ended(nothing_left: None) -> None:
    trionnx.register_engine("toy", toy.ToyEngine)
    async with trionnx.open_scheduler(backend="toy", isolation="process") as scheduler:
        with pytest.raises(SessionInitTimeout):
            await scheduler.load({**TOY, "faults": {"load": ["hang"]}}, init_timeout_s=2)
        assert len(await (await scheduler.load(TOY)).run(None, FEED)) == 1


PHASES = ("load", "begin", "segment 0", "segment 3", "read", "end", "close")


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize("phase", PHASES)
async def test_a_worker_that_is_killed_in_a_phase(phase: str, nothing_left: None) -> None:
    trionnx.register_engine("toy", toy.ToyEngine)
    with trio.fail_after(KILLS * 30):
        async with trionnx.open_scheduler(backend="toy", isolation="process") as scheduler:
            for _ in range(KILLS):
                source = {**TOY, "faults": {phase: ["kill"]}}
                told = None
                try:
                    session = await scheduler.load(source)
                    (y,) = await session.run(None, FEED)
                    assert y.tobytes() == toy.expected(FEED["x"], [8]).tobytes()
                    await session.aclose()
                except trionnx.DeviceLost as error:
                    told = str(error)
                assert (told is None) == (phase in ("end", "close"))  # there the outputs have been read
                assert told is None or re.search("worker process was ended by SIGKILL", told)
            assert len(await (await scheduler.load(TOY)).run(None, FEED)) == 1


def test_too_many_fresh_workers_are_an_error_that_lasts() -> None:
    now = [0.0]
    health = Health(lambda: now[0])
    health.stick("webgpu", "it hung")
    health.stick("webgpu", "another time")
    for _ in range(3):
        for _ in range(MOST_STARTS):
            health.start("webgpu")
        now[0] += WINDOW_S
    health.start("cpu")
    for _ in range(MOST_STARTS):
        health.start("webgpu")
    for _ in range(3):
        with pytest.raises(NoAdapter, match=r"'webgpu' is given up .*\(it hung\)"):
            health.start("webgpu")
        now[0] += 10 * WINDOW_S
    health.start("cpu")


# --- where later loads go ---------------------------------------------------------------------------

SOFTWARE = AdapterInfo(1, "llvmpipe", "driver", "Vulkan", "software", "a")
HARDWARE = AdapterInfo(0, "Radeon", "driver", "Vulkan", "hardware", "b")


@pytest.fixture
def knows(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`knows(adapters, onnxruntime)`: what this process has found out."""

    def know(there: tuple[AdapterInfo, ...], onnxruntime: bool = True) -> None:
        surveys = {(cache_folder(None), variables()): Survey(Verdict("ok"), there, ("sound.json",))}
        monkeypatch.setattr(_process, "surveys", surveys if there else {})
        monkeypatch.setattr(backends, "has_onnxruntime", lambda: onnxruntime)

    return know


@pytest.mark.parametrize(
    ("backend", "adapter", "stuck", "there", "onnxruntime", "goes"),
    [
        ("auto", None, (), (HARDWARE, SOFTWARE), True, None),
        ("cpu", None, ("webgpu",), (HARDWARE, SOFTWARE), True, None),
        ("auto", None, ("webgpu",), (HARDWARE, SOFTWARE), True, Choice("cpu", None)),
        ("auto", None, ("webgpu",), (HARDWARE, SOFTWARE), False, Choice("webgpu", 1)),
        ("auto", None, ("webgpu", "cpu"), (HARDWARE, SOFTWARE), True, Choice("webgpu", 1)),
        ("auto", "radeon", ("webgpu",), (HARDWARE, SOFTWARE), True, Choice("webgpu", 1)),
        ("webgpu", None, ("webgpu",), (HARDWARE, SOFTWARE), True, Choice("webgpu", 1)),
        ("webgpu", "0", ("webgpu",), (HARDWARE,), True, Choice("webgpu", 0)),
        ("webgpu", None, ("webgpu",), (), True, Choice("webgpu", None)),
        ("cpu", None, ("cpu",), (), True, Choice("cpu", None)),
    ],
)
def test_the_way_back(
    knows: Callable[..., None],
    backend: str,
    adapter: str | None,
    stuck: tuple[str, ...],
    there: tuple[AdapterInfo, ...],
    onnxruntime: bool,
    goes: Choice | None,
) -> None:
    knows(there, onnxruntime)
    choice = retreat(backend, adapter, None, stuck.__contains__)
    assert choice == goes
    if choice is not None and choice.backend == "webgpu":
        assert choice.drivers == (("sound.json",) if there else None)


async def test_a_stuck_gpu_is_left_without_another_probe(
    knows: Callable[..., None], monkeypatch: pytest.MonkeyPatch, layers: Any, nothing_left: None
) -> None:
    def probe(*_: object) -> None:
        raise AssertionError("there is no probe any more")

    monkeypatch.setattr(backends, "open_probe", probe)
    knows((HARDWARE, SOFTWARE))
    recovery.recover(Fault(DeviceHung("it hung"), "webgpu"))
    async with trionnx.open_scheduler() as scheduler:
        session = await scheduler.load(layers(2, 8))
        assert session.backend == "cpu"
        assert isinstance(session._actor._engine, RemoteEngine)
        assert len(await session.run(None, {"x": np.ones((2, 8), np.float32)})) == 1


def test_a_workers_environment() -> None:
    threads = {"LP_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    assert variables_of(None, None) == {}
    assert variables_of(None, 1) == threads
    only = {"VK_DRIVER_FILES": "a.json", "VK_ICD_FILENAMES": "a.json", "VK_ADD_DRIVER_FILES": None}
    assert variables_of(("a.json",), 1) == {**only, **threads}


# --- the lock, and memory -----------------------------------------------------------------------------


def test_the_wait_for_the_drivers_is_bounded_and_can_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave() -> None:
        raise LookupError

    with DRIVER_LOCK:
        with pytest.raises(LookupError), one_at_a_time(leave):
            raise AssertionError
        monkeypatch.setattr(adapters, "LOCK_BOUND_S", 0.0)
        with pytest.raises(DeviceHung, match="another session's call"), one_at_a_time():
            raise AssertionError
    with one_at_a_time():
        assert DRIVER_LOCK.locked()
    assert not DRIVER_LOCK.locked()


async def test_a_limit_of_memory(layers: Any) -> None:
    model, feed = layers(4, 64), {"x": np.ones((2, 64), np.float32)}
    async with trionnx.open_scheduler(backend="webgpu") as scheduler:
        with pytest.raises(trionnx.OutOfDeviceMemory, match="would pass the limit of 20000"):
            await (await scheduler.load(model, memory_limit_bytes=20_000)).run(None, feed)
        session = await scheduler.load(model, memory_limit_bytes=1 << 26)
        with pytest.raises(trionnx.OutOfDeviceMemory):
            await session.run(None, {"x": np.ones((1 << 19, 64), np.float32)})
        assert len(await session.run(None, feed)) == 1
        with pytest.raises(ValueError, match="memory_limit_bytes is at least 1"):
            await scheduler.load(model, memory_limit_bytes=0)
