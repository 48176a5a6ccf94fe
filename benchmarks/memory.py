"""How much device memory a model takes, beside the least that its plan can do with.

    python benchmarks/memory.py [--adapter A] [--models NAME,...] [--json FILE] [--judge]

Models are names from examples/real_models.py, or .onnx files whose inputs have fixed shapes. Each is loaded and run
once. The least is what its steps hold at once, at most: the weights that were uploaded, and the temporary values
between the first step that touches them and the last (outputs: the end). The most is what the device had allocated for
the model at any time: weights, slots, parameters, flags, and what the buffer that results are read through grows by.
What is there before any model (that buffer, and one for timestamps) is told beside it.

--judge exits with 1 where the most exceeds 1.2 times the least.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import real_models
import trionnx
import works
from trionnx.cli.console import output, quiet_drivers, table
from trionnx.cli.inputs import UsageError
from trionnx.gpu.graph.block import Block
from trionnx.gpu.graph.memory import touched
from trionnx.gpu.graph.tensor import Storage
from walked import walked_session

__all__ = ["Memory", "least", "measure"]

AIM = 1.2


@dataclass(frozen=True, slots=True)
class Memory:
    """Device memory of a model, in bytes.

    Attributes:
        weights: of those that were uploaded. least: with the temporary values that live at once, at most.
        most: that were allocated for it at once. fixed: that were there before it.
    """

    model: str
    weights: int
    least: int
    most: int
    fixed: int

    @property
    def ratio(self) -> float:
        """The most, in units of the least."""
        return self.most / max(1, self.least)


def least(blocks: Sequence[Block]) -> tuple[int, int]:
    """Bytes of the weights on a path of blocks, and of all that lives at once on it, at most."""
    steps = [step for block in blocks for step in block.steps]
    first: dict[Storage, int] = {}
    last: dict[Storage, int] = {}
    for number, step in enumerate(steps):
        for storage in touched(step):
            first.setdefault(storage, number)
            last[storage] = number
    for block in blocks:
        for _, result in block.results.values():
            if result.storage in last:
                last[result.storage] = len(steps)
    change = [0] * (len(steps) + 2)
    for storage in last:
        if storage.role == "temp":
            change[first[storage]] += storage.nbytes
            change[last[storage] + 1] -= storage.nbytes
    live = most = 0
    for more in change:
        live += more
        most = max(most, live)
    weights = sum(s.nbytes for s in last if s.role == "weight")
    return weights, weights + most


async def measure(work: works.Work, adapter: str | None = None) -> Memory:
    """Load a model, run it once, and look at the device.

    **Cancellation:** stops the run that is under way.
    """
    async with walked_session(work, adapter) as (session, engine, device):
        await session.run(None, work.feeds)
        weights, bound = least(engine.blocks)
        return Memory(work.name, weights, bound, device.most, device.fixed)


def main() -> int:
    """Measure, print, judge."""
    arguments = parse()
    quiet_drivers()
    found = []
    for name in arguments.models.split(",") if arguments.models else real_models.MODELS:
        found.append(trio.run(measure, works.work(name), arguments.adapter))
    rows = table("model", "weights", "least", "most", "ratio", "before any model")
    for one in found:
        sizes = [f"{n / 1e3:,.0f} kB" for n in (one.weights, one.least, one.most)]
        rows.add_row(one.model, *sizes, f"{one.ratio:.2f}", f"{one.fixed / 1e3:,.0f} kB")
    output().print(rows)
    if arguments.json:
        lines = [asdict(one) | {"ratio": one.ratio, "met": one.ratio <= AIM} for one in found]
        Path(arguments.json).write_text(json.dumps(lines, indent=2) + "\n")
    return 1 if arguments.judge and any(one.ratio > AIM for one in found) else 0


def parse() -> argparse.Namespace:
    """The command line."""
    summary = __doc__.partition("\n")[0] if __doc__ else None
    parser = argparse.ArgumentParser(description=summary, usage="memory.py [options]")
    parser.add_argument("--adapter", default=None, help="index or part of a name")
    parser.add_argument("--models", metavar="NAME,...", help="default: all real models")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--judge", action="store_true", help="exit with 1 where the aim is missed")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (trionnx.NoAdapter, real_models.Unavailable, UsageError, OSError) as error:
        sys.exit(f"memory.py: {error}")
