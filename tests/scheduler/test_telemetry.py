"""Runs as OpenTelemetry's spans and metrics, with the SDK's exporters in memory and exact times."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import trio
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from trio.testing import MockClock

import trionnx
from trionnx.actors.fake import FakeModel
from trionnx.scheduler.observer import Sink

Feed = dict[str, np.ndarray[Any, Any]]
SEGMENT_S = 0.005


class Told:
    """What was told."""

    def __init__(self, spans: InMemorySpanExporter, metrics: InMemoryMetricReader) -> None:
        self._spans, self._metrics = spans, metrics

    def spans(self, *names: str) -> list[ReadableSpan]:
        """Spans that have ended, in that order."""
        return [span for span in self._spans.get_finished_spans() if not names or span.name in names]

    def metric(self, name: str, **attributes: Any) -> Any:
        """The value of a metric, for these attributes among others; of a histogram count and sum. None: not told."""
        wanted = {f"trionnx.{key}": value for key, value in attributes.items()}.items()
        data = self._metrics.get_metrics_data()
        if data is None:
            return None
        points: list[Any] = [
            point
            for one in data.resource_metrics[0].scope_metrics[0].metrics
            if one.name == name
            for point in one.data.data_points
            if wanted <= dict(point.attributes or {}).items()
        ]
        if not points:
            return None
        [point] = points
        return point.value if hasattr(point, "value") else (point.count, point.sum)


def said_of(span: ReadableSpan) -> dict[str, Any]:
    """A span's attributes of ours."""
    return {key.removeprefix("trionnx."): value for key, value in (span.attributes or {}).items()}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    spans, metrics = InMemorySpanExporter(), InMemoryMetricReader()
    tracers, meters = TracerProvider(shutdown_on_exit=False), MeterProvider([metrics], shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: tracers)
    monkeypatch.setattr("opentelemetry.metrics._internal.get_meter_provider", lambda: meters)
    yield Told(spans, metrics)
    meters.shutdown()
    tracers.shutdown()


async def test_a_run_is_a_span_within_its_callers(autojump_clock: MockClock, feed: Feed, told: Told) -> None:
    async with trionnx.open_scheduler(backend="fake", telemetry=True) as scheduler:
        session = await scheduler.load(FakeModel())
        with trace.get_tracer("test").start_as_current_span("request"):
            await session.run(None, feed, trionnx.RunOptions(tag="mine", priority=3))
        await session.run(None, feed)
    run, request, alone = told.spans()
    assert (run.name, request.name) == ("run fake", "request")
    assert run.parent == request.get_span_context()
    assert alone.parent is None
    said = said_of(run)
    assert said.pop("device.busy_time") == pytest.approx(10 * SEGMENT_S)
    # While as many of its own segments are ahead of it as may be.
    waits, wait_s = said.pop("turns.waits"), said.pop("turns.wait_time")
    assert said == {
        "model": "fake", "adapter": "fake", "queue": session._actor.number, "tag": "mine", "priority": 3,
        "outcome": "whole", "segments.submitted": 10, "segments.finished": 10, "segments.dropped": 0,
    }  # fmt: skip
    assert [event.name for event in run.events] == ["session is free", *["waits for a turn", "has a turn"] * waits]
    assert 0 < wait_s < 10 * SEGMENT_S
    assert run.status.is_ok
    assert "tag" not in said_of(alone)


async def test_metrics_count_runs_segments_and_time(autojump_clock: MockClock, feed: Feed, told: Told) -> None:
    async with trionnx.open_scheduler(backend="fake", telemetry=True) as scheduler:
        session = await scheduler.load(FakeModel(failures={23: trionnx.InvalidData("x", "wrong")}))
        await session.run(None, feed)
        with trio.move_on_after(0.011):
            await session.run(None, feed)
        submitted = session.statistics().segments_submitted
        assert told.metric("trionnx.runs", outcome="whole") == 1
        assert told.metric("trionnx.runs", outcome="cancelled") == 1
        assert told.metric("trionnx.segments", model="fake") == submitted
        assert told.metric("trionnx.device.busy_time") == pytest.approx(submitted * SEGMENT_S)
        count, took_s = told.metric("trionnx.run.duration", outcome="whole")
        assert (count, took_s) == (1, pytest.approx(10 * SEGMENT_S))


async def test_the_queue_is_as_long_as_runs_wait(autojump_clock: MockClock, feed: Feed, told: Told) -> None:
    async with trionnx.open_scheduler(backend="fake", telemetry=True) as scheduler:
        session = await scheduler.load(FakeModel())
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(session.run, None, feed)
            await trio.sleep(0.5 * SEGMENT_S)
            assert told.metric("trionnx.queue.length") == session.statistics().queued == 2
            await trio.sleep(10 * SEGMENT_S)
            assert told.metric("trionnx.queue.length") == session.statistics().queued == 1
            nursery.cancel_scope.cancel()
        assert told.metric("trionnx.queue.length") == 0
    assert [said_of(span)["outcome"] for span in told.spans()] == ["whole", "cancelled", "cancelled"]


async def test_stops_waits_and_faults_are_told(autojump_clock: MockClock, feed: Feed, told: Told) -> None:
    async with trionnx.open_scheduler(backend="fake", telemetry=True) as scheduler:
        session = await scheduler.load(FakeModel())
        other = await scheduler.load(FakeModel(failures={9: trionnx.InvalidData("x", "wrong")}))

        async def fails() -> None:
            with pytest.raises(trionnx.InvalidData):
                await other.run(None, feed)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails)
            with trio.move_on_after(0.032):
                await session.run(None, feed)
    failed, stopped = sorted(told.spans(), key=lambda span: span.status.is_ok or span.status.is_unset)
    assert failed.status.status_code is trace.StatusCode.ERROR
    names = [event.name for event in stopped.events]
    assert (names[0], names[-1]) == ("session is free", "stops")
    assert names.count("waits for a turn") == names.count("has a turn") + (names[-2] == "waits for a turn") > 0
    assert said_of(stopped)["turns.waits"] == names.count("waits for a turn")
    assert 0 < said_of(stopped)["turns.wait_time"] < 0.032


async def test_the_devices_memory_is_told_and_gone_at_the_end(watched: list[Any], layers: Any, told: Told) -> None:
    async with trionnx.open_scheduler(backend="watched", telemetry=True) as scheduler:
        session = await scheduler.load(layers(2, 16))
        await session.run(None, {"x": np.ones((16, 16), np.float32)})
        assert told.metric("trionnx.device.memory") == watched[0].device.bytes > 0
    assert told.metric("trionnx.device.memory") == 0


async def test_nobody_is_told_where_nobody_asked(autojump_clock: MockClock, feed: Feed, told: Told) -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        await (await scheduler.load(FakeModel())).run(None, feed)
    assert told.spans() == []
    assert told.metric("trionnx.runs") is None


async def test_telemetry_does_not_ask_for_a_wake_per_segment(autojump_clock: MockClock, feed: Feed, told: Told) -> None:
    async with trionnx.open_scheduler(backend="fake", telemetry=True) as scheduler:
        session = await scheduler.load(FakeModel())
        assert [sink.closely for sink in scheduler._sinks] == [False]
        assert not session._observer.listened
    assert Sink(print).closely


async def test_without_the_extra_it_is_said_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "trionnx.scheduler.telemetry", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'trionnx\[otel\]'"):
        async with trionnx.open_scheduler(backend="fake", telemetry=True):
            pass
    with pytest.raises(TypeError, match="telemetry is True or False, not 1"):
        async with trionnx.open_scheduler(backend="fake", telemetry=1):  # type: ignore[arg-type]
            pass
