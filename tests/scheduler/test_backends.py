from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

import trionnx
from trionnx.actors.fake import FakeEngine
from trionnx.gpu.errors import NoAdapter
from trionnx.scheduler import backends
from trionnx.scheduler.backends import Choice, choose, pick


@dataclass
class Adapter:
    index: int
    kind: str


HARDWARE, SOFTWARE = Adapter(1, "hardware"), Adapter(0, "software")


def test_auto_takes_hardware_then_onnxruntime_then_software() -> None:
    assert pick([SOFTWARE, HARDWARE], onnxruntime=True) == Choice("webgpu", 1)
    assert pick([SOFTWARE], onnxruntime=True) == Choice("cpu", None)
    assert pick([SOFTWARE], onnxruntime=False) == Choice("webgpu", 0)
    with pytest.raises(NoAdapter) as caught:
        pick([], onnxruntime=False)
    assert "mesa-vulkan-drivers" in str(caught.value)
    assert "pip install 'trionnx[cpu]'" in str(caught.value)


async def test_auto_asks_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_adapters", lambda: [SOFTWARE, HARDWARE])
    assert await choose(None, None) == Choice("webgpu", 1)
    assert await choose("auto", None) == Choice("webgpu", 1)


async def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIONNX_BACKEND", "cpu")
    monkeypatch.setenv("TRIONNX_ADAPTER", "llvm")
    assert await choose(None, None) == Choice("cpu", "llvm")
    assert await choose("auto", None) == Choice("cpu", "llvm")
    assert await choose("webgpu", None) == Choice("webgpu", "llvm")
    assert await choose("webgpu", "H200") == Choice("webgpu", "H200")
    monkeypatch.setenv("TRIONNX_ADAPTER", "2")
    assert await choose("webgpu", None) == Choice("webgpu", 2)
    assert await choose("webgpu", "") == Choice("webgpu", 2)


async def test_an_adapter_that_is_named_is_used_whatever_its_kind() -> None:
    assert await choose("auto", "llvm") == Choice("webgpu", "llvm")
    assert await choose(None, 0) == Choice("webgpu", 0)


async def test_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    known = "known are auto, cpu, webgpu$"
    with pytest.raises(ValueError, match=f"back end 'cuda' is not known; {known}"):
        await choose("cuda", None)
    with pytest.raises(ValueError, match=known):
        async with trionnx.open_scheduler(backend="cuda"):
            pass
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        with pytest.raises(ValueError, match=known):
            await scheduler.load("model.onnx", backend="cuda")
    monkeypatch.setenv("TRIONNX_BACKEND", "cuda")
    with pytest.raises(ValueError, match="the back end in TRIONNX_BACKEND, 'cuda' is not known"):
        await choose(None, None)


async def test_an_engine_of_ones_own(engines: dict[str, Any]) -> None:
    made = []

    def factory(*, adapter: str | int | None, max_in_flight: int) -> FakeEngine:
        made.append((adapter, max_in_flight))
        return FakeEngine(adapter, max_in_flight)

    trionnx.register_engine("mine", factory)
    async with trionnx.open_scheduler(backend="mine", adapter="here", max_in_flight=5) as scheduler:
        await scheduler.load("model.onnx")
        await scheduler.load("model.onnx", adapter=7)
    assert made == [("here", 5), (7, 5)]
    with pytest.raises(ValueError, match="cannot be called 'auto'"):
        trionnx.register_engine("auto", factory)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_in_flight": 0}, ValueError, "max_in_flight is at least 1, not 0"),
        ({"max_in_flight": "2"}, TypeError, "max_in_flight is a whole number, not '2'"),
        ({"max_in_flight": 1.5}, TypeError, "max_in_flight is a whole number, not 1.5"),
        ({"max_in_flight": True}, TypeError, "max_in_flight is a whole number, not True"),
        ({"adapter": 1.5}, TypeError, "adapter is an index, a part of a name or None, not float"),
        ({"backend": 3}, TypeError, "back end is a name or None, not int"),
    ],
)
async def test_arguments_of_a_wrong_kind(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        async with trionnx.open_scheduler(**arguments):
            pass
    assert str(caught.value) == message


def test_importing_trionnx_imports_no_engine() -> None:
    heavy = {"wgpu", "onnx", "onnx_ir", "onnxruntime"}
    code = f"import sys, trionnx; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    assert all(hasattr(trionnx, name) for name in trionnx.__all__)
