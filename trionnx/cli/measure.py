"""How long a cancel takes: runs that are cancelled on purpose, and a heartbeat beside them.

Used by ``trionnx doctor`` and by benchmarks/cancel.py. Times are seconds of ``time.perf_counter``.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from ..scheduler import Session

__all__ = ["Cancelled", "HandOvers", "Heartbeat", "cancel_after", "heartbeat", "quantile", "whole_runs"]

BEAT_S = 0.001


@dataclass(frozen=True, slots=True)
class Cancelled:
    """What came of a run that was to be cancelled.

    Attributes:
        left_s: from the cancel to the scope left; None where the run was over before.
        late: segments that were handed over after the cancel.
    """

    left_s: float | None
    late: int


@dataclass
class Heartbeat:
    """Times between the beats of a task that sleeps for a millisecond at a time."""

    gaps: list[float] = field(default_factory=list)


class HandOvers:
    """Counts the segments that a session hands to its actor."""

    def __init__(self, session: Session) -> None:
        self.count = 0
        actor = session._actor
        submit: Callable[..., None] = actor.submit_nowait

        def counted(*arguments: Any) -> None:
            self.count += 1
            submit(*arguments)

        # On the handle of this session alone.
        vars(actor)["submit_nowait"] = counted


@asynccontextmanager
async def heartbeat() -> AsyncIterator[Heartbeat]:
    """Beat while the body runs."""
    beats = Heartbeat()

    async def beat() -> None:
        last = time.perf_counter()
        while True:
            await trio.sleep(BEAT_S)
            now = time.perf_counter()
            beats.gaps.append(now - last)
            last = now

    async with trio.open_nursery() as nursery:
        nursery.start_soon(beat)
        yield beats
        nursery.cancel_scope.cancel()


async def whole_runs(session: Session, feeds: Mapping[str, Any], count: int) -> tuple[list[float], list[Any]]:
    """The seconds of runs that nobody cancels, and the outputs of the last."""
    seconds, outputs = [], []
    for _ in range(count):
        start = time.perf_counter()
        outputs = await session.run(None, feeds)
        seconds.append(time.perf_counter() - start)
    return seconds, outputs


async def cancel_after(session: Session, feeds: Mapping[str, Any], delay_s: float, handed: HandOvers) -> Cancelled:
    """Start a run, cancel its scope after so many seconds, and wait until the scope is left."""
    at = count = 0.0
    left = None

    async def cancel(scope: trio.CancelScope) -> None:
        nonlocal at, count
        await trio.sleep(delay_s)
        count = handed.count
        at = time.perf_counter()
        scope.cancel()

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            nursery.start_soon(cancel, scope)
            await session.run(None, feeds)
        if scope.cancelled_caught:
            left = time.perf_counter() - at
        nursery.cancel_scope.cancel()
    return Cancelled(left, int(handed.count - count) if left is not None else 0)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least this share of them does not exceed; nan where there are none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
