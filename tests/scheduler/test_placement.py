"""Where sessions go: adapters that are alike in turn, replicas behind one session."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import trionnx
from trionnx.actors.fake import FakeEngine, FakeModel
from trionnx.gpu.device.adapters import AdapterInfo
from trionnx.scheduler import scheduler as scheduling
from trionnx.scheduler.backends import Choice, ways
from trionnx.scheduler.placement import least_loaded, placement

Feed = dict[str, np.ndarray[Any, Any]]

CARDS = tuple(
    AdapterInfo(index, name, "driver 1.0", "Vulkan", "hardware", f"card {index}")
    for index, name in enumerate(("GeForce", "GeForce", "Integrated", "GeForce"))
)


def test_of_adapters_that_are_alike_the_least_loaded_comes_first() -> None:
    sessions = Counter({"card 0": 2, "card 1": 1})
    assert [a.index for a in least_loaded(CARDS, sessions)] == [3, 1, 0, 2]
    assert [a.index for a in least_loaded(CARDS, Counter())] == [0, 1, 3, 2]
    assert [way.adapter for way in ways(CARDS, "auto", None, True, sessions)] == [3, 1, 0, 2, None]
    assert ways(CARDS, "webgpu", "geforce", True, sessions)[0] == Choice("webgpu", 3)
    assert ways(CARDS, "webgpu", 0, True, sessions) == [Choice("webgpu", 0)]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the fake back end had three cards that are alike."""

    async def choose(backend: object, adapter: Any, cache_dir: object, sessions: Counter[str]) -> Choice:
        there = [card for card in CARDS if card.name == "GeForce"]
        first = least_loaded(there, sessions)[0]
        for _ in range(3):
            await trio.lowlevel.checkpoint()
        return Choice("fake", first.index, first.identity)

    monkeypatch.setattr(scheduling, "choose", choose)


async def test_loads_at_once_are_spread_and_closed_ones_make_room(autojump_clock: MockClock, cards: None) -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        sessions: list[trionnx.Session] = []

        async def load() -> None:
            sessions.append(await scheduler.load(FakeModel(load_s=0.1)))

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(load)
        count = placement().sessions
        assert [count[f"card {n}"] for n in (0, 1, 3)] == [2, 2, 2]
        with trio.move_on_after(0.05):
            await scheduler.load(FakeModel(load_s=0.1))
        with pytest.raises(trionnx.InvalidModel):
            await scheduler.load(FakeModel(failures={"load": trionnx.InvalidModel("m", "cannot be read")}))
        for session in sessions[:5]:
            await session.aclose()
        assert sum(count.values()) == 1
    assert not any(placement().sessions.values())


async def test_replicas_share_the_runs(autojump_clock: MockClock, cards: None, feed: Feed) -> None:
    model = FakeModel()
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model, replicas=3)
        assert len(model.engines) == len(session.adapters) == 3
        assert Counter(e for e in model.engines)[model.engines[0]] == 1
        count = placement().sessions
        assert [count[f"card {n}"] for n in (0, 1, 3)] == [1, 1, 1]
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(session.run, None, feed)
        assert [engine.count("begin") for engine in model.engines] == [2, 2, 2]
        assert session.statistics().runs == scheduler.statistics().runs == 6
        async with session.stream(None, feed) as items:
            async for name, value in items:
                np.testing.assert_array_equal(value, model.expected(feed)[name])
        await session.aclose()
        assert all(engine.count("close") == 1 for engine in model.engines)
        with pytest.raises(trio.ClosedResourceError):
            await session.run(None, feed)
        assert scheduler.statistics().runs == 7


async def test_a_replica_that_hangs_is_used_no_more(autojump_clock: MockClock, feed: Feed) -> None:
    model = FakeModel()
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model, replicas=2)

        async def one(told: list[object]) -> None:
            try:
                told.append(await session.run(None, feed))
            except trionnx.DeviceHung as error:
                told.append(error)

        first: list[object] = []
        model.hangs.add(4)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, first)
            await trio.sleep(0.035)
            model.hangs.clear()
        assert isinstance(first[0], trionnx.DeviceHung)
        later: list[object] = []
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(one, later)
        assert not any(isinstance(answer, trionnx.DeviceHung) for answer in later)


async def test_one_that_cannot_be_loaded_takes_the_others_along(autojump_clock: MockClock, feed: Feed) -> None:
    model = FakeModel()
    made: list[FakeEngine] = model.engines
    async with trionnx.open_scheduler(backend="fake") as scheduler:

        def fail(phase: str, done: int, total: int) -> None:
            if len(made) == 3 and done:
                raise KeyError(phase)

        with pytest.raises(KeyError):
            await scheduler.load(model, replicas=4, on_progress=fail)
        await wait_all_tasks_blocked()
        assert all(engine.count("close") == 1 for engine in made)
        assert len(made) == 3
        for wrong in (0, 1.5):
            with pytest.raises((ValueError, TypeError), match="replicas"):
                await scheduler.load(model, replicas=wrong)  # type: ignore[arg-type]
        session = await scheduler.load(model)
        with pytest.raises(ValueError, match="replicas"):
            await scheduler.load(model, replicas=2, beside=session)
