"""Which of several adapters that are alike a session goes to: the one that has the fewest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import trio

from ..gpu.device.adapters import AdapterInfo

__all__ = ["Claim", "Placement", "least_loaded", "placement"]


class Claim:
    """A session's place on an adapter, until it is released."""

    def __init__(self, sessions: Counter[str], identity: str) -> None:
        self._sessions: Counter[str] | None = sessions
        self._identity = identity
        sessions[identity] += 1

    def release(self) -> None:
        """Give the place back. No effect on one that was."""
        if self._sessions is not None:
            self._sessions[self._identity] -= 1
            self._sessions = None


class Placement:
    """The sessions of a Trio run, counted by adapter.

    Attributes:
        sessions: adapter's identity -> number of sessions. lock: held from the choice of an adapter to the claim.
    """

    def __init__(self) -> None:
        self.sessions: Counter[str] = Counter()
        self.lock = trio.Lock()

    def claim(self, identity: str) -> Claim:
        """Count one session more on an adapter."""
        return Claim(self.sessions, identity)


_placement: trio.lowlevel.RunVar[Placement] = trio.lowlevel.RunVar("trionnx placement")


def placement() -> Placement:
    """The placement of this Trio run."""
    try:
        return _placement.get()
    except LookupError:
        made = Placement()
        _placement.set(made)
        return made


def least_loaded(adapters: Sequence[AdapterInfo], sessions: Counter[str]) -> list[AdapterInfo]:
    """Adapters in the order in which to try them.

    Those that are alike (kind, name and driver) come in the place of the first of them, the one with the fewest
    sessions first; the others stay where they are: an integrated GPU is not taken because the large one is busy.
    """
    kinds = [(a.kind, a.name, a.driver) for a in adapters]
    order = sorted(range(len(adapters)), key=lambda i: (kinds.index(kinds[i]), sessions[adapters[i].identity], i))
    return [adapters[i] for i in order]
