"""The demo: two real models, and a run that stops when it is told to.

    python examples/demo.py

1. Magika tells the types of this repository's own files.
2. A text recogniser reads a line, is cancelled half way, and is run again to the end.

Exits with 1 where anything is not as it should be.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import trio
from rich.progress import Progress

import real_models
import trionnx
from trionnx.cli.console import bar, milliseconds, output, quiet_drivers, table
from trionnx.cli.measure import HandOvers

__all__: list[str] = []

ROOT = Path(__file__).resolve().parent.parent
BATCH = 8
KNOWN = {"README.md": "markdown", "pyproject.toml": "toml", "Makefile": "makefile", "examples/demo.py": "python"}

console = output()


class Wrong(Exception):
    """Something is not as it should be."""


def check(holds: bool, what: str) -> None:
    """Raise `Wrong` unless it holds."""
    if not holds:
        raise Wrong(what)


async def load(scheduler: trionnx.Scheduler, name: str, progress: Progress, **shapes: Sequence[int]) -> trionnx.Session:
    """Load a model, with a bar."""
    task = progress.add_task(f"load {name}", total=None)

    def on_progress(phase: str, done: int, total: int) -> None:
        progress.update(task, description=f"load {name}: {phase}", completed=done, total=total or None)

    start = time.perf_counter()
    session = await scheduler.load(real_models.model(name), input_shapes=shapes or None, on_progress=on_progress)
    progress.remove_task(task)
    console.print(f"{name}: loaded in {time.perf_counter() - start:.1f} s on {session.backend}: {session.adapter}")
    return session


def own_files() -> list[Path]:
    """The files of this repository."""
    paths: list[Path] = []
    if shutil.which("git"):
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
        paths = [ROOT / line for line in listed.stdout.splitlines()]
    if not paths:
        folders = [ROOT / name for name in ("actors", "examples", "gpu", "scheduler", "tests", "trionnx")]
        paths = [*ROOT.glob("*"), *(path for folder in folders for path in folder.rglob("*.py"))]
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())


async def tell_types(scheduler: trionnx.Scheduler) -> None:
    """Magika on this repository's own files."""
    magika, files = real_models.magika(), own_files()
    told: dict[Path, str] = {}
    inputs: list[tuple[Path, Any]] = []
    for path in files:
        data = path.read_bytes()
        features = magika.features(data)
        if features is None:
            told[path] = magika.small(data)
        else:
            inputs.append((path, features))
    with bar() as progress:
        async with await load(scheduler, "magika_v3_3", progress, bytes=(BATCH, 2048)) as session:
            task = progress.add_task("telling file types", total=len(inputs))
            start = time.perf_counter()
            for first in range(0, len(inputs), BATCH):
                some = inputs[first : first + BATCH]
                rows = np.full((BATCH, 2048), 256, np.int32)
                rows[: len(some)] = [features for _, features in some]
                (scores,) = await session.run(None, {"bytes": rows})
                told.update({path: magika.label(row)[0] for (path, _), row in zip(some, scores, strict=False)})
                progress.update(task, completed=first + len(some))
            seconds = time.perf_counter() - start

    groups: dict[str, list[str]] = defaultdict(list)
    for path, kind in told.items():
        groups[kind].append(str(path.relative_to(ROOT)))
    rows_ = table("type", "files", "such as")
    for kind, names in sorted(groups.items(), key=lambda group: -len(group[1])):
        rows_.add_row(kind, str(len(names)), ", ".join(sorted(names, key=len)[:3]))
    console.print(rows_)
    console.print(f"{len(inputs)} files in {seconds:.2f} s, {milliseconds(seconds / max(1, len(inputs)))} each\n")
    for name, kind in KNOWN.items():
        found = told.get(ROOT / name, kind)
        check(found == kind, f"{name} is {kind}, and was told to be {found}")


async def read_text(scheduler: trionnx.Scheduler) -> None:
    """The text recogniser: whole, cancelled half way, whole again."""
    feeds = real_models.feeds("ppocrv4_rec")
    with bar() as progress:
        session = await load(scheduler, "ppocrv4_rec", progress, x=feeds["x"].shape)
        whole, first = await run(session, feeds, progress, "first run")
        whole, first = await run(session, feeds, progress, "whole run")
        console.print(f"a whole run: {milliseconds(whole)}")
        await cancel_half_way(session, feeds, whole, progress)
        _, again = await run(session, feeds, progress, "run again")
    alphabet = real_models.characters(session.get_modelmeta().custom_metadata_map)
    text = real_models.read_line(again, alphabet)
    console.print(f"run again to the end: reads {text!r}")
    check(np.array_equal(first, again), "after the cancel the output is not, bit for bit, what it was before")
    check(text == real_models.LINE, f"the picture says {real_models.LINE!r}")
    await session.aclose()


async def run(session: trionnx.Session, feeds: Any, progress: Progress, label: str) -> tuple[float, Any]:
    """The seconds of a run, and its output."""
    task = progress.add_task(label, total=None)
    start = time.perf_counter()

    def on_progress(done: int, total: int) -> None:
        progress.update(task, completed=done, total=total)

    (output,) = await session.run(None, feeds, trionnx.RunOptions(on_progress=on_progress))
    progress.remove_task(task)
    return time.perf_counter() - start, output


async def cancel_half_way(session: trionnx.Session, feeds: Any, whole_s: float, progress: Progress) -> None:
    """Cancel a run when half of its segments are done; where it has one only, when half of its time is over."""
    task = progress.add_task("a run to be cancelled", total=None)
    handed = HandOvers(session)
    cancelled_at, handed_then, reached = 0.0, 0, ""

    def cancel(scope: trio.CancelScope, so_far: str) -> None:
        nonlocal cancelled_at, handed_then, reached
        if not scope.cancel_called:
            cancelled_at, handed_then, reached = time.perf_counter(), handed.count, so_far
            scope.cancel()

    with trio.CancelScope() as scope:

        def on_progress(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)
            if total > 1 and 2 * done >= total:
                cancel(scope, f"when {done} of {total} segments were done")

        async def when_half_the_time_is_over() -> None:
            await trio.sleep(whole_s / 2)
            if handed.count <= 1:
                cancel(scope, "half of its time in, in its only segment")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(when_half_the_time_is_over)
            await session.run(None, feeds, trionnx.RunOptions(on_progress=on_progress))
            nursery.cancel_scope.cancel()
    left = time.perf_counter() - cancelled_at
    progress.remove_task(task)
    check(scope.cancelled_caught, "the run was to be cancelled, and went on to its end")
    late = handed.count - handed_then
    console.print(f"cancelled {reached}")
    console.print(f"  from the cancel to the scope left: {milliseconds(left)}")
    console.print(f"  segments handed over after it:     {late}")
    check(late == 0, "segments were handed over after the cancel")


def fetch(name: str) -> None:
    """Fetch a model where it is not here yet, and say so."""
    real_models.model(name, say=console.print)


async def main() -> None:
    """All of it, on WebGPU where that is possible."""
    for name in ("magika_v3_3", "ppocrv4_rec"):
        await trio.to_thread.run_sync(fetch, name)
    await trio.to_thread.run_sync(real_models.magika)
    async with trionnx.open_scheduler(backend="webgpu") as scheduler:
        try:
            await tell_types(scheduler)
            await read_text(scheduler)
            return
        except trionnx.NoAdapter as error:
            console.print(f"{error}\nGoing on with ONNX Runtime's CPU provider.\n")
    async with trionnx.open_scheduler(backend="cpu") as scheduler:
        await tell_types(scheduler)
        await read_text(scheduler)


if __name__ == "__main__":
    quiet_drivers()
    try:
        trio.run(main)
    except (Wrong, real_models.Unavailable) as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
