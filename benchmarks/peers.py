"""How fast trionnx is beside its peers: onnxruntime-webgpu, tinygrad (WEBGPU), and onnxruntime on the CPU.

    python benchmarks/peers.py [--adapter A] [--models NAME,...] [--engines NAME,...] [--rounds N] [--starts N]
                               [--limit SECONDS] [--json FILE] [--plot FILE] [--judge]

Models are names from examples/real_models.py, matmul_512 and matmul_1024 (a product of square matrices of that size,
one of them known), or .onnx files whose inputs have fixed shapes. Every engine has a process of its own and the same
inputs; warm runs alternate. onnxruntime-webgpu and tinygrad live in virtual environments of their own, and take the
adapter that their Dawn ranks first: narrow the drivers down for all (VK_ICD_FILENAMES for Vulkan) where that is not
the one `--adapter` picks. A peer that cannot be installed, or does not run a model, has the reason in its place.

--judge exits with 1 where an aim is missed: against onnxruntime-webgpu on a software adapter, 10 x as fast warm in the
geometric mean over TEN, none of them less than 3 x; matrix products 12 x; the others no slower; load and first run
together twice as fast.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import real_models
from chart import draw_chart
from contest import ENGINES, contest
from trionnx.cli.console import output, quiet_drivers, table
from trionnx.cli.inputs import UsageError, draw
from trionnx.gpu.device.adapters import choose_adapter
from trionnx.gpu.errors import NoAdapter
from trionnx.gpu.graph.read import read_model

__all__: list[str] = []

TEN = (
    "magika_v3_3", "ppocrv4_rec", "captcha_crnn", "opennsfw", "ppocr_cls_v2", "oww_embedding", "caustic_painn",
    "ppocrv4_det", "ddddocr_det", "eeg_spindle",
)  # fmt: skip
"""What onnxruntime-webgpu computes on the GPU; the rest of the models it computes mostly on the CPU."""
PRODUCTS = ("matmul_512", "matmul_1024")
OTHERS = ("silero_vad", "arname_encoder", "arname_decoder", "t5small_title_encoder_int8")
US, PEER = "trionnx", "onnxruntime-webgpu"
MEAN, LEAST, PRODUCT, OTHER, START = 10.0, 3.0, 12.0, 1.0, 2.0
RIGHT = 2e-3


def main() -> int:
    """Measure, print, judge."""
    arguments = parse()
    adapter = choose_adapter(arguments.adapter)
    engines = [ENGINES[name] for name in arguments.engines]
    notes = Console(stderr=True, markup=False, highlight=False)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            model, feeds = work(name, Path(folder))
            options = {"adapter": adapter.index, "host_steps": name not in TEN}
            found[name] = contest(
                engines, model, feeds, options,
                rounds=arguments.rounds, starts=arguments.starts, limit_s=arguments.limit,
                say=lambda line, name=name: notes.print(f"{name}: {line}", style="dim"),  # type: ignore[misc]
            )  # fmt: skip
            if len(arguments.models) > 1 and not arguments.json:
                show_model(name, found[name])
    judged = judge(found)
    whole = {"adapter": str(adapter), "driver": adapter.driver, "models": found, "judged": judged}
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(whole, indent=2) + "\n")
    if arguments.plot:
        warm = {
            name: {key: one["warm_s"] for key, one in row.items() if "warm_s" in one} for name, row in found.items()
        }
        draw_chart(Path(arguments.plot), f"One warm run on {adapter}", warm, arguments.engines)
    show(str(adapter), found, judged)
    return 1 if arguments.judge and not all(line["met"] for line in judged) else 0


def parse() -> argparse.Namespace:
    """The command line."""
    summary = __doc__.partition("\n")[0] if __doc__ else None
    parser = argparse.ArgumentParser(description=summary, usage="peers.py [options]")

    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    def engines(text: str) -> list[str]:
        if unknown := [name for name in names(text) if name not in ENGINES]:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(ENGINES)}")
        return names(text)

    parser.add_argument("--adapter", default=None, help="index or part of a name")
    parser.add_argument("--models", type=names, default=[*TEN, *OTHERS, *PRODUCTS], metavar="NAME,...")
    parser.add_argument("--engines", type=engines, default=list(ENGINES), metavar="NAME,...")
    parser.add_argument("--rounds", type=int, default=5, help="warm runs of each engine (default: 5)")
    parser.add_argument("--starts", type=int, default=1, help="processes of each engine (default: 1)")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one run (default: 120)")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE")
    parser.add_argument("--judge", action="store_true", help="exit with 1 where an aim is missed")
    return parser.parse_args()


def work(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A model's path and its inputs."""
    if name in real_models.MODELS:
        return real_models.model(name), real_models.feeds(name)
    kind, _, size = name.rpartition("_")
    if kind == "matmul" and size.isdigit():
        return product(int(size), folder)
    path = Path(name)
    if path.suffix != ".onnx":
        raise UsageError(f"{name} is no model of examples/real_models.py, no matmul_N, and no .onnx file")
    return path, draw(read_model(path, optimise=False).inputs, {}, seed=0)


def product(size: int, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A model that multiplies two square matrices, the right one known."""
    rng = np.random.default_rng(0)
    weights = numpy_helper.from_array(rng.standard_normal((size, size), np.float32), "w")
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [size, size]) for name in "xy"]
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "product", infos[:1], infos[1:], [weights])
    path = folder / f"matmul_{size}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path, {"x": rng.standard_normal((size, size), np.float32)}


def judge(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What is aimed at against onnxruntime-webgpu: how far each is met. Empty where it did not take part."""
    lines: list[dict[str, Any]] = []

    def aim(what: str, value: float, least: float) -> None:
        lines.append({"what": what, "ratio": value, "aim": least, "met": value >= least})

    warm: list[float] = []
    for name, row in found.items():
        ours, peer = row.get(US, {}), row.get(PEER, {})
        if "warm_s" not in ours:
            if ours:
                lines.append({"what": f"{name} runs", "ratio": 0.0, "aim": 1.0, "met": False})
            continue
        if "warm_s" not in peer:
            continue
        ratio = peer["warm_s"] / ours["warm_s"]
        if name in TEN:
            warm.append(ratio)
        aim(f"{name}, warm", ratio, LEAST if name in TEN else PRODUCT if name in PRODUCTS else OTHER)
        aim(f"{name}, load and first run", *((start_s(peer) / start_s(ours)), START))
    if warm:
        aim(f"geometric mean of {len(warm)}, warm", math.prod(warm) ** (1 / len(warm)), MEAN)
    return lines


def start_s(one: dict[str, Any]) -> float:
    """Load and first run together."""
    return float(one["load_s"] + one["first_s"])


def show_model(name: str, row: dict[str, Any]) -> None:
    """One line on standard error for what has been measured so far."""
    parts = [f"{engine} {seconds(one)}" for engine, one in row.items()]
    print(f"{name}: {', '.join(parts)}", file=sys.stderr)


def seconds(one: dict[str, Any]) -> str:
    """How long a warm run took, or why there is none."""
    return f"{one['warm_s'] * 1e3:.1f} ms" if "warm_s" in one else one.get("error", "")[:60]


def show(adapter: str, found: dict[str, Any], judged: list[dict[str, Any]]) -> None:
    """Print tables."""
    console = output()
    console.print(f"on {adapter}")
    columns = ("model", "engine", "load", "first run", "warm run", "trionnx is faster", "start", "peak memory", "apart")
    rows = table(*columns)
    for name, row in found.items():
        ours = row.get(US, {})
        for engine, one in row.items():
            if "warm_s" not in one:
                rows.add_row(name, engine, "", "", seconds(one))
                continue
            ratios = ["", ""]
            if engine != US and "warm_s" in ours:
                ratios = [f"{one['warm_s'] / ours['warm_s']:.2f} x", f"{start_s(one) / start_s(ours):.2f} x"]
            apart, peak = one["apart"], one["peak_bytes"]
            rows.add_row(
                name, engine, f"{one['load_s']:.2f} s", f"{one['first_s']:.2f} s", seconds(one), *ratios,
                "" if peak is None else f"{peak / 2**20:.0f} MiB",
                "" if apart is None else f"{apart:.0e}" + (" !" if apart > RIGHT else ""),
            )  # fmt: skip
    console.print(rows)
    if judged:
        aims = table("against onnxruntime-webgpu", "faster", "aim", "")
        for line in judged:
            met = "met" if line["met"] else "missed"
            aims.add_row(line["what"], f"{line['ratio']:.2f} x", f"{line['aim']:g} x", met)
        console.print(aims)


if __name__ == "__main__":
    quiet_drivers()
    try:
        sys.exit(main())
    except (NoAdapter, UsageError, real_models.Unavailable, OSError) as error:
        sys.exit(f"peers.py: {error}")
