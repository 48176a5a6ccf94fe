"""What a run has handed over and not heard of: how much, for how long, and how long that may be."""

from __future__ import annotations

import math

import trio

from ..gpu.policy import TerminatePolicy

__all__ = ["FACTOR", "Flight"]

FACTOR = 8.0
"""What is in flight may take so many times its estimated time, where the policy's bounds are shorter."""
FAST, SLOW = 64.0, 1.5


class Flight:
    """The segments of one run that are handed over and unanswered.

    Attributes:
        pace: how many times longer than estimated segments take; 1 where the estimates hold.
        watch: a scope to be in while segments are handed over; it is cancelled when the device hangs.
    """

    def __init__(self, policy: TerminatePolicy) -> None:
        self._policy = policy
        self._segments: dict[int, tuple[float, str]] = {}
        self._cost_s = 0.0
        self._since = 0.0
        self.pace = 1.0
        self.watch = trio.CancelScope()

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def seconds(self) -> float:
        """Estimated seconds of what is in flight."""
        return self.pace * self._cost_s

    def takes_off(self, seq: int, cost_s: float, kind: str) -> None:
        """A segment is handed over."""
        if not self._segments:
            self._since = trio.current_time()
        self._segments[seq] = cost_s, kind
        self._cost_s += cost_s
        self._look()

    def lands(self, seq: int, took_s: float | None) -> None:
        """A segment was answered; `took_s` are its seconds on the device, where known."""
        cost_s, kind = self._segments.pop(seq)
        self._cost_s = self._cost_s - cost_s if self._segments else 0.0
        self._since = trio.current_time()
        self._look()
        if took_s is None or kind != "gpu":
            return
        ratio = min(FAST, took_s / max(cost_s, 1e-6))
        if took_s > self._policy.checkpoint_interval_s / 2 and ratio > SLOW:
            self.pace = max(self.pace, ratio)
        elif self.pace > 1:
            calmer = (self.pace + ratio) / 2
            self.pace = calmer if calmer > SLOW else 1.0

    def drain_bound(self) -> float:
        """How many seconds what is in flight is waited for once the run is stopped."""
        return max(self._policy.drain_timeout_s, FACTOR * self.seconds)

    def hang_bound(self) -> float:
        """How many seconds a segment may take while nobody stops the run."""
        return max(self._policy.hang_timeout_s, FACTOR * self.seconds)

    def callers_deadline(self) -> float:
        """The deadline of the scopes around `watch`, by Trio's clock."""
        deadline, mine = trio.current_effective_deadline(), self.watch.deadline
        if deadline == mine != math.inf:
            self.watch.deadline = math.inf
            deadline = trio.current_effective_deadline()
            self.watch.deadline = mine
        return deadline

    def _look(self) -> None:
        """Set when the device counts as hung: never, while it has nothing to do for the run.

        Moving the deadline costs, so it is moved when it matters, and then by a little more.
        """
        oldest = next(iter(self._segments.values()), None)
        if oldest is None or oldest[1] != "gpu":
            if self.watch.deadline != math.inf:
                self.watch.deadline = math.inf
            return
        bound_s = self.hang_bound()
        if not self._since + bound_s <= self.watch.deadline < self._since + 1.1 * bound_s + 1e-9:
            self.watch.deadline = self._since + 1.05 * bound_s
