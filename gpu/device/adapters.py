"""Which GPUs there are, and which one to use.

`list_adapters` may block for as long as the drivers like: call it in a thread, and once a probe has told that they
can be opened (actors/probe.py).
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import DeviceHung, NoAdapter
from ..graph.target import Target
from .drivers import apply, environment
from .probe_child import features, found

__all__ = [
    "DRIVER_LOCK",
    "AdapterInfo",
    "adapter_features",
    "choose_adapter",
    "driver_lock",
    "fitting",
    "list_adapters",
    "one_at_a_time",
    "restrict",
    "target_of",
]

DRIVER_LOCK = threading.Lock()
"""Held while a process-wide thing of the drivers is made: instance, device, pipeline (they crash side by side)."""

HOW_TO_GET_ONE = (
    "Install a Vulkan driver (on Debian or Ubuntu `apt-get install mesa-vulkan-drivers libvulkan1` "
    "gives a software GPU), "
    "or `pip install 'trionnx[cpu]'` and use backend=\"cpu\"."
)
LOCK_BOUND_S = 60.0
"""How long a call to the drivers waits for another one, in seconds."""
_LOOK_S = 0.05
_only: list[tuple[str, ...]] = []


def restrict(drivers: Sequence[str] | None) -> None:
    """Have this process open these Vulkan drivers only, by their manifests; None: all. For before the first is."""
    with one_at_a_time():
        _only[:] = [] if drivers is None else [tuple(drivers)]


@contextlib.contextmanager
def one_at_a_time(check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold `DRIVER_LOCK`.

    Args:
        check: called during the wait; what it raises ends that.

    Raises:
        DeviceHung: whoever holds it does not come back.
    """
    end = time.monotonic() + LOCK_BOUND_S
    while not DRIVER_LOCK.acquire(timeout=_LOOK_S):
        check()
        if time.monotonic() >= end:
            raise DeviceHung(f"a driver has not come back for {LOCK_BOUND_S:g} s from another session's call")
    try:
        yield
    finally:
        DRIVER_LOCK.release()


@contextlib.contextmanager
def driver_lock(check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold `DRIVER_LOCK` as `one_at_a_time` does, with the environment that drivers are to see.

    That is what `restrict` says, and the variable whose lack Mesa complains of on standard error.
    """
    with one_at_a_time(check):
        change = environment(_only[0]) if _only else {}
        if sys.platform == "linux" and "XDG_RUNTIME_DIR" not in os.environ:
            change["XDG_RUNTIME_DIR"] = tempfile.gettempdir()
        before = {name: os.environ.get(name) for name in change}
        try:
            apply(change, os.environ)
            yield
        finally:
            apply(before, os.environ)


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """One adapter.

    Attributes:
        index: its place in the list; stable while the drivers stay the same.
        name: the device's name. driver: the driver's name and version, as far as it tells.
        backend: "Vulkan", "Metal" or "D3D12".
        kind: "hardware" or "software" (a driver that computes on the CPU).
        identity: a text that tells adapters of one machine apart.
    """

    index: int
    name: str
    driver: str
    backend: str
    kind: Literal["hardware", "software"]
    identity: str
    _adapter: Any = field(repr=False, compare=False, default=None)

    def __str__(self) -> str:
        return f"{self.name} ({self.backend}, {self.kind})"


def list_adapters() -> list[AdapterInfo]:
    """The adapters that can run compute shaders as this package needs them, as the drivers list them.

    May block for as long as the drivers do.
    """
    with driver_lock():  # also while `found` drops what is of no use: two threads in EGL abort the process
        return [AdapterInfo(**facts, _adapter=native) for facts, native in found()]


def choose_adapter(selector: str | int | None = None) -> AdapterInfo:
    """Pick an adapter of those that `list_adapters` gives: the first of `fitting`."""
    return fitting(list_adapters(), selector)[0]


def fitting(
    adapters: Sequence[AdapterInfo],
    selector: str | int | None = None,
    kinds: Sequence[str] = ("hardware", "software"),
) -> list[AdapterInfo]:
    """The adapters that fit, best first: hardware before software, else in their order.

    Args:
        adapters: to choose from.
        selector: an index, a part of the name (upper and lower case alike), or None or "": what
            TRIONNX_ADAPTER says, else any.
        kinds: which kinds will do.

    Raises:
        NoAdapter: nothing fits; the message says what there is, and, where that is nothing of
            the kinds that will do, how to get one.
    """
    if selector is None or selector == "":
        selector = os.environ.get("TRIONNX_ADAPTER") or None
    fits = [a for a in adapters if a.kind in kinds]
    if selector is not None:
        text = str(selector)
        if text.isdigit():
            fits = [a for a in fits if a.index == int(text)]
        else:
            fits = [a for a in fits if text.lower() in f"{a.name} {a.driver}".lower()]
    if not fits:
        listed = ", ".join(f"{a.index}: {a}" for a in adapters) or "none at all"
        wanted = (
            f"no adapter fits {selector!r}" if selector is not None else f"no {' or '.join(kinds)} adapter was found"
        )
        advice = "" if any(a.kind in kinds for a in adapters) else f". {HOW_TO_GET_ONE}"
        raise NoAdapter(f"{wanted}; there are: {listed}{advice}")
    return sorted(fits, key=lambda a: (a.kind != "hardware", a.index))


def adapter_features(info: AdapterInfo, f16: bool = False) -> list[str]:
    """The features to ask the device for: what is needed, and what helps where it is offered."""
    return features(info._adapter, f16)


def target_of(info: AdapterInfo) -> Target:
    """The facts that kernels choose their variants by."""
    limits = info._adapter.limits
    buffers = min(int(limits["max-storage-buffers-per-shader-stage"]), 10)
    binding = min(int(limits["max-storage-buffer-binding-size"]), int(limits["max-buffer-size"]))
    f16 = "shader-f16" in info._adapter.features
    if info.kind == "software":
        return Target(
            max_storage_buffers=buffers, max_binding_bytes=binding, width=max(1, os.cpu_count() or 1), f16=f16
        )
    return Target(
        cpu=False,
        flops_per_s=1e12,
        bytes_per_s=1e11,
        overhead_s=5e-6,
        max_storage_buffers=buffers,
        max_binding_bytes=binding,
        width=64,
        f16=f16,
    )
