from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest

hypothesis.settings.register_profile("trionnx", deadline=None, max_examples=100)
hypothesis.settings.load_profile("trionnx")


@pytest.fixture(scope="session", autouse=True)
def _one_probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The drivers are probed once for all tests, with time enough for a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIONNX_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        if not os.environ.get("TRIONNX_PROBE"):
            patch.setenv("TRIONNX_PROBE", "30")
        yield
