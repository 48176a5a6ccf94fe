from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _the_registry_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from trionnx.scheduler import backends

    monkeypatch.setattr(backends, "_registered", dict(backends._registered))
