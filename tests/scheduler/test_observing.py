"""What is seen of runs: statistics, and the trace, with exact times."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

import trionnx
from trionnx.actors.fake import FakeModel
from trionnx.gpu.seam import StepView
from trionnx.scheduler.observer import WINDOW_S, Meter

Feed = dict[str, np.ndarray[Any, Any]]


def events(path: Path, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == phase]


def test_the_busy_share_is_of_the_last_moments_and_overlaps_count_once() -> None:
    meter = Meter()
    assert meter.share(1.0) == 0
    meter.takes_off(1.0)
    meter.takes_off(1.01)
    assert meter.share(1.02) == pytest.approx(0.02 / WINDOW_S)
    meter.lands(1.02)
    meter.lands(1.03)
    assert meter.share(1.04) == pytest.approx(0.03 / WINDOW_S)
    assert meter.share(1.04 + WINDOW_S) == 0
    meter.takes_off(2.0)
    assert meter.share(3.0) == pytest.approx(1)
    meter.lands(3.0)
    assert len(meter._past) == 1


async def test_statistics_say_what_is_going_on(autojump_clock: MockClock, feed: Feed) -> None:
    model = FakeModel(((StepView("gpu", cost_s=0.01),) * 20,))
    async with trionnx.open_scheduler(backend="fake") as scheduler, trio.open_nursery() as nursery:
        session = await scheduler.load(model)
        for _ in range(3):
            nursery.start_soon(session.run, None, feed)
        await trio.sleep(0.101)
        now = scheduler.statistics()
        assert (now.running, now.queued) == (1, 2)
        assert now.busy_share == pytest.approx(1)
        assert now.in_flight == 5
        nursery.cancel_scope.cancel()
        await trio.lowlevel.checkpoint()
    now = scheduler.statistics()
    assert (now.runs, now.cancels, now.failures) == (3, 3, 0)
    assert (now.running, now.queued, now.in_flight) == (0, 0, 0)


async def test_how_runs_ended_is_counted(autojump_clock: MockClock, feed: Feed) -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(FakeModel(failures={3: trionnx.InvalidData("x", "wrong")}))
        with pytest.raises(trionnx.InvalidData):
            await session.run(None, feed)
        await session.run(None, feed)
        options = trionnx.RunOptions()
        async with trio.open_nursery() as nursery:

            async def stopped() -> None:
                with pytest.raises(trionnx.RunTerminated):
                    await session.run(None, feed, options)

            nursery.start_soon(stopped)
            await trio.sleep(0.012)
            options.terminate()
        with trio.move_on_after(0.012):
            await session.run(None, feed)
        now = session.statistics()
        assert (now.runs, now.cancels, now.failures) == (4, 2, 1)


async def test_the_device_says_what_it_holds(watched: list[Any], layers: Any) -> None:
    async with trionnx.open_scheduler(backend="watched") as scheduler:
        session = await scheduler.load(layers(2, 16))
        await scheduler.load(layers(2, 16), beside=session)
        assert scheduler.statistics().device_bytes == watched[0].device.bytes > 0
    assert scheduler.statistics().device_bytes == 0


async def test_the_trace_has_segments_one_after_another(
    autojump_clock: MockClock, feed: Feed, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    async with trionnx.open_scheduler(backend="fake", trace=path) as scheduler:
        session = await scheduler.load(FakeModel())
        start = trio.current_time()
        await session.run(None, feed, trionnx.RunOptions(tag="mine"))
        assert not path.exists()
    (lane,) = events(path, "M")
    assert lane["args"]["name"].endswith("fake")
    slices = events(path, "X")
    assert [round(one["ts"] / 1e3 - start * 1e3, 2) for one in slices] == [5 * n for n in range(10)]
    assert [one["dur"] for one in slices] == pytest.approx([5000.0] * 10, abs=0.01)
    assert {one["tid"] for one in slices} == {lane["tid"]}
    begin, *_ = events(path, "b")
    end = events(path, "e")[-1]
    assert begin["name"] == end["name"] == "fake mine"
    assert end["ts"] - begin["ts"] == pytest.approx(50_000, abs=0.01)
    assert end["args"] == {"outcome": "whole", "submitted": 10, "finished": 10}
    assert os.listdir(tmp_path) == ["trace.json"]


async def test_the_trace_has_waits_and_cancels(autojump_clock: MockClock, feed: Feed, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    async with trionnx.open_scheduler(backend="fake", trace=path) as scheduler:
        session = await scheduler.load(FakeModel())
        start = trio.current_time()
        with trio.move_on_after(0.062):
            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(session.run, None, feed)
    (stop,) = events(path, "i")
    assert (stop["name"], round(stop["ts"] / 1e3 - start * 1e3, 2)) == ("cancelled", 62)
    spans: dict[tuple[str, str], list[float]] = {}
    for event in events(path, "b") + events(path, "e"):
        spans.setdefault((event["id"], event["name"]), []).append(round(event["ts"] / 1e3 - start * 1e3, 2))
    lengths = sorted((name, times) for (_, name), times in spans.items() if times[0] != times[1])
    assert {"waits for the session": [0, 50], "drain": [62, 70]}.items() <= dict(lengths).items()
    assert all(len(times) == 2 for (_, name), times in spans.items() if "turn" not in name)
    assert all(len(times) % 2 == 0 for times in spans.values())
    for one, other in zip(events(path, "X"), events(path, "X")[1:], strict=False):
        assert one["ts"] + one["dur"] <= other["ts"] + 0.01


@pytest.mark.parametrize("how", ["error", "cancel"])
async def test_the_trace_is_whole_however_the_scheduler_ends(
    autojump_clock: MockClock, feed: Feed, tmp_path: Path, how: str
) -> None:
    path = tmp_path / "trace.json"
    with trio.CancelScope() as scope:
        try:
            async with trionnx.open_scheduler(backend="fake", trace=path) as scheduler, trio.open_nursery() as nursery:
                nursery.start_soon((await scheduler.load(FakeModel())).run, None, feed)
                await trio.sleep(0.012)
                if how == "error":
                    raise LookupError("mine")
                scope.cancel()
                await trio.sleep_forever()
        except* LookupError:
            pass
    assert scope.cancelled_caught is (how == "cancel")
    assert events(path, "i")[0]["name"] == "cancelled"
    assert len(events(path, "b")) == len(events(path, "e"))


async def test_a_trace_in_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none"):
        async with trionnx.open_scheduler(backend="fake", trace=tmp_path / "none" / "t.json"):
            pass
    with pytest.raises(TypeError, match="trace is a path"):
        async with trionnx.open_scheduler(backend="fake", trace=7):  # type: ignore[arg-type]
            pass
