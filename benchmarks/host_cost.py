"""What a warm run costs the host on the queue's thread: time per dispatch, dispatches, buffers, Python's memory.

    python benchmarks/host_cost.py [--adapter A] [--models NAME,...] [--rounds N] [--json FILE] [--judge]

Each model is loaded and run until it is warm. Then all that its steps ask of the device is encoded and finished again
and again on that thread, in command buffers of 16 steps: that is what is timed. Submitting is not; but submitted they
are, with no workgroups, since wgpu gives the memory of commands back only then, and a command buffer that is dropped
costs the next one 50 us for new memory, which no run ever pays. A command buffer has a cost of its own, so the same is
told for all steps in one; real segments may be shorter than 16 steps. Both leave out what the engine and the scheduler
do once per segment. The buffers that warm runs make are counted. tracemalloc says what encoding allocates at most, for
all of the steps and for half.

--judge exits with 1 where ppocrv4_rec takes more than 5 us per dispatch (the median, by 16 steps) or more than 150
dispatches, a warm run makes a buffer, or what is allocated grows with the dispatches (by more than 4 bytes for each).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import real_models
import trionnx
import works
from trionnx.cli.console import output, quiet_drivers, table
from trionnx.cli.inputs import UsageError
from trionnx.gpu.device.realise import PassWriter
from trionnx.gpu.graph.steps import Dispatch
from walked import WalkedEngine, walked_session

__all__ = ["HostCost", "measure"]

JUDGED, AIM_S, MOST_DISPATCHES, GROWTH = "ppocrv4_rec", 5e-6, 150, 4.0


@dataclass(frozen=True, slots=True)
class HostCost:
    """What a warm run costs the host.

    Attributes:
        dispatches: of one run. seconds: per dispatch, the median over rounds. whole: with all steps in one buffer.
        buffers: made by the warm runs with a real submit.
        growth: bytes of Python's memory for each further dispatch, at most at once.
    """

    model: str
    dispatches: int
    seconds: float
    whole: float
    buffers: int
    growth: float

    def missed(self) -> list[str]:
        """The aims that are missed."""
        judged = self.model == JUDGED
        aims = {
            "time": judged and self.seconds > AIM_S,
            "dispatches": judged and self.dispatches > MOST_DISPATCHES,
            "buffers": self.buffers > 0,
            "memory": self.growth > GROWTH,
        }
        return [aim for aim, missed in aims.items() if missed]


def on_thread(engine: WalkedEngine, job: Callable[[], Any]) -> Any:
    """What a job gives on the queue's thread."""
    answers: list[Any] = []
    answered = threading.Event()

    def answer() -> None:
        try:
            answers.append(job())
        except BaseException as error:
            answers.append(error)
        answered.set()

    assert engine._thread.post(answer)
    answered.wait()
    if isinstance(answers[0], BaseException):
        raise answers[0]
    return answers[0]


class Encoding:
    """The dispatches and copies of a run's blocks, in command buffers of `size`; the device has nothing to do."""

    def __init__(self, engine: WalkedEngine, size: int = 16) -> None:
        device = engine.device
        assert device is not None
        self._device, self._size = device, size
        self._calls = [
            (*call[:2], 0) if len(call) == 3 else (*call[:4], 4)
            for block in engine.blocks
            for call, kind in zip(block.device.calls, block.device.kinds, strict=True)
            if kind == "gpu"
        ]

    def run(self, share: float = 1.0) -> float:
        """Encode and finish the first `share` of the calls, and submit them; the seconds without the latter."""
        device, count, seconds = self._device, int(len(self._calls) * share), 0.0
        for start in range(0, count, self._size):
            before = time.perf_counter()
            encoder = device.encoder()
            writer = PassWriter(device, encoder)
            writer.write(self._calls[start : min(count, start + self._size)])
            writer.end()
            commands = device.finish(encoder)
            seconds += time.perf_counter() - before
            device.wait(device.submit(commands))
        return seconds

    def timed(self, rounds: int) -> float:
        """The median of the seconds of a run."""
        return statistics.median(self.run() for _ in range(rounds))

    def peak(self, share: float) -> int:
        """Bytes of Python's memory that a run takes at most."""
        self.run(share)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            self.run(share)
            return tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()


async def measure(work: works.Work, adapter: str | None = None, rounds: int = 200) -> HostCost:
    """Load a model, warm it, and measure.

    **Cancellation:** stops the run that is under way; what is measured without a device is not cut short.
    """
    async with walked_session(work, adapter) as (session, walked, device):
        for _ in range(3):
            await session.run(None, work.feeds)
        before = device.buffers
        for _ in range(3):
            await session.run(None, work.feeds)
        buffers = device.buffers - before
        encoding = Encoding(walked)
        dispatches = sum(isinstance(step, Dispatch) for block in walked.blocks for step in block.steps)
        seconds = on_thread(walked, lambda: encoding.timed(rounds)) / max(1, dispatches)
        single = Encoding(walked, sys.maxsize)
        in_one = on_thread(walked, lambda: single.timed(rounds)) / max(1, dispatches)
        all_of_it, half = (on_thread(walked, partial(encoding.peak, share)) for share in (1.0, 0.5))
        return HostCost(work.name, dispatches, seconds, in_one, buffers, (all_of_it - half) / max(1.0, dispatches / 2))


def main() -> int:
    """Measure, print, judge."""
    arguments = parse()
    quiet_drivers()
    found = []
    for name in arguments.models.split(","):
        found.append(trio.run(measure, works.work(name), arguments.adapter, arguments.rounds))
    rows = table(
        "model",
        "dispatches",
        "host time per dispatch",
        "in one buffer",
        "new buffers",
        "bytes per further dispatch",
        "missed",
    )
    for one in found:
        cells = (
            one.dispatches,
            f"{one.seconds * 1e6:.2f} us",
            f"{one.whole * 1e6:.2f} us",
            one.buffers,
            f"{one.growth:.1f}",
        )
        rows.add_row(one.model, *map(str, cells), ", ".join(one.missed()))
    output().print(rows)
    if arguments.json:
        lines = [asdict(one) | {"missed": one.missed()} for one in found]
        Path(arguments.json).write_text(json.dumps(lines, indent=2) + "\n")
    return 1 if arguments.judge and any(one.missed() for one in found) else 0


def parse() -> argparse.Namespace:
    """The command line."""
    summary = __doc__.partition("\n")[0] if __doc__ else None
    parser = argparse.ArgumentParser(description=summary, usage="host_cost.py [options]")
    parser.add_argument("--adapter", default=None, help="index or part of a name")
    parser.add_argument("--models", metavar="NAME,...", default=JUDGED)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--judge", action="store_true", help="exit with 1 where an aim is missed")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (trionnx.NoAdapter, real_models.Unavailable, UsageError, OSError) as error:
        sys.exit(f"host_cost.py: {error}")
