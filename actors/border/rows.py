"""Messages that are numbers alone, as a row of them: what goes to and fro with every segment.

Which messages those are, their annotations tell: whole numbers, floats, and tuples of them with names. Other fields
must have their defaults, or the message goes as text.
"""

from __future__ import annotations

import dataclasses
import struct
import typing
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from .messages import MESSAGES
from .parcel import Malformed

__all__ = ["MARK", "from_row", "to_row"]

MARK = b"\0"
"""What a row begins with, and no text does."""

_FORMATS = {int: "q", float: "d"}


class _Row:
    """How messages of one class become a row and come back."""

    def __init__(self, number: int, cls: Any) -> None:
        hints = typing.get_type_hints(cls)
        names: list[str] = []
        defaults: list[Any] = []
        form = "<cB"
        self._parts: list[tuple[str, Any, int, int]] = []
        self._rest: list[str] = []
        for field in dataclasses.fields(cls):
            hint = hints[field.name]
            kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None)]
            inner = list(typing.get_type_hints(kinds[0]).items()) if _is_named_tuple(kinds[0]) else []
            start = len(names)
            if inner and all(kind in _FORMATS for _, kind in inner):
                names += [f"{field.name}.{name}" for name, _ in inner]
                form += "".join(_FORMATS[kind] for _, kind in inner)
                self._parts.append((field.name, kinds[0]._make, start, len(names)))
            elif len(kinds) == 1 and kinds[0] in _FORMATS:
                names.append(field.name)
                form += _FORMATS[kinds[0]]
                self._parts.append((field.name, None, start, start + 1))
            elif field.default is not dataclasses.MISSING:
                self._rest.append(field.name)
                defaults.append(field.default)
            else:
                names.clear()
                break
        self.fits = len(names) > 1
        self._class, self._number, self._struct = cls, number, struct.Struct(form)
        self._get = attrgetter(*names) if self.fits else None
        self._defaults = defaults

    def pack(self, message: Any) -> bytes | None:
        """The row, or None: it must go as text."""
        assert self._get is not None
        for name, default in zip(self._rest, self._defaults, strict=True):
            if getattr(message, name) != default:
                return None
        try:
            return self._struct.pack(MARK, self._number, *self._get(message))
        except struct.error:  # a number that is not there, or a very large one
            return None

    def unpack(self, row: bytes) -> Any:
        """The message again."""
        if len(row) != self._struct.size:
            raise Malformed(f"a row of {len(row)} bytes for {self._class.__name__}")
        values = self._struct.unpack(row)[2:]
        return self._class(
            **{
                name: values[first] if make is None else make(values[first:last])
                for name, make, first, last in self._parts
            }
        )


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_make")


_ROWS = [_Row(number, cls) for number, cls in enumerate(MESSAGES)]
_PACK: dict[type, Callable[[Any], bytes | None]] = {
    cls: row.pack for cls, row in zip(MESSAGES, _ROWS, strict=True) if row.fits
}


def to_row(message: Any) -> bytes | None:
    """A message as a row; None: it is not one of numbers alone."""
    pack = _PACK.get(type(message))
    return None if pack is None else pack(message)


def from_row(row: bytes) -> Any:
    """The message again.

    Raises:
        Malformed: it is none.
    """
    if len(row) < 2 or row[1] >= len(_ROWS) or not _ROWS[row[1]].fits:
        raise Malformed("a row of no message")
    return _ROWS[row[1]].unpack(row)
