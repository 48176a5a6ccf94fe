from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from driving import Driver, close
from trionnx.actors.remote import RemoteEngine

LIMIT_S = 60.0


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
