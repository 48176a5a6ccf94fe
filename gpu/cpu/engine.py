"""The engine that computes on the CPU: ONNX Runtime's CPU provider, a whole model as one opaque step.

Rules of this file:
1. ONNX Runtime is called on the engine's own thread only, but for `RunOptions.terminate`, which
   `stop` and `close` set from wherever they are called: that is what ONNX Runtime allows, and
   what stops a run between two of its nodes.
2. What a run is, the calling thread and the engine's thread both see: it is changed under the
   lock.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..errors import NoAdapter, RunStopped
from ..graph.model import Graph
from ..graph.read import read_model
from ..kept import Kept
from ..seam import (
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
    Free,
    Freed,
    Load,
    Loaded,
    NodeTime,
    Outputs,
    Progress,
    Read,
    Reply,
    Segment,
    StepView,
    TensorInfo,
    TensorRef,
)
from ..shapes import check_shapes
from .faults import load_fault, run_fault

__all__ = ["MISSING", "OrtCpuEngine", "is_installed"]

MISSING = "the cpu back end needs ONNX Runtime: pip install 'trionnx[cpu]'"

_WHOLE = "ONNX Runtime runs the model as one step; stopped, it finishes the node that it is at, at most."
LIMITS = {
    "split_into_checkpoints": _WHOLE,
    "poll_after": _WHOLE,
    "checkpoint_interval_s": _WHOLE,
    "max_in_flight": "there is one segment, the whole model.",
    "hang_timeout_s": "steps on the CPU are not bounded.",
}
"""What of a `TerminatePolicy` it cannot honour."""

_COSTS = 64


def is_installed() -> bool:
    """Whether ONNX Runtime can be imported here. Does not import it."""
    return importlib.util.find_spec("onnxruntime") is not None


@dataclass(slots=True)
class _Run:
    stopped: bool = False
    stops: int = 0
    recalled: int = 0
    options: Any = None
    request: Begin | None = None
    feeds: dict[str, Any] = field(default_factory=dict)
    wanted: tuple[str, ...] = ()
    outputs: dict[str, Any] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    times: tuple[NodeTime, ...] = ()


class OrtCpuEngine:
    """ONNX Runtime's CPU provider behind the `Engine` protocol.

    A run is one step that cannot be cut. `stop` sets ONNX Runtime's own terminate flag, which it
    reads between two nodes.

    Args:
        cpu_threads: how many threads compute, where `Load.cpu_threads` does not say; None: one per
            core that this process may use.
        adapter: ignored; there is none to choose. max_in_flight: ignored; a run is one step.
    """

    def __init__(
        self, *, cpu_threads: int | None = None, adapter: str | int | None = None, max_in_flight: int = 1
    ) -> None:
        self._cpu_threads = cpu_threads
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._runs: dict[int, _Run] = {}
        self._costs: dict[Any, float] = {}
        self._explained: dict[int, tuple[Explained, ...]] = {}
        self._sessions: dict[int, Any] = {}
        self._infos: dict[int, tuple[TensorInfo, ...]] = {}
        self._kept: Kept[Any] = Kept()
        self._unwanted: set[int] = set()
        self._new_options: Any = None
        self._load_options: tuple[int, Any] | None = None
        self._closing = False
        self._closed = False
        self._closers: list[Done] = []
        self._thread = threading.Thread(target=self._work, name="trionnx cpu", daemon=True)
        self._thread.start()

    def load(self, request: Load, done: Done, progress: Callable[[Progress], None]) -> None:
        """Make the session: phases "read" and "compile"."""
        self._ask(lambda: self._load(request, progress), done)

    def begin(self, request: Begin, done: Done) -> None:
        """Take the feeds; ONNX Runtime checks them when it runs. The block is one opaque step."""
        with self._lock:
            run = _Run(stopped=self._closing)
            if not self._closed:
                self._runs[request.run] = run
        self._ask(lambda: self._begin(run, request), done)

    def submit(self, segment: Segment, done: Done) -> None:
        """Run the model. Failed(RunStopped()) where it was stopped in the middle."""
        self._ask(lambda: self._submit(segment), done)

    def stop(self, run: int) -> None:
        """Set the terminate flag of the run."""
        with self._lock:
            if (found := self._runs.get(run)) is not None:
                self._terminate(found)

    def recall(self, run: int, seq: int) -> None:
        """A run of one segment has nothing behind it that could be overtaken: it is dropped while it waits."""
        with self._lock:
            if (found := self._runs.get(run)) is not None:
                found.recalled = seq

    def read(self, request: Read, done: Done) -> None:
        """Hand the outputs over."""
        run = self._runs.get(request.run)
        stops = 0 if run is None else run.stops
        self._ask(lambda: self._read(request, stops), done)

    def end(self, run: int, done: Done, kept: tuple[TensorRef, ...] = ()) -> None:
        """Forget the run."""
        self._ask(lambda: self._end(run, kept), done)

    def free(self, request: Free, done: Done) -> None:
        """Forget arrays and sessions; a load of one is cancelled."""
        with self._lock:
            self._unwanted.update(request.models)
            if self._load_options is not None and self._load_options[0] in self._unwanted:
                self._load_options[1].set_load_cancellation_flag(True)
        self._ask(lambda: self._free(request), done)

    def explain(self, model: int = 0) -> tuple[Explained, ...]:
        """Every node is "opaque"."""
        return self._explained.get(model, ())

    def close(self, done: Done) -> None:
        """Terminate every run, cancel a load under way, end the thread."""
        with self._lock:
            if not self._closed:
                self._closers.append(done)
                if len(self._closers) == 1:
                    self._closing = True
                    for run in self._runs.values():
                        self._terminate(run)
                    if self._load_options is not None:
                        self._load_options[1].set_load_cancellation_flag(True)
                    self._jobs.put(self._finish)
                return
        done(Closed())

    # --- the thread ---------------------------------------------------------------------------

    def _ask(self, work: Callable[[], Reply], done: Done) -> None:
        def job() -> None:
            try:
                reply = work()
            except Exception as error:
                reply = Failed(error)
            done(reply)

        with self._lock:
            if not self._closed:
                self._jobs.put(job)
                return
        job()

    def _work(self) -> None:
        while not self._closed:
            self._jobs.get()()
        while not self._jobs.empty():
            self._jobs.get()()
        closers, self._closers = self._closers, []
        for done in closers:
            done(Closed())

    def _finish(self) -> None:
        self._sessions.clear()
        self._kept.clear()
        with self._lock:
            self._closed = True
            self._runs.clear()

    # --- requests, on the thread --------------------------------------------------------------

    def _load(self, request: Load, progress: Callable[[Progress], None]) -> Reply:
        if not is_installed():
            return Failed(NoAdapter(MISSING))
        import onnxruntime as ort

        check = partial(self._check_open, request.model)
        source = request.source.read() if hasattr(request.source, "read") else request.source
        model = read_model(
            source,
            check=check,
            progress=lambda phase, done, total: progress(Progress(phase, done, total)),
            optimise=False,
        )
        check_shapes((*model.inputs, *model.overridable), request.input_shapes)
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = request.cpu_threads or self._cpu_threads or _cores()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        with self._lock:
            check()
            self._load_options = request.model, options
        progress(Progress("compile", 0, 1))
        try:
            session = ort.InferenceSession(_file(source), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            check()
            raise load_fault(error, model, _label(source)) from None
        finally:
            with self._lock:
                self._load_options = None
        progress(Progress("compile", 1, 1))
        self._new_options = ort.RunOptions
        self._kept.belong(request.actor, request.generation)
        self._explained[request.model] = tuple(_explain(model.graph))
        self._infos[request.model] = (*model.inputs, *model.overridable)
        loaded = Loaded(
            inputs=model.inputs,
            outputs=model.outputs,
            overridable=model.overridable,
            metadata=model.metadata,
            backend="cpu",
            adapter=f"ONNX Runtime {ort.__version__}, {options.intra_op_num_threads} threads",
            providers=tuple(session.get_providers()),
            limits=LIMITS,
        )
        self._sessions[request.model] = session
        return loaded

    def _begin(self, run: _Run, request: Begin) -> Reply:
        if request.model not in self._sessions:
            raise RunStopped
        refs = {name: feed for name, feed in request.feeds.items() if isinstance(feed, TensorRef)}
        check_shapes(self._infos[request.model], {name: ref.shape for name, ref in refs.items()})
        self._kept.begin(request.run)
        run.feeds = {**request.feeds, **{name: self._kept.find(name, ref) for name, ref in refs.items()}}
        run.request, run.wanted = request, request.wanted
        options = self._new_options()
        options.log_severity_level = 4
        with self._lock:
            if run.stopped:
                raise RunStopped
            run.options = options
        cost = self._costs.get((request.model, _shapes(run.feeds)), 0.0)
        return Begun(request.run, BlockView(0, (StepView("opaque", cost_s=cost),)))

    def _submit(self, segment: Segment) -> Reply:
        run = self._runs[segment.run]
        assert run.request is not None
        session = self._sessions[run.request.model]
        with self._lock:
            if run.stopped or segment.seq < run.recalled:
                run.counts = replace(run.counts, dropped=run.counts.dropped + 1)
                return Dropped(segment.run, segment.seq)
            run.counts = replace(run.counts, submitted=run.counts.submitted + 1, most_in_flight=1)
        start = time.perf_counter()
        try:
            values = session.run(list(run.wanted), run.feeds, run.options) if run.wanted else []
        except Exception as error:
            if run.stopped:
                raise RunStopped from None
            raise run_fault(error) from None
        finally:
            run.counts = replace(run.counts, finished=run.counts.finished + 1)
        seconds = time.perf_counter() - start
        if len(self._costs) >= _COSTS:
            self._costs.clear()
        self._costs[run.request.model, _shapes(run.feeds)] = seconds
        if run.request.profile:
            run.times = (NodeTime("the whole model", "ONNX Runtime", "opaque", seconds),)
        run.outputs = dict(zip(run.wanted, values, strict=True))
        return Fenced(segment.run, segment.seq, gpu_s=seconds, ready=run.wanted)

    def _read(self, request: Read, stops: int) -> Reply:
        if request.tensors:
            return Outputs(request.run, tensors=tuple(copy(self._kept.find("", ref)) for ref in request.tensors))
        run = self._runs.get(request.run)
        if run is None or run.stops > stops or not run.outputs.keys() >= set(request.names):
            raise RunStopped
        assert run.request is not None
        values = {name: run.outputs[name] for name in request.names}
        for name in values.keys() & run.request.keep:
            array = values[name]
            values[name] = self._kept.add(array, run.request.model, request.run, array.dtype, array.shape)
        return Outputs(request.run, values)

    def _free(self, request: Free) -> Reply:
        self._kept.free(request.tensors)
        for model in request.models:
            self._kept.free_model(model)
            self._sessions.pop(model, None)
            self._explained.pop(model, None)
        return Freed()

    def _end(self, number: int, kept: tuple[TensorRef, ...]) -> Reply:
        self._kept.end(number, kept)
        with self._lock:
            run = self._runs.pop(number, None)
        return Ended(number, Counts()) if run is None else Ended(number, run.counts, run.times)

    def _terminate(self, run: _Run) -> None:
        """Under the lock."""
        run.stopped = True
        run.stops += 1
        if run.options is not None:
            run.options.terminate = True

    def _check_open(self, model: int) -> None:
        if self._closing or model in self._unwanted:
            raise RunStopped


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _file(source: Any) -> str | bytes:
    """What ONNX Runtime reads a model from."""
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    return bytes(source.SerializeToString())


def _label(source: Any) -> str:
    return os.fspath(source) if isinstance(source, str | os.PathLike) else "the model"


def _shapes(feeds: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, getattr(value, "shape", None)) for name, value in sorted(feeds.items()))


def _explain(graph: Graph) -> Iterator[Explained]:
    for node in graph.nodes:
        yield Explained(node.name, node.op, "opaque", "ONNX Runtime's CPU provider runs the whole model")
        for nested in node.graphs():
            yield from _explain(nested)
