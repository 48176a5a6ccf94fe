"""Where the commands print: tables on standard output, what is going on at the moment on standard error."""

from __future__ import annotations

import os
import tempfile

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = ["bar", "milliseconds", "output", "quiet_drivers", "table"]

WIDE = 240


def output() -> Console:
    """Standard output; in a file or pipe lines are not broken at a terminal's width."""
    console = Console(markup=False, highlight=False)
    return console if console.is_terminal else Console(markup=False, highlight=False, width=WIDE)


def table(*columns: str) -> Table:
    """An empty table with these columns."""
    out = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    for column in columns:
        out.add_column(column, overflow="fold")
    return out


def bar() -> Progress:
    """A progress bar on standard error, which vanishes when done; nothing where that is no terminal."""
    console = Console(stderr=True, markup=False, highlight=False)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def milliseconds(seconds: float) -> str:
    """Such as "12.3 ms"."""
    return f"{seconds * 1e3:.1f} ms"


def quiet_drivers() -> None:
    """Keep drivers that look for a Wayland display from complaining on standard error that there is none."""
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())
