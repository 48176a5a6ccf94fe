"""How long a cancel takes, what it leaves behind, and what checkpoints cost.

    python benchmarks/cancel.py [--models NAME ...] [--giants] [--all-drivers] [--judge]

A NAME is one from examples/real_models.py, "matmul_2048", "all" for these, or an .onnx file (then --shape,
for free dimensions). For each policy a warm run is cancelled at 100 random moments, the same each time. The device
itself counts the segments that it executes; outputs afterwards are compared, bit for bit. Meanwhile a task beats
every millisecond. Then runs that are cut into segments take turns with runs that are submitted whole.

--all-drivers does it in a process of its own on each software driver that is installed. --json keeps what was
measured, samples and all, and --read shows, draws and judges it again.

--peer does the same work in onnxruntime-webgpu, in a virtual environment of its own, and sets
`RunOptions.terminate` at 5, 15, ... 95 % of its own run; needs an adapter that Dawn takes (SwiftShader will do).

Exits with 1 where a segment was handed over after a cancel, an output was not the same, the device counted
something else than what was submitted, or the peer does not run here; with --judge also where an aim was missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import measuring
import peer
import real_models
import record
import report
import trionnx
import works
from drivers import software_drivers
from moments import POLICIES
from record import Record
from trionnx.cli.console import output, quiet_drivers
from trionnx.cli.inputs import UsageError

__all__: list[str] = []

FAILURES = (
    *(trionnx.DeviceHung, trionnx.DeviceLost, trionnx.OutOfDeviceMemory, trionnx.InvalidData),
    *(trionnx.UnsupportedOperator, real_models.Unavailable),
)
"""What ends the measurement of one model, and not that of the others."""
SHARES = tuple(percent / 100 for percent in range(5, 100, 10))


def main() -> int:
    """Measure, print, draw, judge."""
    arguments = parse()
    other: dict[str, Any] | None = None
    wrong: list[str] = []
    if arguments.read:
        records = record.load(arguments.read)
    elif arguments.all_drivers:
        records = on_each_driver(arguments, wrong)
    else:
        records = on_this_driver(arguments, wrong)
    if arguments.peer:
        try:
            other = by_the_peer(arguments)
        except peer.Unavailable as error:
            wrong.append(str(error))
    if arguments.json == "-":
        print(record.save(records))
    else:
        report.show(records, output())
        if other is not None:
            peer.show(other, output())
    if arguments.plot is not None and records:
        draw(records, arguments.plot)
    wrong += [line for one in records for line in one.faults()]
    if arguments.judge:
        wrong += [line for one in records for line in one.misses()]
    for line in wrong:
        print(f"cancel.py: {line}", file=sys.stderr)
    return 1 if wrong or not records else 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0] if __doc__ else None, usage="cancel.py [options]"
    )
    add = parser.add_argument
    add("--models", nargs="+", default=["ppocrv4_rec"], metavar="NAME", help="names, files, all (default: ppocrv4_rec)")
    add("--giants", action="store_true", help="one large Conv, LSTM and Resize, too")
    add("--shape", action="append", default=[], metavar="NAME=1,3,48,320", help="of a file's free dimensions")
    add("--policies", nargs="+", default=list(POLICIES), choices=POLICIES, metavar="POLICY", help=" ".join(POLICIES))
    add("--rounds", type=int, default=100, help="cancels for each policy (default: 100)")
    add("--pairs", type=int, default=15, help="samples of split and whole runs (default: 15; 0: none)")
    add("--check", type=int, default=5, help="compare outputs after so many cancels (default: 5)")
    add("--seed", type=int, default=0, help="of the moments")
    add("--backend", default="webgpu")
    add("--adapter", default=None)
    add("--all-drivers", action="store_true", help="on each software driver that is installed")
    add("--json", nargs="?", const="-", metavar="FILE", help="print JSON, or keep it in a file as it grows")
    add("--read", nargs="+", type=Path, metavar="FILE", help="measure nothing; read what --json kept")
    add("--plot", type=Path, metavar="FILE.png", help="draw it")
    add("--judge", action="store_true", help="exit with 1 where an aim was missed")
    add("--peer", action="store_true", help="the first model in onnxruntime-webgpu, too")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.check < 1 or arguments.pairs < 0:
        parser.error("--rounds and --check are at least 1, --pairs at least 0")
    if arguments.peer and (arguments.all_drivers or arguments.read):
        parser.error("--peer goes neither with --all-drivers nor with --read")
    return arguments


def on_this_driver(arguments: argparse.Namespace, wrong: list[str]) -> list[Record]:
    """Measure one model after the other; what there is goes to the file after each. `wrong` is told what fails."""
    records: list[Record] = []
    for name in works.names_of(arguments.models, arguments.giants):

        async def measure(name: str = name) -> Record:
            return await measuring.measure(
                works.work(name, arguments.shape),
                backend=arguments.backend,
                adapter=arguments.adapter,
                policies=arguments.policies,
                rounds=arguments.rounds,
                pairs=arguments.pairs,
                check=arguments.check,
                seed=arguments.seed,
                say=partial(say, name),
            )

        try:
            records.append(trio.run(measure))
        except FAILURES as error:
            wrong.append(f"{name}: {error}")
            continue
        if arguments.json not in (None, "-"):
            record.save(records, Path(arguments.json))
    return records


def say(name: str, what: str) -> None:
    """Say on standard error what is being done."""
    print(f"{name}: {what}", file=sys.stderr, flush=True)


def on_each_driver(arguments: argparse.Namespace, wrong: list[str]) -> list[Record]:
    """Measure in a process of its own on each driver; a process that fails is told of in `wrong`."""
    drivers = software_drivers()
    if not drivers:
        wrong.append("no software driver is installed where one is looked for")
    words = ["--models", *works.names_of(arguments.models, arguments.giants), "--policies", *arguments.policies]
    words += [f"--shape={shape}" for shape in arguments.shape]
    words += [f"--{name}={getattr(arguments, name)}" for name in ("rounds", "pairs", "check", "seed")]
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as folder:
        for driver in drivers:
            say(driver.name, "a process of its own")
            # Beside the file that is asked for, so that what a long measurement made outlives its end.
            kept = Path(folder) / "kept.json" if arguments.json in (None, "-") else Path(arguments.json)
            file = kept.with_suffix(f".{driver.name}.json")
            file.unlink(missing_ok=True)
            code = driver.run(Path(__file__), [*words, f"--json={file}"])
            made = record.load([file]) if file.exists() else []
            records += made
            if code and not any(one.faults() for one in made):
                wrong.append(f"on {driver.name} the measurement ended with {code}")
            if arguments.json not in (None, "-"):
                record.save(records, Path(arguments.json))
    return records


def by_the_peer(arguments: argparse.Namespace) -> dict[str, Any]:
    """The first model in onnxruntime-webgpu."""
    work = works.work(works.names_of(arguments.models)[0], arguments.shape)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{work.name}.onnx"
        path.write_bytes(work.source if isinstance(work.source, bytes) else work.source.read_bytes())
        return peer.measure(path, work.feeds, SHARES, say=partial(say, "peer"))


def draw(records: list[Record], path: Path) -> None:
    """Draw what was measured."""
    try:
        import picture
    except ImportError:
        raise UsageError("--plot needs Pillow, which comes with the extra [examples]") from None
    picture.draw(records).save(path)


if __name__ == "__main__":
    quiet_drivers()
    try:
        sys.exit(main())
    except (
        *(trionnx.NoAdapter, trionnx.InvalidInput, trionnx.InvalidModel, trionnx.UnsupportedOperator),
        *(measuring.WrongBackend, UsageError, real_models.Unavailable, MemoryError, OSError, ValueError),
    ) as error:
        sys.exit(f"cancel.py: {error}")
