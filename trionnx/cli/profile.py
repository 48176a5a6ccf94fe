"""``trionnx profile``: what each kernel, or each node, of a model takes, beside what the device could do."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import trio
from rich.console import Console

from ..actors.probe import cache_folder
from ..gpu.device.adapters import choose_adapter
from ..gpu.device.device import Device
from ..gpu.device.peak import Peak, Peaks, measure_peak
from ..gpu.seam import NodeTime
from ..scheduler import RunOptions, open_scheduler
from ..scheduler.backends import Choice, choose, is_built_in
from .console import bar, milliseconds, output, table
from .inputs import feeds_of

__all__ = ["Row", "main", "share_of_peak", "summed"]

WARM = 3
"""Runs before the first that counts: the costs of steps are learned in them."""
COUNTED: tuple[str, ...] = ("dispatches", "copies", "uploads", "fetches", "host steps", "whole models")


@dataclass(slots=True)
class Row:
    """What the steps of one kernel, or of one node, took in a run.

    Attributes:
        name: of the kernel or of the node. also: of a node, its kernels; of a kernel, its nodes.
        where: "gpu", "host" or "opaque". calls: steps, or parts of steps, one for each dispatch.
        seconds, flops, nbytes: the sums over them.
    """

    name: str
    also: tuple[str, ...]
    where: str
    calls: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class _Profile:
    """What was measured: `run_s` is the median of runs without a profile, `times` of the shortest with one."""

    backend: str
    adapter: str
    peak: Peak | None
    run_s: float
    times: Sequence[NodeTime]


def main(arguments: argparse.Namespace) -> int:
    """Run, sum up, print."""
    found = trio.run(_measure, arguments, feeds_of(arguments))
    rows = summed(found.times, arguments.nodes)
    if arguments.json:
        print(json.dumps(_plain(found, rows), indent=1))
        return 0
    console = output()
    _show(console, found, rows, "node" if arguments.nodes else "kernel")
    return 0


def summed(times: Iterable[NodeTime], nodes: bool) -> list[Row]:
    """Sums by kernel, or by node, what takes longest first."""
    rows: dict[tuple[str, str], Row] = {}
    for one in times:
        name, also = (one.node, one.kernel) if nodes else (one.kernel, one.node)
        row = rows.setdefault((name, one.where), Row(name, (), one.where))
        if also not in row.also:
            row.also += (also,)
        row.calls += 1
        row.seconds += one.seconds
        row.flops += one.flops
        row.nbytes += one.nbytes
    return sorted(rows.values(), key=lambda row: -row.seconds)


def share_of_peak(row: Row, peak: Peak) -> tuple[float, str]:
    """The least time that the device could do a row's work in, of the time that it took; and what bounds it.

    More than 1 where caches are faster than the memory behind them.
    """
    bounds = {"compute": row.flops / peak.flops_per_s, "memory": row.nbytes / peak.bytes_per_s}
    by = max(bounds, key=lambda name: bounds[name])
    return bounds[by] / row.seconds if row.seconds else 0.0, by


async def _measure(arguments: argparse.Namespace, feeds: Mapping[str, Any]) -> _Profile:
    with bar() as progress:
        task = progress.add_task("look", total=None)
        choice = await choose(arguments.backend, arguments.adapter)
        peak = None
        if choice.backend == "webgpu" and is_built_in("webgpu"):
            progress.update(task, description="measure the device")
            peak = await _peak(choice, arguments.remeasure)

        def on_progress(phase: str, done: int, total: int) -> None:
            progress.update(task, description=phase, completed=done, total=total or None)

        async with open_scheduler(backend=choice.backend, adapter=choice.adapter) as scheduler:
            shapes = {name: value.shape for name, value in feeds.items()}
            session = await scheduler.load(arguments.model, input_shapes=shapes, on_progress=on_progress)
            seconds, profiles = [], []
            for number in range(WARM + arguments.repeat):
                progress.update(task, description="run", completed=number, total=WARM + arguments.repeat)
                start = time.perf_counter()
                await session.run(None, feeds)
                seconds.append(time.perf_counter() - start)
                options = RunOptions(profile=True)
                await session.run(None, feeds, options)
                profiles.append(options.node_times)
            times = min(profiles[WARM:], key=_total)
            return _Profile(session.backend, session.adapter, peak, median(seconds[WARM:]), times)


async def _peak(choice: Choice, anew: bool) -> Peak:
    """What is remembered of the adapter, or measured now and remembered."""

    def look() -> Peak:
        info = choose_adapter(choice.adapter)
        known = Peaks(cache_folder())
        peak = None if anew else known.get(info.identity)
        if peak is None:
            device = Device(info, check=trio.from_thread.check_cancelled)
            try:
                peak = measure_peak(device, trio.from_thread.check_cancelled)
            finally:
                device.close()
            known.put(info.identity, peak)
        return peak

    return await trio.to_thread.run_sync(look)


def _total(times: Iterable[NodeTime]) -> float:
    return sum(one.seconds for one in times)


def _counts(times: Iterable[NodeTime]) -> dict[str, int]:
    """How many steps there are of each kind; a step that was cut counts as often as it was submitted."""
    counts: dict[str, int] = dict.fromkeys(COUNTED, 0)
    kinds = {("gpu", "copy"): "copies", ("host", "upload"): "uploads", ("host", "fetch"): "fetches"}
    others = {"gpu": "dispatches", "host": "host steps", "opaque": "whole models"}
    for one in times:
        counts[kinds.get((one.where, one.kernel), others[one.where])] += 1
    return counts


def _plain(found: _Profile, rows: Sequence[Row]) -> dict[str, Any]:
    lines = []
    for row in rows:
        line: dict[str, Any] = asdict(row)
        line["share"] = row.seconds / (_total(found.times) or 1.0)
        if found.peak is not None and row.where == "gpu":
            line["of_peak"], line["bound"] = share_of_peak(row, found.peak)
        lines.append(line)
    return {
        "backend": found.backend,
        "adapter": found.adapter,
        "peak": None if found.peak is None else asdict(found.peak),
        "run_seconds": found.run_s,
        "measured_seconds": _total(found.times),
        "steps": _counts(found.times),
        "rows": lines,
    }


def _show(console: Console, found: _Profile, rows: Sequence[Row], what: str) -> None:
    also = "kernels" if what == "node" else "nodes"
    lines = table(what, "where", "calls", "time", "share", "GFLOP/s", "GB/s", "of peak", also)
    whole = _total(found.times) or 1.0
    for row in rows:
        rates, of = ("", ""), ""
        if row.where == "gpu" and row.seconds:
            rates = (f"{row.flops / row.seconds / 1e9:.2f}", f"{row.nbytes / row.seconds / 1e9:.2f}")
            if found.peak is not None:
                share, by = share_of_peak(row, found.peak)
                of = f"{share:.0%} {by}"
        time_of = (milliseconds(row.seconds), f"{row.seconds / whole:.1%}")
        names = ", ".join(row.also) if what == "node" or len(row.also) < 3 else f"{row.also[0]} and {len(row.also) - 1}"
        lines.add_row(row.name, row.where, str(row.calls), *time_of, *rates, of, names)
    console.print(lines)
    counts = ", ".join(f"{name}: {count}" for name, count in _counts(found.times).items() if count)
    console.print(f"{counts}; {milliseconds(_total(found.times))} in them, and a run takes {milliseconds(found.run_s)}")
    console.print(f"on {found.backend}: {found.adapter}")
    if found.peak is not None:
        flops, nbytes = found.peak.flops_per_s / 1e9, found.peak.bytes_per_s / 1e9
        console.print(f"peak, as measured: {flops:.1f} GFLOP/s in registers, {nbytes:.1f} GB/s copied")
