"""Back ends by name, and the choice of one.

This file imports no engine until one is asked for: `import trionnx` opens no driver.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import trio

from ..gpu.engine import Engine
from ..gpu.errors import NoAdapter
from .arguments import adapter_of

__all__ = ["Choice", "Factory", "backend_names", "choose", "engine_factory", "register_engine"]


class Factory(Protocol):
    """Makes an engine; returns at once, like all of an engine's methods."""

    def __call__(self, *, adapter: str | int | None, max_in_flight: int) -> Engine:
        """Make an engine for an adapter: its index, a part of its name, or None = the engine's choice."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Choice:
    """A back end by its registered name, and the adapter that it is to use."""

    backend: str
    adapter: str | int | None


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


async def choose(backend: str | None, adapter: str | int | None) -> Choice:
    """Choose a back end.

    Args:
        backend: a name, or None or "auto": what ``TRIONNX_BACKEND`` says, else "auto", which is a
            hardware adapter, else "cpu" where onnxruntime is installed, else a software adapter.
        adapter: index or part of the name of an adapter; None: what ``TRIONNX_ADAPTER`` says. With
            "auto", an adapter that is named is used whatever its kind.

    Raises:
        ValueError: a name that is not known.
        TypeError: an argument is of a wrong kind.
        NoAdapter: there is nothing to run on, or not what was asked for.

    **Cancellation:** felt at once; the look for adapters goes on in its thread.
    """
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
    if backend != "auto":
        return Choice(backend, adapter)
    if adapter is not None:
        return Choice("webgpu", adapter)
    return pick(await trio.to_thread.run_sync(_adapters, abandon_on_cancel=True), has_onnxruntime())


def pick(adapters: Iterable[Any], onnxruntime: bool) -> Choice:
    """What "auto" is.

    Args:
        adapters: each with `kind` ("hardware" or "software") and `index`, best first.
        onnxruntime: whether onnxruntime is installed.

    Raises:
        NoAdapter: nothing is there.
    """
    adapters = list(adapters)
    for adapter in adapters:
        if adapter.kind == "hardware":
            return Choice("webgpu", adapter.index)
    if onnxruntime:
        return Choice("cpu", None)
    if adapters:
        return Choice("webgpu", adapters[0].index)
    raise NoAdapter(
        "no GPU driver was found, and onnxruntime is not installed; install a Vulkan driver "
        "(on Debian or Ubuntu: apt-get install mesa-vulkan-drivers libvulkan1), or: pip install 'trionnx[cpu]'"
    )


def has_onnxruntime() -> bool:
    """Whether the extra [cpu] is installed."""
    return importlib.util.find_spec("onnxruntime") is not None


def _adapters() -> list[Any]:
    try:
        module = importlib.import_module("..gpu.device.adapters", __package__)
        return list(module.list_adapters())
    except (ImportError, OSError, NoAdapter):
        return []
