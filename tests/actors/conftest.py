from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from driving import Driver, close
from trionnx.actors.remote import RemoteEngine

LIMIT_S = 60.0


def children() -> set[int]:
    """The processes that this one has started and not reaped."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= {int(pid) for pid in (task / "children").read_text().split()}
        except OSError:  # the thread has just ended
            continue
    return found


def holdings() -> dict[str, int]:
    """What this process holds of the system: counted before and after."""
    gc.collect()
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    maps = Path("/proc/self/maps").read_text()
    return {
        "children": len(children()),
        "pipes": sum(link.startswith("pipe:") for link in links),
        "memory": maps.count("memfd:trionnx") + sum("trionnx" in link for link in links),
        "threads": sum(thread.name.startswith("trionnx worker") for thread in threading.enumerate()),
    }


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No process, no zombie, no descriptor, no shared memory and no thread is left by the test."""
    before = holdings()
    yield
    end = time.monotonic() + LIMIT_S
    while (after := holdings()) != before and time.monotonic() < end:  # a thread that answered may yet have to end
        time.sleep(0.005)
    assert after == before


@pytest.fixture
def open_model() -> Iterator[Callable[..., Any]]:
    """`open_model(engine, source, **load)`: a Driver on a remote engine, closed after the test."""
    opened: list[RemoteEngine] = []

    def open_one(engine: RemoteEngine, source: Any, **load: Any) -> Any:
        opened.append(engine)
        return Driver(engine, source, **load)

    yield open_one
    for engine in opened:
        close(engine)
