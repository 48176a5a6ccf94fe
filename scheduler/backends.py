"""Back ends by name, and the choice of one.

This file imports no engine until one is asked for: `import trionnx` opens no driver.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import trio

from ..actors.probe import Probe, answer_bound, open_probe, remembered
from ..gpu.device.adapters import AdapterInfo, fitting, list_adapters, restrict
from ..gpu.device.verdicts import Survey, Verdict
from ..gpu.engine import Engine
from ..gpu.errors import NoAdapter
from .arguments import adapter_of
from .placement import least_loaded

__all__ = [
    "Choice",
    "Factory",
    "backend_names",
    "choose",
    "engine_factory",
    "examine",
    "has_onnxruntime",
    "known_adapters",
    "register_engine",
    "retreat",
    "ways",
]


class Factory(Protocol):
    """Makes an engine; returns at once, like all of an engine's methods."""

    def __call__(self, *, adapter: str | int | None, max_in_flight: int) -> Engine:
        """Make an engine for an adapter: its index, a part of its name, or None = the engine's choice."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Choice:
    """A back end by its registered name, and the adapter that it is to use.

    Attributes:
        identity: of the adapter, where it is known.
        drivers: the Vulkan drivers, by their manifests, that alone may be opened for it; None: all.
    """

    backend: str
    adapter: str | int | None
    identity: str = field(default="", compare=False)
    drivers: tuple[str, ...] | None = field(default=None, compare=False)


_BUILT_IN = {
    "webgpu": ("..gpu.device.engine", "WebGpuEngine"),
    "cpu": ("..gpu.cpu.engine", "OrtCpuEngine"),
    "fake": ("..actors.fake", "FakeEngine"),
}
_FOR_TESTS = frozenset(("fake",))
_registered: dict[str, Factory] = {}


def register_engine(name: str, factory: Factory) -> None:
    """Make an engine known under a name, for ``backend=`` and ``TRIONNX_BACKEND``.

    Args:
        name: the name; one that is known already is taken over by the new factory.
        factory: called as ``factory(adapter=..., max_in_flight=...)`` for each session.

    Raises:
        ValueError: the name is empty or "auto".
    """
    if not name or name == "auto":
        raise ValueError(f"an engine cannot be called {name!r}")
    _registered[name] = factory


def backend_names() -> tuple[str, ...]:
    """The names that a program may want for ``backend=``, "auto" first; those for tests of schedules are not told."""
    return "auto", *sorted({*_BUILT_IN, *_registered} - (_FOR_TESTS - set(_registered)))


def is_built_in(name: str) -> bool:
    """Whether a name is one of this package's engines, and not taken over by a registered one."""
    return name in _BUILT_IN and name not in _registered


def check_backend(name: str, said_by: str) -> None:
    """Refuse a name that no engine has."""
    if not isinstance(name, str):
        raise TypeError(f"{said_by} is a name or None, not {type(name).__name__}")
    if name not in backend_names() and name not in _FOR_TESTS:
        raise ValueError(f"{said_by} {name!r} is not known; known are {', '.join(backend_names())}")


async def engine_factory(name: str) -> Factory:
    """The factory of a back end; its module is imported here, in a thread.

    **Cancellation:** felt at once; the import goes on in its thread.
    """
    if name in _registered:
        return _registered[name]
    module_name, attribute = _BUILT_IN[name]
    if name == "fake":  # in a thread an autojump clock would jump
        module = importlib.import_module(module_name, __package__)
    else:
        module = await trio.to_thread.run_sync(
            importlib.import_module, module_name, __package__, abandon_on_cancel=True
        )
    if name == "cpu":
        engine = module.OrtCpuEngine
        return lambda *, adapter, max_in_flight: engine()
    factory: Factory = getattr(module, attribute)
    return factory


async def choose(
    backend: str | None,
    adapter: str | int | None,
    cache_dir: str | os.PathLike[str] | None = None,
    sessions: Counter[str] | None = None,
) -> Choice:
    """Choose a back end. No driver is opened in this process before a probe has found that it can be.

    Args:
        backend: a name, or None or "auto": what ``TRIONNX_BACKEND`` says, else "auto", which is a
            hardware adapter, else "cpu" where onnxruntime is installed, else a software adapter.
        adapter: index or part of the name of an adapter; None: what ``TRIONNX_ADAPTER`` says. With
            "auto", an adapter that is named is used whatever its kind.
        cache_dir: where it is remembered what the probe found; None: the user's cache folder.
        sessions: adapter's identity -> how many sessions are there: of adapters that are alike, the one with the
            fewest is taken.

    Raises:
        ValueError: a name that is not known, or a ``TRIONNX_PROBE`` that is no number.
        TypeError: an argument is of a wrong kind.
        NoAdapter: there is nothing to run on, or not what was asked for, or it cannot be used.

    **Cancellation:** felt at once; the probe's process is killed, and reaped.
    """
    backend, adapter = _asked(backend, adapter)
    if backend not in ("auto", "webgpu") or "webgpu" in _registered:
        return Choice(backend, adapter)
    if not answer_bound():
        if backend == "webgpu" or adapter is not None:
            return Choice("webgpu", adapter)
        there = await trio.to_thread.run_sync(_adapters, abandon_on_cancel=True)
        return ways(there, backend, adapter, has_onnxruntime())[0]
    async with open_probe(cache_dir) as probe:
        return await _sound(probe, backend, adapter, sessions)


def retreat(
    backend: str | None,
    adapter: str | int | None,
    cache_dir: str | os.PathLike[str] | None,
    stuck: Callable[[str], bool],
) -> Choice | None:
    """The choice where a back end got stuck in this process: a back end or an adapter that is not the GPU.

    Args:
        backend: as for `choose`.
        adapter: as for `choose`.
        cache_dir: as for `choose`.
        stuck: whether a back end did.

    Returns:
        For a worker process of its own, without a probe; None: what is asked for is not stuck.

    Raises:
        ValueError, TypeError: as `choose` does.
    """
    backend, adapter = _asked(backend, adapter)
    if backend not in ("auto", "webgpu"):
        return Choice(backend, adapter) if stuck(backend) else None
    if not stuck("webgpu"):
        return None
    if backend == "auto" and adapter is None and has_onnxruntime() and not stuck("cpu"):
        return Choice("cpu", None)
    survey = remembered(cache_dir) or Survey(Verdict("ok"))
    software = [there.index for there in survey.adapters if there.kind == "software"]
    return Choice("webgpu", software[0] if software else adapter, drivers=survey.drivers)


def _asked(backend: str | None, adapter: str | int | None) -> tuple[str, str | int | None]:
    """What is asked for, the environment taken in."""
    if backend in (None, "auto"):
        backend = os.environ.get("TRIONNX_BACKEND") or "auto"
        check_backend(backend, "the back end in TRIONNX_BACKEND,")
    assert backend is not None
    check_backend(backend, "back end")
    adapter = adapter_of(adapter)
    if adapter is None:
        adapter = os.environ.get("TRIONNX_ADAPTER") or None
    if isinstance(adapter, str) and adapter.isdecimal():
        adapter = int(adapter)
    return backend, adapter


async def _sound(probe: Probe, backend: str, adapter: str | int | None, sessions: Counter[str] | None) -> Choice:
    """The first way to run that is found to work."""
    survey = probe.survey
    if not survey.listing.ok and (backend == "webgpu" or adapter is not None or not has_onnxruntime()):
        raise NoAdapter(f"no adapter can be used: {survey.listing.reason}")
    faults = []
    for way in ways(survey.adapters, backend, adapter, has_onnxruntime(), sessions):
        if way.backend != "webgpu":
            return way
        found = next(a for a in survey.adapters if a.index == way.adapter)
        verdict = await probe.attempt(found)
        if verdict.ok:
            await trio.to_thread.run_sync(restrict, survey.drivers, abandon_on_cancel=True)  # a lock is waited for
            return replace(way, drivers=survey.drivers)
        faults.append(f"{found.index}: {found}: {verdict.reason}")
    raise NoAdapter(f"no adapter can be used: {'; '.join(faults)}")


def ways(
    adapters: Sequence[AdapterInfo],
    backend: str,
    adapter: str | int | None,
    onnxruntime: bool,
    sessions: Counter[str] | None = None,
) -> list[Choice]:
    """The ways to run, best first.

    Args:
        adapters: what there is.
        backend: "webgpu", or "auto": a hardware adapter, else onnxruntime, else a software adapter.
        adapter: index or part of a name; with "auto", one that is named is used whatever its kind.
        onnxruntime: whether it is installed.
        sessions: as for `choose`.

    Raises:
        NoAdapter: there is none.
    """
    count = Counter[str]() if sessions is None else sessions

    def on(those: Sequence[AdapterInfo]) -> list[Choice]:
        return [Choice("webgpu", a.index, a.identity) for a in least_loaded(those, count)]

    if backend == "webgpu" or adapter is not None:
        return on(fitting(adapters, adapter))
    choices = on([a for a in adapters if a.kind == "hardware"])
    choices += [Choice("cpu", None)] * onnxruntime
    choices += on([a for a in adapters if a.kind != "hardware"])
    if not choices:
        raise NoAdapter(
            "no GPU driver was found, and onnxruntime is not installed; install a Vulkan driver "
            "(on Debian or Ubuntu: apt-get install mesa-vulkan-drivers libvulkan1), or: pip install 'trionnx[cpu]'"
        )
    return choices


async def known_adapters(cache_dir: str | os.PathLike[str] | None = None) -> tuple[AdapterInfo, ...]:
    """The adapters, as the probe lists them; none where it cannot.

    **Cancellation:** as that of `choose`.
    """
    if not answer_bound():
        return tuple(await trio.to_thread.run_sync(_adapters, abandon_on_cancel=True))
    async with open_probe(cache_dir) as probe:
        return probe.survey.adapters


async def examine(cache_dir: str | os.PathLike[str] | None = None, *, anew: bool = False) -> Survey:
    """What is known of every driver and adapter; those that have not been tried are now.

    Args:
        cache_dir: as for `choose`.
        anew: forget what is remembered, and try all.

    Raises:
        OSError: with `anew`, what is remembered cannot be removed.

    **Cancellation:** as that of `choose`.
    """
    if not answer_bound():
        return Survey(Verdict("ok"), await known_adapters())
    async with open_probe(cache_dir, anew=anew) as probe:
        for adapter in probe.survey.adapters:
            await probe.attempt(adapter)
        return probe.survey


def has_onnxruntime() -> bool:
    """Whether the extra [cpu] is installed."""
    return importlib.util.find_spec("onnxruntime") is not None


def _adapters() -> list[AdapterInfo]:
    try:
        return list_adapters()
    except (ImportError, OSError):
        return []
