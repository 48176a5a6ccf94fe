"""Cancels at random moments of warm runs, under one policy."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import trio

import trionnx
from record import Cancels
from watch import Watch

__all__ = ["POLICIES", "Moment", "cancel_at_random", "cancel_once", "moments", "same"]

POLICIES: Mapping[str, trionnx.TerminatePolicy] = {
    "default": trionnx.TerminatePolicy(),
    "20ms": trionnx.TerminatePolicy(checkpoint_interval_s=0.020),
    "50ms": trionnx.TerminatePolicy(checkpoint_interval_s=0.050),
    "every_op": trionnx.TerminatePolicy(poll_after="every_op"),
    # On a slow adapter a large model that is submitted whole is no sign of one that hangs.
    "unsplit": trionnx.TerminatePolicy(split_into_checkpoints=False, drain_timeout_s=600, hang_timeout_s=600),
}
"""Name -> policy."""

WARM, NEWEST = 2, 5
COARSE_S = 0.002
"""A sleep may be so much too long; the rest of a wait is turns of the loop."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What came of a run that was to be cancelled.

    Attributes:
        asked_s: when its scope was to be cancelled, from its start.
        left_s: from the cancel to the scope left; None where the run was over before.
        late: segments that were handed over after the cancel.
        after: segments that finished after it.
        miscounted: whether the device's counter differs from what was submitted; None: nothing counts there.
    """

    asked_s: float
    left_s: float | None
    late: int = 0
    after: int = 0
    miscounted: bool | None = None


def moments(seed: str) -> Iterator[float]:
    """Random shares of a run, the same for the same seed: evenly spread over 0 <= share < 1."""
    dice = random.Random(seed)
    while True:
        yield dice.random()


def same(one: Any, other: Any) -> bool:
    """Whether outputs agree bit for bit: arrays, texts, and lists and dicts of them."""
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return isinstance(other, dict) and same([*one], [*other]) and same([*one.values()], [*other.values()])
    if one is None or other is None:
        return one is other
    a, b = np.asarray(one), np.asarray(other)
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return np.array_equal(a, b) if a.dtype == object else a.tobytes() == b.tobytes()


async def cancel_once(
    session: trionnx.Session,
    feeds: Mapping[str, Any],
    delay_s: float,
    watch: Watch,
    policy: trionnx.TerminatePolicy | None = None,
) -> Moment:
    """Start a run, cancel its scope after so many seconds, and wait until the scope is left.

    **Cancellation:** stops the run.
    """
    handed = fenced = 0
    cancelled_at = 0.0

    async def cancel(scope: trio.CancelScope) -> None:
        nonlocal handed, fenced, cancelled_at
        if delay_s > COARSE_S:
            await trio.sleep(delay_s - COARSE_S)
        while time.perf_counter() < started + delay_s:
            await trio.lowlevel.checkpoint()
        handed = len(watch.handed)
        cancelled_at = time.perf_counter()
        scope.cancel()
        fenced = watch.fenced

    watch.clear()
    options = trionnx.RunOptions(policy=policy)
    left_s = None
    async with trio.open_nursery() as nursery:
        started = time.perf_counter()
        with trio.CancelScope() as scope:
            nursery.start_soon(cancel, scope)
            await session.run(None, feeds, options)
        if scope.cancelled_caught:
            left_s = time.perf_counter() - cancelled_at
        nursery.cancel_scope.cancel()
    if left_s is None:
        return Moment(delay_s, None)
    finished = watch.ended.counts.finished if watch.ended is not None else 0
    return Moment(delay_s, left_s, len(watch.handed) - handed, finished - fenced, watch.miscounted)


async def cancel_at_random(
    session: trionnx.Session,
    feeds: Mapping[str, Any],
    name: str,
    *,
    rounds: int,
    check: int,
    seed: str,
    bounded: bool = True,
) -> Cancels:
    """Cancel runs until `rounds` of them were, or three times as many were over before they could be.

    Args:
        session: warm, or not.
        feeds: its inputs.
        name: of a policy.
        rounds: cancels.
        check: compare the outputs of a whole run after each so many cancels, and at the end.
        seed: of the moments.
        bounded: whether the engine cuts as the policy says.

    **Cancellation:** stops the run that is under way.
    """
    policy = POLICIES[name]
    options = trionnx.RunOptions(policy=policy)
    seconds: list[float] = []

    async def whole() -> list[Any]:
        start = time.perf_counter()
        outputs = await session.run(None, feeds, options)
        seconds.append(time.perf_counter() - start)
        return outputs

    with Watch(session) as watch:
        for _ in range(WARM):
            await whole()
        seconds.clear()
        expected = await whole()
        segments = len(watch.handed)
        made: list[Moment] = []
        compared = different = cancelled = 0
        for share in moments(seed):
            if cancelled == rounds or len(made) == 3 * rounds:
                break
            # Of the newest whole runs: a busy machine changes its pace.
            made.append(await cancel_once(session, feeds, share * statistics.median(seconds[-NEWEST:]), watch, policy))
            cancelled += made[-1].left_s is not None
            if len(made) % check == 0:
                compared, different = compared + 1, different + (not same(expected, await whole()))
        compared, different = compared + 1, different + (not same(expected, await whole()))
    hit = [moment for moment in made if moment.left_s is not None]
    counted = [moment.miscounted for moment in hit if moment.miscounted is not None]
    splits = bounded and policy.split_into_checkpoints
    return Cancels(
        policy=name,
        interval_s=policy.checkpoint_interval_s if splits else None,
        limit=policy.max_in_flight if splits else None,
        left_s=[moment.left_s for moment in hit if moment.left_s is not None],
        asked_s=[moment.asked_s for moment in hit],
        over_before=len(made) - len(hit),
        late=sum(moment.late for moment in hit),
        after=max((moment.after for moment in hit), default=0),
        miscounted=sum(counted) if counted else None,
        compared=compared,
        different=different,
        whole_s=statistics.median(seconds),
        segments=segments,
    )
