"""Values that stay on the device between runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..graph.tensor import Array, Storage, as_words, from_words, gpu_type
from ..seam import TensorRef
from .device import Check, Device

__all__ = ["Resident", "brought", "copied", "uploaded"]


@dataclass(frozen=True, slots=True, eq=False)
class Resident:
    """A buffer of its own, and how a value lies in it."""

    buffer: Any
    storage: Storage


def copied(device: Device, source: Any, begin: int, storage: Storage, check: Check) -> Resident:
    """What lies in a buffer from a byte on, in one of its own."""
    made = Resident(device.buffer(storage.nbytes), storage)
    try:
        device.copy(source, begin, made.buffer, storage.nbytes, check)
    except BaseException:
        device.release(made.buffer)
        raise
    return made


def uploaded(device: Device, value: Any, check: Check) -> Any:
    """A value of the host's on the device; a copy of it, still the host's, where a buffer cannot hold it."""
    array = np.asarray(value)
    half = device.target.f16 and array.dtype == np.float16
    nbytes = max(16, (array.size * (2 if half else 4) + 15) // 16 * 16)
    if gpu_type(array.dtype) is None or nbytes > device.target.max_binding_bytes:
        return np.array(array)
    made = Resident(device.buffer(nbytes), Storage(nbytes, half=half))
    try:
        device.write(made.buffer, 0, as_words(array, half), check)
    except BaseException:
        device.release(made.buffer)
        raise
    return made


def brought(device: Device, value: Any, ref: TensorRef, check: Check) -> Array:
    """A kept value as an array of its own."""
    if not isinstance(value, Resident):
        return np.array(value)
    if 0 in ref.shape:
        return np.empty(ref.shape, ref.dtype)
    storage = value.storage
    data = device.read(value.buffer, 0, int(np.prod(ref.shape)) * storage.each, check)
    return from_words(data, ref.dtype, ref.shape, storage.half)
