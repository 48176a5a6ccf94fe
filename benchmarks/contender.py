"""One engine with one model in a process of its own, that runs when it is told to.

    python contender.py ENGINE MODEL FEEDS.npz OUTPUTS.npz OPTIONS

ENGINE is trionnx, onnxruntime-webgpu, onnxruntime or tinygrad. It writes a line of JSON once it has loaded and
run the model for the first time, then one for each line "run" that it reads, and one when its input ends; a line
with "error" is its last. Started by peers.py, with the Python of the engine's own environment: it must not import
what other engines need.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

__all__: list[str] = []

Feeds = dict[str, Any]
Run = Callable[[], list[Any]]


def main(engine: str, model: str, feeds: str, outputs: str, options: str) -> None:
    """Load, run, obey."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what drivers print is no reply

    def say(**words: Any) -> None:
        replies.write(json.dumps(words) + "\n")
        replies.flush()

    with np.load(feeds, allow_pickle=True) as file:
        arrays = dict(file)
    try:
        ENGINES[engine](model, arrays, json.loads(options), Told(say, outputs))
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}".strip().splitlines()[0])


class Told:
    """What is measured, and when."""

    def __init__(self, say: Callable[..., None], outputs: str) -> None:
        self._say, self._outputs = say, outputs

    def loaded(self, start: float, load_s: float, found: Sequence[Any], **facts: Any) -> None:
        """The first run is through: its outputs are kept for a comparison."""
        arrays = [np.asarray(value) for value in found]
        np.savez(self._outputs, *arrays, allow_pickle=True)
        self._say(load_s=load_s, first_s=time.perf_counter() - start - load_s, **facts)

    def next(self) -> bool:
        """Whether there is one more run to make; waits."""
        if sys.stdin.readline().strip() == "run":
            return True
        self._say(peak_bytes=_peak_bytes())
        return False

    def ran(self, seconds: float) -> None:
        """One more run is through."""
        self._say(run_s=seconds)


def _peak_bytes() -> int | None:
    """The most memory that this process has had resident; with a software adapter that holds the device's, too."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage tells of the process before exec, too
        lines = status.read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes, where there is no /proc


def trionnx(model: str, feeds: Feeds, options: dict[str, Any], told: Told) -> None:
    """The code in this repository, on the back end webgpu."""
    import trio

    import trionnx

    async def run() -> None:
        start = time.perf_counter()
        async with trionnx.open_scheduler(backend="webgpu", adapter=options["adapter"]) as scheduler:
            session = await scheduler.load(model, allow_host_steps=options["host_steps"])
            load_s = time.perf_counter() - start
            found = await session.run(None, feeds)
            where = [step.where for step in session.explain()]
            told.loaded(start, load_s, found, version=version("trionnx"), adapter=session.adapter,
                        host_steps=where.count("host"))
            while told.next():
                start = time.perf_counter()
                await session.run(None, feeds)
                told.ran(time.perf_counter() - start)

    trio.run(run)


def onnxruntime(model: str, feeds: Feeds, options: dict[str, Any], told: Told) -> None:
    """ONNX Runtime, with the provider that the options name."""
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    start = time.perf_counter()
    session = ort.InferenceSession(model, settings, providers=[options["provider"]])
    if session.get_providers()[0] != options["provider"]:
        raise RuntimeError("it finds no adapter that it takes")
    load_s = time.perf_counter() - start
    found = session.run(None, feeds)
    told.loaded(start, load_s, found, version=ort.__version__)
    while told.next():
        start = time.perf_counter()
        session.run(None, feeds)
        told.ran(time.perf_counter() - start)


def tinygrad(model: str, feeds: Feeds, options: dict[str, Any], told: Told) -> None:
    """The ONNX runner of tinygrad, captured once as its own examples do; the first run is the one before that."""
    from tinygrad import Device, Tensor, TinyJit  # type: ignore[import-not-found]
    from tinygrad.nn.onnx import OnnxRunner  # type: ignore[import-not-found]

    start = time.perf_counter()
    runner = OnnxRunner(model)
    Device[Device.DEFAULT]
    load_s = time.perf_counter() - start

    @TinyJit  # type: ignore[untyped-decorator]
    def captured(**given: Tensor) -> list[Tensor]:
        return [value.contiguous().realize() for value in runner(given).values()]

    def run() -> list[Any]:
        return [value.numpy() for value in captured(**{name: Tensor(value).realize() for name, value in feeds.items()})]

    found = run()
    told.loaded(start, load_s, found, version=version("tinygrad"))
    run()
    while told.next():
        start = time.perf_counter()
        run()
        told.ran(time.perf_counter() - start)


ENGINES: dict[str, Callable[[str, Feeds, dict[str, Any], Told], None]] = {
    "trionnx": trionnx,
    "onnxruntime-webgpu": onnxruntime,
    "onnxruntime": onnxruntime,
    "tinygrad": tinygrad,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
