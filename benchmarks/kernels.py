"""How fast the kernels are: each as it is chosen for the adapter, beside its other variants and a plain copy.

    python benchmarks/kernels.py [--adapter A] [--size N] [--rounds N] [--json FILE] [--judge]

Variants are forced by telling the planner of another adapter: "plain" is a software adapter whose subgroups are not
known, which for large products means register tiles of 16 rows x 4 vec4 columns, all operands in storage buffers;
"shared" is a hardware adapter, which means tiles in workgroup memory. All of them run in turns in this process, each
as one submission; the shortest time counts, the one that was disturbed the least. The copies are what the elementwise
kernels are held against.

--judge exits with 1 where an aim is missed, on software adapters with subgroups of eight or more: against the plain
product of the same size 3 x at 512 and 2 x at 1024, Conv 3x3 4 x the plain product at 512, elementwise kernels 0.8 of
the best copy's bandwidth.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from trionnx.cli.console import milliseconds, output, quiet_drivers, table
from trionnx.gpu.device.adapters import choose_adapter
from trionnx.gpu.device.device import Device
from trionnx.gpu.device.realise import PassWriter, Realiser
from trionnx.gpu.errors import NoAdapter
from trionnx.gpu.graph.planner import Planner
from trionnx.gpu.graph.read import read_model
from trionnx.gpu.graph.steps import Copy, Dispatch, Upload
from trionnx.gpu.graph.target import Target
from trionnx.gpu.graph.tensor import as_words
from trionnx.gpu.kernels.kernel import Binding, Kernel, link

__all__: list[str] = []

Array = np.ndarray[Any, Any]
SIZE = 512
COPIES = (1, 2, 4, 8)
AIMS = {"MatMul 512": 3.0, "MatMul 1024": 2.0, "Conv 3x3": 4.0, "elementwise": 0.8}
ELEMENTWISE = "elementwise"


@dataclass(eq=False)
class Work:
    """What is measured: one operator in one variant.

    Attributes:
        what: the operator. variant: how it is computed. kernels: names of its dispatches.
        flops, nbytes: of one run, 0 where that is not what counts.
        go: encodes one run.
    """

    what: str
    variant: str
    kernels: Sequence[str]
    flops: float
    nbytes: float
    go: Callable[[PassWriter], None]
    seconds: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """FLOP/s or bytes/s."""
        return (self.flops or self.nbytes) / min(self.seconds)


def main() -> int:
    """Measure, print, judge."""
    arguments = parse()
    info = choose_adapter(arguments.adapter)
    device = Device(info)
    try:
        side = 4 * arguments.size
        works = [*products(device, arguments.size), *elementwise(device, side), *copies(device, side * side)]
        for number in range(arguments.rounds + 1):
            for work in works:
                seconds = run(device, work)
                if number:
                    work.seconds.append(seconds)
    finally:
        device.close()
    judged = judge(works)
    output().print(f"on {info}, subgroups of {device.target.subgroup or 'unknown size'}")
    show(works, judged)
    if arguments.json:
        lines = [
            {"what": w.what, "variant": w.variant, "kernels": list(w.kernels), "seconds": w.seconds, "rate": w.rate}
            for w in works
        ]
        whole = {"adapter": str(info), "works": lines, "judged": judged}
        Path(arguments.json).write_text(json.dumps(whole, indent=2) + "\n")
    held = device.target.cpu and device.target.subgroup >= 8
    return 1 if arguments.judge and held and not all(line["met"] for line in judged) else 0


def parse() -> argparse.Namespace:
    """The command line."""
    summary = __doc__.partition("\n")[0] if __doc__ else None
    parser = argparse.ArgumentParser(description=summary, usage="kernels.py [options]")
    parser.add_argument("--adapter", default=None, help="index or part of a name")
    parser.add_argument("--size", type=int, default=SIZE, help="rows of the smaller product, a multiple of 64")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--judge", action="store_true", help="exit with 1 where an aim is missed")
    return parser.parse_args()


def variants(target: Target) -> dict[str, Target]:
    """Targets that make the planner choose otherwise, by name; "chosen" is the adapter's own."""
    others = {"plain": replace(target, cpu=True, subgroup=0), "shared": replace(target, cpu=False)}
    return {"chosen": target} | {name: other for name, other in others.items() if other != target}


def products(device: Device, small: int) -> list[Work]:
    """Matrix products and convolutions."""
    rng = np.random.default_rng(0)
    made = []
    for size in (small, 2 * small):
        x, w = (rng.standard_normal((size, size), np.float32) for _ in range(2))
        for name, target in variants(device.target).items():
            made.append(operator(device, target, f"MatMul {size}", name, "MatMul", {"x": x}, {"w": w}, 2.0 * size**3))
    x, w = rng.standard_normal((1, 64, 56, 56), np.float32), rng.standard_normal((64, 64, 3, 3), np.float32)
    for name, target in variants(device.target).items():
        flops = 2.0 * w.size * 56 * 56
        made.append(operator(device, target, "Conv 3x3", name, "Conv", {"x": x}, {"w": w}, flops, pads=[1, 1, 1, 1]))
    return made


def elementwise(device: Device, side: int) -> list[Work]:
    """Operators that only move bytes; what counts is what invocations read, the row as often as they do."""
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((side, side), np.float32) for _ in range(2))
    row = y[:1]
    given: dict[str, tuple[str, dict[str, Array]]] = {
        "Relu": ("Relu", {"x": x}), "Add": ("Add", {"x": x, "y": y}), "Mul by a row": ("Mul", {"x": x, "y": row}),
    }  # fmt: skip
    made = []
    for what, (op, feeds) in given.items():
        nbytes = 4.0 * x.size * (len(feeds) + 1)
        made.append(operator(device, device.target, what, ELEMENTWISE, op, feeds, {}, 0.0, nbytes))
    return made


def operator(
    device: Device,
    target: Target,
    what: str,
    variant: str,
    op: str,
    feeds: dict[str, Array],
    known: dict[str, Array],
    flops: float,
    nbytes: float = 0.0,
    **attributes: Any,
) -> Work:
    """One operator as the planner lowers it for a target, its inputs uploaded; only the dispatches are run."""
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape) for name, value in feeds.items()]
    node = helper.make_node(op, [*feeds, *known], ["out"], **attributes)
    weights = [numpy_helper.from_array(value, name) for name, value in known.items()]
    graph = helper.make_graph([node], "one", infos, [onnx.ValueInfoProto(name="out")], weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    planner = Planner(read_model(proto.SerializeToString()), target, False)
    block = planner.start({name: (value.dtype, value.shape) for name, value in feeds.items()}, lambda: None)
    realiser = Realiser(device)
    calls = realiser.realise(block, lambda: None, lambda *_: None).calls
    for step in block.steps:
        if isinstance(step, Upload):
            name = next(name for name, key in block.inputs.items() if key == step.key)
            device.write(*realiser.place(block, step.target), as_words(feeds[name]), lambda: None)

    def go(writer: PassWriter) -> None:
        for step, call in zip(block.steps, calls, strict=True):
            if isinstance(step, Dispatch):
                writer.dispatch(call[0], call[1], 0, call[2])
            elif isinstance(step, Copy):
                writer.copy(*call)

    names = [step.program.name for step in block.steps if isinstance(step, Dispatch)]
    return Work(what, variant, names, flops, nbytes, go)


def copies(device: Device, elements: int) -> list[Work]:
    """Kernels that copy, so many vec4 for each invocation."""
    source, target = (device.buffer(4 * elements) for _ in range(2))
    made = []
    for each in COPIES:
        lines = "\n".join(f"out[at + {n}u] = x[at + {n}u];" for n in range(each))
        reads, writes = (Binding("x", "vec4f"),), (Binding("out", "vec4f"),)
        body = f"let at = (group * 64u + lane) * {each}u;\n{lines}"
        pipeline = device.pipeline(link(Kernel(f"copy{each}", body, reads, writes, result=None)))
        group = device.bind(pipeline, None, 0, [(b, 0, 4 * elements) for b in (source, target)])
        groups = elements // 4 // 64 // each

        def go(writer: PassWriter, pipeline: Any = pipeline, group: Any = group, groups: int = groups) -> None:
            writer.dispatch(pipeline, group._internal, 0, groups)

        made.append(Work("copy", f"{each} vec4 for each invocation", [f"copy{each}"], 0.0, 8.0 * elements, go))
    return made


def run(device: Device, work: Work) -> float:
    """Seconds of one run, from its submission to its fence."""
    encoder = device.encoder()
    writer = PassWriter(device, encoder)
    work.go(writer)
    writer.end()
    commands = device.finish(encoder)
    start = time.perf_counter()
    device.wait(device.submit(commands))
    return time.perf_counter() - start


def judge(works: Sequence[Work]) -> list[dict[str, Any]]:
    """How the chosen kernels compare with what they are held against."""
    rates = {(work.what, work.variant): work.rate for work in works}
    best = max(work.rate for work in works if work.what == "copy")
    plain = next((w.rate for w in works if w.what.startswith("MatMul") and w.variant == "plain"), None)
    lines = []
    for work in works:
        aim = AIMS.get(work.variant if work.variant == ELEMENTWISE else work.what)
        against = best if work.variant == ELEMENTWISE else rates.get((work.what, "plain"))
        if work.what == "Conv 3x3":
            against = plain
        if aim is not None and against is not None and work.variant in ("chosen", ELEMENTWISE):
            ratio = work.rate / against
            lines.append({"what": work.what, "ratio": ratio, "aim": aim, "met": ratio >= aim})
    return lines


def show(works: Sequence[Work], judged: Sequence[dict[str, Any]]) -> None:
    """Print tables."""
    console = output()
    rows = table("operator", "variant", "kernels", "time", "", "of the chosen")
    chosen = {work.what: work.rate for work in works if work.variant == "chosen"}
    for work in works:
        unit = f"{work.rate / 1e9:.2f} {'GFLOP/s' if work.flops else 'GB/s'}"
        share = f"{work.rate / chosen[work.what]:.2f}" if work.what in chosen else ""
        seconds = milliseconds(min(work.seconds))
        rows.add_row(work.what, work.variant, ", ".join(work.kernels), seconds, unit, share)
    console.print(rows)
    aims = table("chosen", "against the plain product, or the best copy", "aim", "")
    for line in judged:
        met = "met" if line["met"] else "missed"
        aims.add_row(line["what"], f"{line['ratio']:.2f} x", f"{line['aim']:g} x", met)
    console.print(aims)


if __name__ == "__main__":
    quiet_drivers()
    try:
        sys.exit(main())
    except (NoAdapter, OSError) as error:
        sys.exit(f"kernels.py: {error}")
