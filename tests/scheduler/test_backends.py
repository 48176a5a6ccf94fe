from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
import trio

import trionnx
from trionnx.actors.fake import FakeEngine
from trionnx.gpu.device.adapters import AdapterInfo
from trionnx.gpu.device.verdicts import Survey, Verdict
from trionnx.gpu.errors import NoAdapter
from trionnx.scheduler import backends
from trionnx.scheduler.backends import Choice, choose, known_adapters


def adapter(index: int, name: str, kind: Literal["hardware", "software"]) -> AdapterInfo:
    return AdapterInfo(index, name, "driver 1.0", "Vulkan", kind, f"{name}{index}")


SOFTWARE, RADEON, GEFORCE = (
    adapter(0, "llvmpipe", "software"),
    adapter(1, "Radeon", "hardware"),
    adapter(2, "GeForce", "hardware"),
)
CPU = Choice("cpu", None)


class FakeProbe:
    """Knows these adapters; those in `bad` do not work."""

    def __init__(self, adapters: Sequence[AdapterInfo], bad: Mapping[str, str], listing: Verdict) -> None:
        self.survey = Survey(listing, tuple(adapters), ("sound.json",))
        self.bad, self.tried = bad, list[int]()

    async def attempt(self, adapter: AdapterInfo) -> Verdict:
        self.tried.append(adapter.index)
        await trio.lowlevel.checkpoint()
        return Verdict("crash", self.bad[adapter.name]) if adapter.name in self.bad else Verdict("ok")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeProbe]:
    """`machine(adapters, onnxruntime=..., bad=...)`: what the probe finds; nothing is opened."""

    def make(
        adapters: Sequence[AdapterInfo] = (),
        *,
        onnxruntime: bool = True,
        bad: Mapping[str, str] | None = None,
        listing: Verdict | None = None,
    ) -> FakeProbe:
        probe = FakeProbe(adapters, bad or {}, listing or Verdict("ok"))

        @asynccontextmanager
        async def opened(cache_dir: object) -> AsyncIterator[FakeProbe]:
            await trio.lowlevel.checkpoint()
            yield probe

        monkeypatch.setattr(backends, "open_probe", opened)
        monkeypatch.setattr(backends, "has_onnxruntime", lambda: onnxruntime)
        monkeypatch.setattr(backends, "restrict", lambda drivers: None)
        return probe

    return make


ALL = (SOFTWARE, RADEON, GEFORCE)


@pytest.mark.parametrize(
    ("there", "onnxruntime", "bad", "chosen", "tried"),
    [
        (ALL, True, [], Choice("webgpu", 1), [1]),
        (ALL, True, ["Radeon"], Choice("webgpu", 2), [1, 2]),
        (ALL, True, ["Radeon", "GeForce"], CPU, [1, 2]),
        (ALL, False, ["Radeon", "GeForce"], Choice("webgpu", 0), [1, 2, 0]),
        ([SOFTWARE], True, [], CPU, []),
        ([SOFTWARE], True, ["llvmpipe"], CPU, []),
        ([SOFTWARE], False, [], Choice("webgpu", 0), [0]),
        ([], True, [], CPU, []),
    ],
)
async def test_auto_takes_hardware_then_onnxruntime_then_software_that_works(
    machine: Callable[..., FakeProbe],
    there: Sequence[AdapterInfo],
    onnxruntime: bool,
    bad: Sequence[str],
    chosen: Choice,
    tried: Sequence[int],
) -> None:
    for backend in (None, "auto"):
        probe = machine(there, onnxruntime=onnxruntime, bad=dict.fromkeys(bad, "broken"))
        assert await choose(backend, None) == chosen
        assert probe.tried == tried


async def test_nothing_to_run_on(machine: Callable[..., FakeProbe]) -> None:
    machine([], onnxruntime=False)
    with pytest.raises(NoAdapter) as caught:
        await choose(None, None)
    assert "mesa-vulkan-drivers" in str(caught.value)
    assert "pip install 'trionnx[cpu]'" in str(caught.value)
    machine(ALL, onnxruntime=False, bad={"llvmpipe": "hangs", "Radeon": "lies", "GeForce": "burns"})
    with pytest.raises(NoAdapter) as caught:
        await choose(None, None)
    assert str(caught.value) == (
        f"no adapter can be used: 1: {RADEON}: lies; 2: {GEFORCE}: burns; 0: {SOFTWARE}: hangs"
    )


async def test_webgpu_by_name_goes_through_the_probe_and_never_to_another_back_end(
    machine: Callable[..., FakeProbe],
) -> None:
    probe = machine(ALL, bad={"Radeon": "lies"})
    assert await choose("webgpu", None) == Choice("webgpu", 2)
    assert await choose("webgpu", "llvm") == Choice("webgpu", 0)
    assert probe.tried == [1, 2, 0]
    for name in ("radeon", 1, "1"):
        with pytest.raises(NoAdapter, match=r"no adapter can be used: 1: Radeon .*: lies$"):
            await choose("webgpu", name)
    with pytest.raises(NoAdapter, match="no adapter fits 'voodoo'"):
        await choose("webgpu", "voodoo")
    machine([])
    with pytest.raises(NoAdapter, match="mesa-vulkan-drivers"):
        await choose("webgpu", None)


async def test_drivers_that_cannot_even_be_listed(machine: Callable[..., FakeProbe]) -> None:
    machine(listing=Verdict("timeout", "hangs"))
    assert await choose("auto", None) == CPU
    for backend, name in (("webgpu", None), ("auto", "radeon")):
        with pytest.raises(NoAdapter, match=r"^no adapter can be used: hangs$"):
            await choose(backend, name)
    machine(listing=Verdict("timeout", "hangs"), onnxruntime=False)
    with pytest.raises(NoAdapter, match=r"^no adapter can be used: hangs$"):
        await choose("auto", None)


async def test_this_process_opens_only_what_the_probe_found_sound(
    machine: Callable[..., FakeProbe], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(ALL)
    opened: list[object] = []
    monkeypatch.setattr(backends, "restrict", opened.append)
    await choose("webgpu", None)
    assert opened == [("sound.json",)]


async def test_arguments_win_over_the_environment(
    machine: Callable[..., FakeProbe], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(ALL)
    monkeypatch.setenv("TRIONNX_BACKEND", "cpu")
    monkeypatch.setenv("TRIONNX_ADAPTER", "llvm")
    assert await choose(None, None) == Choice("cpu", "llvm")
    assert await choose("auto", None) == Choice("cpu", "llvm")
    assert await choose("webgpu", None) == Choice("webgpu", 0)
    assert await choose("webgpu", "GeForce") == Choice("webgpu", 2)
    monkeypatch.setenv("TRIONNX_ADAPTER", "2")
    assert await choose("webgpu", None) == Choice("webgpu", 2)
    assert await choose("webgpu", "") == Choice("webgpu", 2)


async def test_an_adapter_that_is_named_is_used_whatever_its_kind(machine: Callable[..., FakeProbe]) -> None:
    machine(ALL)
    assert await choose("auto", "llvm") == Choice("webgpu", 0)
    assert await choose(None, 0) == Choice("webgpu", 0)


async def test_without_a_probe(machine: Callable[..., FakeProbe], monkeypatch: pytest.MonkeyPatch) -> None:
    probe = machine(ALL)
    monkeypatch.setattr(backends, "_adapters", lambda: list(ALL))
    monkeypatch.setenv("TRIONNX_PROBE", "0")
    assert await choose(None, None) == Choice("webgpu", 1)
    assert await choose("webgpu", "Voodoo") == Choice("webgpu", "Voodoo")  # the engine finds that there is none
    assert await choose("auto", 7) == Choice("webgpu", 7)
    assert await known_adapters() == ALL
    assert probe.tried == []
    for text in ("yes", "-1", "nan", "inf"):
        monkeypatch.setenv("TRIONNX_PROBE", text)
        with pytest.raises(ValueError, match=f"TRIONNX_PROBE is a number of seconds, or 0 for no probe, not '{text}'"):
            await choose(None, None)


async def test_what_is_no_driver_needs_no_probe(
    engines: dict[str, Any], machine: Callable[..., FakeProbe]
) -> None:
    probe = machine(ALL)
    assert await choose("cpu", None) == CPU
    assert await choose("fake", "x") == Choice("fake", "x")
    trionnx.register_engine("webgpu", lambda *, adapter, max_in_flight: FakeEngine(adapter, max_in_flight))
    assert await choose("webgpu", "x") == Choice("webgpu", "x")
    assert probe.tried == []


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
        ({"cache_dir": 3}, TypeError, "cache_dir is a path or None, not int"),
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


def test_the_choice_opens_no_driver_here() -> None:
    code = (
        "import sys, trio; from trionnx.scheduler.backends import choose\n"
        "try: trio.run(choose, 'webgpu', None)\n"
        "except RuntimeError as error: print(error)\n"
        "print('wgpu' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_every_public_name_is_there() -> None:
    assert all(hasattr(trionnx, name) for name in trionnx.__all__)
