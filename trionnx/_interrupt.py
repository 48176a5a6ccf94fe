"""Ctrl-C while the command line's modules are still being imported, which takes half a second.

The first module that the package imports: standard library only, and little of that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

__all__ = ["EXIT_CANCELLED", "begin", "end"]

EXIT_CANCELLED = 130


def begin() -> None:
    """From now on Ctrl-C ends the process with a line and exit code 130; in a program of another's, no effect."""
    if _is_command_line() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # another thread than the main one
            signal.signal(signal.SIGINT, _leave)


def end() -> None:
    """Ctrl-C raises KeyboardInterrupt again. No effect where `begin` had none."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_command_line() -> bool:
    """Whether this process is ``trionnx ...`` or ``python -m trionnx ...``."""
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    if name == "-m":  # which module it is, argv does not say yet
        return any(pair == ("-m", "trionnx") for pair in zip(sys.orig_argv, sys.orig_argv[1:], strict=False))
    return name in ("trionnx", "trionnx.exe")


def _leave(*_: object) -> None:
    # An exception in the middle of an import would come out as one of the importing module's own making.
    os.write(2, b"trionnx: cancelled\n")
    os._exit(EXIT_CANCELLED)


begin()
