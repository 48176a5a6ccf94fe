"""Arrays of a model's tensors: from the protobuf, from the blobs of its skeleton, or from other files.

This file does not know graphs. Large arrays are views of mapped files wherever their dtype allows.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import sys
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto
from onnx.helper import tensor_dtype_to_np_dtype

from ..errors import InvalidModel
from ..host.room import MOST_DIMENSIONS
from .wire import BLOB_KEY, Blob

__all__ = ["TensorFiles", "element_type", "map_file", "misshapen"]

Array = np.ndarray[Any, Any]
_CODES: dict[str, int] = dict(TensorProto.DataType.items())
_PACKED = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2}
_BITS: dict[int, int] = {_CODES[name]: bits for name, bits in _PACKED.items() if name in _CODES}
_SIXES = {_CODES[name] for name in ("FLOAT6E2M3", "FLOAT6E3M2") if name in _CODES}
_VARINTS = (5, 7, 11)
_PIECE = 1 << 17


def element_type(data_type: int) -> np.dtype[Any] | None:
    """The NumPy dtype of a TensorProto.DataType (strings: object); None where there is none."""
    try:
        return np.dtype(tensor_dtype_to_np_dtype(data_type)) if data_type else None
    except (KeyError, ValueError, TypeError):
        return None


def misshapen(shape: Sequence[int], dtype: np.dtype[Any]) -> str:
    """Why no array can have a shape; "" where one can."""
    if any(d < 0 for d in shape):
        return f"negative dimension in shape {list(shape)}"
    if len(shape) > MOST_DIMENSIONS:
        return f"{len(shape)} dimensions are too many"
    if prod(max(1, d) for d in shape) * dtype.itemsize > sys.maxsize:
        return f"shape {list(shape)} is too large"
    return ""


def map_file(path: str | os.PathLike[str]) -> memoryview:
    """Map a file for reading; an empty one is an empty view.

    Raises:
        OSError: it cannot be opened, or is no regular file (a pipe, say); the error names the path.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        if not status.st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


class TensorFiles:
    """Where a model's tensors come from.

    Args:
        label: what to call the model in messages.
        blobs: the large data that the skeleton left out.
        folders: folders that external data may lie in; names are relative to the first.
        check: called between pieces of work.
    """

    def __init__(
        self, label: str, blobs: Sequence[Blob], folders: Sequence[Path], check: Callable[[], None] = lambda: None
    ) -> None:
        self.label, self.blobs, self.folders, self.check = label, blobs, tuple(folders), check
        self._mapped: dict[str, memoryview] = {}

    def array(self, proto: TensorProto) -> Array:
        """The array of a tensor; not writable where it is a view of a file.

        Raises:
            InvalidModel: the data do not fit dtype and shape, or are not where they should be.
        """
        dtype = element_type(proto.data_type)
        if dtype is None:
            raise self.wrong(proto, f"unknown data type {proto.data_type}")
        shape = tuple(proto.dims)
        why = misshapen(shape, dtype)
        if why:
            raise self.wrong(proto, why)
        if proto.data_location == TensorProto.EXTERNAL:
            entries = {e.key: e.value for e in proto.external_data}
            if BLOB_KEY in entries:
                return self._blob(proto, entries[BLOB_KEY], dtype, shape)
            return self._raw(proto, self._external(proto, entries, dtype, shape), dtype, shape)
        if dtype.hasobject:
            if len(proto.string_data) != prod(shape):
                raise self.wrong(proto, f"{len(proto.string_data)} strings for shape {list(shape)}")
            strings = np.empty(len(proto.string_data), object)
            strings[:] = [s.decode("utf-8", "replace") for s in proto.string_data]
            return strings.reshape(shape)
        if proto.HasField("raw_data"):
            return self._raw(proto, memoryview(proto.raw_data), dtype, shape)
        try:
            return onnx.numpy_helper.to_array(proto).reshape(shape)
        except (ValueError, TypeError, IndexError, OverflowError):
            raise self.wrong(proto, f"its data do not fit shape {list(shape)} of {dtype}") from None

    def _blob(self, proto: TensorProto, index: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        if not index.isdecimal() or int(index) >= len(self.blobs):
            raise self.wrong(proto, "its data are missing")
        blob = self.blobs[int(index)]
        if blob.field in _VARINTS:
            return self._integers(proto, blob, dtype, shape)
        part = blob.parts[0] if len(blob.parts) == 1 else memoryview(b"".join(blob.parts))
        return self._raw(proto, part, dtype, shape)

    def _integers(self, proto: TensorProto, blob: Blob, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Packed varints (int32_data, int64_data, uint64_data), in pieces that are not long."""
        pieces = []
        for part in blob.parts:
            data = np.frombuffer(part, np.uint8)
            if data.size and data[-1] > 0x7F:
                raise self.wrong(proto, "its data end within a number")
            start = 0
            while start < data.size:
                self.check()
                stop = min(start + _PIECE, data.size)
                while data[stop - 1] > 0x7F:
                    stop += 1
                pieces.append(_varints(data[start:stop]))
                start = stop
        numbers = np.concatenate(pieces)
        bits = _BITS.get(proto.data_type, 0)
        if bits or proto.data_type in _SIXES:
            return self._raw(proto, memoryview(numbers.astype(np.uint8).tobytes()), dtype, shape)
        if numbers.size != prod(shape):
            raise self.wrong(proto, f"{numbers.size} numbers for shape {list(shape)}")
        if dtype.kind in "iub" and dtype.isbuiltin == 1:
            return numbers.astype(dtype).reshape(shape)
        return numbers.astype(f"u{dtype.itemsize}").view(dtype).reshape(shape)

    def _raw(self, proto: TensorProto, data: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        count, bits = prod(shape), _BITS.get(proto.data_type, 0)
        six = proto.data_type in _SIXES
        size = -(-count * bits // 8) if bits else -(-count * 6 // 8) if six else count * dtype.itemsize
        if len(data) != size:
            raise self.wrong(proto, f"shape {list(shape)} of {dtype} takes {size} bytes, there are {len(data)}")
        if bits:
            packed = np.frombuffer(data, np.uint8)
            per = 8 // bits
            out = np.empty((packed.size, per), np.uint8)
            for i in range(per):
                np.bitwise_and(packed >> (bits * i), (1 << bits) - 1, out=out[:, i])
            return out.reshape(-1)[:count].view(dtype).reshape(shape)
        if six:
            whole = TensorProto(dims=shape, data_type=proto.data_type, raw_data=bytes(data))
            return onnx.numpy_helper.to_array(whole)
        array = np.frombuffer(data, np.uint8).view(np.bool_ if dtype == np.bool_ else dtype) if size else None
        return np.empty(shape, dtype) if array is None else array.reshape(shape)

    def _external(
        self, proto: TensorProto, entries: dict[str, str], dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> memoryview:
        location = entries.get("location", "")
        file = f"its data file {location!r}"
        if not self.folders:
            raise self.wrong(proto, f"{file} cannot be found: the model came without a path, so there is no folder")
        if not location:
            raise self.wrong(proto, "its external data have no location")
        if dtype.hasobject:
            raise self.wrong(proto, "strings cannot lie in another file")
        path = self.folders[0] / location
        if os.path.isabs(location) or ".." in Path(location).parts or not self._inside(path):
            raise self.wrong(proto, f"{file} lies outside the model's folder")
        view = self._mapped.get(location)
        if view is None:
            try:
                view = self._mapped[location] = map_file(path)
            except FileNotFoundError:
                raise self.wrong(proto, f"{file} does not exist in {self.folders[0]}") from None
            except OSError as error:
                raise self.wrong(proto, f"{file} cannot be read: {error.strerror}") from None
        count, bits = prod(shape), _BITS.get(proto.data_type, 0)
        size = -(-count * bits // 8) if bits else count * dtype.itemsize
        try:
            offset = int(entries.get("offset") or 0)
            length = int(entries["length"]) if entries.get("length") else size
        except ValueError:
            raise self.wrong(proto, f"offset or length in {file} is no number") from None
        if offset < 0 or length < 0 or offset + length > len(view):
            raise self.wrong(
                proto, f"{file} is too short: bytes {offset} to {offset + length} of {len(view)} are wanted"
            )
        return view[offset : offset + length]

    def _inside(self, path: Path) -> bool:
        real = Path(os.path.realpath(path))
        return any(real.is_relative_to(os.path.realpath(folder)) for folder in self.folders)

    def wrong(self, proto: TensorProto, why: str) -> InvalidModel:
        """An error that names the model and the tensor."""
        return InvalidModel(f"{self.label}: tensor {proto.name!r}: {why}")


def _varints(data: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Decode whole varints, at most 10 bytes each, modulo 2**64."""
    last = np.flatnonzero(data < 0x80)
    first = np.concatenate(([0], last[:-1] + 1))
    length = last - first + 1
    out = np.zeros(last.size, np.uint64)
    for i in range(min(int(length.max(initial=0)), 10)):
        has = length > i
        out[has] |= (data[first[has] + i] & np.uint8(0x7F)).astype(np.uint64) << np.uint64(7 * i)
    return out
