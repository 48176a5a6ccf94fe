from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import kernels

ROOT = Path(__file__).resolve().parent.parent.parent


def work(what: str, variant: str, flops: float, seconds: float) -> kernels.Work:
    return kernels.Work(what, variant, ["kernel"], flops, 0.0, lambda writer: None, [9.0, seconds])


def test_every_variant_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/kernels.py", "--rounds=1", "--size=64", f"--json={tmp_path / 'found.json'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    works = json.loads((tmp_path / "found.json").read_text())["works"]
    by_kernel = {(w["what"], w["variant"]): w["kernels"][-1] for w in works}
    assert by_kernel["MatMul 64", "plain"] != by_kernel["MatMul 64", "shared"] == "matmul_shared"
    assert {"chosen", "plain", "shared"} == {w["variant"] for w in works if w["what"] == "Conv 3x3"}
    assert all(w["rate"] > 0 for w in works)


def test_the_chosen_kernels_are_held_against_the_plain_product_and_the_best_copy() -> None:
    works = [
        work("MatMul 512", "chosen", 1.0, 0.1),
        work("MatMul 512", "plain", 1.0, 0.4),
        work("Conv 3x3", "chosen", 1.0, 0.2),
        work("Conv 3x3", "plain", 1.0, 9.0),
        work("Relu", "elementwise", 1.0, 0.5),
        work("copy", "2", 1.0, 0.7),
        work("copy", "4", 1.0, 0.2),
    ]
    judged = {line["what"]: (round(line["ratio"], 6), line["met"]) for line in kernels.judge(works)}
    assert judged == {"MatMul 512": (4.0, True), "Conv 3x3": (2.0, False), "Relu": (0.4, False)}
