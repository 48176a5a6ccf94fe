"""Statistics for other processes, such as ``trionnx top``: a file of the user's own in the runtime folder.

A process that is killed leaves its file behind; whoever reads next removes it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import stat
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import platformdirs
import trio

from .statistics import Statistics

__all__ = ["PERIOD_S", "Exposed", "expose", "exposed", "runtime_folder"]

PERIOD_S = 0.5
"""How often the file is written anew, in seconds."""

_numbers = itertools.count()


class Exposed(NamedTuple):
    """What a scheduler says of itself: its process, its number there, a line on each session, the numbers."""

    pid: int
    number: int
    sessions: tuple[str, ...]
    statistics: Statistics


def runtime_folder() -> Path:
    """The folder, made where it is not there.

    Raises:
        PermissionError: it is another user's, others may write to it, or it is a link.
    """
    folder = Path(platformdirs.user_runtime_dir("trionnx", appauthor=False))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid"):
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(1, "not a folder of this user's alone", str(folder))
    return folder


async def expose(
    look: Callable[[], tuple[tuple[str, ...], Statistics]], *, task_status: trio.TaskStatus[None]
) -> None:
    """Write what `look` gives, again and again; a few hundred bytes, to memory on most systems.

    Raises:
        OSError: the file cannot be made.

    **Cancellation:** felt between two writes; the file is removed.
    """
    folder, pid, number = runtime_folder(), os.getpid(), next(_numbers)
    file, part = folder / f"{pid}-{number}.json", folder / f"{pid}-{number}.part"

    def write() -> None:
        sessions, statistics = look()
        part.unlink(missing_ok=True)
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "w", encoding="utf-8") as out:
            json.dump({"sessions": sessions, "statistics": asdict(statistics)}, out)
        os.replace(part, file)

    try:
        write()
        task_status.started()
        while True:
            await trio.sleep(PERIOD_S)
            with contextlib.suppress(OSError):  # a full disk must not stop the runs
                write()
    finally:
        for path in (part, file):
            with contextlib.suppress(OSError):
                path.unlink()


def exposed() -> list[Exposed]:
    """What the schedulers of this user's processes say; files of processes that are gone are removed.

    Raises:
        PermissionError: as of `runtime_folder`.
    """
    found = []
    for path in sorted(runtime_folder().glob("*-*.json")):
        try:
            pid, number = map(int, path.stem.split("-"))
            if not _lives(pid):
                path.unlink(missing_ok=True)
                path.with_suffix(".part").unlink(missing_ok=True)
                continue
            said = json.loads(path.read_text(encoding="utf-8"))
            found.append(Exposed(pid, number, tuple(said["sessions"]), Statistics(**said["statistics"])))
        except (OSError, ValueError, KeyError, TypeError):  # just removed, or another version's
            continue
    return found


def _lives(pid: int) -> bool:
    if os.name == "nt":  # there os.kill would end it
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the number is another user's now
        return False
    return True
