"""The service of examples/service.py, on the real device, with real clients: some read on, some hang up.

A hundred requests, seeded; a thousand, in a new order each time, with

    TRIONNX_SOAK=1 pytest tests/examples/test_service.py
"""

from __future__ import annotations

import gc
import os
import random
from collections import Counter

import httpx
import numpy as np
import pytest
import trio

import service
import trionnx

SOAK = os.environ.get("TRIONNX_SOAK") == "1"
REQUESTS, AT_A_TIME, SIDE = 1000 if SOAK else 60, 6, 96
LIMIT_S = 1200 if SOAK else 300
IDLE_S = 0.1
X = np.random.default_rng(0).standard_normal((400, SIDE)).astype(np.float32)


@pytest.fixture
async def served(watched, layers):
    """A scheduler, a session and the address of a service on it."""
    async with trionnx.open_scheduler(backend="watched") as scheduler:
        session = await scheduler.load(layers(12, SIDE))
        await session.run(None, {"x": X})
        app = service.application(scheduler, session)
        async with service.service(app, "127.0.0.1:0") as address:
            yield scheduler, session, address


async def test_answers_and_refusals(served):
    _, session, address = served
    (right,) = await session.run(None, {"x": X})
    async with httpx.AsyncClient(base_url=address, timeout=60) as client:
        answer = await client.post("/run", content=service.packed({"x": X}))
        assert answer.status_code == 200
        assert service.unpacked(answer.content)["y"].tobytes() == right.tobytes()
        assert (await client.post("/run", content=b"nonsense")).status_code == 400
        wrong = await client.post("/run", content=service.packed({"z": X}))
        assert (wrong.status_code, "z" in wrong.text) == (422, True)
        assert (await client.get("/statistics")).json()["runs"] == 3


async def test_a_client_that_hangs_up_stops_its_run(served, watched):
    scheduler, _, address = served
    long = np.tile(X, (30, 1))
    async with httpx.AsyncClient(base_url=address, timeout=60) as client:
        with trio.fail_after(LIMIT_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: client.post("/run", content=service.packed({"x": long})))
                while not scheduler.statistics().in_flight:  # noqa: ASYNC110
                    await trio.sleep(0.001)
                nursery.cancel_scope.cancel()
            while not scheduler.statistics().cancels:  # noqa: ASYNC110
                await trio.sleep(0.001)
    now = scheduler.statistics()
    assert (now.cancels, now.running, now.in_flight) == (1, 0, 0)
    assert watched[0].ended[-1].finished == watched[0].ended[-1].submitted


# A request that is cancelled while it is sent leaves a generator of the client library's to the collector.
@pytest.mark.filterwarnings(r"ignore:Exception ignored in\W+async_generator object ByteStream")
async def test_many_requests_of_which_a_third_hangs_up(served, watched, left_behind, record_property):
    scheduler, session, address = served
    dice = random.Random(None if SOAK else 7)
    feeds = [X[:rows] for rows in (400, 300, 200)]
    right = [(await session.run(None, {"x": x}))[0].tobytes() for x in feeds]
    bodies = [service.packed({"x": x}) for x in feeds]
    start = trio.current_time()
    await session.run(None, {"x": X})
    run_s = trio.current_time() - start
    ended: Counter[str] = Counter()

    async def request(client, hangs_up):
        which = dice.randrange(len(feeds))
        with trio.CancelScope() as scope:
            if hangs_up:
                scope.deadline = trio.current_time() + dice.uniform(0, AT_A_TIME * run_s)
            answer = await client.post("/run", content=bodies[which])
            assert answer.status_code == 200
            assert service.unpacked(answer.content)["y"].tobytes() == right[which]
        ended["hung up" if scope.cancelled_caught else "answered"] += 1

    async def many(count):
        todo = [n < 0.3 * count for n in range(count)]
        dice.shuffle(todo)
        turns = iter(todo)

        async def work():
            async with httpx.AsyncClient(base_url=address, timeout=LIMIT_S) as client:
                for hangs_up in turns:
                    await request(client, hangs_up)

        async with trio.open_nursery() as nursery:
            for _ in range(AT_A_TIME):
                nursery.start_soon(work)

    async def last_hang_up():
        """All clients hang up at once, in the middle; how long the device is busy then."""
        async with trio.open_nursery() as nursery:
            for _ in range(AT_A_TIME):
                nursery.start_soon(work_alone)
            while not scheduler.statistics().in_flight:  # noqa: ASYNC110
                await trio.sleep(0.001)
            nursery.cancel_scope.cancel()
        start = trio.current_time()
        while (now := scheduler.statistics()).busy_share or now.running or now.queued:  # noqa: ASYNC110
            await trio.sleep(0.001)
        return trio.current_time() - start

    async def work_alone():
        async with httpx.AsyncClient(base_url=address, timeout=LIMIT_S) as client:
            await client.post("/run", content=bodies[0])

    with trio.fail_after(LIMIT_S):
        await many(AT_A_TIME)
        await last_hang_up()
        gc.collect()
        before = watched[0].device.bytes, trio.lowlevel.current_statistics().tasks_living
        ended.clear()
        await many(REQUESTS)
        idle_s = await last_hang_up()
        while trio.lowlevel.current_statistics().tasks_living > before[1]:  # noqa: ASYNC110
            await trio.sleep(0.01)
        gc.collect()
        assert watched[0].device.bytes == before[0]
        assert trio.lowlevel.current_statistics().tasks_living <= before[1]
    assert sum(ended.values()) == REQUESTS
    assert ended["hung up"] > REQUESTS // 10
    now = scheduler.statistics()
    assert (now.in_flight, now.queued, now.running, now.failures) == (0, 0, 0, 0)
    assert now.segments_submitted == now.segments_finished
    assert not watched[0]._runs
    record_property("ended", dict(ended))
    record_property("idle_s", idle_s)
    if SOAK:
        assert idle_s <= IDLE_S
