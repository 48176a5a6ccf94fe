"""Tables of what was measured, for people."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from rich.console import Console

from record import Record
from trionnx.cli.console import milliseconds, table

__all__ = ["show"]

GAP_RUN_S, GAP_LOAD_S = 0.010, 0.050


def show(records: Sequence[Record], console: Console) -> None:
    """Print the tables, one adapter after the other."""
    for adapter, group in itertools.groupby(records, key=lambda record: record.adapter):
        some = list(group)
        console.print(f"\non {some[0].backend}: {adapter}\n")
        _cancels(some, console)
        if any(record.costs for record in some):
            console.print()
            _costs(some, console)
        loading, running = max(r.gap_load_max_s for r in some), max(r.gap_run_p99_s for r in some)
        console.print(
            f"\nheartbeat: the longest gap during loads {milliseconds(loading)} (aim {milliseconds(GAP_LOAD_S)}), "
            f"p99 during runs {milliseconds(running)} (aim {milliseconds(GAP_RUN_S)})"
        )


def _cancels(records: Sequence[Record], console: Console) -> None:
    rows = table(
        *("model", "policy", "a run", "segments", "cancels", "p50", "p99", "max", "bound", ""),
        *("finish after", "handed late", "device's count", "outputs"),
    )
    for record in records:
        for first, cancels in enumerate(record.cancels):
            bound_s = cancels.bound_s
            met = bound_s is not None and cancels.left(0.99) <= bound_s
            rows.add_row(
                "" if first else record.work,
                cancels.policy,
                milliseconds(cancels.whole_s),
                str(cancels.segments),
                str(len(cancels.left_s)),
                *(milliseconds(cancels.left(share)) for share in (0.5, 0.99, 1.0)),
                "none" if bound_s is None else milliseconds(bound_s),
                "" if bound_s is None else "met" if met else "missed",
                f"{cancels.after}" if cancels.limit is None else f"{cancels.after} of {cancels.limit}",
                str(cancels.late),
                _counted(cancels.miscounted),
                f"{cancels.compared - cancels.different} of {cancels.compared} same",
            )
    console.print(rows)


def _counted(wrong: int | None) -> str:
    return "none" if wrong is None else "right" if wrong == 0 else f"wrong {wrong} times"


def _costs(records: Sequence[Record], console: Console) -> None:
    rows = table(
        *("model", "policy", "run, whole", "longest operator", "cut inside", "pairs"),
        *("checkpoints cost, median", "quartiles", "aim", ""),
    )
    for record in records:
        for first, cost in enumerate(record.costs):
            low, middle, high = cost.quartiles
            rows.add_row(
                "" if first else record.work,
                cost.policy,
                milliseconds(statistics.median(cost.whole_s)),
                milliseconds(cost.longest_s),
                str(cost.cuts),
                str(len(cost.ratios)),
                f"{middle:+.1%}",
                f"{low:+.1%} to {high:+.1%}",
                f"at most {cost.aim:.0%}",
                "missed" if cost.misses() else "met",
            )
    console.print(rows)
