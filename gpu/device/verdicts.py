"""What is known of this machine's drivers, and the file that remembers it from one process to the next.

This file asks no driver: a probe does (actors/probe.py), in a process of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from .adapters import AdapterInfo
from .drivers import boot
from .entries import Entries

__all__ = ["Book", "Outcome", "Survey", "Verdict", "adapter_info"]

Outcome = Literal["ok", "error", "wrong", "crash", "timeout"]
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one trial ended.

    Attributes:
        outcome: "ok"; "error", the driver said so; "wrong", it computed other numbers; "crash", it took its process
            along; "timeout", it did not answer.
        reason: why, in a sentence; "" where all is well.
        at: when, in seconds since the epoch. boot: of which start of the machine, "" where that is not known.
    """

    outcome: Outcome
    reason: str = ""
    at: float = field(default_factory=time.time)
    boot: str = field(default_factory=boot)

    @property
    def ok(self) -> bool:
        """Whether it can be used."""
        return self.outcome == "ok"

    def holds(self, now: float, boot: str) -> bool:
        """Whether it still counts: a success for good, a time-out until the machine is started anew, else for a day."""
        if self.ok:
            return True
        if self.outcome == "timeout" and self.boot and boot:
            return self.boot == boot
        return 0 <= now - self.at < DAY_S


@dataclass(frozen=True, slots=True)
class Survey:
    """What is known of the drivers.

    Attributes:
        listing: whether the adapters could be listed at all.
        adapters: those that were.
        drivers: the Vulkan drivers, by their manifests, that alone may be opened; None: all.
        refused: the other ones, and why.
        trials: adapters that were tried, by their identity.
    """

    listing: Verdict
    adapters: tuple[AdapterInfo, ...] = ()
    drivers: tuple[str, ...] | None = None
    refused: Mapping[str, Verdict] = field(default_factory=dict)
    trials: Mapping[str, Verdict] = field(default_factory=dict)

    def holds(self, now: float, boot: str) -> bool:
        """Whether its list of adapters still counts."""
        return all(verdict.holds(now, boot) for verdict in (self.listing, *self.refused.values()))

    def trial(self, adapter: AdapterInfo, now: float, boot: str) -> Verdict | None:
        """How an adapter's trial ended; None: there was none, or it does not count any more."""
        verdict = self.trials.get(adapter.identity)
        return verdict if verdict is not None and verdict.holds(now, boot) else None

    def tried(self, adapter: AdapterInfo, verdict: Verdict) -> Survey:
        """This, and one more trial."""
        return replace(self, trials={**self.trials, adapter.identity: verdict})


class Book:
    """Surveys by machine (`drivers.machine`), in one file. What cannot be read, or was damaged, is not there.

    Args:
        folder: where the file is; made when there is something to write.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._entries = Entries(Path(folder) / "probes.json", "machines")

    @property
    def file(self) -> Path:
        """The file."""
        return self._entries.file

    def get(self, machine: str) -> Survey | None:
        """What is remembered of a machine."""
        try:
            return _survey(self._entries.read()[machine])
        except (KeyError, TypeError, ValueError, AttributeError):
            return None

    def put(self, machine: str, survey: Survey) -> None:
        """Remember.

        Raises:
            OSError: it cannot be written; what was there before still is.
        """
        self._entries.put(machine, _plain(survey))

    def forget(self) -> None:
        """Forget all.

        Raises:
            OSError: the file cannot be removed.
        """
        self._entries.forget()


def adapter_info(facts: Any) -> AdapterInfo:
    """An adapter from its facts as plain values.

    Raises:
        ValueError, TypeError, KeyError: they are not those of an adapter.
    """
    texts = [facts[name] for name in ("name", "driver", "backend", "kind", "identity")]
    index = facts["index"]
    if type(index) is not int or index < 0 or not all(type(text) is str for text in texts):
        raise ValueError("an adapter is told by an index and texts")
    if facts["kind"] not in ("hardware", "software"):
        raise ValueError(f"an adapter is hardware or software, not {facts['kind']!r}")
    return AdapterInfo(index, *texts)


def _plain(survey: Survey) -> dict[str, Any]:
    facts = ("index", "name", "driver", "backend", "kind", "identity")
    return {
        "listing": asdict(survey.listing),
        "adapters": [{name: getattr(adapter, name) for name in facts} for adapter in survey.adapters],
        "drivers": survey.drivers,
        "refused": {file: asdict(verdict) for file, verdict in survey.refused.items()},
        "trials": {identity: asdict(verdict) for identity, verdict in survey.trials.items()},
    }


def _survey(plain: Any) -> Survey:
    drivers = plain["drivers"]
    if drivers is not None and not (isinstance(drivers, list) and all(isinstance(file, str) for file in drivers)):
        raise ValueError("drivers are a list of files")
    return Survey(
        _verdict(plain["listing"]),
        tuple(adapter_info(facts) for facts in plain["adapters"]),
        None if drivers is None else tuple(drivers),
        {str(file): _verdict(verdict) for file, verdict in plain["refused"].items()},
        {str(identity): _verdict(verdict) for identity, verdict in plain["trials"].items()},
    )


def _verdict(plain: Any) -> Verdict:
    outcome, reason, boot = plain["outcome"], plain["reason"], plain["boot"]
    if outcome not in get_args(Outcome) or type(reason) is not str or type(boot) is not str:
        raise ValueError("that is no verdict")
    return Verdict(outcome, reason, float(plain["at"]), boot)
