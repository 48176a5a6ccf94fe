"""A worker process: how it is started, what its pipes are, how it is ended and reaped.

Rules of this file:
1. Never a fork: a new interpreter, which ends when its pipe ends.
2. What is fixed per process, such as the threads of software drivers, is decided here, before it starts.
3. In a forked child of this process nothing is done with a worker: its pipes are closed there, no more.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence

from ..gpu.device.drivers import apply
from .border.shared import SharedFile

__all__ = ["WorkerProcess", "driver_threads"]

_MODULE = "trionnx._worker"
_READ = 1 << 16
_LEAVE_S = 2.0
_THREADS = ("LP_NUM_THREADS",)

_living: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()


def driver_threads() -> int:
    """How many threads a software driver may have in a worker."""
    return min(8, os.cpu_count() or 4)


class WorkerProcess:
    """A child that runs `trionnx._worker`. Made in the thread that outlives it: on Linux it ends with that thread.

    Args:
        files: memory that it shares.
        environment: variables that differ from those here; None: one that it does not have.

    Raises:
        OSError: it could not be started.
    """

    def __init__(self, files: Sequence[SharedFile], environment: Mapping[str, str | None] | None = None) -> None:
        variables = dict.fromkeys(_THREADS, str(driver_threads())) | dict(os.environ)
        apply(environment or {}, variables)
        command = [sys.executable, "-P", "-m", _MODULE, str(os.getpid()), *(file.handle for file in files)]
        if sys.platform == "win32":
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=variables,
                creationflags=subprocess.CREATE_NEW_PROCESS_GROUP,
            )
        else:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=variables,
                pass_fds=[file.fd for file in files],
                process_group=0,  # Ctrl-C is for this process to answer
            )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._in, self._out = self._child.stdin.fileno(), self._child.stdout.fileno()
        self._here = os.getpid()
        if sys.platform != "win32":
            os.set_blocking(self._in, False)
        _living.add(self)

    @property
    def pid(self) -> int:
        """Its number."""
        return self._child.pid

    @property
    def ended(self) -> bool:
        """Whether it was seen to have ended."""
        return self._child.returncode is not None

    def send_now(self, data: bytes | memoryview) -> int:
        """Write as much as goes without waiting; how much that was. 0 where the system cannot tell."""
        if sys.platform == "win32":
            return 0
        try:
            return os.write(self._in, data)
        except BlockingIOError:
            return 0

    def send(self, data: bytes) -> None:
        """Write it all, waiting as long as it takes.

        Raises:
            OSError: the worker does not read any more.
        """
        view = memoryview(data)
        while len(view):
            if sys.platform == "win32":
                count = os.write(self._in, view)
            else:
                count = self.send_now(view)
                if count == 0:
                    waiter = select.poll()
                    waiter.register(self._in, select.POLLOUT)
                    waiter.poll()
            view = view[count:]

    def receive(self) -> bytes:
        """Bytes from the worker, waiting for them; none: its pipe has ended."""
        try:
            return os.read(self._out, _READ)
        except OSError:
            return b""

    def kill(self) -> None:
        """End it, at once, from any thread."""
        if os.getpid() == self._here:
            with contextlib.suppress(OSError):
                self._child.kill()

    def wait(self, bound_s: float = _LEAVE_S) -> str:
        """Wait for it to end by itself, else end it: reaped in any case. How it ended, in words."""
        try:
            self._child.wait(bound_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        _living.discard(self)
        code = self._child.returncode
        if code >= 0:
            return f"ended with exit code {code}"
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"

    def close(self) -> None:
        """Close its pipes."""
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _forget(self) -> None:
        """In a forked child: it is not ours."""
        self.close()
        self._child.returncode = 0


def _kill_all() -> None:
    """At the interpreter's exit."""
    for worker in tuple(_living):
        if not worker.ended and os.getpid() == worker._here:
            worker.kill()
            worker.wait()


def _forget_all() -> None:
    for worker in tuple(_living):
        worker._forget()


atexit.register(_kill_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
