from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from trionnx import register_engine
from trionnx.actors.fake import FakeEngine, FakeModel
from trionnx.cli import main
from trionnx.gpu.seam import Done, Segment
from trionnx.scheduler import backends

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def model(tmp_path: Path) -> str:
    """y = x + x, for x of any length."""
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"], name="add")], "twice", info[:1], info[1:])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="me")
    onnx.save(proto, tmp_path / "twice.onnx")
    return str(tmp_path / "twice.onnx")


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs a command: exit code, standard output, standard error."""
    monkeypatch.delenv("TRIONNX_BACKEND", raising=False)
    monkeypatch.delenv("TRIONNX_ADAPTER", raising=False)

    def run(*words: str) -> tuple[int, str, str]:
        try:
            code = main(words)
        except SystemExit as left:
            code = -1 if left.code is None else int(left.code)
        out, err = capfd.readouterr()
        return code, out, err

    return run


def line(err: str) -> str:
    """The one line on standard error."""
    assert err.startswith("trionnx: ")
    assert err.count("\n") == 1
    return err.removeprefix("trionnx: ").rstrip("\n")


def test_run_from_files_and_save(cli: Cli, model: str, tmp_path: Path) -> None:
    x = np.arange(5, dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "all.npz", x=x)
    for number, source in enumerate([f"x={tmp_path / 'x.npy'}", str(tmp_path / "all.npz")]):
        saved = tmp_path / f"out{number}.npz"
        code, out, err = cli("run", model, source, "--backend", "cpu", "--output", str(saved))
        assert (code, err) == (0, "")
        assert "float32   [5]" in out
        assert f"saved {saved}" in out
        with np.load(saved) as outputs:
            np.testing.assert_array_equal(outputs["y"], x + x)


def test_run_at_random_is_seeded(cli: Cli, model: str, tmp_path: Path) -> None:
    def run(*words: str) -> Any:
        code, _, err = cli("run", model, "--backend", "cpu", "--shape", "x=7", "--output", str(tmp_path / "o"), *words)
        assert (code, err) == (0, "")
        with np.load(tmp_path / "o.npz") as outputs:
            return outputs["y"]

    assert run().shape == (7,)
    np.testing.assert_array_equal(run(), run("--seed", "0"))
    assert not np.array_equal(run(), run("--seed", "1"))


def test_options_may_stand_between_the_inputs(cli: Cli, model: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones(3, np.float32))
    code, out, _ = cli("run", model, "--backend", "cpu", f"x={tmp_path / 'x.npy'}", "--repeat", "3")
    assert code == 0
    assert "3 runs: fastest" in out


class Interrupting(FakeEngine):
    """Ctrl-C is pressed when the seventh segment is submitted."""

    def submit(self, segment: Segment, done: Done) -> None:
        if segment.seq == 6:
            signal.raise_signal(signal.SIGINT)
        super().submit(segment, done)


def test_ctrl_c_cancels_and_says_how_far_it_got(cli: Cli, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_registered", {})
    fakes: list[FakeEngine] = []

    def factory(*, adapter: str | int | None, max_in_flight: int) -> FakeEngine:
        fakes.append(Interrupting(max_in_flight=max_in_flight, model=FakeModel()))
        return fakes[-1]

    register_engine("interrupted", factory)
    before = signal.getsignal(signal.SIGINT)
    code, out, err = cli("run", model, "--backend", "interrupted", "--shape", "x=3", "--repeat", "2")
    assert (code, err) == (130, "")
    assert out == "cancelled in run 1 of 2, after 2 of 10 segments\n"
    assert [h.seq for h in fakes[0].log if h.what == "driver"] == [0, 1, 2, 3]
    assert signal.getsignal(signal.SIGINT) is before


def test_info(cli: Cli, model: str) -> None:
    code, out, err = cli("info", model)
    assert (code, err) == (0, "")
    words = out.split()
    assert "producer me" in " ".join(words)
    assert "opsets ai.onnx 17" in " ".join(words)
    assert "input x float32 [n]" in " ".join(words)
    assert "1 Add 1 together" in " ".join(words)


def test_explain(cli: Cli, model: str) -> None:
    code, out, err = cli("explain", model, "--backend", "cpu", "--shape", "x=4")
    assert (code, err) == (0, "")
    assert "1 nodes: 1 opaque" in out
    assert "--shape x" not in out
    _, out, _ = cli("explain", model, "--backend", "cpu")
    assert "input x is float32 [n]: give --shape x=..." in out


def test_doctor_measures(cli: Cli) -> None:
    code, out, err = cli("doctor", "--backend", "cpu")
    assert (code, err) == (0, "")
    assert "chosen: cpu, because --backend says so" in out
    assert "segments handed over after a cancel: 0" in out
    assert [row for row in out.splitlines() if "not installed" in row] == []


def test_doctor_fails_where_what_was_asked_for_is_not_there(cli: Cli) -> None:
    code, out, err = cli("doctor", "--adapter", "abacus")
    assert (code, err) == (1, "")
    assert "nothing to run on: no adapter fits 'abacus'" in out


def test_doctor_says_which_drivers_work_and_where_it_knows_that_from(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIONNX_CACHE_DIR", str(tmp_path))
    told = f"remembered in {tmp_path}; trionnx doctor --reprobe forgets it and tries anew"

    def doctor(*words: str) -> tuple[bool, bool]:
        code, out, err = cli("doctor", "--adapter", "abacus", *words)
        assert (code, err) == (1, "")
        found = " ".join(out.split())
        assert ("tried now" in found) != ("as of 20" in found) or "no adapters: no GPU driver was found" in found
        return told in found, "yes, tried now" in found

    remembered, works = doctor()
    assert not remembered
    assert doctor() == (True, False)
    assert doctor("--reprobe") == (False, works)
    (tmp_path / "probes.json").unlink()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["run", "{none}"], 1, "{none}: No such file or directory"),
        (["info", "{text}"], 1, "{text}: a text file"),
        (["run", "{cut}"], 1, "{cut}: truncated or damaged"),
        (["explain", "{cut}"], 1, "{cut}: truncated or damaged"),
        (["run", "{model}", "--shape", "q=1"], 1, "'q': expected an input of the model: 'x', got a name"),
        (["run", "{model}", "--shape", "x=1,2"], 1, "'x': expected shape (n), got (1, 2)"),
        (["run", "{model}", "x={table}"], 1, "'x': expected shape (n), got (2, 2)"),
        (["explain", "{model}", "--shape", "x=1,2"], 1, "'x': expected shape (n), got (1, 2)"),
        (["explain", "{model}", "--shape", "q=1"], 1, "'q': expected an input of the model: 'x', got a name"),
        (["run", "{model}", "x={numbers}"], 1, "'x': expected float32 of shape (n), got int64 of shape (4)\n"),
        (["run", "{model}", "x={numbers}", "x={doubles}"], 2, "x={doubles}: input 'x' has been given before"),
        (["run", "{model}", "x={numbers}", "{held}"], 2, "{held}: input 'x' has been given before"),
        (["run", "{model}", "--shape", "x=1", "--shape", "x=2"], 2, "--shape x=2: x has been given a shape before"),
        (["run", "{model}", "--shape", "x=1000000000000000"], 1, "input 'x': 4,000,000,000,000,000 bytes, drawn at"),
        (["run", "{model}", "--shape", "x=1", "--output", "{folder}"], 1, "{folder}: Is a directory"),
        (["run", "{model}", "--shape", "x=1", "--output", "{folder}/y"], 1, "{folder}/y.npz: Is a directory"),
        (["run", "{model}", "x={doubles}"], 1, "'x': expected float32 of shape (n), got float64 of shape (4)"),
        (["run", "{model}", "q={doubles}"], 1, "'q': expected an input of the model: 'x', got a name"),
        (["run", "{model}"], 2, "input 'x' is float32 [n]: give its shape, such as --shape x=1, or a file"),
        (["run", "{model}", "--shape", "x=a"], 2, "--shape x=a: expected NAME=SIZE,SIZE"),
        (["run", "{model}", "--shape", "3"], 2, "--shape 3: expected NAME=SIZE,SIZE"),
        (["run", "{model}", "{doubles}"], 2, "{doubles}: which input is it?"),
        (["run", "{model}", "x={text}"], 2, "{text}: not a .npy or .npz file of plain arrays"),
        (["run", "{model}", "x={objects}"], 2, "{objects}: not a .npy or .npz file of plain arrays"),
        (["run", "{model}", "x={none}"], 1, "{none}: No such file or directory"),
        (["run", "{model}", "x={doubles}", "--shape", "x=4"], 2, "--shape x: the shape is that of the array"),
        (["run", "{model}", "--output", "{none}/o.npz"], 1, "{none}: No such file or directory"),
        (["run", "{model}", "--shape", "x=4", "--backend", "abacus"], 2, "--backend 'abacus' is not known"),
        (["run", "{model}", "--shape=x=4", "--backend=webgpu", "--adapter=abacus"], 1, "no adapter fits 'abacus'"),
    ],
)
def test_faults_are_one_line(
    cli: Cli, model: str, tmp_path: Path, words: list[str], code: int, message: str
) -> None:
    names = ("none", "text", "cut", "doubles", "objects", "table", "numbers", "held", "folder")
    files = {name: str(tmp_path / name) for name in names}
    (tmp_path / "folder" / "y.npz").mkdir(parents=True)
    with open(files["held"], "wb") as file:
        np.savez(file, x=np.ones(4, np.float32))
    Path(files["text"]).write_text("once upon a time\n" * 20)
    Path(files["cut"]).write_bytes(Path(model).read_bytes()[:-9])
    arrays = {"doubles": np.ones(4), "objects": np.array([{}], object)}
    arrays |= {"table": np.ones((2, 2)), "numbers": np.arange(4)}
    for name, value in arrays.items():
        with open(files[name], "wb") as file:
            np.save(file, value)
    backend = [] if words[0] == "info" or any(word.startswith("--backend") for word in words) else ["--backend", "cpu"]
    got, out, err = cli(*(word.format(model=model, **files) for word in words), *backend)
    assert (got, out) == (code, "")
    assert f"{line(err)}\n".startswith(message.format(**files))


def test_faults_in_the_environment(cli: Cli, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIONNX_BACKEND", "abacus")
    code, _, err = cli("run", model, "--shape", "x=1")
    assert code == 2
    assert line(err).startswith("TRIONNX_BACKEND 'abacus' is not known")
    monkeypatch.delenv("TRIONNX_BACKEND")
    monkeypatch.setenv("TRIONNX_PROBE", "soon")
    code, _, err = cli("run", model, "--shape", "x=1")
    assert (code, line(err)) == (2, "TRIONNX_PROBE is a number of seconds, or 0 for no probe, not 'soon'")


def test_unknown_words(cli: Cli, model: str) -> None:
    for words in (["run", model, "--frob"], ["info", model, "more"], ["run", model, "--repeat", "0"], []):
        code, _, err = cli(*words)
        assert code == 2
        assert "error: " in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "m", "--seed", "-1"], "argument --seed: '-1' is no whole number from 0 on"),
        (["run", "m", "--repeat", "many"], "argument --repeat: 'many' is no whole number from 1 on"),
        (["run"], "the following arguments are required: MODEL"),
        (["run", ""], "argument MODEL: an empty path"),
        (["info", ""], "argument MODEL: an empty path"),
    ],
)
def test_wrong_words_are_told(cli: Cli, words: list[str], message: str) -> None:
    code, out, err = cli(*words)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == f"trionnx {words[0]}: error: {message}"


def test_empty_options_are_options_not_given(cli: Cli, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIONNX_BACKEND", "cpu")
    code, out, err = cli("run", model, "--shape", "x=4", "--backend", "", "--adapter", "")
    assert (code, err) == (0, "")
    assert "on cpu: " in out


INTERRUPTED = """
import importlib.abc, signal, sys

class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == at:
            signal.raise_signal(signal.SIGINT)

at, sys.argv = sys.argv[1], [{program!r}, "run", "none.onnx"]
sys.meta_path.insert(0, Interrupting())
try:
    from trionnx.cli import main
    main()
except KeyboardInterrupt:
    print("KeyboardInterrupt")
"""


@pytest.mark.parametrize("module", ["ml_dtypes", "trio", "rich.console", "trionnx.cli.run"])
def test_ctrl_c_during_the_imports(module: str) -> None:
    def run(program: str) -> tuple[int, str, str]:
        command = [sys.executable, "-c", INTERRUPTED.format(program=program), module]
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        return done.returncode, done.stdout, done.stderr

    assert run("/usr/bin/trionnx") == (130, "", "trionnx: cancelled\n")
    code, out, _ = run("/usr/bin/anothers-program")
    assert (code, out) == (0, "KeyboardInterrupt\n")


def test_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trionnx", "--version"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert done.stdout.startswith("trionnx ")
