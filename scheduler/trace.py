"""A trace in Chrome's JSON format, for Perfetto (ui.perfetto.dev) or chrome://tracing: `Trace`.

A lane for each queue, with segments one after another and an instant for each stop; and for each run its span, in it
what it waits for, its session or a turn, and its drain.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .observer import Lane, Seen

__all__ = ["MOST", "Trace"]

MOST = 1_000_000
"""So many happenings are kept; of more, the newest."""


class Trace:
    """A sink that keeps what happens in memory, until `write`.

    Args:
        path: of the file to be.

    Raises:
        FileNotFoundError: there is no such folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        if not self.path.parent.is_dir():
            raise FileNotFoundError(2, os.strerror(2), str(self.path.parent))
        self._seen: deque[Seen] = deque(maxlen=MOST)
        self.note = self._seen.append

    def write(self) -> None:
        """Write the file, whole: one that is there is replaced at the end.

        Raises:
            OSError: it cannot be written.
        """
        part = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with open(part, "w", encoding="utf-8") as file:
                file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
                file.write(",\n".join(map(json.dumps, self._events())))
                file.write("\n]}\n")
            os.replace(part, self.path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def _events(self) -> Iterator[dict[str, Any]]:
        lanes: dict[int, Lane] = {}
        flying: dict[tuple[int, int, int], Seen] = {}
        last_us: dict[int, float] = {}
        open_spans: dict[tuple[int, int], list[str]] = {}
        for seen in self._seen:
            queue, us = seen.lane.queue, seen.at * 1e6
            if lanes.setdefault(queue, seen.lane) is seen.lane and queue not in last_us:
                last_us[queue] = us
                yield _event("M", "thread_name", queue, args={"name": f"queue {queue}: {seen.lane.adapter}"})
            key = (queue, seen.run, seen.seq)
            spans = open_spans.setdefault(key[:2], [])
            if seen.what == "handed":
                flying[key] = seen
            elif seen.seq >= 0:
                handed = flying.pop(key, None)
                if handed is not None and seen.what != "dropped":
                    start_us = max(handed.at * 1e6, last_us[queue])
                    args = {"run": seen.run, "seq": seen.seq, "kind": handed.detail, "how": seen.what}
                    if seen.gpu_s is not None:
                        args["gpu_us"] = round(seen.gpu_s * 1e6, 3)
                    name = f"{seen.lane.model} {seen.run}.{seen.seq}"
                    yield _event("X", name, queue, ts=start_us, dur=us - start_us, cat="segment", args=args)
                    last_us[queue] = us
            else:
                yield from _of_run(seen, us, spans)
                if seen.what == "ended":
                    del open_spans[key[:2]]


def _of_run(seen: Seen, us: float, spans: list[str]) -> Iterator[dict[str, Any]]:
    """Spans of a run, one in another; `spans` are those that are open."""
    queue = seen.lane.queue
    opens = {"called": "run", "waits": "waits for a turn", "stops": "drain"}
    ends = {"begun": 1, "granted": 1, "stops": 1, "ended": 0}

    def span(phase: str, name: str, args: dict[str, Any] | None = None) -> dict[str, Any]:
        return _event(phase, name, queue, ts=us, cat="run", id=f"{queue}.{seen.run}", args=args or {})

    while seen.what in ends and len(spans) > ends[seen.what]:
        counts = seen.counts
        args: dict[str, Any] = {}
        if len(spans) == 1 and counts is not None:
            args = {"outcome": seen.detail, "submitted": counts.submitted, "finished": counts.finished}
        yield span("e", spans.pop(), args)
    if seen.what == "called":
        spans.append(f"{seen.lane.model} {seen.detail}".strip())
        yield span("b", spans[-1], {"run": seen.run})
        spans.append("waits for the session")
        yield span("b", spans[-1])
    elif seen.what in opens and spans:
        spans.append(opens[seen.what])
        yield span("b", spans[-1])
    if seen.what == "stops":
        yield _event("i", seen.detail, queue, ts=us, s="t", cat="stop", args={"run": seen.run})


def _event(phase: str, name: str, queue: int, **more: Any) -> dict[str, Any]:
    rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in more.items()}
    return {"ph": phase, "name": name, "pid": os.getpid(), "tid": queue, **rounded}
