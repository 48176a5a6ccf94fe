"""What a process border costs: cancel latency and throughput, thread against process isolation, side by side.

    python benchmarks/isolation.py MODEL [--rounds N] [--backend B] [--adapter A] [--shape NAME=1,3,48,320] [--json]

MODEL is a name from examples/real_models.py, or an .onnx file. Both sessions live in one run of this program, and
take turns: a whole run here, a whole run there, a cancel here, a cancel there, so that a busy machine is busy for both.

Aims: a cancel within 5 ms of the thread's at p50 and p99, throughput at least 0.95 of the thread's.
Exits with 1 where outputs differ, or a segment was handed over after a cancel.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Literal

import trio

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import real_models
import trionnx
from moments import same
from trionnx.cli.console import milliseconds, output, quiet_drivers, table
from trionnx.cli.inputs import UsageError
from trionnx.cli.measure import HandOvers, cancel_after, quantile, whole_runs
from works import work

__all__: list[str] = []

KINDS: tuple[Literal["thread", "process"], ...] = ("thread", "process")
WARM = 3
SHARES = tuple(percent / 100 for percent in range(5, 100, 10))
LATER_S, THROUGHPUT = 0.005, 0.95


def main() -> int:
    """Measure, print, judge."""
    arguments = parse()
    made = work(arguments.model, arguments.shape)
    path, feeds = made.source, made.feeds
    found = trio.run(measure, arguments, path, feeds)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)
    return 0 if found["late_segments"] == 0 and found["different_outputs"] == 0 else 1


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0] if __doc__ else None, usage="isolation.py MODEL [options]"
    )
    parser.add_argument("model", help="a name from examples/real_models.py, or an .onnx file")
    parser.add_argument("--shape", action="append", default=[], metavar="NAME=1,3,48,320")
    parser.add_argument("--rounds", type=int, default=10, help="each: ten cancels and ten whole runs of both")
    parser.add_argument("--backend", default="webgpu")
    parser.add_argument("--adapter", default=None)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


async def measure(arguments: argparse.Namespace, path: Path | bytes, feeds: dict[str, Any]) -> dict[str, Any]:
    """Load twice, then take turns."""
    shapes = {name: value.shape for name, value in feeds.items()}
    found: dict[str, Any] = {"model": arguments.model, "late_segments": 0, "different_outputs": 0}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    left: dict[str, list[float]] = {kind: [] for kind in KINDS}
    async with trionnx.open_scheduler(backend=arguments.backend, adapter=arguments.adapter) as scheduler:
        sessions, handed = {}, {}
        expected: list[Any] = []
        for kind in KINDS:
            start = time.perf_counter()
            session = await scheduler.load(path, input_shapes=shapes, isolation=kind)
            found[f"load_{kind}_s"] = time.perf_counter() - start
            sessions[kind], handed[kind] = session, HandOvers(session)
            _, expected = await whole_runs(session, feeds, WARM)
        found["backend"], found["adapter"] = sessions["thread"].backend, sessions["thread"].adapter
        for turn in range(arguments.rounds):
            for number, share in enumerate(SHARES):
                for kind in KINDS if (turn + number) % 2 else reversed(KINDS):
                    more, outputs = await whole_runs(sessions[kind], feeds, 1)
                    seconds[kind] += more
                    found["different_outputs"] += not same(expected, outputs)
                whole = statistics.median(seconds["thread"][-10:])
                for kind in KINDS if number % 2 else reversed(KINDS):
                    sample = await cancel_after(sessions[kind], feeds, share * whole, handed[kind])
                    found["late_segments"] += sample.late
                    if sample.left_s is not None:
                        left[kind].append(sample.left_s)
    if not all(left.values()):
        raise SystemExit("isolation.py: every run was over before it could be cancelled")
    for kind in KINDS:
        found[f"whole_{kind}_s"] = statistics.median(seconds[kind])
        found[f"fast_{kind}_s"] = quantile(seconds[kind], 0.10)
        found[f"cancelled_{kind}"] = len(left[kind])
        for name, at in (("p50", 0.50), ("p99", 0.99)):
            found[f"left_{kind}_{name}_s"] = quantile(left[kind], at)
    # Of each pair, so that what the machine did meanwhile falls out.
    ratios = [a / b for a, b in zip(seconds["thread"], seconds["process"], strict=True)]
    found["throughput"] = statistics.median(ratios)
    found["throughput_fast"] = found["fast_thread_s"] / found["fast_process_s"]
    return found


def show(found: dict[str, Any]) -> None:
    """Print a table, with what was aimed at."""
    console = output()
    console.print(f"{found['model']} on {found['backend']}: {found['adapter']}")
    rows = table("", *KINDS, "difference", "aim", "")
    for what, key in (
        ("load", "load_{}_s"),
        ("a whole run, median", "whole_{}_s"),
        ("a whole run, fastest tenth", "fast_{}_s"),
        ("cancel to scope left, p50", "left_{}_p50_s"),
        ("cancel to scope left, p99", "left_{}_p99_s"),
    ):
        here, there = (found[key.format(kind)] for kind in KINDS)
        aimed = "cancel" in what
        met = "met" if there - here <= LATER_S else "missed"
        rows.add_row(
            *(what, milliseconds(here), milliseconds(there), milliseconds(there - here)),
            *((f"at most {milliseconds(LATER_S)}", met) if aimed else ("", "")),
        )
    for what, key in (("median of pairs", "throughput"), ("fastest tenths", "throughput_fast")):
        met = "met" if found[key] >= THROUGHPUT else "missed"
        rows.add_row(
            f"throughput, process / thread, {what}", "", "", f"{found[key]:.3f}", f"at least {THROUGHPUT}", met
        )
    rows.add_row("runs cancelled", str(found["cancelled_thread"]), str(found["cancelled_process"]), "", "", "")
    for what, key in (
        ("segments handed over after a cancel", "late_segments"),
        ("outputs that were not the same", "different_outputs"),
    ):
        rows.add_row(what, "", "", str(found[key]), "0", "met" if found[key] == 0 else "missed")
    console.print(rows)


if __name__ == "__main__":
    quiet_drivers()
    try:
        sys.exit(main())
    except (
        *(trionnx.NoAdapter, trionnx.InvalidInput, trionnx.InvalidModel, trionnx.UnsupportedOperator),
        *(UsageError, real_models.Unavailable, MemoryError, OSError),
    ) as error:
        sys.exit(f"isolation.py: {error}")
