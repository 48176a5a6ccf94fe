"""Values of any kind that may cross: arrays, scalars, texts, bytes, lists, tuples, maps, None, models.

Rules of this file:
1. Nothing here can name a class or a function: a value is data, whatever was sent.
2. The bytes of an array are copied once by the sender; who receives owns what it gets, or, in a
   worker, may read it until the run ends.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...gpu.seam import TensorRef
from .parcel import Malformed, Packing, Unpacking

__all__ = ["dtype_named", "name_of", "pack", "unpack"]

_PLAIN = re.compile(r"[<>|]?[biufcSU]\d{1,9}")
_MOST_DIMENSIONS = 32
_MOST_PROTO = (1 << 31) - 1


def name_of(dtype: np.dtype[Any]) -> str:
    """How a dtype is written.

    Raises:
        TypeError: it is of a kind that no tensor has.
    """
    if dtype.kind == "O":
        return "O"
    if dtype.kind == "T":
        return "T"
    if dtype.isbuiltin != 2 and dtype.names is None and dtype.subdtype is None and _PLAIN.fullmatch(dtype.str):
        return dtype.str
    if dtype.isbuiltin == 2 and _extended().get(dtype.name) is not None:
        return dtype.name
    raise TypeError(f"an array of {dtype} cannot be sent to a worker process")


def dtype_named(name: object) -> np.dtype[Any]:
    """The dtype that `name_of` wrote.

    Raises:
        Malformed: it is none.
    """
    if name == "O":
        return np.dtype(object)
    if name == "T":
        return np.dtypes.StringDType()
    if isinstance(name, str):
        try:
            found = np.dtype(name) if _PLAIN.fullmatch(name) else _extended().get(name)
        except (TypeError, ValueError):
            found = None
        if found is not None:
            return found
    raise Malformed(f"a dtype of {name!r}")


@functools.cache
def _extended() -> dict[str, np.dtype[Any]]:
    """The dtypes that NumPy does not have itself. Not imported until one is met: that takes most of a second."""
    import ml_dtypes

    kinds = vars(ml_dtypes).items()
    return {name: np.dtype(kind) for name, kind in kinds if isinstance(kind, type) and issubclass(kind, np.generic)}


def pack(value: Any, parcel: Packing) -> Any:
    """A value as JSON's types, its bytes in the parcel.

    Raises:
        TypeError: it holds something that may not cross.
    """
    kind = type(value)
    if value is None or kind is bool or kind is int or kind is float or kind is str:
        return value
    if isinstance(value, np.ndarray):
        return _pack_array("a", value, parcel)
    if isinstance(value, np.generic):
        return _pack_array("g", np.asarray(value), parcel)
    if isinstance(value, bytes | bytearray | memoryview):
        view = memoryview(value)
        view = view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
        return ["b", *parcel.add(view), len(view)]
    if kind is complex:
        return ["c", value.real, value.imag]
    if kind is TensorRef:
        return ["r", value.actor, value.generation, value.id, name_of(value.dtype), list(value.shape)]
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list | tuple):
        return ["t" if isinstance(value, tuple) else "l", *(pack(item, parcel) for item in value)]
    if isinstance(value, Mapping):
        return ["d", *([pack(key, parcel), pack(item, parcel)] for key, item in value.items())]
    if isinstance(value, int | float):
        return value
    if isinstance(value, os.PathLike):
        return pack(os.fspath(value), parcel)
    if _is_model(value):
        return ["m", *parcel.add_pieces(_pieces(value))]
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} cannot be sent to a worker process")


def unpack(item: Any, parcel: Unpacking) -> Any:
    """The value again.

    Raises:
        Malformed: it is no value, or its bytes are not there.
    """
    if item is None or isinstance(item, bool | int | float | str):
        return item
    if not isinstance(item, list) or not item:
        raise Malformed(f"a value of {type(item).__name__}")
    match item:
        case ["a" | "g" as tag, name, list(shape), *where]:
            array = _unpack_array(dtype_named(name), _shape(shape), where, parcel)
            return array[()] if tag == "g" else array
        case ["l", *items]:
            return [unpack(i, parcel) for i in items]
        case ["t", *items]:
            return tuple(unpack(i, parcel) for i in items)
        case ["d", *items]:
            return dict(_pair(i, parcel) for i in items)
        case ["c", int() | float() as real, int() | float() as imaginary]:
            return complex(real, imaginary)
        case ["r", int(actor), int(generation), int(number), name, list(shape)]:
            return TensorRef(actor, generation, number, dtype_named(name), _shape(shape))
        case ["b", place, offset, int(size)]:
            return parcel.take(place, offset, size).tobytes()
        case ["m", place, offset, int(size)]:
            return _model(parcel.take(place, offset, size))
    raise Malformed(f"a value with the tag {item[0]!r}")


def _pack_array(tag: str, array: np.ndarray[Any, Any], parcel: Packing) -> list[Any]:
    name = name_of(array.dtype)
    shape = list(array.shape)
    if name in "OT":
        return [tag, name, shape, [pack(item, parcel) for item in array.flat]]
    if array.nbytes == 0:
        return [tag, name, shape, 0, 0]
    flat = np.asarray(array, order="C").reshape(-1).view(np.uint8)
    return [tag, name, shape, *parcel.add(flat.data)]


def _unpack_array(
    dtype: np.dtype[Any], shape: tuple[int, ...], where: list[Any], parcel: Unpacking
) -> np.ndarray[Any, Any]:
    count = math.prod(shape)
    try:
        if dtype.kind in "OT":
            if len(where) != 1 or not isinstance(where[0], list) or len(where[0]) != count:
                raise Malformed(f"an array of {count} texts without them")
            array = np.empty(count, dtype)
            for index, item in enumerate(where[0]):
                array[index] = unpack(item, parcel)
            return array.reshape(shape)
        if len(where) != 2:
            raise Malformed("an array that does not say where it is")
        size = count * dtype.itemsize
        if size == 0:
            return np.zeros(shape, dtype)
        return parcel.take(where[0], where[1], size).view(dtype).reshape(shape)
    except Malformed:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise Malformed(f"an array of {dtype} {shape}: {error}") from None


def _shape(shape: list[Any]) -> tuple[int, ...]:
    if len(shape) > _MOST_DIMENSIONS or not all(type(size) is int and 0 <= size < 1 << 62 for size in shape):
        raise Malformed(f"a shape of {shape!r}")
    return tuple(shape)


def _pair(item: Any, parcel: Unpacking) -> tuple[Any, Any]:
    if not isinstance(item, list) or len(item) != 2:
        raise Malformed("an entry of a map that is no pair")
    key = unpack(item[0], parcel)
    if not isinstance(key, str | int | float | bytes | bool):
        raise Malformed(f"a key of {type(key).__name__}")
    return key, unpack(item[1], parcel)


# --- models ---------------------------------------------------------------------------------------


def _is_model(value: Any) -> bool:
    return getattr(getattr(value, "DESCRIPTOR", None), "full_name", "") == "onnx.ModelProto"


def _pieces(model: Any) -> Iterator[memoryview]:
    """A ModelProto serialised a node and a tensor at a time: the pieces, one behind the other, are the model."""
    shell, number = type(model)(), 0
    for descriptor, value in model.ListFields():
        if descriptor.name != "graph":
            _set(shell, descriptor, value)
            continue
        number = descriptor.number
        shell.graph.SetInParent()
        for inner, items in value.ListFields():
            if not hasattr(items, "extend"):
                _set(shell.graph, inner, items)
    yield memoryview(shell.SerializeToString())
    for inner, items in model.graph.ListFields():
        for item in items if hasattr(items, "extend") else ():
            body = item.SerializeToString()
            head = _head(inner.number, len(body))
            yield memoryview(_head(number, len(head) + len(body)) + head)
            yield memoryview(body)


def _head(number: int, size: int) -> bytes:
    """Protobuf's head of a field that has a length."""
    out = bytearray()
    for value in (number << 3 | 2, size):
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
    return bytes(out)


def _set(message: Any, descriptor: Any, value: Any) -> None:
    if hasattr(value, "extend"):
        getattr(message, descriptor.name).extend(value)
    elif hasattr(value, "CopyFrom"):
        getattr(message, descriptor.name).CopyFrom(value)
    else:
        setattr(message, descriptor.name, value)


def _model(data: np.ndarray[Any, Any]) -> Any:
    if data.nbytes > _MOST_PROTO:
        return data.tobytes()
    import onnx
    from google.protobuf.message import DecodeError

    model = onnx.ModelProto()
    try:
        model.ParseFromString(data.tobytes())
    except (DecodeError, ValueError) as error:
        raise Malformed(f"a model that cannot be decoded: {error}") from None
    return model
