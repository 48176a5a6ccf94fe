"""`TerminatePolicy`: how a run is cut up and how it ends when it is stopped. Every engine reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["TerminatePolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminatePolicy:
    """What bounds the time between a cancel, or `RunOptions.terminate`, and the end of a run. All times in seconds.

    Attributes:
        split_into_checkpoints: cut the plan into segments; False submits each block whole, so that a
            run can only be stopped before it, behind it, and where it passes between GPU and CPU.
        poll_after: "every_subgraph": a segment holds what takes `checkpoint_interval_s`; "every_op":
            one operator at most.
        checkpoint_interval_s: time on the device that a segment aims at; longer operators are cut inside.
        max_in_flight: segments of the run on the queue at once, at least 1; never more than the scheduler's.
        on_terminate: what `terminate` does. "throw_cancel": `run` raises `RunTerminated`; "stop_submit":
            it returns, with None for each output that was not reached. A cancelled scope always
            raises `trio.Cancelled`.
        drain_timeout_s: how long what is in flight is waited for, at least: the bound is the larger of
            this and 8 times its estimated time.
        hang_timeout_s: how long a segment on the device may take while nobody cancels, at least: the
            bound is the larger of this and 8 times the estimated time of what is in flight. Then the
            run raises `DeviceHung`. Steps on the CPU are not bounded.

    Raises:
        ValueError: a value is out of range.
        TypeError: a value is of a wrong kind.
    """

    split_into_checkpoints: bool = True
    poll_after: Literal["every_subgraph", "every_op"] = "every_subgraph"
    checkpoint_interval_s: float = 0.005
    max_in_flight: int = 2
    on_terminate: Literal["throw_cancel", "stop_submit"] = "throw_cancel"
    drain_timeout_s: float = 2.0
    hang_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        _is(bool, "split_into_checkpoints", self.split_into_checkpoints)
        _one_of("poll_after", self.poll_after, ("every_subgraph", "every_op"))
        _one_of("on_terminate", self.on_terminate, ("throw_cancel", "stop_submit"))
        _is(int, "max_in_flight", self.max_in_flight)
        if self.max_in_flight < 1:
            raise ValueError(f"max_in_flight is at least 1, not {self.max_in_flight}")
        for name in ("checkpoint_interval_s", "drain_timeout_s", "hang_timeout_s"):
            value = getattr(self, name)
            _is((int, float), name, value)
            if math.isnan(value) or value < 0 or (value == 0 and name != "drain_timeout_s"):
                least = "at least 0" if name == "drain_timeout_s" else "more than 0"
                raise ValueError(f"{name} is a number of seconds, {least}, not {value!r}")

    def as_dict(self) -> dict[str, Any]:
        """The fields by name; ``TerminatePolicy(**policy.as_dict()) == policy``."""
        return asdict(self)

    def describe(self, limits: Mapping[str, str] | None = None) -> str:
        """What the policy means, in sentences for people.

        Args:
            limits: fields that an engine cannot honour -> what it does instead. `Session.describe_policy`
                passes those of the session's engine.
        """
        limits = limits or {}
        lines = []
        for name, value in self.as_dict().items():
            meaning = self._meaning(name)
            limit = limits.get(name)
            lines.append(f"{name} = {value!r}: {meaning}" + (f" NOT HONOURED HERE: {limit}" if limit else ""))
        return "\n".join(lines)

    def _meaning(self, name: str) -> str:
        if name == "split_into_checkpoints":
            if self.split_into_checkpoints:
                return "the plan is cut into segments, and the scope is asked before each."
            return "the plan is submitted whole: what has been submitted runs to its end."
        if name == "poll_after":
            if self.poll_after == "every_op":
                return "a segment holds one operator at most."
            return "a segment holds as many operators as fit checkpoint_interval_s."
        if name == "checkpoint_interval_s":
            return (
                f"a segment takes about {self.checkpoint_interval_s * 1e3:g} ms on the device; "
                "a longer operator is cut inside."
            )
        if name == "max_in_flight":
            return f"at most {self.max_in_flight} segments finish on the device after a stop."
        if name == "on_terminate":
            if self.on_terminate == "stop_submit":
                return "terminate() makes run return, with None for outputs that were not reached."
            return "terminate() makes run raise RunTerminated."
        if name == "drain_timeout_s":
            return (
                f"what is in flight is waited for, at least {self.drain_timeout_s:g} s "
                "or 8 times its estimated time, whichever is more."
            )
        return (
            f"a segment that takes more than {self.hang_timeout_s:g} s and 8 times its estimated time "
            "counts as hung: DeviceHung."
        )


def _is(kind: type | tuple[type, ...], name: str, value: object) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        wanted = "True or False" if kind is bool else "a whole number" if kind is int else "a number"
        raise TypeError(f"{name} is {wanted}, not {type(value).__name__}")


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {' or '.join(map(repr, known))}, not {value!r}")
