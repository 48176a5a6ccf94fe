from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import cancel
import peer

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Sixty matrix products, one after the other."""
    weights = numpy_helper.from_array(np.eye(256, dtype=np.float32), "w")
    names = ["x", *(f"v{number}" for number in range(59)), "y"]
    nodes = [helper.make_node("MatMul", [names[i], "w"], [names[i + 1]]) for i in range(60)]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [256, 256]) for name in "xy"]
    graph = helper.make_graph(nodes, "products", infos[:1], infos[1:], [weights])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    return str(tmp_path / "m.onnx")


def test_it_measures(model: str) -> None:
    command = [sys.executable, "benchmarks/cancel.py", model, "--backend=cpu", "--rounds=1", "--json"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["backend"], found["late_segments"], found["different_outputs"]) == ("cpu", 0, 0)
    assert found["cancelled"] + found["over_before"] == 10
    assert found["segments"] == 1


def test_its_own_numbers_are_told_where_the_peer_does_not_run(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(*_: object, **__: object) -> None:
        raise peer.Unavailable("it finds no adapter")

    monkeypatch.setattr(peer, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["cancel.py", model, "--backend=cpu", "--rounds=1", "--peer"])
    assert cancel.main() == 1
    out, err = capsys.readouterr()
    assert "cancel to scope left, max" in out
    assert err == "cancel.py: it finds no adapter\n"
