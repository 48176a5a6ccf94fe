from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _no_choice_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRIONNX_BACKEND", raising=False)
    monkeypatch.delenv("TRIONNX_ADAPTER", raising=False)


@pytest.fixture
def engines() -> Iterator[dict[str, Any]]:
    """The registry of engines, as it was again afterwards."""
    from trionnx.scheduler import backends

    before = dict(backends._registered)
    yield backends._registered
    backends._registered.clear()
    backends._registered.update(before)


@pytest.fixture(scope="session")
def feed() -> dict[str, np.ndarray[Any, Any]]:
    return {"x": np.arange(4, dtype=np.float32)}
