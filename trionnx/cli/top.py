"""``trionnx top``: what the schedulers of this user's processes are doing, live."""

from __future__ import annotations

import argparse
import time

from rich.live import Live
from rich.table import Table

from ..scheduler.exposed import PERIOD_S, Exposed, exposed
from .console import output, table

__all__ = ["main"]

MIB = 1 << 20
NOBODY = "no scheduler says anything: open_scheduler(expose=True), or TRIONNX_EXPOSE=1, in the program"


def main(arguments: argparse.Namespace) -> int:
    """Show a table: live on a terminal until Ctrl-C, once elsewhere or with --once."""
    console = output()
    if arguments.once or not console.is_terminal:
        found = exposed()
        console.print(_rows(found) if found else NOBODY)
        return 0 if found else 1
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            found = exposed()
            live.update(_rows(found) if found else NOBODY, refresh=True)
            time.sleep(PERIOD_S)


def _rows(found: list[Exposed]) -> Table:
    rows = table(
        *("process", "busy", "running", "queued", "in flight", "runs", "cancels", "failures"),
        *("segments", "finished", "on the device", "sessions"),
    )
    for one in found:
        s = one.statistics
        numbers = (s.running, s.queued, s.in_flight, s.runs, s.cancels, s.failures)
        rows.add_row(
            *(f"{one.pid}.{one.number}", f"{s.busy_share:.0%}", *map(str, numbers)),
            *(str(s.segments_submitted), str(s.segments_finished), f"{s.device_bytes / MIB:.1f} MiB"),
            ", ".join(one.sessions) or "none",
        )
    return rows
