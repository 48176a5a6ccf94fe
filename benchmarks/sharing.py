"""Sessions that share one adapter: how its time is divided, what it makes in all, how long an urgent run takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import trio
from onnx import helper, numpy_helper

import trionnx
from trionnx.cli.measure import quantile
from works import Work

__all__ = ["Latency", "Shares", "Throughput", "chain", "interactive", "many", "shares"]

WARM = 3
FAIR, TOTAL, SLACK_S = 0.05, 0.95, 0.005
"""What is aimed at: shares within 5 %, 95 % of one session's work, and 5 ms beside two segments."""


@dataclass
class Shares:
    """How sessions that are always busy divided an adapter's time.

    Attributes:
        weights: what each is to have. segments: what each had, of one model.
    """

    weights: Sequence[float]
    segments: list[int]

    @property
    def first(self) -> float:
        """The first one's part."""
        return self.segments[0] / max(1, sum(self.segments))

    @property
    def aim(self) -> float:
        """What it should be."""
        return self.weights[0] / sum(self.weights)

    def misses(self) -> list[str]:
        """What is not as it should be."""
        if abs(self.first - self.aim) <= FAIR:
            return []
        return [f"of weights {self.weights} the first had {self.first:.1%}, not {self.aim:.0%} +- {FAIR:.0%}"]


@dataclass
class Throughput:
    """Runs per second, of one session and of several together, in pairs measured one after the other."""

    sessions: int
    one: list[float] = field(default_factory=list)
    together: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The several's work over the one's; the median of the pairs."""
        return statistics.median(b / a for a, b in zip(self.one, self.together, strict=True))

    def misses(self) -> list[str]:
        """What is not as it should be."""
        if self.ratio >= TOTAL:
            return []
        return [f"{self.sessions} sessions make {self.ratio:.2f} of what one makes, not {TOTAL}"]


@dataclass
class Latency:
    """Seconds of runs that come at a fixed pace: alone, and beside a session that is always busy."""

    segment_s: float
    batch_s: float
    alone_s: list[float]
    beside_s: list[float]

    @property
    def bound_s(self) -> float:
        """What a run beside the other may take."""
        return statistics.median(self.alone_s) + 2 * self.segment_s + SLACK_S

    def misses(self) -> list[str]:
        """What is not as it should be."""
        p99_s = quantile(self.beside_s, 0.99)
        if p99_s <= self.bound_s:
            return []
        return [f"p99 of an interactive run is {p99_s * 1e3:.1f} ms, more than {self.bound_s * 1e3:.1f} ms"]


def chain(size: int, length: int) -> Work:
    """Products of square matrices, one after the other."""
    weight = np.random.default_rng(0).standard_normal((size, size)).astype(np.float32) / size**0.5
    names = ["x", *(f"v{number}" for number in range(1, length)), "y"]
    nodes = [helper.make_node("MatMul", [names[i], "w"], [names[i + 1]]) for i in range(length)]
    infos = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [size, size]) for name in "xy"]
    graph = helper.make_graph(nodes, "chain", infos[:1], infos[1:], [numpy_helper.from_array(weight, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return Work(f"{length} products of {size} x {size}", model.SerializeToString(), {"x": weight})


async def shares(scheduler: trionnx.Scheduler, work: Work, weights: Sequence[float], seconds: float) -> Shares:
    """Keep a session of each weight busy for so long.

    **Cancellation:** stops them.
    """
    sessions = [await _load(scheduler, work, weight) for weight in weights]
    found = Shares(weights, [0] * len(sessions))

    async def busy(number: int) -> None:
        def count(done: int, total: int) -> None:
            found.segments[number] += 1

        while True:
            await sessions[number].run(None, work.feeds, trionnx.RunOptions(on_progress=count))

    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            for number in range(len(sessions)):
                nursery.start_soon(busy, number)
    await _close(sessions)
    return found


async def many(scheduler: trionnx.Scheduler, work: Work, count: int, seconds: float, pairs: int) -> Throughput:
    """Keep one session busy, then several, in turns, each time for so long.

    **Cancellation:** stops them.
    """
    sessions = [await _load(scheduler, work) for _ in range(count)]
    found = Throughput(count)

    async def rate(some: Sequence[trionnx.Session]) -> float:
        runs = 0
        start = time.perf_counter()

        async def busy(session: trionnx.Session) -> None:
            nonlocal runs
            while time.perf_counter() < start + seconds:
                await session.run(None, work.feeds)
                runs += 1

        async with trio.open_nursery() as nursery:
            for session in some:
                nursery.start_soon(busy, session)
        return runs / (time.perf_counter() - start)

    for _ in range(pairs):
        found.one.append(await rate(sessions[:1]))
        found.together.append(await rate(sessions))
    await _close(sessions)
    return found


async def interactive(
    scheduler: trionnx.Scheduler, small: Work, batch: Work, period_s: float, runs: int, *, priority: int = 1
) -> Latency:
    """Run a small model at a fixed pace, alone and beside a large one that runs without a pause.

    **Cancellation:** stops both.
    """
    quick, slow = await _load(scheduler, small), await _load(scheduler, batch)
    start = time.perf_counter()
    await slow.run(None, batch.feeds)
    batch_s = time.perf_counter() - start

    async def busy() -> None:
        while True:
            await slow.run(None, batch.feeds)

    async def paced() -> list[float]:
        took: list[float] = []
        due = trio.current_time()
        for _ in range(runs):
            due = max(due + period_s, trio.current_time())
            await trio.sleep_until(due)
            start = time.perf_counter()
            await quick.run(None, small.feeds, trionnx.RunOptions(priority=priority))
            took.append(time.perf_counter() - start)
        return took

    alone_s = await paced()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(busy)
        beside_s = await paced()
        nursery.cancel_scope.cancel()
    segment_s = slow.policy.checkpoint_interval_s
    await _close((quick, slow))
    return Latency(segment_s, batch_s, alone_s, beside_s)


async def _load(scheduler: trionnx.Scheduler, work: Work, weight: float = 1.0) -> trionnx.Session:
    """A session that has run a few times, so that its costs are learned."""
    shapes: Mapping[str, Any] = {name: value.shape for name, value in work.feeds.items()}
    session = await scheduler.load(work.source, weight=weight, input_shapes=shapes)
    for _ in range(WARM):
        await session.run(None, work.feeds)
    return session


async def _close(sessions: Sequence[trionnx.Session]) -> None:
    for session in sessions:
        await session.aclose()
