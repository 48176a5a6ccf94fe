"""Checking what a caller feeds and asks for, against what the model declares. Pure: no Trio, no engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..gpu.errors import InvalidInput
from ..gpu.seam import TensorInfo
from .tensor import DeviceTensor

__all__ = ["SLOW_BYTES", "check_feeds", "check_names", "is_slow", "pack"]

Array = np.ndarray[Any, Any]

SLOW_BYTES = 1 << 20
"""Arrays of more bytes are not copied on the Trio thread."""


def check_names(outputs: Sequence[TensorInfo], names: Iterable[str] | None) -> tuple[str, ...]:
    """The names of the outputs that are wanted.

    Args:
        outputs: what the model has.
        names: in the order wanted; None or empty: all.

    Raises:
        InvalidInput: there is no such output.
        TypeError: a single string, or something that is no name.
    """
    if isinstance(names, str):
        raise TypeError(f"output_names is a list of names or None, not the string {names!r}")
    wanted = tuple(names or ())
    known = [info.name for info in outputs]
    for name in wanted:
        if not isinstance(name, str):
            raise TypeError(f"an output name is a string, not {type(name).__name__}")
        if name not in known:
            raise InvalidInput(name, f"an output of the model: {_list(known)}", "a name that it does not have")
    return wanted or tuple(known)


def check_feeds(
    inputs: Sequence[TensorInfo], overridable: Sequence[TensorInfo], feeds: Mapping[str, Any]
) -> dict[str, Any]:
    """The feeds as NumPy arrays of the declared dtypes; not yet contiguous, nor aligned. Tensors stay as they are.

    Args:
        inputs: what must be fed.
        overridable: what may be fed.
        feeds: name -> array, numbers (nested in lists) that become one, or a `DeviceTensor`.

    Raises:
        InvalidInput: a name that is not known, a name that is missing (and is no optional), or a wrong dtype, rank or
            fixed dimension. Sizes of named dimensions are not compared with each other.
        TypeError: `feeds` is no mapping.
    """
    if not isinstance(feeds, Mapping):
        raise TypeError(f"input_feed is a dict of arrays by name, not {type(feeds).__name__}")
    infos = {info.name: info for info in (*inputs, *overridable)}
    for name in feeds:
        if name not in infos:
            raise InvalidInput(name, f"an input of the model: {_list(infos)}", "a name that it does not have")
    for info in inputs:
        if info.name not in feeds and not info.type.startswith("optional("):
            raise InvalidInput(info.name, _declared(info), "nothing")
    return {name: _check(infos[name], value) for name, value in feeds.items()}


def is_slow(feeds: Mapping[str, Any]) -> bool:
    """Whether `pack` would copy so much that it should not be done on the Trio thread."""
    arrays = [feed for feed in feeds.values() if isinstance(feed, np.ndarray)]
    return any(array.nbytes > SLOW_BYTES and not _is_plain(array) for array in arrays)


def pack(feeds: Mapping[str, Any]) -> dict[str, Any]:
    """The feeds with every array C-contiguous and aligned; copies only what is not."""
    return {name: _plain(feed) if isinstance(feed, np.ndarray) else feed for name, feed in feeds.items()}


def _is_plain(array: Array) -> bool:
    return array.flags.c_contiguous and array.flags.aligned


def _plain(array: Array) -> Array:
    return array if _is_plain(array) else np.array(array, order="C")


def _check(info: TensorInfo, value: Any) -> Any:
    if info.dtype is None and not isinstance(value, DeviceTensor):
        return value
    if isinstance(value, DeviceTensor) and value.dtype != info.dtype:
        raise InvalidInput(info.name, _declared(info), _given(value, False))
    array = value if isinstance(value, DeviceTensor) else _array(info, value)
    if info.shape is not None:
        fits = len(info.shape) == len(array.shape) and all(
            not isinstance(want, int) or want < 0 or want == got
            for want, got in zip(info.shape, array.shape, strict=True)
        )
        if not fits:
            raise InvalidInput(info.name, _declared(info), _given(array, False))
    return array


def _array(info: TensorInfo, value: Any) -> Array:
    assert info.dtype is not None
    plain = isinstance(value, (bool, int, float, complex, str, bytes, list, tuple))
    try:
        array: Array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidInput(info.name, _declared(info), f"{type(value).__name__} that makes no array: {error}") from None
    if array.dtype == info.dtype and array.dtype.kind != "O":
        return array
    if info.dtype.kind in _TEXT and array.dtype.kind in _TEXT and _is_text(array):
        return array
    if plain and _converts(array, info.dtype):
        return array.astype(info.dtype)
    raise InvalidInput(info.name, _declared(info), _given(array, plain and info.dtype.kind in "iu"))


_TEXT = "OSUT"


def _is_text(array: Array) -> bool:
    return array.dtype.kind != "O" or all(isinstance(item, (str, bytes)) for item in array.flat)


def _converts(array: Array, dtype: np.dtype[Any]) -> bool:
    """Whether Python numbers that NumPy made this array of are numbers of the declared dtype."""
    if array.size == 0:
        return True
    if array.dtype.kind in "iu" and dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return bounds.min <= int(array.min()) and int(array.max()) <= bounds.max
    # Kind "V": bfloat16 and the 8-bit floats, which are no kinds of NumPy's own.
    return array.dtype.kind in "iuf" and dtype.kind in "fcV" and dtype.names is None


def _declared(info: TensorInfo) -> str:
    kind = info.type if info.dtype is None or info.dtype.kind in _TEXT else str(info.dtype)
    if info.shape is None:
        return f"{kind} of any shape"
    return f"{kind} of shape ({_shape('?' if size is None else size for size in info.shape)})"


def _given(array: Array | DeviceTensor, with_values: bool) -> str:
    values = ""
    if with_values and isinstance(array, np.ndarray) and array.dtype.kind in "iu" and array.size:
        low, high = int(array.min()), int(array.max())
        values = f" with the value {low}" if low == high else f" with values {low} to {high}"
    return f"{array.dtype} of shape ({_shape(array.shape)}){values}"


def _shape(sizes: Iterable[object]) -> str:
    return ", ".join(str(size) for size in sizes)


def _list(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "(it has none)"
