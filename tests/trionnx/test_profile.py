from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from trionnx.cli import main, profile
from trionnx.cli.profile import Row, share_of_peak, summed
from trionnx.gpu.device.adapters import choose_adapter
from trionnx.gpu.device.peak import Peak, Peaks
from trionnx.gpu.seam import NodeTime

TIMES = (
    NodeTime("a", "upload", "host", 1.0, 0.0, 400),
    NodeTime("a", "conv", "gpu", 2.0, 300.0, 30),
    NodeTime("b", "conv", "gpu", 1.0, 100.0, 10),
    NodeTime("b", "conv", "gpu", 3.0, 100.0, 10),
    NodeTime("b", "map", "gpu", 0.5, 5.0, 40),
)


def test_sums_by_kernel_and_by_node():
    assert summed(TIMES, nodes=False) == [
        Row("conv", ("a", "b"), "gpu", 3, 6.0, 500.0, 50),
        Row("upload", ("a",), "host", 1, 1.0, 0.0, 400),
        Row("map", ("b",), "gpu", 1, 0.5, 5.0, 40),
    ]
    assert summed(TIMES, nodes=True) == [
        Row("b", ("conv", "map"), "gpu", 3, 4.5, 205.0, 60),
        Row("a", ("conv",), "gpu", 1, 2.0, 300.0, 30),
        Row("a", ("upload",), "host", 1, 1.0, 0.0, 400),
    ]


@pytest.mark.parametrize(
    ("flops", "nbytes", "seconds", "share", "by"),
    [
        (50.0, 4, 1.0, 0.5, "compute"),
        (50.0, 8, 1.0, 0.8, "memory"),
        (0.0, 30, 1.0, 3.0, "memory"),
        (9.0, 9, 0.0, 0.0, "memory"),
    ],
)
def test_the_share_of_the_peak_is_of_what_bounds_the_kernel(flops, nbytes, seconds, share, by):
    row = Row("k", (), "gpu", 1, seconds, flops, nbytes)
    assert share_of_peak(row, Peak(flops_per_s=100.0, bytes_per_s=10.0)) == (share, by)


@pytest.fixture
def model(tmp_path: Path) -> str:
    made = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 18]>'
        "g (float[n,32] x) => (float[n,64] y) <float[32,64] w> { [product] a = MatMul(x, w) [ends] y = Softmax(a) }"
    )
    weights = onnx.numpy_helper.from_array(np.ones((32, 64), np.float32), "w")
    del made.graph.initializer[:]
    made.graph.initializer.append(weights)
    onnx.save(made, tmp_path / "model.onnx")
    return str(tmp_path / "model.onnx")


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Peak:
    """What is remembered of the adapter."""
    monkeypatch.delenv("TRIONNX_BACKEND", raising=False)
    monkeypatch.setenv("TRIONNX_CACHE_DIR", str(tmp_path / "cache"))
    peak = Peak(2e12, 1e12, 1.0)
    Peaks(tmp_path / "cache").put(choose_adapter().identity, peak)
    return peak


def words(model: str, *more: str, backend: str = "webgpu") -> list[str]:
    return ["profile", model, "--backend", backend, "--shape", "x=48,32", "--repeat", "2", *more]


def test_a_table_of_kernels_and_of_nodes(model, known, capfd):
    assert main(words(model)) == 0
    out, err = capfd.readouterr()
    assert err == ""
    table, _, notes = out.partition("dispatches: ")
    rows = [line.split() for line in table.splitlines()]
    [product] = [row for row in rows if row and row[0].startswith("matmul")]
    assert product[1:3] == ["gpu", "1"]
    assert product[-2:] == ["compute", "product"]
    assert notes.startswith("2, uploads: 1; ")
    assert "peak, as measured: 2000.0 GFLOP/s in registers, 1000.0 GB/s copied" in out
    assert main(words(model, "--nodes")) == 0
    out, _ = capfd.readouterr()
    names = [line.split()[0] for line in out.splitlines() if " gpu " in line]
    assert sorted(names) == ["ends", "product"]


def test_json(model, known, capfd):
    assert main(words(model, "--json")) == 0
    said = json.loads(capfd.readouterr().out)
    assert (said["backend"], said["peak"]["flops_per_s"]) == ("webgpu", known.flops_per_s)
    assert said["steps"] == {
        "dispatches": 2, "copies": 0, "uploads": 1, "fetches": 0, "host steps": 0, "whole models": 0,
    }  # fmt: skip
    [product] = [row for row in said["rows"] if row["also"] == ["product"] and row["where"] == "gpu"]
    assert product["flops"] == 2 * 48 * 32 * 64
    assert product["nbytes"] == 4 * (48 * 32 + 32 * 64 + 48 * 64)
    bound = max(product["flops"] / known.flops_per_s, product["nbytes"] / known.bytes_per_s)
    assert product["of_peak"] == pytest.approx(bound / product["seconds"])
    assert sum(row["share"] for row in said["rows"]) == pytest.approx(1.0)
    assert said["measured_seconds"] == pytest.approx(sum(row["seconds"] for row in said["rows"]))


def test_a_peak_is_measured_once_and_anew_where_that_is_wanted(model, known, capfd, monkeypatch, tmp_path):
    measured = []

    def measure(device: object, check: object) -> Peak:
        measured.append(device)
        return Peak(3e12 * len(measured), 1e12, 2.0)

    monkeypatch.setattr(profile, "measure_peak", measure)

    def flops_per_s(*more: str) -> object:
        assert main(words(model, "--json", *more)) == 0
        return json.loads(capfd.readouterr().out)["peak"]["flops_per_s"]

    assert (flops_per_s(), len(measured)) == (2e12, 0)
    assert (flops_per_s("--remeasure"), len(measured)) == (3e12, 1)
    assert (flops_per_s(), len(measured)) == (3e12, 1)
    (tmp_path / "cache" / "peaks.json").unlink()
    assert (flops_per_s(), len(measured)) == (6e12, 2)


def test_the_cpu_engine_is_one_line(model, known, capfd):
    assert main(words(model, backend="cpu")) == 0
    out, err = capfd.readouterr()
    assert err == ""
    [line] = [line.split() for line in out.splitlines() if "opaque" in line]
    assert line[:4] == ["ONNX", "Runtime", "opaque", "1"]
    assert line[-3:] == ["the", "whole", "model"]
    assert "whole models: 1; " in out
    assert "peak" not in out.replace("of peak", "")


def test_faults_are_those_of_run(model, known, capfd):
    assert main(["profile", model, "--backend", "cpu"]) == 2
    assert "input 'x' is float32 [n, 32]: give its shape" in capfd.readouterr().err
    assert main(["profile", model, "--shape", "x=1,32", "--backend", "webgpu", "--adapter", "abacus"]) == 1
    assert "no adapter fits 'abacus'" in capfd.readouterr().err
