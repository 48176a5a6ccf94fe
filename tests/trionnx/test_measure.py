from __future__ import annotations

import math
import time

import numpy as np
import trio
import trio.testing

from trionnx import open_scheduler
from trionnx.actors.fake import FakeModel
from trionnx.cli.measure import BEAT_S, HandOvers, cancel_after, heartbeat, quantile, whole_runs
from trionnx.gpu.seam import StepView

FEEDS = {"x": np.ones(2, np.float32)}


def test_quantile() -> None:
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile([3, 1, 2, 4], 0.5) == 2
    assert quantile(range(1, 101), 0.99) == 99
    assert quantile([5], 0.99) == 5
    assert math.isnan(quantile([], 0.5))


async def test_a_cancel_is_counted(autojump_clock: trio.testing.MockClock) -> None:
    async with open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(FakeModel(((StepView("gpu", cost_s=0.005),) * 10,)))
        handed = HandOvers(session)
        await whole_runs(session, FEEDS, 2)
        assert handed.count == 20
        sample = await cancel_after(session, FEEDS, 0.012, handed)
        assert sample.left_s is not None
        assert sample.late == 0
        assert 20 < handed.count < 30
        over = await cancel_after(session, FEEDS, 1.0, handed)
        assert (over.left_s, over.late) == (None, 0)


async def test_what_is_handed_over_after_a_cancel_is_seen(autojump_clock: trio.testing.MockClock) -> None:
    async with open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(FakeModel(((StepView("gpu", cost_s=0.005),) * 10,)))
        handed = HandOvers(session)

        class Disobedient:
            async def run(self, *arguments: object) -> None:
                try:
                    await session.run(None, FEEDS)
                finally:
                    handed.count += 3

        sample = await cancel_after(Disobedient(), FEEDS, 0.012, handed)  # type: ignore[arg-type]
        assert sample.late == 3


async def test_a_heartbeat_shows_that_the_loop_was_blocked() -> None:
    async with heartbeat() as beats:
        await trio.sleep(2 * BEAT_S)
        until = time.perf_counter() + 0.03
        while time.perf_counter() < until:
            pass
        await trio.sleep(2 * BEAT_S)
    assert max(beats.gaps) >= 0.03
