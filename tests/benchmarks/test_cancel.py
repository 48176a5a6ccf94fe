from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import cancel
import peer
import record
import trionnx
import works
from moments import cancel_at_random
from overhead import compare
from record import Cancels, Record
from trionnx.actors.fake import FakeModel
from trionnx.gpu.seam import StepView

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


SHORT = ["--backend=cpu", "--rounds=2", "--pairs=1", "--policies", "default", "unsplit"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/cancel.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


def test_it_measures(model: str, tmp_path: Path) -> None:
    done = run("--models", model, *SHORT, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(done.stdout)
    assert (found["work"], found["backend"]) == ("m", "cpu")
    for cancels in found["cancels"]:
        assert (cancels["late"], cancels["different"], cancels["segments"]) == (0, 0, 1)
        # What is one step for the engine, no policy can bound.
        assert (cancels["interval_s"], cancels["limit"], cancels["miscounted"]) == (None, None, None)
        assert len(cancels["left_s"]) + cancels["over_before"] <= 6
    assert [cost["policy"] for cost in found["costs"]] == ["default", "20ms"]
    (tmp_path / "kept.json").write_text(done.stdout)
    again = run("--read", str(tmp_path / "kept.json"), "--plot", str(tmp_path / "drawn.png"))
    assert again.returncode == 0, again.stderr
    assert "checkpoints cost, median" in again.stdout
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


def test_it_judges(tmp_path: Path) -> None:
    slow = Cancels("default", 0.005, 2, [0.1], [0.2], compared=1)
    record.save([Record("products", "webgpu", "some GPU", 1.0, 0.0, 0.0, 0.0, [slow], [])], tmp_path / "kept.json")
    shown = run("--read", str(tmp_path / "kept.json"))
    assert (shown.returncode, shown.stderr) == (0, "")
    judged = run("--read", str(tmp_path / "kept.json"), "--judge")
    assert judged.returncode == 1
    assert judged.stderr == "cancel.py: products on some GPU, default: p99 100.0 ms, and 25 ms are the bound\n"


def test_its_own_numbers_are_told_where_the_peer_does_not_run(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(*_: object, **__: object) -> None:
        raise peer.Unavailable("it finds no adapter")

    monkeypatch.setattr(peer, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["cancel.py", "--models", model, *SHORT, "--peer"])
    assert cancel.main() == 1
    out, err = capsys.readouterr()
    assert "finish after" in out
    assert err.endswith("cancel.py: it finds no adapter\n")


@pytest.fixture
async def session() -> AsyncIterator[trionnx.Session]:
    """Twelve steps of 5 ms, and one of 20 ms that can be cut."""
    model = FakeModel(blocks=((StepView("gpu", cost_s=0.005),) * 12, (StepView("gpu", 8, 0.02),)))
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        yield await scheduler.load(model)


async def test_moments_are_measured(session: trionnx.Session) -> None:
    feeds = {"x": np.arange(4, dtype=np.float32)}
    found = await cancel_at_random(session, feeds, "default", rounds=6, check=2, seed="0")
    assert (len(found.left_s), found.segments, found.compared) == (6, 16, 4)
    assert (found.late, found.different, found.miscounted) == (0, 0, 0)
    assert found.faults() == []
    assert found.limit == 2
    assert 0 < found.after <= 2
    assert "begin" not in vars(session._actor)


async def test_an_engine_that_goes_on_is_seen(session: trionnx.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session._actor, "stop_nowait", lambda _: None)
    found = await cancel_at_random(session, {"x": np.ones(4, np.float32)}, "default", rounds=6, check=2, seed="0")
    assert found.after > 2
    assert "segments finished after a cancel" in found.misses()[-1]


async def test_cuts_are_told(session: trionnx.Session) -> None:
    default, longer = await compare(session, {"x": np.ones(4, np.float32)}, 2)
    assert (default.policy, default.cuts, longer.policy, longer.cuts) == ("default", 1, "20ms", 0)
    assert default.longest_s == pytest.approx(0.02)
    assert (default.aim, longer.aim) == (0.15, 0.05)
    assert len(default.ratios) == len(longer.ratios) == len(default.whole_s) == 2


def test_a_model_that_fails_does_not_end_the_others(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = works.work

    def work(name: str, shapes: Sequence[str] = ()) -> works.Work:
        if name == "bad":
            raise trionnx.DeviceHung("it hangs")
        return made(name, shapes)

    monkeypatch.setattr(works, "work", work)
    monkeypatch.setattr(sys, "argv", ["cancel.py", "--models", "bad", model, *SHORT])
    assert cancel.main() == 1
    out, err = capsys.readouterr()
    assert "of 1 same" in out or "of 2 same" in out
    assert err.endswith("cancel.py: bad: it hangs\n")
