"""What was measured, as plain data that goes to JSON and back, and whether it is what was aimed at."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trionnx.cli.measure import quantile

__all__ = ["FREE_S", "Cancels", "Cost", "Record", "load", "save"]

FREE_S = 0.015
"""What a cancel may take beyond two intervals."""
UNCUT, CUT, RELAXED, RELAXED_FROM_S = 0.03, 0.15, 0.05, 0.02
"""The most that checkpoints may cost: where no operator is cut, where one is, and from this interval on."""


@dataclass(frozen=True)
class Cancels:
    """Runs of one model under one policy, cancelled at random moments.

    Attributes:
        policy: its name here. interval_s: what a segment aims at; None: nothing bounds a segment.
        limit: segments that may finish after a cancel; None: nothing says so.
        left_s: from each cancel to the scope left. asked_s: when they were made, from the start of the run.
        over_before: runs that were over before they could be cancelled.
        late: segments that were handed over after a cancel, in all.
        after: the most segments that finished after a cancel.
        miscounted: runs in which the device's counter differs from the segments submitted; None: nothing counts there.
        compared: outputs afterwards that were compared. different: of those, not the same bit for bit.
        whole_s: the median of runs that nobody cancelled, under the same policy.
        segments: of such a run.
    """

    policy: str
    interval_s: float | None
    limit: int | None
    left_s: list[float] = field(default_factory=list)
    asked_s: list[float] = field(default_factory=list)
    over_before: int = 0
    late: int = 0
    after: int = 0
    miscounted: int | None = None
    compared: int = 0
    different: int = 0
    whole_s: float = math.nan
    segments: int = 0

    @property
    def bound_s(self) -> float | None:
        """What 99 of 100 cancels are to take at most."""
        return None if self.interval_s is None else 2 * self.interval_s + FREE_S

    def left(self, share: float) -> float:
        """A quantile of the seconds from the cancel to the scope left; nan where no run was cancelled."""
        return quantile(self.left_s, share)

    def faults(self) -> list[str]:
        """What is wrong, whatever the machine."""
        found = []
        if self.late:
            found.append(f"{self.late} segments were handed over after a cancel")
        if self.different:
            found.append(f"{self.different} of {self.compared} outputs were not the same")
        if self.miscounted:
            found.append(f"in {self.miscounted} runs the device did not count what was submitted")
        if not self.left_s:
            found.append("every run was over before it could be cancelled")
        return found

    def misses(self) -> list[str]:
        """Which aims were missed."""
        found = []
        bound_s, p99_s = self.bound_s, self.left(0.99)
        if bound_s is not None and p99_s > bound_s:
            found.append(f"p99 {p99_s * 1e3:.1f} ms, and {bound_s * 1e3:.0f} ms are the bound")
        if self.limit is not None and self.after > self.limit:
            found.append(f"{self.after} segments finished after a cancel")
        return found


@dataclass(frozen=True)
class Cost:
    """What checkpoints cost: runs split and whole, side by side.

    Attributes:
        policy: the name of the policy that splits. interval_s: what its segments aim at.
        cuts: operators that it cuts inside.
        longest_s: the longest operator's estimated seconds.
        whole_s: seconds of runs that are submitted whole.
        ratios: of the seconds of split runs to those of the whole runs beside them.
    """

    policy: str
    interval_s: float
    cuts: int
    longest_s: float
    whole_s: list[float]
    ratios: list[float]

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The share that checkpoints add: lower quartile, median, upper quartile."""
        shares = [ratio - 1 for ratio in self.ratios]
        if len(shares) < 2:
            return shares[0], shares[0], shares[0]
        low, middle, high = statistics.quantiles(shares, n=4, method="inclusive")
        return low, middle, high

    @property
    def aim(self) -> float:
        """The most that it may cost."""
        if self.interval_s >= RELAXED_FROM_S:
            return RELAXED
        return CUT if self.cuts else UNCUT

    def misses(self) -> list[str]:
        """Which aim was missed."""
        median = self.quartiles[1]
        return [f"checkpoints cost {median:+.1%}, and {self.aim:.0%} is the aim"] if median > self.aim else []


@dataclass(frozen=True)
class Record:
    """One model on one adapter."""

    work: str
    backend: str
    adapter: str
    load_s: float
    gap_load_max_s: float
    gap_run_p99_s: float
    gap_run_max_s: float
    cancels: list[Cancels]
    costs: list[Cost]

    @property
    def driver(self) -> str:
        """The adapter, in a word or two."""
        for part, name in (("llvmpipe", "lavapipe"), ("swiftshader", "SwiftShader")):
            if part in self.adapter.lower():
                return name
        return self.backend if self.backend == "cpu" else self.adapter

    def faults(self) -> list[str]:
        """What is wrong, in sentences."""
        return [f"{self.work} on {self.driver}, {c.policy}: {line}" for c in self.cancels for line in c.faults()]

    def misses(self) -> list[str]:
        """Which aims were missed, in sentences."""
        parts: list[Cancels | Cost] = [*self.cancels, *self.costs]
        return [f"{self.work} on {self.driver}, {part.policy}: {line}" for part in parts for line in part.misses()]

    @staticmethod
    def of(data: dict[str, Any]) -> Record:
        """A record out of what JSON gives."""
        cancels = [Cancels(**part) for part in data["cancels"]]
        return Record(**{**data, "cancels": cancels, "costs": [Cost(**part) for part in data["costs"]]})


def save(records: Iterable[Record], path: Path | None = None) -> str:
    """Records as JSON, in a file, too, where there is a path; the newest of a model on an adapter counts."""
    newest = {(record.adapter, record.work): record for record in records}
    text = json.dumps([asdict(record) for record in newest.values()])
    if path is not None:
        part = path.with_suffix(path.suffix + ".part")
        part.write_text(text)
        part.replace(path)
    return text


def load(paths: Sequence[Path]) -> list[Record]:
    """The records in files that `save` wrote.

    Raises:
        ValueError: a file holds something else.
        OSError: a file cannot be opened.
    """
    records = []
    for path in paths:
        try:
            records += [Record.of(data) for data in json.loads(path.read_text())]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} holds no records of this benchmark") from error
    return records
