"""Engines side by side on one model: a process each, started one after the other, then run in turns.

Each process begins with empty shader caches, so that its first run is a first one. Python code has its bytecode, as
installed packages do, and trionnx remembers from an earlier process that the drivers work, as it does on any machine.
"""

from __future__ import annotations

import compileall
import contextlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import trio

import peer
from trionnx.actors.probe import cache_folder
from trionnx.scheduler.backends import examine

__all__ = ["ENGINES", "Engine", "Failed", "contest"]

SCRIPT = Path(__file__).resolve().parent / "contender.py"
CACHES = ("MESA_SHADER_CACHE_DIR", "__GL_SHADER_DISK_CACHE_PATH", "XDG_CACHE_HOME")
TINYGRAD = ("tinygrad==0.14.0", "dawn-python==0.3.0", "onnx", "numpy")
ENOUGH = 2
"""Runs of each engine that are made even where the time for them is over."""


class Failed(RuntimeError):
    """An engine does not do its work; the message says what it said."""


@dataclass(frozen=True)
class Engine:
    """What takes part.

    Attributes:
        name: as contender.py knows it.
        python: gives the interpreter that has its packages; told what to say while it installs them.
        environment: variables that it needs. options: for contender.py.
    """

    name: str
    python: Callable[[Callable[[str], None]], Path]
    environment: Callable[[Path], dict[str, str]] = lambda python: {}
    options: Mapping[str, Any] = field(default_factory=dict)


@cache
def _prepare() -> None:
    for package in ("trionnx", "trionnx.gpu", "trionnx.actors", "trionnx.scheduler"):
        (folder,) = importlib.import_module(package).__path__
        compileall.compile_dir(folder, quiet=2)
    trio.run(examine)


def _trionnx(say: Callable[[str], None]) -> Path:
    """This Python, once the package has its bytecode and it is known whether the drivers work."""
    _prepare()
    return Path(sys.executable)


def _dawn(python: Path) -> dict[str, str]:
    """What tinygrad finds its WebGPU by."""
    found = [path for path in python.parent.parent.glob("**/pydawn/lib/libwebgpu_dawn*") if _ours(path.name)]
    names = {"WEBGPU_PATH": str(found[0])} if found else {}
    return {"DEV": "WEBGPU", "WEBGPU": "1", "CACHELEVEL": "0", **names}


def _ours(name: str) -> bool:
    machine = os.uname().machine if hasattr(os, "uname") else "x86_64"
    ending = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
    arm = any(part in name for part in ("arm64", "aarch64"))
    return name.endswith(ending) and arm == (machine in ("arm64", "aarch64"))


ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("trionnx", _trionnx, lambda python: {"TRIONNX_CACHE_DIR": str(cache_folder())}),
        Engine(
            "onnxruntime-webgpu",
            lambda say: peer.environment("peer", peer.PACKAGES, say),
            options={"provider": "WebGpuExecutionProvider"},
        ),
        Engine("tinygrad", lambda say: peer.environment("tinygrad", TINYGRAD, say), _dawn),
        Engine("onnxruntime", lambda say: Path(sys.executable), options={"provider": "CPUExecutionProvider"}),
    )
}


class Contender:
    """One engine's process."""

    def __init__(self, engine: Engine, python: Path, words: Sequence[str], folder: Path, limit_s: float) -> None:
        self._limit_s = limit_s
        variables = os.environ | dict.fromkeys(CACHES, str(folder)) | engine.environment(python)
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen(
            [str(python), str(SCRIPT), engine.name, *words],
            env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )

    def reply(self) -> dict[str, Any]:
        """The next line that it says. Raises Failed."""
        assert self._process.stdout is not None
        late = threading.Timer(self._limit_s, self._process.kill)
        start = time.perf_counter()
        late.start()
        line = self._process.stdout.readline()
        late.cancel()
        if not line:
            if time.perf_counter() - start >= self._limit_s:
                raise Failed(f"more than {self._limit_s:g} s")
            self._log.seek(0)
            raise Failed((self._log.read().strip().splitlines() or ["ended without a word"])[-1])
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise Failed(found["error"])
        return found

    def run(self) -> float:
        """Seconds of one run. Raises Failed."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write("run\n")
            self._process.stdin.flush()
        return float(self.reply()["run_s"])

    def finish(self) -> int | None:
        """Bytes that its process had resident at most. Raises Failed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self.reply()["peak_bytes"]  # type: ignore[no-any-return]

    def close(self) -> None:
        """End it."""
        self._process.kill()
        with self._process, contextlib.suppress(OSError):
            self._log.close()


def contest(
    engines: Sequence[Engine],
    model: Path,
    feeds: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    rounds: int,
    starts: int,
    limit_s: float,
    say: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Start each engine with a model, run them in turns, compare what they say.

    Args:
        engines: who takes part.
        model: the file.
        feeds: its inputs.
        options: for trionnx: adapter, host_steps.
        rounds: warm runs of each.
        starts: processes of each, for the medians of load and first run.
        limit_s: for one run, and for all rounds together; at least two are made.
        say: is told what is being done.

    Returns:
        For each engine its medians "load_s", "first_s", "warm_s", the "runs_s", "peak_bytes", and "apart", how
        far its outputs are from those of onnxruntime, of the largest; or its "error".
    """
    found: dict[str, dict[str, Any]] = {engine.name: {} for engine in engines}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        np.savez(folder / "feeds.npz", allow_pickle=True, **feeds)
        there: dict[str, Contender] = {}
        for number in range(starts):
            for engine in engines:
                if "error" in found[engine.name]:
                    continue
                say(f"{engine.name} starts")
                try:
                    started = stack.enter_context(_started(engine, model, folder, number, options, limit_s, say))
                    first = started.reply()
                    times = {key: [*found[engine.name].get(key, []), first.pop(key)] for key in ("load_s", "first_s")}
                    found[engine.name] |= times | first
                    if number:
                        started.close()
                    else:
                        there[engine.name] = started
                except (Failed, peer.Unavailable) as error:
                    found[engine.name] = {"error": str(error)}
        _rounds(there, found, rounds, limit_s, say)
        _compare(found, folder)
    for one in found.values():
        if "error" not in one:
            one |= {key: statistics.median(one[key]) for key in ("load_s", "first_s")}
            one["warm_s"] = statistics.median(one["runs_s"])
    return found


@contextmanager
def _started(
    engine: Engine,
    model: Path,
    folder: Path,
    number: int,
    options: Mapping[str, Any],
    limit_s: float,
    say: Callable[[str], None],
) -> Iterator[Contender]:
    own = folder / f"{engine.name}-{number}"
    own.mkdir()
    given = json.dumps(dict(options) | dict(engine.options))
    words = [str(model), str(folder / "feeds.npz"), str(folder / f"{engine.name}.npz"), given]
    contender = Contender(engine, engine.python(say), words, own, limit_s)
    try:
        yield contender
    finally:
        contender.close()


def _rounds(
    there: dict[str, Contender],
    found: dict[str, dict[str, Any]],
    rounds: int,
    limit_s: float,
    say: Callable[[str], None],
) -> None:
    start = time.perf_counter()
    for number in range(rounds):
        if number >= ENOUGH and time.perf_counter() - start > limit_s:
            break
        say(f"round {number + 1} of {rounds}")
        for name in list(there):
            try:
                found[name].setdefault("runs_s", []).append(there[name].run())
            except Failed as error:
                found[name] = {"error": str(error)}
                there.pop(name)
    for name, contender in there.items():
        try:
            found[name]["peak_bytes"] = contender.finish()
        except Failed as error:
            found[name] = {"error": str(error)}


def _compare(found: dict[str, dict[str, Any]], folder: Path) -> None:
    arrays = {}
    for name, one in found.items():
        if "error" not in one:
            with np.load(folder / f"{name}.npz", allow_pickle=True) as file:
                arrays[name] = [value for key, value in file.items() if key != "allow_pickle"]
    right = arrays.get("onnxruntime")
    for name, values in arrays.items():
        found[name]["apart"] = None if right is None else max(map(_apart, values, right), default=0.0)


def _apart(one: Any, right: Any) -> float:
    """The largest difference, of the largest element; infinite where shapes or NaN differ."""
    if one.shape != right.shape or right.dtype.kind not in "fiub":
        return 0.0 if np.array_equal(one, right) else float("inf")
    one, right = one.astype(np.float64), right.astype(np.float64)
    if not np.array_equal(np.isnan(one), np.isnan(right)):
        return float("inf")
    scale = float(np.nanmax(np.abs(right), initial=0.0)) or 1.0
    return float(np.nanmax(np.abs(one - right), initial=0.0)) / scale
