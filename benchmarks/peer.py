"""The same work in onnxruntime-webgpu, which has a terminate flag too.

It lives in a virtual environment of its own: its package and onnxruntime's have one import name.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from rich.console import Console

from trionnx.cli.console import milliseconds, table

__all__ = ["PACKAGES", "Unavailable", "environment", "measure", "show"]

PACKAGES = ("onnxruntime-webgpu==1.27.0", "onnx", "numpy")


class Unavailable(RuntimeError):
    """The peer cannot be installed, or does not run here."""


SCRIPT = """
import json, sys, threading, time
import numpy as np, onnxruntime as ort

model, feeds, shares = sys.argv[1], dict(np.load(sys.argv[2])), json.loads(sys.argv[3])
options = ort.SessionOptions()
options.log_severity_level = 4
start = time.perf_counter()
session = ort.InferenceSession(model, options, providers=["WebGpuExecutionProvider"])
load = time.perf_counter() - start
if session.get_providers()[0] != "WebGpuExecutionProvider":
    sys.exit("NO ADAPTER")
whole = []
for _ in range(3):
    start = time.perf_counter()
    session.run(None, feeds)
    whole.append(time.perf_counter() - start)
whole = min(whole[1:])
left, obeyed = [], 0
for delay in [share * whole for share in shares]:
    run_options, outcome = ort.RunOptions(), []
    run_options.log_severity_level = 4

    def work():
        try:
            session.run(None, feeds, run_options)
            outcome.append(False)
        except Exception:
            outcome.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(delay)
    if not thread.is_alive():
        continue
    start = time.perf_counter()
    run_options.terminate = True
    thread.join()
    left.append(time.perf_counter() - start)
    obeyed += outcome[0]
print(json.dumps(dict(version=ort.__version__, load_s=load, whole_s=whole, left_s=left, obeyed=obeyed)))
"""


def measure(
    model: Path,
    feeds: dict[str, Any],
    shares: Sequence[float],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Terminate runs at the given shares of a whole run.

    Raises:
        Unavailable: it cannot be installed, or finds no adapter.
    """
    python = environment("peer", PACKAGES, say)
    say("running onnxruntime-webgpu; without an early end it takes as long as a dozen whole runs")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "feeds.npz"
        np.savez(file, allow_pickle=True, **feeds)
        words = [str(python), "-c", SCRIPT, str(model), str(file), json.dumps(list(shares))]
        done = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    lines = done.stdout.strip().splitlines()
    if "NO ADAPTER" in done.stderr:
        raise Unavailable(
            "onnxruntime-webgpu finds no adapter that it takes; with VK_ICD_FILENAMES set to the ICD file of a "
            "SwiftShader (Chromium comes with one) it finds that"
        )
    if done.returncode or not lines:
        raise Unavailable(f"onnxruntime-webgpu failed: {(done.stderr.strip().splitlines() or ['silently'])[-1]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def show(found: dict[str, Any], console: Console) -> None:
    """Print a table."""
    left = sorted(found["left_s"])
    rows = table(f"onnxruntime-webgpu {found['version']}", "measured")
    rows.add_row("load", f"{found['load_s']:.2f} s")
    rows.add_row("a whole run", milliseconds(found["whole_s"]))
    rows.add_row("runs told to terminate", str(len(left)))
    rows.add_row("of them ended early", str(found["obeyed"]))
    if left:
        rows.add_row("terminate to run left, p50", milliseconds(statistics.median_low(left)))
        rows.add_row("terminate to run left, max", milliseconds(left[-1]))
    console.print(rows)


def environment(name: str, packages: Sequence[str], say: Callable[[str], None]) -> Path:
    """The Python of a peer's virtual environment; made where there is none yet.

    Raises:
        Unavailable: it cannot be made, or the packages cannot be installed.
    """
    version = ".".join(map(str, sys.version_info[:2]))
    folder = platformdirs.user_cache_path("trionnx", appauthor=False) / f"{name}-{version}"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    ready = folder / "ready"
    if ready.exists() and ready.read_text() == " ".join(packages):
        return python
    say(f"installing {packages[0]} into {folder}")
    try:
        venv.create(folder, clear=True, with_pip=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Unavailable(f"no virtual environment for {packages[0]} can be made: {error}") from None
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise Unavailable(f"{packages[0]} cannot be installed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    ready.write_text(" ".join(packages))
    return python
