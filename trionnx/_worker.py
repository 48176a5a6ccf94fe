"""A worker process: an engine, and a pipe to the process of its sessions.

    python -P -m trionnx._worker PARENT CONTROL FEEDS OUTPUTS

Started by actors/process.py, never by hand. Requests come on standard input, replies go to standard output,
large arrays through shared memory. It ends when standard input does, whatever else goes on in it.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from typing import Any, NoReturn

from .actors.border import codec
from .actors.border.messages import Close, End, Explanation, Lost, Recall, Setup, Stop, Up
from .actors.border.parcel import Frames, Malformed, Packing, Unpacking, frame
from .actors.border.shared import Arena, Control, SharedFile
from .gpu.engine import Engine
from .gpu.seam import Begin, Closed, Failed, Free, Load, Outputs, Read, Reply, Segment

__all__: list[str] = []

_READ = 1 << 16
_LOST = 70


class _Pipe:
    """The way back: replies from any thread, one after the other."""

    def __init__(self, fd: int, control: Control, outputs: Arena) -> None:
        self._fd = fd
        self._control = control
        self._outputs = outputs
        self._lock = threading.Lock()
        self._sent = 0
        self._explained: dict[int, Any] = {}
        self.engine: Engine | None = None

    def send(self, message: Any, number: int = 0) -> None:
        """Send a message; where it cannot be sent, that is the answer."""
        with self._lock:
            if number and self.engine is not None:
                for model, before in self._explained.items():
                    explained = self.engine.explain(model)
                    if explained is not before:
                        self._explained[model] = explained
                        self._write(Explanation(model, explained), 0)
            try:
                self._write(message, number)
            except (TypeError, ValueError, MemoryError) as error:
                self._write(Failed(error), number)

    def expect(self, model: int) -> None:
        """From now on tell what is explained of a model, too."""
        with self._lock:
            self._explained[model] = None

    def forget(self, models: tuple[int, ...]) -> None:
        """Tell no more of these models."""
        with self._lock:
            for model in models:
                self._explained.pop(model, None)

    def _write(self, message: Any, number: int) -> None:
        if isinstance(message, Outputs) and self._control.taken == self._sent:
            self._outputs.clear()
        parcel = Packing(self._outputs)
        data = memoryview(frame(codec.encode(message, parcel), parcel.tail, number))
        self._sent += isinstance(message, Outputs)
        try:
            while len(data):
                data = data[os.write(self._fd, data) :]
        except OSError:  # nobody hears it
            os._exit(0)


class _Service:
    """Carries requests to the engine."""

    def __init__(self, pipe: _Pipe, control: Control) -> None:
        self._pipe = pipe
        self._control = control
        self._engine: Engine | None = None
        self._refusal: Exception | None = None

    def handle(self, message: Any, number: int) -> None:
        """Do what a message asks for. Returns at once, as an engine's methods do."""
        if isinstance(message, Setup):
            try:
                self._set_up(message)
            except Exception as error:
                self._refusal = error
            self._pipe.send(Up())
            return

        def done(reply: Reply) -> None:
            self._pipe.send(reply, number)

        engine = self._engine
        if engine is None:
            if isinstance(message, Close):
                self._closed(Closed())
            done(Failed(self._refusal or Malformed("a request before the engine is made")))
            return
        try:
            match message:
                case Segment():
                    engine.submit(message, done)
                case Begin():
                    engine.begin(message, done)
                case Read():
                    engine.read(message, done)
                case End(run=run, kept=kept):
                    engine.end(run, done, kept)
                case Free():
                    self._pipe.forget(message.models)
                    engine.free(message, done)
                case Stop(run=run):
                    engine.stop(run)
                case Recall(run=run, seq=seq):
                    engine.recall(run, seq)
                case Load():
                    self._pipe.expect(message.model)
                    engine.load(message, done, lambda progress: self._pipe.send(progress, number))
                case Close():
                    engine.close(self._closed)
                case _:
                    raise Malformed(f"{type(message).__name__} is no request")
        except Malformed:
            raise
        except Exception as error:
            done(Failed(error))

    def _set_up(self, setup: Setup) -> None:
        sys.path.extend(entry for entry in setup.path if entry not in sys.path)
        self._engine = self._pipe.engine = _make(setup)
        if (watch := getattr(self._engine, "watch", None)) is not None:
            watch(self._control.drops)

    def _closed(self, reply: Reply) -> NoReturn:
        self._pipe.send(Closed())
        os._exit(0)  # the engine has given back what it had; a driver may still have something to say at an exit


def _make(setup: Setup) -> Engine:
    module, _, name = setup.engine.partition(":")
    factory: Any = importlib.import_module(module)
    for part in name.split("."):
        factory = getattr(factory, part)
    engine: Engine = factory(adapter=setup.adapter, max_in_flight=setup.max_in_flight)
    return engine


def _end_with(parent: int) -> None:
    """On Linux the kernel ends this process with its parent; elsewhere the pipe does."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(0)


def _own_pipes() -> tuple[int, int]:
    """Standard input and output for this module alone: what a driver prints goes to standard error."""
    ours = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    try:
        os.dup2(2, 1)
    except OSError:  # there is no standard error
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
    os.close(nothing)
    return ours


def main(arguments: list[str]) -> NoReturn:
    """Serve until the pipe ends.

    Args:
        arguments: the parent's process number, and what the shared files are found by.
    """
    _end_with(int(arguments[0]))
    source, sink = _own_pipes()
    control_file, feeds, outputs = (SharedFile.adopt(text) for text in arguments[1:])
    control = Control(control_file)
    pipe = _Pipe(sink, control, Arena(outputs))
    service, frames, arena = _Service(pipe, control), Frames(), Arena(feeds, mapped=True)
    try:
        while data := os.read(source, _READ):
            frames.feed(data)
            while (found := frames.next()) is not None:
                number, text, tail = found
                service.handle(codec.decode(text, Unpacking(tail, arena)), number)
    except Exception as error:
        pipe.send(Lost(f"{type(error).__name__}: {error}"))
        os._exit(_LOST)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
