"""An engine for tests of the process border: it plays what its source says, in a thread, without Trio.

The source is a dict: "blocks" (numbers of steps), "seconds" (that a segment takes), "lies" (what it answers wrongly)
and "faults": phase -> what goes wrong there, one after the other each time it comes to it; "" is nothing. Phases are
load, begin, segment N, read, end, close; faults are in `_FAULTS`.
"""

from __future__ import annotations

import os
import queue
import signal
import stat
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from trionnx.gpu.errors import DeviceLost, InvalidInput, OutOfDeviceMemory, RunStopped
from trionnx.gpu.seam import (
    Begin,
    Begun,
    BlockView,
    Closed,
    Counts,
    Done,
    Dropped,
    Ended,
    Explained,
    Failed,
    Fenced,
    Finished,
    Free,
    Freed,
    Load,
    Loaded,
    ModelMetadata,
    Outputs,
    Progress,
    Read,
    Reply,
    Segment,
    StepView,
    TensorInfo,
    TensorRef,
)

__all__ = ["ToyEngine", "expected"]

X = TensorInfo("x", "tensor(float)", ("n",), np.dtype(np.float32))


def expected(x: np.ndarray[Any, Any], blocks: list[int]) -> np.ndarray[Any, Any]:
    """What a run gives that executes each step once, in order."""
    y = x.astype(np.float64)
    for number in range(sum(blocks)):
        y = y * 0.5 + number
    return y


class NotHere(Exception):
    """An error of a class that no other process knows."""


def _garbage() -> None:
    """Write to every pipe that leads out of this process."""
    for fd in range(3, 64):
        try:
            if stat.S_ISFIFO(os.fstat(fd).st_mode):
                os.write(fd, b"\x00 this is no message " * 9)
        except OSError:
            pass


def _truncate() -> None:
    """From now on shared memory is cut off behind whatever is put there."""
    from trionnx.actors.border.shared import Arena

    put = Arena.put

    def short(self: Any, pieces: Any) -> tuple[int, int]:
        where = put(self, pieces)
        self._file.resize(where[0] + where[1] // 2)
        return where

    Arena.put = short  # type: ignore[method-assign]


def _hang() -> None:
    """Say so, where the test wants to know, and stay."""
    if mark := os.environ.get("TOY_MARK"):
        open(mark, "w").close()
    time.sleep(1000)


def _raise(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


_FAULTS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "abort": os.abort,
    "exit": lambda: os._exit(3),
    "hang": _hang,
    "garbage": _garbage,
    "truncate": _truncate,
    "lost": _raise(DeviceLost("gone")),
    "memory": _raise(OutOfDeviceMemory("no room")),
    "input": _raise(InvalidInput("x", "a", "b")),
    "unknown": _raise(NotHere("strange")),
}


class _Run:
    def __init__(self, request: Begin) -> None:
        self.x = np.asarray(request.feeds["x"])
        self.y = self.x.astype(np.float64)
        self.stopped = False
        self.recalled = 0
        self.counts = Counts()


class ToyEngine:
    """See the file's head. Needs no adapter."""

    def __init__(self, *, adapter: str | int | None = None, max_in_flight: int = 2) -> None:
        if adapter == "none":
            raise OutOfDeviceMemory("this adapter has no room")
        self._adapter = adapter
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._runs: dict[int, _Run] = {}
        self._source: dict[str, Any] = {}
        self._closing = False
        self._reads = 0
        threading.Thread(target=self._work, daemon=True).start()

    def load(self, request: Load, done: Done, progress: Callable[[Progress], None]) -> None:
        self._source = dict(request.source)

        def work() -> Reply:
            progress(Progress("compile", 0, 2))
            self._wrong("load")
            progress(Progress("compile", 2, 2))
            adapter = f"{self._adapter}, {os.environ.get('LP_NUM_THREADS')}, {os.environ.get('TOY')}"
            y = TensorInfo("y", "tensor(double)", ("n",), np.dtype(np.float64))
            return Loaded((X,), (y,), (), ModelMetadata(graph_name="toy"), "toy", adapter, ("Toy",))

        self._post(work, done)

    def begin(self, request: Begin, done: Done) -> None:
        run = self._runs[request.run] = _Run(request)

        def work() -> Reply:
            self._wrong("begin")
            if run.stopped:
                raise RunStopped
            return Begun(request.run, self._view(0))

        self._post(work, done)

    def submit(self, segment: Segment, done: Done) -> None:
        def work() -> Reply:
            run = self._runs[segment.run]
            counts = run.counts
            if run.stopped or self._closing or segment.seq < run.recalled:
                run.counts = Counts(counts.submitted, counts.finished, counts.dropped + 1)
                return Dropped(segment.run, segment.seq)
            self._wrong(f"segment {segment.seq}")
            time.sleep(self._source.get("seconds", 0.0))
            before = sum(self._source["blocks"][: segment.start.activation])
            for number in range(segment.start.step, segment.stop.step):
                run.y = run.y * 0.5 + before + number
            run.counts = Counts(counts.submitted + 1, counts.finished + 1, counts.dropped)
            ended = segment.stop.step == self._source["blocks"][segment.stop.activation]
            next_block = self._view(segment.stop.activation + 1) if ended else None
            seq = segment.seq + 1000 * ("another" in self._source.get("lies", ()))
            return Fenced(segment.run, seq, None, next_block)

        self._post(work, done)

    def stop(self, run: int) -> None:
        if run in self._runs:
            self._runs[run].stopped = True

    def recall(self, run: int, seq: int) -> None:
        if run in self._runs:
            self._runs[run].recalled = seq

    def read(self, request: Read, done: Done) -> None:
        def work() -> Reply:
            run = self._runs[request.run]
            self._wrong("read")
            if run.stopped:
                raise RunStopped
            lies, self._reads = self._source.get("lies", ()), self._reads + 1
            y = run.y + self._reads if "counted" in lies else run.y
            return Outputs(request.run, {"z" if "names" in lies else "y": object() if "object" in lies else y})

        self._post(work, done)

    def end(self, run: int, done: Done, kept: tuple[TensorRef, ...] = ()) -> None:
        def work() -> Reply:
            self._wrong("end")
            known = self._runs.pop(run, None)
            return Ended(run, known.counts if known else Counts())

        self._post(work, done)

    def free(self, request: Free, done: Done) -> None:
        done(Freed())

    def explain(self, model: int = 0) -> tuple[Explained, ...]:
        return ()

    def close(self, done: Done) -> None:
        self._closing = True
        for run in self._runs.values():
            run.stopped = True

        def work() -> Reply:
            self._wrong("close")
            return Closed()

        self._post(work, done)
        self._jobs.put(None)

    def _view(self, activation: int) -> BlockView | Finished:
        blocks = self._source["blocks"]
        if activation == len(blocks):
            return Finished()
        return BlockView(activation, (StepView("gpu", cost_s=0.005),) * blocks[activation], None)

    def _wrong(self, phase: str) -> None:
        coming = self._source.get("faults", {}).get(phase)
        if coming and (fault := coming.pop(0)):
            _FAULTS[fault]()

    def _post(self, work: Callable[[], Reply], done: Done) -> None:
        def job() -> None:
            try:
                reply = work()
            except Exception as error:
                reply = Failed(error)
            done(reply)
            if "twice" in self._source.get("lies", ()):
                done(reply)

        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
