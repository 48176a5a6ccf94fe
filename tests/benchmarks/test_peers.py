from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import contest
import peer
import peers

ONCE: dict[str, Any] = {"rounds": 1, "starts": 1, "limit_s": 60.0, "say": lambda line: None}
ROOT = Path(__file__).resolve().parent.parent.parent


def test_engines_run_in_turns_and_agree(tmp_path: Path) -> None:
    found, chart = tmp_path / "found.json", tmp_path / "chart.png"
    command = [sys.executable, "benchmarks/peers.py", "--models=matmul_64", "--engines=trionnx,onnxruntime"]
    command += ["--rounds=2", "--starts=2", f"--json={found}", f"--plot={chart}", "--judge"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    row = json.loads(found.read_text())["models"]["matmul_64"]
    for one in row.values():
        assert len(one["runs_s"]) == 2
        assert min(one["load_s"], one["first_s"], one["warm_s"]) > 0
        assert one["apart"] < 1e-5
    assert row["trionnx"]["host_steps"] == 0
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_a_peer_that_is_not_to_be_had_has_the_reason_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def environment(*_: object) -> Path:
        raise peer.Unavailable("no network")

    monkeypatch.setattr(peer, "environment", environment)
    folder = Path(__file__).parent
    engines = [contest.ENGINES["tinygrad"]]
    found = contest.contest(engines, folder / "no.onnx", {}, {}, **ONCE)
    assert found == {"tinygrad": {"error": "no network"}}


def test_an_engine_that_fails_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"nonsense")
    engines = [contest.ENGINES["onnxruntime"]]
    found = contest.contest(engines, broken, {}, {}, **ONCE)
    assert "INVALID_PROTOBUF" in found["onnxruntime"]["error"]


def times(warm: float, start: float) -> dict[str, float]:
    return {"warm_s": warm, "load_s": start / 2, "first_s": start / 2}


def test_aims() -> None:
    found = {
        "opennsfw": {"trionnx": times(1, 4), "onnxruntime-webgpu": times(4, 9)},
        "magika_v3_3": {"trionnx": times(1, 4), "onnxruntime-webgpu": times(64, 7)},
        "matmul_512": {"trionnx": times(1, 1), "onnxruntime-webgpu": times(11, 2)},
        "silero_vad": {"trionnx": times(2, 1), "onnxruntime-webgpu": times(1, 2)},
        "captcha_crnn": {"trionnx": {"error": "out of luck"}, "onnxruntime-webgpu": times(1, 1)},
        "eeg_spindle": {"trionnx": times(1, 1), "onnxruntime-webgpu": {"error": "no adapter"}},
    }
    judged = {line["what"]: (round(line["ratio"], 6), line["met"]) for line in peers.judge(found)}
    assert judged == {
        "opennsfw, warm": (4.0, True),
        "opennsfw, load and first run": (2.25, True),
        "magika_v3_3, warm": (64.0, True),
        "magika_v3_3, load and first run": (1.75, False),
        "matmul_512, warm": (11.0, False),
        "matmul_512, load and first run": (2.0, True),
        "silero_vad, warm": (0.5, False),
        "silero_vad, load and first run": (2.0, True),
        "captcha_crnn runs": (0.0, False),
        "geometric mean of 2, warm": (16.0, True),
    }
