"""Messages as bytes: each of the closed list, by the fields of its dataclass, whatever they are.

What a field may hold is taken from its annotation, so that a field that is added to a message needs nothing
here. Both directions check it: what does not fit is `Malformed`, never a message with a hole.
Most is JSON. What goes with every segment is a row of numbers, and the many steps of a block go by columns: that
is what makes it fast.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Union

import numpy as np

from . import faults, rows, values
from .messages import MESSAGES
from .parcel import Malformed, Packing, Unpacking

__all__ = ["decode", "encode"]

_PLAIN = (int, float, str, bool)


class _Codec(NamedTuple):
    """How values of one annotation go to JSON's types and come back.

    Attributes:
        pack: None: JSON takes them as they are.
        as_is: values of this very type come back as they are; there is no need to call `unpack`.
    """

    pack: Callable[[Any, Packing], Any] | None
    unpack: Callable[[Any, Unpacking], Any]
    as_is: type | None = None

    def packed(self, value: Any, parcel: Packing) -> Any:
        """A value as JSON's types."""
        return value if self.pack is None else self.pack(value, parcel)


def encode(message: Any, parcel: Packing) -> bytes:
    """A message as JSON; its large bytes are in the parcel.

    Raises:
        TypeError: it is not of the list, or holds something that may not cross.
    """
    row = rows.to_row(message)
    if row is not None:
        return row
    cls = type(message)
    if cls not in MESSAGES:
        raise TypeError(f"{cls.__name__} is no message")
    return _to_text([cls.__name__, _codec(cls).packed(message, parcel)]).encode("ascii")


def decode(text: bytes, parcel: Unpacking) -> Any:
    """The message again.

    Raises:
        Malformed: it is no message, or not whole.
    """
    if text[:1] == rows.MARK:
        return rows.from_row(text)
    try:
        item = json.loads(text)
        if not isinstance(item, list) or len(item) != 2 or not isinstance(item[0], str) or item[0] not in _BY_NAME:
            raise Malformed("no message of the list")
        return _codec(_BY_NAME[item[0]]).unpack(item[1], parcel)
    except Malformed:
        raise
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise Malformed(f"a message that cannot be read: {error}") from None


_BY_NAME = {cls.__name__: cls for cls in MESSAGES}


def _number(value: Any) -> Any:
    """NumPy's scalars where a Python number was meant."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} may not cross")


_to_text = json.JSONEncoder(separators=(",", ":"), default=_number, check_circular=False).encode


# --- annotations ----------------------------------------------------------------------------------


def _codec(hint: Any) -> _Codec:
    codec: _Codec = _made(hint)
    return codec


@functools.cache
def _made(hint: Any) -> _Codec:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return _Codec(values.pack, values.unpack)
    if hint in _PLAIN:
        return _plain(hint)
    if origin is Literal:
        return _literal(arguments)
    if origin is np.dtype or hint is np.dtype:
        return _Codec(lambda value, _: values.name_of(value), lambda item, _: values.dtype_named(item))
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is tuple:
        return _sequence(arguments[0]) if arguments[-1] is Ellipsis else _fixed(tuple, arguments)
    if origin in (Mapping, dict):
        return _mapping(*arguments)
    if isinstance(hint, type) and issubclass(hint, BaseException):
        return _Codec(faults.pack, faults.unpack)
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        named: Any = hint
        return _fixed(named._make, tuple(typing.get_type_hints(hint).values()))
    if dataclasses.is_dataclass(hint):
        return _record(hint)
    raise TypeError(f"{hint!r} may not cross")


def _plain(kind: type) -> _Codec:
    def unpack(item: Any, _: Unpacking) -> Any:
        if type(item) is kind:
            return item
        if kind is float and type(item) is int:
            return float(item)
        raise Malformed(f"{type(item).__name__} where {kind.__name__} belongs")

    return _Codec(None, unpack, kind)


def _literal(known: tuple[Any, ...]) -> _Codec:
    def unpack(item: Any, _: Unpacking) -> Any:
        if isinstance(item, str | int) and item in known:
            return item
        raise Malformed(f"{item!r} where one of {known} belongs")

    return _Codec(None, unpack)


def _union(kinds: tuple[Any, ...]) -> _Codec:
    """Plain kinds and None as they are; one kind besides untagged; several, which are records, by their names."""
    plain = tuple(kind for kind in kinds if kind in _PLAIN or kind is types.NoneType)
    others = tuple(kind for kind in kinds if kind not in plain)
    if Any in others:
        return _codec(Any)
    named = {kind.__name__: kind for kind in others} if len(others) > 1 else {}
    floats = float in plain and int not in plain

    def pack(value: Any, parcel: Packing) -> Any:
        if isinstance(value, (*plain, np.generic)):
            return value
        name = type(value).__name__
        if named and name in named:
            return [name, _codec(named[name]).packed(value, parcel)]
        if named or not others:
            raise TypeError(f"{type(value).__name__} may not cross here")
        return _codec(others[0]).packed(value, parcel)

    def unpack(item: Any, parcel: Unpacking) -> Any:
        if type(item) in plain:
            return item
        if floats and type(item) is int:
            return float(item)
        if named:
            if not isinstance(item, list) or len(item) != 2 or not isinstance(item[0], str) or item[0] not in named:
                raise Malformed(f"none of {', '.join(named)}")
            return _codec(named[item[0]]).unpack(item[1], parcel)
        if not others:
            raise Malformed(f"{type(item).__name__} where it does not belong")
        return _codec(others[0]).unpack(item, parcel)

    # A field of one plain kind, or none: what is not None is most often of that kind.
    return _Codec(pack if others else None, unpack, next((kind for kind in plain if kind is not types.NoneType), None))


def _sequence(kind: Any) -> _Codec:
    if dataclasses.is_dataclass(kind):
        return _table(kind)
    one = _codec(kind)

    def pack(value: Any, parcel: Packing) -> Any:
        return [one.packed(item, parcel) for item in value]

    def unpack(item: Any, parcel: Unpacking) -> Any:
        return tuple(i if type(i) is one.as_is else one.unpack(i, parcel) for i in _list(item))

    return _Codec(pack if one.pack else None, unpack)


def _table(cls: Any) -> _Codec:
    """Many records of one kind: a column for each field."""
    hints = _fields(cls)
    getters = [attrgetter(name) for name in hints]

    def pack(value: Any, parcel: Packing) -> Any:
        columns = []
        for getter, hint in zip(getters, hints.values(), strict=True):
            one, column = _codec(hint), list(map(getter, value))
            columns.append(column if one.pack is None else [one.pack(item, parcel) for item in column])
        return columns

    def unpack(item: Any, parcel: Unpacking) -> Any:
        packed = _list(item)
        if len(packed) != len(hints) or len({len(_list(column)) for column in packed}) > 1:
            raise Malformed(f"columns that are no {cls.__name__}s")
        columns = []
        for column, hint in zip(packed, hints.values(), strict=True):
            one = _codec(hint)
            plain = one.as_is is not None and set(map(type, column)) == {one.as_is}
            columns.append(column if plain else [one.unpack(i, parcel) for i in column])
        return tuple(map(cls, *columns)) if columns else ()

    return _Codec(pack, unpack)


def _fixed(make: Callable[[Any], Any], kinds: tuple[Any, ...]) -> _Codec:
    codecs = [_codec(kind) for kind in kinds]

    as_is = tuple(codec.as_is for codec in codecs)

    def pack(value: Any, parcel: Packing) -> Any:
        return [codec.packed(item, parcel) for codec, item in zip(codecs, value, strict=True)]

    def unpack(item: Any, parcel: Unpacking) -> Any:
        items = _list(item)
        if tuple(map(type, items)) == as_is:
            return make(items)
        if len(items) != len(codecs):
            raise Malformed(f"{len(items)} items where {len(codecs)} belong")
        return make(codec.unpack(i, parcel) for codec, i in zip(codecs, items, strict=True))

    return _Codec(pack if any(codec.pack for codec in codecs) else None, unpack)


def _mapping(key: Any, kind: Any) -> _Codec:
    """Keys are texts, which is all that the seam has."""
    if key is not str:
        raise TypeError(f"a mapping by {key!r} may not cross")
    one = _codec(kind)

    def pack(value: Any, parcel: Packing) -> Any:
        return {str(name): one.packed(item, parcel) for name, item in value.items()}

    def unpack(item: Any, parcel: Unpacking) -> Any:
        if not isinstance(item, dict):
            raise Malformed(f"{type(item).__name__} where a mapping belongs")
        return {name: one.unpack(i, parcel) for name, i in item.items()}

    return _Codec(pack, unpack)


def _record(cls: Any) -> _Codec:
    hints = _fields(cls)
    names = tuple(hints)
    # Made at the first use, not here: a record may hold its own kind.
    codecs = functools.cache(lambda: [_codec(hint) for hint in hints.values()])
    packed = functools.cache(lambda: [(n, codec.pack) for n, codec in enumerate(codecs()) if codec.pack is not None])

    def pack(value: Any, parcel: Packing) -> Any:
        if type(value) is not cls:
            raise TypeError(f"{type(value).__name__} where {cls.__name__} belongs")
        items = [getattr(value, name) for name in names]
        for n, pack_one in packed():
            if items[n] is not None:
                items[n] = pack_one(items[n], parcel)
        return items

    def unpack(item: Any, parcel: Unpacking) -> Any:
        items = _list(item)
        if len(items) != len(names):
            raise Malformed(f"{len(items)} fields of {cls.__name__}, which has {len(names)}")
        for n, codec in enumerate(codecs()):
            if type(items[n]) is not codec.as_is:
                items[n] = codec.unpack(items[n], parcel)
        return cls(**dict(zip(names, items, strict=True)))

    return _Codec(pack, unpack)


def _fields(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def _list(item: Any) -> list[Any]:
    if not isinstance(item, list):
        raise Malformed(f"{type(item).__name__} where a list belongs")
    return item
