"""What follows from a fault of an engine: each arrives at `recover`, and `Health` says where later loads go.

Rules of this file: nothing is retried behind a caller's back. A back end that got stuck in this process is not
touched here again: what is asked of it later goes to fresh worker processes, and of those there are only so many.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..gpu.errors import DeviceHung, NoAdapter, SessionInitTimeout

__all__ = ["MOST_STARTS", "WINDOW_S", "Fault", "Health", "health", "recover"]

MOST_STARTS = 4
"""So many fresh workers are started for a back end that is stuck..."""
WINDOW_S = 300.0
"""...within so many seconds; with one more it is given up, as long as this process lives."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of an engine.

    Attributes:
        error: what the caller is told. backend: the engine's name.
    """

    error: Exception
    backend: str


class Health:
    """Which back ends got stuck in this process.

    Args:
        clock: gives seconds; for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stuck: dict[str, str] = {}
        self._starts: dict[str, deque[float]] = {}
        self._given_up: set[str] = set()

    def stuck(self, backend: str) -> bool:
        """Whether nothing may be made on it in this process any more."""
        return backend in self._stuck

    def stick(self, backend: str, why: str) -> None:
        """Remember that it got stuck."""
        self._stuck.setdefault(backend, why)

    def start(self, backend: str) -> None:
        """Count a fresh worker that is about to be started.

        Raises:
            NoAdapter: there were too many; from then on, always.
        """
        now, starts = self._clock(), self._starts.setdefault(backend, deque())
        while starts and now - starts[0] >= WINDOW_S:
            starts.popleft()
        if len(starts) >= MOST_STARTS:
            self._given_up.add(backend)
        if backend in self._given_up:
            raise NoAdapter(
                f"the back end {backend!r} is given up in this process: it got stuck ({self._stuck.get(backend)}), and "
                f"{MOST_STARTS} fresh workers within {WINDOW_S:g} s did not help; start the program anew, or name "
                "another back end"
            )
        starts.append(now)

    def forget(self) -> None:
        """Forget all; for tests."""
        self._stuck.clear()
        self._starts.clear()
        self._given_up.clear()


health = Health()
"""That of this process."""


def recover(fault: Fault) -> None:
    """Draw the conclusions from a fault. All of them arrive here, before the caller is told."""
    if isinstance(fault.error, SessionInitTimeout | DeviceHung):
        health.stick(fault.backend, str(fault.error))
