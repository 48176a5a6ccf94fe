"""``trionnx run``: run a model, show how far it is, stop it when Ctrl-C is pressed."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import trio
from rich.progress import Progress

from .._interrupt import EXIT_CANCELLED
from ..scheduler import RunOptions, Session, open_scheduler
from .console import bar, milliseconds, output, table
from .inputs import feeds_of

__all__ = ["main"]


@dataclass
class _State:
    """How far the command is."""

    at: str = "before the model was loaded"
    seconds: list[float] = field(default_factory=list)
    outputs: dict[str, Any] | None = None


def main(arguments: argparse.Namespace) -> int:
    """Run a model."""
    path = _output_path(arguments.output)
    feeds = feeds_of(arguments)
    state = _State()
    trio.run(_run, arguments, feeds, state)
    if len(state.seconds) < arguments.repeat:
        output().print(f"cancelled {state.at}")
        return EXIT_CANCELLED
    _report(path, state)
    return 0


def _output_path(text: str | None) -> Path | None:
    if text is None:
        return None
    path = Path(text if text.endswith(".npz") else f"{text}.npz")
    for folder in (Path(text), path):
        if folder.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(folder))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))
    return path


async def _run(arguments: argparse.Namespace, feeds: Mapping[str, Any], state: _State) -> None:
    fault: Exception | None = None
    with bar() as progress:
        async with trio.open_nursery() as nursery:
            await nursery.start(_interrupted, nursery.cancel_scope.cancel)
            try:
                async with open_scheduler(backend=arguments.backend or "auto", adapter=arguments.adapter) as scheduler:
                    session = await _load(scheduler, arguments.model, feeds, progress, state)
                    for number in range(arguments.repeat):
                        await _once(session, feeds, number, arguments.repeat, progress, state)
            except Exception as error:
                fault = error
            nursery.cancel_scope.cancel()
    if fault is not None:
        raise fault


async def _interrupted(cancel: Callable[[], None], task_status: trio.TaskStatus[None]) -> None:
    with trio.open_signal_receiver(signal.SIGINT) as signals:
        task_status.started()
        async for _ in signals:
            break
    # Python's own handler is back now: a second Ctrl-C ends the program, whatever hangs.
    cancel()


async def _load(scheduler: Any, model: str, feeds: Mapping[str, Any], progress: Progress, state: _State) -> Session:
    task = progress.add_task("load", total=None)

    def on_progress(phase: str, done: int, total: int) -> None:
        state.at = f"while loading ({phase})"
        progress.update(task, description=phase, completed=done, total=total or None)

    shapes = {name: value.shape for name, value in feeds.items()}
    session: Session = await scheduler.load(model, input_shapes=shapes, on_progress=on_progress)
    progress.remove_task(task)
    return session


async def _once(
    session: Session, feeds: Mapping[str, Any], number: int, repeat: int, progress: Progress, state: _State
) -> None:
    label = "run" if repeat == 1 else f"run {number + 1} of {repeat}"
    task = progress.add_task(label, total=None)

    def on_progress(done: int, total: int) -> None:
        state.at = f"in {label}, after {done} of {total} segments"
        progress.update(task, completed=done, total=total)

    state.at = f"in {label}, before its first segment had finished"
    start = time.perf_counter()
    values = await session.run(None, feeds, RunOptions(on_progress=on_progress))
    state.seconds.append(time.perf_counter() - start)
    progress.remove_task(task)
    state.outputs = {info.name: value for info, value in zip(session.get_outputs(), values, strict=True)}
    state.at = f"on {session.backend}: {session.adapter}"


def _report(path: Path | None, state: _State) -> None:
    console, outputs = output(), state.outputs or {}
    rows = table("output", "dtype", "shape", "min", "max", "mean")
    for name, value in outputs.items():
        rows.add_row(name, *_summary(value))
    console.print(rows)
    seconds = sorted(state.seconds)
    took = milliseconds(seconds[0])
    if len(seconds) > 1:
        took = f"{len(seconds)} runs: fastest {took}, median {milliseconds(seconds[len(seconds) // 2])}"
    console.print(f"{took} {state.at}")
    if path is not None:
        with open(path, "wb") as file:
            np.savez(file, allow_pickle=True, **{name: np.asarray(value) for name, value in outputs.items()})
        console.print(f"saved {path}")


def _summary(value: Any) -> list[str]:
    if not isinstance(value, np.ndarray):
        return [type(value).__name__, f"{len(value)} items"]
    about = [str(value.dtype), str(list(value.shape))]
    if value.size and value.dtype.kind in "biuf":
        about += [f"{float(number):.6g}" for number in (value.min(), value.max(), value.mean(dtype=np.float64))]
    return about
