"""Use from where it does not belong, and under another program's loop."""

from __future__ import annotations

import queue
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import outcome
import pytest
import trio

import trionnx
from trionnx.actors.fake import FakeModel

Feed = dict[str, np.ndarray[Any, Any]]


async def test_another_trio_run_is_refused(feed: Feed) -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(FakeModel(speed=0))

        async def elsewhere() -> None:
            sentence = "can only be used in the Trio run that made it"
            with pytest.raises(RuntimeError, match=f"a session {sentence}"):
                await session.run(None, feed)
            with pytest.raises(RuntimeError, match=sentence):
                await session.aclose()
            with pytest.raises(RuntimeError, match=f"a scheduler {sentence}"):
                await scheduler.load(FakeModel())
            with pytest.raises(RuntimeError, match=sentence):
                await scheduler.aclose()

        await trio.to_thread.run_sync(trio.run, elsewhere)
        with pytest.raises(RuntimeError, match="can only be used in the Trio run"):
            await trio.to_thread.run_sync(session.close)
        assert len(await session.run(None, feed)) == 2


def test_use_outside_trio_is_refused(feed: Feed) -> None:
    kept: list[trionnx.Session] = []

    async def main() -> None:
        async with trionnx.open_scheduler(backend="fake") as scheduler:
            kept.append(await scheduler.load(FakeModel()))

    trio.run(main)
    with pytest.raises(RuntimeError, match="can only be used in the Trio run"):
        kept[0].run(None, feed).send(None)
    with pytest.raises(RuntimeError, match="can only be used in the Trio run"):
        kept[0].close()


@pytest.mark.skipif(not hasattr(sys.modules["os"], "fork"), reason="this system has no fork")
def test_a_forked_child_is_refused() -> None:
    code = """
        import os, trio, trionnx
        from trionnx.actors.fake import FakeModel

        async def main():
            async with trionnx.open_scheduler(backend="fake") as scheduler:
                session = await scheduler.load(FakeModel(speed=0))
                child = os.fork()
                if child == 0:
                    try:
                        await session.run(None, {"x": [1]})
                    except RuntimeError as error:
                        print(error, flush=True)
                    os._exit(0)
                os.waitpid(child, 0)
                print(len(await session.run(None, {"x": [1]})))

        trio.run(main)
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["a session cannot be used in a forked process; open a scheduler there", "2"]


def test_guest_mode(feed: Feed) -> None:
    """Trio as a guest of a loop that has never heard of it."""
    todo: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
    ended: list[outcome.Outcome[str]] = []
    model = FakeModel(speed=0.1)

    async def main() -> str:
        async with trionnx.open_scheduler(backend="fake") as scheduler:
            session = await scheduler.load(model)
            await session.run(None, feed)
            with trio.move_on_after(0.002) as scope:
                await session.run(None, feed)
            return "cancelled" if scope.cancelled_caught else "missed"

    trio.lowlevel.start_guest_run(main, run_sync_soon_threadsafe=todo.put, done_callback=ended.append)
    while not ended:
        todo.get()()
    assert ended[0].unwrap() == "cancelled"
    assert model.engines[0].at_rest
