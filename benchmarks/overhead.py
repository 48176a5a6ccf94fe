"""What checkpoints cost: the same plan split and whole, in turns, in one process."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import trionnx
from moments import POLICIES, WARM
from record import Cost
from watch import Watch

__all__ = ["compare"]

SPLIT, WHOLE = ("default", "20ms"), "unsplit"
SAMPLE_S, MOST = 0.05, 50
"""A sample is a run, or as many as take so many seconds, at most so many."""


async def compare(session: trionnx.Session, feeds: Mapping[str, Any], pairs: int) -> list[Cost]:
    """Measure runs split at the default interval and at 20 ms, each beside runs that are submitted whole.

    Args:
        session: warm, or not; it is run a few times first.
        feeds: its inputs.
        pairs: samples of each.

    Returns:
        One for each policy that splits.

    **Cancellation:** stops the run that is under way.
    """
    options = {name: trionnx.RunOptions(policy=POLICIES[name]) for name in (*SPLIT, WHOLE)}

    async def sample(name: str, runs: int) -> float:
        start = time.perf_counter()
        for _ in range(runs):
            await session.run(None, feeds, options[name])
        return (time.perf_counter() - start) / runs

    cuts: dict[str, int] = {}
    runs, longest_s = 1, 0.0
    for name in (WHOLE, *SPLIT):
        await sample(name, WARM)
        with Watch(session) as watch:
            await sample(name, 1)
        cuts[name], longest_s = watch.cuts, watch.longest_s
        runs = max(runs, min(MOST, math.ceil(SAMPLE_S / await sample(name, 1))))
    seconds: dict[str, list[float]] = {name: [] for name in options}
    for turn in range(pairs):
        order = list(options) if turn % 2 else list(options)[::-1]
        for name in order:
            seconds[name].append(await sample(name, runs))
    return [
        Cost(
            policy=name,
            interval_s=POLICIES[name].checkpoint_interval_s,
            cuts=cuts[name],
            longest_s=longest_s,
            whole_s=seconds[WHOLE],
            ratios=[split / whole for split, whole in zip(seconds[name], seconds[WHOLE], strict=True)],
        )
        for name in SPLIT
    ]
