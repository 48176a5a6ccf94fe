"""What an adapter can do at most, measured: operations each second in registers, bytes each second between buffers."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..kernels.kernel import Binding, Kernel, Scalar, link, pack_params
from .device import COPY_DST, UNIFORM, Check, Device
from .entries import Entries
from .realise import PassWriter

__all__ = ["Peak", "Peaks", "measure_peak"]

LANES = 64
CHAINS = (2, 4, 8)
"""Sums that an invocation has under way, each four wide: too few wait for each other, too many leave registers."""
UNROLLED = 8
QUADS = (1, 2, 4, 8)
"""Groups of four floats that an invocation copies."""
LONG_ENOUGH_S = 0.01
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that was measured on an adapter.

    Attributes:
        flops_per_s: float32 operations each second, a multiply-add is two.
        bytes_per_s: read and written each second by a copy that no cache holds.
        at: when, in seconds since the epoch.
    """

    flops_per_s: float
    bytes_per_s: float
    at: float = field(default_factory=time.time)


class Peaks:
    """Peaks by adapter and driver (`AdapterInfo.identity`), in one file of the cache folder.

    Args:
        folder: where the file is; made when there is something to write.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._entries = Entries(Path(folder) / "peaks.json", "adapters")

    def get(self, identity: str) -> Peak | None:
        """What is remembered of an adapter."""
        try:
            peak = Peak(**{name: float(value) for name, value in self._entries.read()[identity].items()})
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        return peak if peak.flops_per_s > 0 and peak.bytes_per_s > 0 else None

    def put(self, identity: str, peak: Peak) -> None:
        """Remember; no error where that cannot be."""
        with contextlib.suppress(OSError):
            self._entries.put(identity, asdict(peak))


def measure_peak(device: Device, check: Check = lambda: None) -> Peak:
    """Measure. Takes a second or two, and 512 MiB of device memory on hardware, 128 MiB elsewhere.

    Args:
        device: nothing else runs on it, or on its adapter.
        check: called between two submissions; what it raises ends the measurement.
    """
    return Peak(
        max(_best(device, check, *arithmetic) for arithmetic in _arithmetic(device)),
        max(_best(device, check, *copy) for copy in _copies(device)),
    )


Encode = Callable[[PassWriter, int], None]


def _best(device: Device, check: Check, each: float, encode: Encode) -> float:
    """The most of `each` in a second, where `encode` writes so many rounds of it."""
    seconds, count = 0.0, 1
    while True:
        seconds = _seconds(device, check, encode, count)
        if seconds >= LONG_ENOUGH_S:
            break
        count *= 2
    return each * count / min(seconds, *(_seconds(device, check, encode, count) for _ in range(ROUNDS)))


def _seconds(device: Device, check: Check, encode: Encode, count: int) -> float:
    check()
    encoder = device.encoder()
    writer = PassWriter(device, encoder)
    encode(writer, count)
    writer.end()
    commands = device.finish(encoder)
    start = time.perf_counter()
    device.wait(device.submit(commands))
    return time.perf_counter() - start


def _arithmetic(device: Device) -> Iterator[tuple[float, Encode]]:
    """Products and sums that wait for nothing but each other: FLOPs of a round, and how to encode some."""
    turns, groups = (64, 8 * device.target.width) if device.target.cpu else (256, 8192)
    for fused in (True, False):
        for chains in CHAINS:
            kernel = _chain_kernel(chains, fused)
            params = pack_params(kernel.params, {"turns": turns, "scale": 0.999, "shift": 0.001})
            flops = 2.0 * 4 * chains * UNROLLED * turns * LANES * groups
            with _Bound(device, kernel, params, [groups * LANES * 16]) as bound:
                yield flops, bound.repeat(groups)


def _copies(device: Device) -> Iterator[tuple[float, Encode]]:
    nbytes = min((64 if device.target.cpu else 256) << 20, device.target.max_binding_bytes)
    for quads in QUADS:
        groups = nbytes // (16 * LANES * quads)
        with _Bound(device, _copy_kernel(quads, device.target.cpu), b"", [nbytes, nbytes]) as bound:
            yield 2.0 * groups * 16 * LANES * quads, bound.repeat(groups)


class _Bound:
    """A kernel and its buffers, given back at the end of the block."""

    def __init__(self, device: Device, kernel: Kernel, params: bytes, sizes: list[int]) -> None:
        self._device, self._kernel, self._params, self._sizes = device, kernel, params, sizes
        self._buffers: list[Any] = []

    def __enter__(self) -> _Bound:
        device = self._device
        try:
            self._buffers += [device.buffer(size) for size in self._sizes]
            storage = [(buffer, 0, buffer.size) for buffer in self._buffers]
            params = None
            if self._params:
                params = device.buffer(16, UNIFORM | COPY_DST)
                self._buffers.append(params)
                padded = self._params + bytes(-len(self._params) % 16)
                device.write(params, 0, np.frombuffer(padded, np.uint32), lambda: None)
            self._pipeline = device.compile(link(self._kernel))
            self._group = device.bind(self._pipeline, params, 0, storage)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for buffer in self._buffers:
            self._device.release(buffer)
        self._buffers.clear()

    def repeat(self, groups: int) -> Encode:
        def encode(writer: PassWriter, count: int) -> None:
            for _ in range(count):
                writer.dispatch(self._pipeline, self._group._internal, 0, groups)

        return encode


def _chain_kernel(chains: int, fused: bool) -> Kernel:
    each = "a{n} = fma(a{n}, m, c);" if fused else "a{n} = a{n} * m + c;"
    lines = [f"var a{n} = vec4f(f32(lane) + {n}.0);" for n in range(chains)]
    lines.append("let m = vec4f(params.scale); let c = vec4f(params.shift);")
    lines.append("for (var turn = 0u; turn < params.turns; turn++) {")
    lines += [each.format(n=n) for _ in range(UNROLLED) for n in range(chains)]
    lines.append("}")
    lines.append(f"out[group * {LANES}u + lane] = {' + '.join(f'a{n}' for n in range(chains))};")
    params: tuple[tuple[str, Scalar], ...] = (("turns", "u32"), ("scale", "f32"), ("shift", "f32"))
    name = f"peak_{'fma' if fused else 'mul_add'}{chains}"
    return Kernel(name, "\n".join(lines), writes=(Binding("out", "vec4f"),), params=params, result=None, lanes=LANES)


def _copy_kernel(quads: int, cpu: bool) -> Kernel:
    """An invocation copies neighbours; on hardware, neighbouring invocations do."""
    at, step = f"(group * {LANES}u + lane) * {quads}u", 1
    if not cpu:
        at, step = f"group * {LANES * quads}u + lane", LANES
    lines = [f"let at = {at};", *(f"out[at + {n * step}u] = x[at + {n * step}u];" for n in range(quads))]
    vec = "vec4f"
    return Kernel(f"peak_copy{quads}", "\n".join(lines), (Binding("x", vec),), (Binding("out", vec),), result=None)
