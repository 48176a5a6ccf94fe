"""How long a cancel takes, and what it leaves behind.

    python benchmarks/cancel.py MODEL [--rounds N] [--adapter A] [--json] [--peer]

MODEL is a name from examples/real_models.py, or an .onnx file (then --shape, for free dimensions).
A run is cancelled at 5, 15, ... 95 % of the time that a whole run takes; after each cancel the next
output is compared with the one before, bit for bit. Meanwhile a task beats every millisecond.

--peer does the same work in onnxruntime-webgpu, in a virtual environment of its own, and sets
`RunOptions.terminate` at the same shares of its own run; needs an adapter that Dawn takes (SwiftShader will do).

Exits with 1 where a segment was handed over after a cancel, an output was not the same, or the peer does not run here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import trio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import peer
import real_models
import trionnx
from trionnx.cli.console import milliseconds, output, quiet_drivers, table
from trionnx.cli.inputs import UsageError, draw, parse_shapes
from trionnx.cli.measure import HandOvers, cancel_after, heartbeat, quantile, whole_runs
from trionnx.gpu.graph.read import read_model
from trionnx.gpu.shapes import check_shapes

__all__: list[str] = []

SHARES = tuple(percent / 100 for percent in range(5, 100, 10))
WARM, TIMED = 2, 5
LEFT_S, LEFT_SHARE, GAP_RUN_S, GAP_LOAD_S = 0.100, 0.03, 0.010, 0.050


def main() -> int:
    """Measure, print, judge."""
    arguments = parse()
    path, feeds = work(arguments)
    found = trio.run(measure, arguments, path, feeds)
    missing = ""
    if arguments.peer:
        try:
            found["peer"] = peer.measure(path, feeds, SHARES, say=lambda line: print(line, file=sys.stderr))
        except peer.Unavailable as error:
            missing = str(error)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)
    if missing:
        print(f"cancel.py: {missing}", file=sys.stderr)
    return 0 if found["late_segments"] == 0 and found["different_outputs"] == 0 and not missing else 1


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0] if __doc__ else None, usage="cancel.py MODEL [options]"
    )
    parser.add_argument("model", help="a name from examples/real_models.py, or an .onnx file")
    parser.add_argument("--shape", action="append", default=[], metavar="NAME=1,3,48,320")
    parser.add_argument("--rounds", type=int, default=5, help="cancels at each of the ten moments (default: 5)")
    parser.add_argument("--backend", default="webgpu")
    parser.add_argument("--adapter", default=None)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--peer", action="store_true", help="onnxruntime-webgpu too")
    return parser.parse_args()


def work(arguments: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """The model's path and its inputs."""
    if arguments.model in real_models.MODELS:
        return real_models.model(arguments.model), real_models.feeds(arguments.model)
    path = Path(arguments.model)
    model, shapes = read_model(path, optimise=False), parse_shapes(arguments.shape)
    check_shapes((*model.inputs, *model.overridable), shapes)
    return path, draw(model.inputs, shapes, seed=0)


async def measure(arguments: argparse.Namespace, path: Path, feeds: dict[str, Any]) -> dict[str, Any]:
    """Load, run whole, cancel again and again."""
    shapes = {name: value.shape for name, value in feeds.items()}
    async with trionnx.open_scheduler(backend=arguments.backend, adapter=arguments.adapter) as scheduler:
        async with heartbeat() as loading:
            start = time.perf_counter()
            session = await scheduler.load(path, input_shapes=shapes)
            load_s = time.perf_counter() - start
        if session.backend != arguments.backend:
            raise SystemExit(f"asked for {arguments.backend}, got {session.backend}")
        _, expected = await whole_runs(session, feeds, WARM)
        handed = HandOvers(session)
        samples, different = [], 0
        async with heartbeat() as running:
            seconds, outputs = await whole_runs(session, feeds, TIMED)
            different += not same(expected, outputs)
            segments = handed.count // TIMED
            for _ in range(arguments.rounds):
                for share in SHARES:
                    # Of the newest whole runs: a busy machine changes its pace.
                    whole = statistics.median(seconds[-TIMED:])
                    samples.append(await cancel_after(session, feeds, share * whole, handed))
                    more, outputs = await whole_runs(session, feeds, 1)
                    seconds += more
                    different += not same(expected, outputs)
        left = [sample.left_s for sample in samples if sample.left_s is not None]
        if not left:
            raise SystemExit("cancel.py: every run was over before it could be cancelled")
        return {
            "model": arguments.model,
            "backend": session.backend,
            "adapter": session.adapter,
            "load_s": load_s,
            "whole_s": statistics.median(seconds),
            "segments": segments,
            "cancelled": len(left),
            "over_before": len(samples) - len(left),
            "left_p50_s": quantile(left, 0.50),
            "left_p99_s": quantile(left, 0.99),
            "left_max_s": max(left),
            "late_segments": sum(sample.late for sample in samples),
            "different_outputs": different,
            "gap_load_max_s": max(loading.gaps, default=0.0),
            "gap_run_p99_s": quantile(running.gaps, 0.99),
            "gap_run_max_s": max(running.gaps, default=0.0),
        }


def same(one: list[Any], other: list[Any]) -> bool:
    """Whether outputs agree bit for bit."""
    return all(
        np.asarray(a).dtype == np.asarray(b).dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(one, other, strict=True)
    )


def show(found: dict[str, Any]) -> None:
    """Print a table, with what was aimed at."""
    bound = max(LEFT_S, LEFT_SHARE * found["whole_s"])
    console = output()
    console.print(f"{found['model']} on {found['backend']}: {found['adapter']}")
    rows = table("", "measured", "aim", "")

    def row(what: str, value: str, aim: str = "", met: bool | None = None) -> None:
        rows.add_row(what, value, aim, "" if met is None else "met" if met else "missed")

    def timed(what: str, key: str, aim: float | None = None) -> None:
        met = None if aim is None else found[key] <= aim
        row(what, milliseconds(found[key]), "" if aim is None else f"at most {milliseconds(aim)}", met)

    row("load", f"{found['load_s']:.2f} s")
    timed("a whole run", "whole_s")
    row("segments in it", str(found["segments"]))
    row("runs cancelled", f"{found['cancelled']} (and {found['over_before']} that were over before)")
    timed("cancel to scope left, p50", "left_p50_s")
    timed("cancel to scope left, p99", "left_p99_s", bound)
    timed("cancel to scope left, max", "left_max_s")
    row("segments handed over after a cancel", str(found["late_segments"]), "0", found["late_segments"] == 0)
    row("outputs that were not the same", str(found["different_outputs"]), "0", found["different_outputs"] == 0)
    timed("heartbeat gap during load, max", "gap_load_max_s", GAP_LOAD_S)
    timed("heartbeat gap during runs, p99", "gap_run_p99_s", GAP_RUN_S)
    timed("heartbeat gap during runs, max", "gap_run_max_s")
    console.print(rows)
    if "peer" in found:
        peer.show(found["peer"], console)


if __name__ == "__main__":
    quiet_drivers()
    try:
        sys.exit(main())
    except (
        *(trionnx.NoAdapter, trionnx.InvalidInput, trionnx.InvalidModel, trionnx.UnsupportedOperator),
        *(UsageError, real_models.Unavailable, MemoryError, OSError),
    ) as error:
        sys.exit(f"cancel.py: {error}")
