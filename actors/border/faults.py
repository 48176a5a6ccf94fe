"""Errors as code and fields. Those of gpu/errors.py and Python's own arrive as what they were; no other class does."""

from __future__ import annotations

import builtins
import traceback
from typing import Any

from ...gpu import errors
from . import values
from .parcel import Malformed, Packing, Unpacking

__all__ = ["pack", "unpack"]

_TRACED = 12


def pack(error: BaseException, parcel: Packing) -> list[Any]:
    """An error as [code, arguments, fields, notes]; one of a class that may not cross becomes a RuntimeError."""
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    cls = type(error)
    if cls.__name__ not in errors.__all__ and error.__traceback__ is not None:
        lines = traceback.format_tb(error.__traceback__)[-_TRACED:]
        notes.append("in the worker process:\n" + "".join(lines).rstrip())
    try:
        if _class(cls.__name__) is not cls:
            raise TypeError(cls.__name__)
        arguments = _arguments(error)
        cls(*arguments)
        fields = {key: value for key, value in vars(error).items() if not key.startswith("_")}
        return [cls.__name__, values.pack(arguments, parcel), values.pack(fields, parcel), notes]
    except Exception:
        text = f"{cls.__module__}.{cls.__qualname__}: {_text(error)}"
        return ["RuntimeError", values.pack((text,), parcel), values.pack({}, parcel), notes]


def unpack(item: Any, parcel: Unpacking) -> BaseException:
    """The error again.

    Raises:
        Malformed: it is none.
    """
    match item:
        case [str(name), arguments, fields, list(notes)] if all(isinstance(note, str) for note in notes):
            cls = _class(name)
            given, more = values.unpack(arguments, parcel), values.unpack(fields, parcel)
            if cls is None or not isinstance(given, tuple) or not isinstance(more, dict):
                raise Malformed(f"an error called {name!r}")
            try:
                error = cls(*given)
                for key, value in more.items():
                    setattr(error, key, value)
            except Exception as cause:
                raise Malformed(f"an error called {name!r}: {cause}") from None
            for note in notes:
                error.add_note(note)
            return error
    raise Malformed("an error without a code")


def _class(name: str) -> type[Exception] | None:
    found = getattr(errors, name, None) if name in errors.__all__ else getattr(builtins, name, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _arguments(error: BaseException) -> tuple[Any, ...]:
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return error.errno, error.strerror, error.filename
    return error.args


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(it has no text)"
