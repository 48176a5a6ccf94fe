"""Where an engine runs: in a thread of this process, or in a worker process of its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..actors.remote import RemoteEngine
from ..gpu.device.drivers import environment
from ..gpu.engine import Engine
from .backends import Factory, engine_factory, is_built_in

__all__ = ["Isolation", "isolated_factory", "isolation_of", "place_of", "variables_of"]

_THREADS = ("LP_NUM_THREADS", "OMP_NUM_THREADS")

Isolation = Literal["thread", "process"]

_PLACES = {
    "webgpu": "trionnx.gpu.device.engine:WebGpuEngine",
    "cpu": "trionnx.gpu.cpu.engine:OrtCpuEngine",
}


def isolation_of(value: Any) -> Isolation:
    """Either of the two; refuses all else.

    Raises:
        TypeError: it is no text.
        ValueError: it is another.
    """
    if not isinstance(value, str):
        raise TypeError(f'isolation is "thread" or "process", not {type(value).__name__}')
    if value not in ("thread", "process"):
        raise ValueError(f'isolation is "thread" or "process", not {value!r}')
    return "thread" if value == "thread" else "process"


async def isolated_factory(
    backend: str, isolation: Isolation, environment: Mapping[str, str | None] | None = None
) -> Factory:
    """The factory of a back end's engines, in a thread or behind a process border.

    Args:
        backend: the name of a back end that is known.
        isolation: where its engines run. "process": this process does not import the engine.
        environment: variables of a worker that differ from those here.

    Raises:
        ValueError: the engine cannot run in a worker process: no other process can import its factory.

    **Cancellation:** felt at once; an import goes on in its thread.
    """
    if isolation == "thread":
        return await engine_factory(backend)
    place = await place_of(backend)
    if place is None:
        if is_built_in(backend):
            raise ValueError(f"the back end {backend!r} lives by Trio's clock in this process, in no worker process")
        raise ValueError(
            f"the factory of the back end {backend!r} cannot run in a worker process: it must be a function or a class "
            "at the top of a module that can be imported, and not of the program itself"
        )

    def remote(*, adapter: str | int | None, max_in_flight: int) -> Engine:
        return RemoteEngine(place, adapter=adapter, max_in_flight=max_in_flight, environment=environment)

    return remote


def variables_of(drivers: Sequence[str] | None, threads: int | None) -> dict[str, str | None]:
    """What a worker's environment is to have otherwise than the one here.

    Args:
        drivers: the Vulkan drivers, by their manifests, that alone may be opened; None: all.
        threads: of a driver that computes on the CPU; None: as many as a worker has.
    """
    return environment(drivers) | ({} if threads is None else dict.fromkeys(_THREADS, str(threads)))


async def place_of(backend: str) -> str | None:
    """Where a worker finds the factory: ``"module:name"``; None: in no worker.

    **Cancellation:** felt at once; an import goes on in its thread.
    """
    if is_built_in(backend):
        return _PLACES.get(backend)
    factory: Any = await engine_factory(backend)
    module, name = getattr(factory, "__module__", None), getattr(factory, "__qualname__", None)
    if isinstance(module, str) and isinstance(name, str) and module != "__main__":
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is factory:
            return f"{module}:{name}"
    return None
