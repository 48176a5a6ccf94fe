"""An engine in a worker process, behind the seam: isolation is an engine, not a second kind of actor.

Rules of this file:
1. Two threads for each worker. The keeper starts it, hears it, reaps it and answers for it; the writer sends
   what is large or has to wait. What is small is sent by who asks, at once.
2. A run is stopped by a word in shared memory, which the worker's queue reads just before it submits;
   a message follows, for engines that do not look there.
3. Whatever a worker does (it dies, it lies, it is silent at a close), each request is answered once, the
   process is reaped, and only then are its pipes and its memory closed.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..gpu.errors import DeviceLost, RunStopped
from ..gpu.seam import (
    Begin,
    Begun,
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
    Outputs,
    Progress,
    Read,
    Reply,
    Segment,
    TensorRef,
)
from .border import codec
from .border.messages import Close, End, Explanation, Lost, Recall, Setup, Stop, Up
from .border.parcel import Frames, Malformed, Packing, Unpacking, frame
from .border.shared import Arena, Control, SharedFile
from .process import WorkerProcess

__all__ = ["CLOSE_BOUND_S", "RemoteEngine"]

CLOSE_BOUND_S = 5.0
"""How long a worker may take to close, in seconds, before it is killed."""

_SMALL = 1 << 18
"""Feeds of so many bytes are copied by who asks; more of them by the writer."""
_LOAD = -1

Fits = Callable[[Any], bool]
OnProgress = Callable[[Progress], None]


class _Asked:
    """A request that waits for its answer: who hears it, and what fits."""

    __slots__ = ("done", "fits", "message", "progress")

    def __init__(self, message: Any, done: Done, fits: Fits, progress: OnProgress | None) -> None:
        self.message, self.done, self.fits, self.progress = message, done, fits, progress


class RemoteEngine:
    """An engine that passes its messages to another in a process of its own. See gpu/engine.py for the rules.

    Args:
        engine: where the factory of the other is: ``"module:name"``.
        adapter: what the factory is given. max_in_flight: likewise.
        environment: variables of the worker that differ from those here.
        close_bound_s: how long it may take to close, in seconds, before it is killed.

    Attributes:
        up: whether the worker has done its imports and made the engine.
    """

    def __init__(
        self,
        engine: str,
        *,
        adapter: str | int | None = None,
        max_in_flight: int = 2,
        environment: Mapping[str, str | None] | None = None,
        close_bound_s: float = CLOSE_BOUND_S,
    ) -> None:
        path = tuple(str(entry) for entry in sys.path if entry)
        self._setup = Setup(engine, adapter, max_in_flight, path)
        self._environment = environment
        self._close_bound_s = close_bound_s
        self._here = os.getpid()
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._packing = threading.Lock()
        self._outbox: deque[bytes | Callable[[], bytes]] = deque()
        self._writing = False
        self._asked: dict[int, _Asked] = {}
        self._count = 0
        self._holders: set[int] = set()
        self._process: WorkerProcess | None = None
        self._control: Control | None = None
        self._feeds: Arena | None = None
        self._state = "new"
        self._why = ""
        self._closers: list[Done] = []
        self._bound: threading.Timer | None = None
        self._explained: dict[int, tuple[Explained, ...]] = {}
        self.up = False

    @property
    def alive(self) -> bool:
        """Whether there is a worker, or one is being started."""
        return self._state in ("running", "closing")

    @property
    def pid(self) -> int | None:
        """The worker's process number, once it has been started."""
        return None if self._process is None else self._process.pid

    def kill(self) -> None:
        """End the worker at once, from any thread. What is asked of it, then and later, fails with DeviceLost."""
        if self._process is not None:
            self._process.kill()

    # --- the engine's methods -------------------------------------------------------------------

    def load(self, request: Load, done: Done, progress: OnProgress) -> None:
        """Start the worker, and have it load."""
        self._check()
        setup = self._encoded(self._setup, 0)
        with self._lock:
            if self._state == "new":
                self._state = "running"
                self._outbox.append(setup)
                threading.Thread(target=self._keep, name="trionnx worker's keeper", daemon=True).start()

        def loaded(reply: Reply) -> None:
            self._release(_LOAD)
            done(reply)

        self._holders.add(_LOAD)
        self._ask(request, loaded, lambda reply: isinstance(reply, Loaded), later=True, progress=progress)

    def begin(self, request: Begin, done: Done) -> None:
        """Send the feeds."""
        self._check()
        self._holders.add(request.run)
        later = _is_slow(request.feeds)
        self._ask(request, done, lambda reply: isinstance(reply, Begun) and reply.run == request.run, later=later)

    def submit(self, segment: Segment, done: Done) -> None:
        """Send a segment."""
        self._check()

        def fits(reply: Any) -> bool:
            return isinstance(reply, Fenced | Dropped) and (reply.run, reply.seq) == (segment.run, segment.seq)

        self._ask(segment, done, fits)

    def stop(self, run: int) -> None:
        """Set the word, and tell the worker."""
        if os.getpid() != self._here:
            return
        with self._lock:
            if self._control is None or run not in self._holders:
                return
            self._control.stop(run)
            self._send(self._encoded(Stop(run), 0))

    def recall(self, run: int, seq: int) -> None:
        """Set the word, and tell the worker."""
        self._check()
        with self._lock:
            if self._control is not None and run in self._holders:
                self._control.recall(run, seq)
                self._send(self._encoded(Recall(run, seq), 0))

    def read(self, request: Read, done: Done) -> None:
        """Ask for outputs."""
        self._check()

        def fits(reply: Any) -> bool:
            return isinstance(reply, Outputs) and reply.run == request.run and set(reply.values) == set(request.names)

        self._ask(request, done, fits)

    def end(self, run: int, done: Done, kept: tuple[TensorRef, ...] = ()) -> None:
        """Have the run forgotten."""
        self._check()

        def ended(reply: Reply) -> None:
            self._release(run)
            done(reply)

        self._ask(End(run, kept), ended, lambda reply: isinstance(reply, Ended) and reply.run == run)

    def free(self, request: Free, done: Done) -> None:
        """Have values and models given back."""
        self._check()
        self._ask(request, done, lambda reply: isinstance(reply, Freed))

    def explain(self, model: int = 0) -> tuple[Explained, ...]:
        """What the worker told of a model's newest plan."""
        self._check()
        return self._explained.get(model, ())

    def close(self, done: Done) -> None:
        """Have the engine closed. Closed once the process is reaped, after `close_bound_s` or little more at the most.

        A worker that is not up yet has nothing to give back, and is killed at once.
        """
        self._check()
        with self._lock:
            if self._state in ("running", "closing"):
                self._closers.append(done)
                if self._state == "running":
                    self._state = "closing"
                    if self._control is not None:
                        self._control.stop_all()
                    self._send(self._encoded(Close(), 0))
                    self._bound = threading.Timer(self._close_bound_s if self.up else 0.0, self.kill)
                    self._bound.daemon = True
                    self._bound.start()
                return
            self._state = "gone"
        done(Closed())

    # --- asking ---------------------------------------------------------------------------------

    def _check(self) -> None:
        if os.getpid() != self._here:
            raise RuntimeError("a session cannot be used in a forked process")

    def _ask(
        self, message: Any, done: Done, fits: Fits, *, later: bool = False, progress: OnProgress | None = None
    ) -> None:
        with self._lock:
            there = self.alive
            self._count += 1
            number = self._count
            if there:
                self._asked[number] = _Asked(message, done, fits, progress)
                if later:
                    self._outbox.append(lambda: self._packed(message, number))
                    self._news.notify_all()
        if not there:
            done(self._refusal(message))
        elif not later and (data := self._packed(message, number)):
            with self._lock:
                self._send(data)

    def _packed(self, message: Any, number: int) -> bytes:
        """A request's frame; where it cannot be one, its answer is the error, and nothing is sent."""
        try:
            if isinstance(message, Load) and hasattr(message.source, "read"):
                message = replace(message, source=message.source.read())
            return self._encoded(message, number)
        except Exception as error:
            with self._lock:
                asked = self._asked.pop(number, None)
                gone = self._state == "gone"
            if asked is not None:
                asked.done(self._refusal(message) if gone else Failed(error))
            return b""

    def _encoded(self, message: Any, number: int) -> bytes:
        with self._packing:
            parcel = Packing(self._feeds)
            text = codec.encode(message, parcel)
        return frame(text, parcel.tail, number)

    def _send(self, data: bytes) -> None:
        """Under the lock: send what goes without waiting, leave the rest to the writer."""
        process = self._process
        if self._state == "gone":  # its pipes may be closed, and their numbers another's
            return
        if self._outbox or self._writing or process is None:
            self._outbox.append(data)
        else:
            try:
                count = process.send_now(data)
            except OSError:  # it does not read any more: the keeper sees its end
                return
            if count == len(data):
                return
            self._outbox.append(data[count:])
        self._news.notify_all()

    def _release(self, holder: int) -> None:
        """The bytes that went with a run, or with the load, are not read any more."""
        self._holders.discard(holder)
        with self._packing:
            if not self._holders and self._feeds is not None:
                self._feeds.clear()

    def _refusal(self, message: Any) -> Reply:
        """The answer to what no worker will answer."""
        if self._why:
            return Failed(DeviceLost(f"the worker process {self._why}"))
        if isinstance(message, Free):
            return Freed()
        return Ended(message.run, Counts()) if isinstance(message, End) else Failed(RunStopped())

    # --- the writer -----------------------------------------------------------------------------

    def _write(self, process: WorkerProcess) -> None:
        while True:
            with self._lock:
                self._writing = False
                self._news.wait_for(lambda: self._outbox or self._state == "gone")
                if self._state == "gone":
                    return
                item = self._outbox.popleft()
                self._writing = True
            try:
                process.send(item if isinstance(item, bytes) else item())
            except OSError:  # it does not read any more: the keeper sees its end
                return

    # --- the keeper -----------------------------------------------------------------------------

    def _keep(self) -> None:
        try:
            why = self._live()
        except Exception as error:
            why = f"could not be started: {error}"
        with self._lock:
            self._state, self._why = "gone", why
            asked, self._asked = list(self._asked.values()), {}
            closers, self._closers = self._closers, []
        if self._bound is not None:
            self._bound.cancel()
            self._bound.join()
        for one in asked:
            one.done(self._refusal(one.message))
        for done in closers:
            done(Closed())

    def _live(self) -> str:
        """The worker's life; how it ended, in words, or nothing where it closed as it should."""
        files: list[SharedFile] = []
        control = None
        try:
            files += (SharedFile.create() for _ in range(3))
            control = Control(files[0], new=True)
            outputs = Arena(files[2])
            process = WorkerProcess(files, self._environment)
            writer = threading.Thread(target=self._write, args=(process,), name="trionnx worker's writer", daemon=True)
            with self._lock:
                self._process, self._control, self._feeds = process, control, Arena(files[1])
                if self._state == "closing":
                    process.kill()
            writer.start()
            lie, last_words, closed = "", "", False
            try:
                last_words, closed = self._hear(process, control, outputs)
            except Exception as error:
                lie = f"said what it should not, and was killed: {error}"
                process.kill()
            how = process.wait()
            why = "" if closed else lie or (f"{how}: {last_words}" if last_words else how)
            with self._lock:
                self._state, self._why = "gone", why
                self._news.notify_all()
            writer.join()
            process.close()
            return why
        finally:
            with self._lock:
                self._control = None
            with self._packing:
                self._feeds = None
            if control is not None:
                control.close()
            for file in files:
                file.close()

    def _hear(self, process: WorkerProcess, control: Control, outputs: Arena) -> tuple[str, bool]:
        """Take what the worker says until its pipe ends; its last words, and whether it closed."""
        frames, last_words, closed = Frames(), "", False
        while data := process.receive():
            frames.feed(data)
            while (found := frames.next()) is not None:
                number, text, tail = found
                message = codec.decode(text, Unpacking(tail, outputs))
                if isinstance(message, Lost):
                    last_words = message.reason
                elif isinstance(message, Closed) and self._state == "closing":
                    closed = True
                else:
                    self._take(number, message, control)
        return last_words, closed

    def _take(self, number: int, message: Any, control: Control) -> None:
        if isinstance(message, Up):
            self.up = True
            return
        if isinstance(message, Explanation):
            self._explained[message.model] = message.nodes
            return
        if isinstance(message, Outputs):
            control.taken += 1
        asked = self._asked.get(number)
        if asked is None:
            raise Malformed(f"{type(message).__name__} that nobody asked for")
        if isinstance(message, Progress) and asked.progress is not None:
            asked.progress(message)
        elif isinstance(message, Failed) or asked.fits(message):
            del self._asked[number]
            asked.done(message)
        else:
            raise Malformed(f"{type(message).__name__} does not answer what was asked")


def _is_slow(feeds: Mapping[str, Any]) -> bool:
    """Whether packing them takes longer than an event loop should stand still."""
    total = 0
    for feed in feeds.values():
        if isinstance(feed, TensorRef):
            continue
        if not isinstance(feed, np.ndarray | np.generic) or feed.dtype.kind in "OT":
            return True
        total += feed.nbytes
    return total > _SMALL
