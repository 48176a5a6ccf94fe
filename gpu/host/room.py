"""Whether the machine has room for an array, asked before it is made: a file of 200 bytes can want a petabyte."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import OutOfDeviceMemory

__all__ = ["MOST_DIMENSIONS", "check_room", "room"]

MOST_DIMENSIONS = 64
"""What NumPy can hold."""

UNASKED = 64 << 20
"""Arrays of fewer bytes are made without asking."""

_CGROUP = Path("/sys/fs/cgroup")


def check_room(what: str, dtype: np.dtype[Any], shape: Sequence[int]) -> None:
    """Refuse an array that the machine has no room for.

    Args:
        what: who wants it, for the message, such as "node 'a' (Tile)".
        dtype: of the array.
        shape: of the array; whole numbers from 0 on.

    Raises:
        OutOfDeviceMemory: there is no room.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes > UNASKED and nbytes > room():
        raise OutOfDeviceMemory(f"{what}: {nbytes:,} bytes are wanted, for {dtype} of shape {list(shape)}")


def room() -> int:
    """Bytes of main memory that this process can still have, as far as the system tells."""
    rooms = [sys.maxsize]
    available = _number(Path("/proc/meminfo"), "MemAvailable:")
    if available is not None:
        rooms.append(available * 1024)
    most, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if most is not None and used is not None:
        rooms.append(most - used)
    if sys.platform != "win32":
        import resource

        most, pages = resource.getrlimit(resource.RLIMIT_AS)[0], _number(Path("/proc/self/statm"))
        if most != resource.RLIM_INFINITY:
            rooms.append(most - (pages or 0) * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(rooms))


def _number(file: Path, after: str = "") -> int | None:
    """The first number in a file, or that after a word."""
    try:
        words = file.read_text().split()
        return int(words[words.index(after) + 1 if after else 0])
    except (OSError, ValueError, IndexError):
        return None
