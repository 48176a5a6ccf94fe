"""``trionnx doctor``: what there is to run on, what is chosen and why, and how long a cancel takes there."""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import onnx
import trio
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console

from ..actors.probe import cache_folder, unwritten
from ..gpu.device.verdicts import Survey, Verdict
from ..gpu.errors import NoAdapter
from ..scheduler import open_scheduler
from ..scheduler.backends import choose, examine, has_onnxruntime
from .console import milliseconds, output, table
from .measure import HandOvers, cancel_after, quantile, whole_runs

__all__ = ["main"]

SIZE = 256
LONG_ENOUGH_S = 0.1
MOST_STEPS = 4096
CANCELS = 20

VULKAN = "install a Vulkan driver; on Debian or Ubuntu a software one: apt-get install mesa-vulkan-drivers libvulkan1"
HARDWARE = "for a hardware GPU install its vendor's Vulkan driver (for AMD and Intel: mesa-vulkan-drivers)"
CPU = "for ONNX Runtime's CPU provider, which is faster than a software adapter: pip install 'trionnx[cpu]'"


@dataclass(frozen=True)
class _Measured:
    where: str
    steps: int
    whole_s: float
    left_s: Sequence[float]
    late: int


def main(arguments: argparse.Namespace) -> int:
    """Look, choose, measure, advise."""
    console = output()
    _versions(console)
    survey = _adapters(console, arguments.reprobe)
    ready = _choice(console, arguments, survey.adapters) and _measure(console, arguments)
    _advise(console, survey)
    return 0 if ready else 1


def _versions(console: Console) -> None:
    rows = table("software", "version")
    rows.add_row("Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    for name in ("trionnx", "trio", "numpy", "onnx", "wgpu", "onnxruntime"):
        try:
            rows.add_row(name, version(name))
        except PackageNotFoundError:
            rows.add_row(name, "not installed")
    console.print(rows)
    console.print()


def _adapters(console: Console, anew: bool) -> Survey:
    started = time.time()
    survey = trio.run(partial(examine, anew=anew))
    if survey.adapters:
        rows = table("index", "adapter", "kind", "driver", "through", "works")
        for a in survey.adapters:
            works = _works(survey.trials.get(a.identity), started)
            rows.add_row(str(a.index), a.name, a.kind, a.driver, a.backend, works)
        console.print(rows)
    elif survey.listing.ok:
        console.print("no adapters: no GPU driver was found")
    else:
        console.print(f"no adapters: {_works(survey.listing, started)}")
    for file, verdict in survey.refused.items():
        console.print(f"{file}: {_works(verdict, started)}")
    known = (survey.listing, *survey.refused.values(), *survey.trials.values())
    if any(verdict.at < started for verdict in known):
        console.print(f"remembered in {cache_folder()}; trionnx doctor --reprobe forgets it and tries anew")
    if (fault := unwritten()) is not None:
        console.print(f"nothing can be remembered in {cache_folder()}: {fault.strerror}; each process tries anew")
    console.print()
    return survey


def _works(verdict: Verdict | None, started: float) -> str:
    if verdict is None:
        return "not tried"
    when = "tried now" if verdict.at >= started else f"as of {datetime.fromtimestamp(verdict.at):%Y-%m-%d %H:%M}"
    return f"yes, {when}" if verdict.ok else f"no, {when}: {verdict.reason}"


def _choice(console: Console, arguments: argparse.Namespace, adapters: Sequence[Any]) -> bool:
    try:
        choice = trio.run(choose, arguments.backend, arguments.adapter)
    except NoAdapter as error:
        console.print(f"nothing to run on: {error}", end="\n\n")
        return False
    console.print(f"chosen: {choice.backend}, because {_why(arguments, choice, adapters)}")
    return True


def _why(arguments: argparse.Namespace, choice: Any, adapters: Sequence[Any]) -> str:
    said = os.environ.get("TRIONNX_BACKEND")
    if arguments.backend not in (None, "auto"):
        return "--backend says so"
    if said and said != "auto":
        return f"TRIONNX_BACKEND says so ({said})"
    if choice.adapter is not None and (arguments.adapter or os.environ.get("TRIONNX_ADAPTER")):
        return f"an adapter was named ({choice.adapter})"
    kinds = {a.index: a.kind for a in adapters}
    if choice.backend == "webgpu" and kinds.get(choice.adapter) == "hardware":
        return "there is a hardware adapter"
    none = f"there is no hardware adapter{' that works' if 'hardware' in kinds.values() else ''}"
    if choice.backend == "cpu":
        return f"{none}, and onnxruntime is installed"
    return f"{none} and no onnxruntime: a software adapter is what is left"


def _measure(console: Console, arguments: argparse.Namespace) -> bool:
    try:
        found = trio.run(_cancels, arguments.backend or "auto", arguments.adapter)
    except NoAdapter as error:
        console.print(f"but it cannot be used: {error}", end="\n\n")
        return False
    console.print(f"runs on {found.where}")
    console.print(f"a run of {found.steps} matrix products ({SIZE} x {SIZE}) takes {milliseconds(found.whole_s)}")
    if not found.left_s:
        console.print("too short to be cancelled in the middle", end="\n\n")
        return True
    p50, p99 = quantile(found.left_s, 0.5), quantile(found.left_s, 0.99)
    console.print(
        f"{len(found.left_s)} of them cancelled on the way: scope left after p50 {milliseconds(p50)}, "
        f"p99 {milliseconds(p99)}, max {milliseconds(max(found.left_s))}; "
        f"segments handed over after a cancel: {found.late}",
        end="\n\n",
    )
    return True


def _advise(console: Console, survey: Survey) -> None:
    adapters, advice = survey.adapters, []
    if survey.listing.outcome == "error" and sys.platform.startswith("linux"):
        advice.append("wgpu comes with a binary for glibc Linux, macOS and Windows; elsewhere it must be built")
    if not adapters:
        advice.append(VULKAN)
    elif all(a.kind == "software" for a in adapters):
        advice.append(HARDWARE)
    if not has_onnxruntime():
        advice.append(CPU)
    for line in advice:
        console.print(f"- {line}")
    if not advice:
        console.print("nothing is missing")


async def _cancels(backend: str, adapter: str | None) -> _Measured:
    feeds = {"x": np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(np.float32)}
    async with open_scheduler(backend=backend, adapter=adapter) as scheduler:
        steps = 16
        while True:
            session = await scheduler.load(_products(steps))
            seconds, _ = await whole_runs(session, feeds, 3)
            whole = min(seconds)
            if whole >= LONG_ENOUGH_S or steps >= MOST_STEPS:
                break
            await session.aclose()
            steps = min(MOST_STEPS, max(2 * steps, int(1.3 * steps * LONG_ENOUGH_S / whole)))
        handed = HandOvers(session)
        samples = [
            await cancel_after(session, feeds, whole * (0.05 + 0.9 * number / CANCELS), handed)
            for number in range(CANCELS)
        ]
        left = [sample.left_s for sample in samples if sample.left_s is not None]
        where = f"{session.backend}: {session.adapter}"
        return _Measured(where, steps, whole, left, sum(sample.late for sample in samples))


def _products(steps: int) -> onnx.ModelProto:
    """A chain of matrix products; a rotation keeps the numbers as large as they are."""
    rng = np.random.default_rng(1)
    rotation = np.linalg.qr(rng.standard_normal((SIZE, SIZE)))[0].astype(np.float32)
    names = ["x", *(f"v{number}" for number in range(1, steps)), "y"]
    nodes = [helper.make_node("MatMul", [a, "w"], [b], name=b) for a, b in itertools.pairwise(names)]
    shape = [SIZE, SIZE]
    graph = helper.make_graph(
        nodes,
        "matrix products",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(rotation, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
