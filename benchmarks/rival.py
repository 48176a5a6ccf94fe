"""An interactive session beside a batch session in onnxruntime-webgpu, with a thread each."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import peer
from works import Work

__all__ = ["measure"]

SCRIPT = """
import json, sys, threading, time
import numpy as np, onnxruntime as ort

folder, period, runs = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
options = ort.SessionOptions()
options.log_severity_level = 4

def load(name):
    session = ort.InferenceSession(f"{folder}/{name}.onnx", options, providers=["WebGpuExecutionProvider"])
    if session.get_providers()[0] != "WebGpuExecutionProvider":
        sys.exit("NO ADAPTER")
    feeds = dict(np.load(f"{folder}/{name}.npz"))
    session.run(None, feeds)
    return lambda: session.run(None, feeds)

small, batch = load("small"), load("batch")
start = time.perf_counter()
batch()
batch_s = time.perf_counter() - start

def paced():
    took, due = [], time.perf_counter()
    for _ in range(runs):
        due = max(due + period, time.perf_counter())
        time.sleep(max(0, due - time.perf_counter()))
        start = time.perf_counter()
        small()
        took.append(time.perf_counter() - start)
    return took

alone, over = paced(), threading.Event()

def busy():
    while not over.is_set():
        batch()

thread = threading.Thread(target=busy)
thread.start()
beside = paced()
over.set()
thread.join()
print(json.dumps(dict(version=ort.__version__, batch_s=batch_s, alone_s=alone, beside_s=beside)))
"""


def measure(python: Path, small: Work, batch: Work, period_s: float, runs: int) -> dict[str, Any]:
    """Run the small model at a fixed pace, alone and beside the other.

    Raises:
        peer.Unavailable: it finds no adapter, or fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, work in (("small", small), ("batch", batch)):
            content = work.source if isinstance(work.source, bytes) else work.source.read_bytes()
            Path(folder, f"{name}.onnx").write_bytes(content)
            np.savez(Path(folder, f"{name}.npz"), allow_pickle=True, **work.feeds)
        words = [str(python), "-c", SCRIPT, folder, str(period_s), str(runs)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if "NO ADAPTER" in done.stderr:
        raise peer.Unavailable("onnxruntime-webgpu finds no adapter that it takes")
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise peer.Unavailable(f"onnxruntime-webgpu failed: {(done.stderr.strip().splitlines() or ['silently'])[-1]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found
