"""How several sessions share one adapter: fair shares, work in all, and an interactive run beside a batch.

    python benchmarks/scheduler.py [--seconds 10] [--runs 100] [--judge] [--peer --peer-python PYTHON]

Busy sessions of one model divide the adapter by their weights; four of them make as much as one; a small model
every 100 ms beside a model of seconds, back to back, takes its time alone, two segments and 5 ms at most.

--peer does the last of these in onnxruntime-webgpu as well, two sessions in two threads; it needs an adapter that
Dawn takes (SwiftShader will do). --peer-python is the Python of a virtual environment that has it; one is made
where none is given.

Exits with 1 where the peer does not run here; with --judge also where an aim was missed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import rival
import sharing

import peer
import trionnx
import works
from trionnx.cli.console import milliseconds, output, quiet_drivers, table
from trionnx.cli.measure import quantile

__all__: list[str] = []

WEIGHTS = ((1.0, 1.0), (3.0, 1.0))
PERIOD_S = 0.1
PARTS = ("shares", "throughput", "latency")


def main() -> int:
    """Measure, print, judge."""
    arguments = parse()
    found = trio.run(measure, arguments)
    show(found)
    wrong: list[str] = []
    if arguments.peer:
        try:
            other = by_the_peer(arguments)
        except peer.Unavailable as error:
            wrong.append(str(error))
        else:
            latency(other, f"onnxruntime-webgpu {other.pop('version')}")
    if arguments.judge:
        wrong += [line for one in found for line in one.misses()]
    for line in wrong:
        print(f"scheduler.py: {line}", file=sys.stderr)
    return 1 if wrong else 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help=" ".join(PARTS))
    add("--model", default="opennsfw", metavar="NAME", help="of busy sessions (default: opennsfw)")
    add("--small", default="ppocr_cls_v2", metavar="NAME", help="of interactive runs (default: ppocr_cls_v2)")
    add("--batch", nargs=2, type=int, default=[1024, 40], metavar=("SIZE", "LENGTH"), help="of a chain of products")
    add("--seconds", type=float, default=10.0, help="for each measurement of busy sessions (default: 10)")
    add("--runs", type=int, default=100, help="interactive runs (default: 100)")
    add("--pairs", type=int, default=3, help="of one session and four (default: 3)")
    add("--backend", default="webgpu")
    add("--adapter", default=None)
    add("--judge", action="store_true", help="exit with 1 where an aim was missed")
    add("--peer", action="store_true", help="interactive runs in onnxruntime-webgpu, too")
    add("--peer-python", type=Path, metavar="PYTHON", help="that has onnxruntime-webgpu")
    return parser.parse_args()


async def measure(arguments: argparse.Namespace) -> list[Any]:
    """All parts, one after the other.

    **Cancellation:** stops what is under way.
    """
    found: list[Any] = []
    async with trionnx.open_scheduler(backend=arguments.backend, adapter=arguments.adapter) as scheduler:
        if "shares" in arguments.parts:
            for weights in WEIGHTS:
                work = works.work(arguments.model)
                found.append(await sharing.shares(scheduler, work, weights, arguments.seconds))
        if "throughput" in arguments.parts:
            work = works.work(arguments.model)
            found.append(await sharing.many(scheduler, work, 4, arguments.seconds, arguments.pairs))
        if "latency" in arguments.parts:
            small, batch = works.work(arguments.small), sharing.chain(*arguments.batch)
            found.append(await sharing.interactive(scheduler, small, batch, PERIOD_S, arguments.runs))
    return found


def show(found: list[Any]) -> None:
    """Print tables."""
    rows = table("busy sessions", "measured", "aim")
    for one in found:
        if isinstance(one, sharing.Shares):
            weights = " : ".join(f"{weight:g}" for weight in one.weights)
            aim = f"{one.aim:.0%} +- {sharing.FAIR:.0%}"
            rows.add_row(f"share of the first, weights {weights}", f"{one.first:.1%}", aim)
        elif isinstance(one, sharing.Throughput):
            rows.add_row(f"work of {one.sessions}, of one session's", f"{one.ratio:.2f}", f"{sharing.TOTAL}")
    if rows.row_count:
        output().print(rows)
    for one in found:
        if isinstance(one, sharing.Latency):
            latency(vars(one), "trionnx", one.bound_s)


def latency(found: dict[str, Any], name: str, bound_s: float | None = None) -> None:
    """Print what an interactive run takes."""
    rows = table(f"{name}: a run each {milliseconds(PERIOD_S)}", "p50", "p99", "max")
    for what in ("alone", "beside"):
        took = found[f"{what}_s"]
        rows.add_row(what, *(milliseconds(quantile(took, share)) for share in (0.5, 0.99, 1.0)))
    if bound_s is not None:
        rows.add_row("aim", "", milliseconds(bound_s), "")
    rows.add_row("the batch alone", milliseconds(found["batch_s"]), "", "")
    output().print(rows)


def by_the_peer(arguments: argparse.Namespace) -> dict[str, Any]:
    """Interactive runs in onnxruntime-webgpu."""

    def say(what: str) -> None:
        print(f"peer: {what}", file=sys.stderr, flush=True)

    python = arguments.peer_python or peer.environment("peer", peer.PACKAGES, say)
    small, batch = works.work(arguments.small), sharing.chain(*arguments.batch)
    return rival.measure(python, small, batch, PERIOD_S, arguments.runs)


if __name__ == "__main__":
    quiet_drivers()
    sys.exit(main())
