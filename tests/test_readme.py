from __future__ import annotations

import builtins
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import trionnx
from trionnx.cli.main import _parser

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


@pytest.mark.parametrize("backend", ["cpu", "webgpu"])
def test_the_sample_runs(backend: str, tmp_path: Path) -> None:
    (sample,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "sample.py").write_text(sample)
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 3]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", infos[:1], infos[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(tmp_path / "sample.py"), str(tmp_path / "m.onnx")],
        env={**os.environ, "TRIONNX_BACKEND": backend},
        capture_output=True,
        text=True,
        check=False,
    )
    if "trionnx.gpu.errors.NoAdapter" in done.stderr:
        pytest.skip("no GPU driver is here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"on {backend}: ")
    assert "[(1, 3)]" in done.stdout


def test_its_commands_are_there() -> None:
    blocks = "".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))
    commands = re.findall(r"^trionnx (.*?)(?:  +#.*)?$", blocks, re.MULTILINE)
    assert {command.split()[0] for command in commands} == {"run", "info", "explain", "doctor", "profile", "top"}
    for command in commands:
        _parser().parse_known_args(command.split())


def test_the_errors_it_names_are_there() -> None:
    section = README.partition("## Errors")[2].partition("## ")[0]
    for name in re.findall(r"`([A-Z]\w+)`", section):
        assert hasattr(trionnx, name) or hasattr(builtins, name)


def test_run_options_are_the_third_argument() -> None:
    assert "`run_options` is the third\n  argument" in README
    assert list(inspect.signature(trionnx.Session.run).parameters)[1:] == ["output_names", "input_feed", "run_options"]
