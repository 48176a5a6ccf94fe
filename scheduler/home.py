"""Where an object belongs: one Trio run in one process. `Home` refuses its use from anywhere else."""

from __future__ import annotations

import contextlib
import os

import trio

__all__ = ["Home"]


class Home:
    """The Trio run and the process in which it was made."""

    __slots__ = ("_pid", "token")

    def __init__(self) -> None:
        self.token = trio.lowlevel.current_trio_token()
        self._pid = os.getpid()

    def check(self, what: str) -> None:
        """Refuse a call from outside.

        Args:
            what: the object, such as "a session".

        Raises:
            RuntimeError: called in a forked child, in another thread, or in another Trio run.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(f"{what} cannot be used in a forked process; open a scheduler there")
        if not self.here():
            raise RuntimeError(f"{what} can only be used in the Trio run that made it, on that run's thread")

    def cancel(self, scope: trio.CancelScope) -> None:
        """Cancel a scope of this Trio run, from any thread; no effect once the run is over."""
        if self.here():
            scope.cancel()
        else:
            with contextlib.suppress(trio.RunFinishedError):
                self.token.run_sync_soon(scope.cancel)

    def here(self) -> bool:
        """Whether this is the Trio run."""
        return trio.lowlevel.in_trio_run() and trio.lowlevel.current_trio_token() is self.token
