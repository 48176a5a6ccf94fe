"""Checking the plain arguments of the public calls: numbers, callbacks, shapes, adapters. Pure.

Each refusal is one sentence that names the argument and what it takes.
"""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Mapping
from typing import Any

from ..gpu.policy import TerminatePolicy

__all__ = ["adapter_of", "callback_of", "count_of", "folder_of", "policy_of", "positive_of", "shapes_of", "whole_of"]


def count_of(name: str, value: Any) -> int:
    """A whole number from 1 on.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is below 1.
    """
    number = whole_of(name, value)
    if number < 1:
        raise ValueError(f"{name} is at least 1, not {number}")
    return number


def whole_of(name: str, value: Any) -> int:
    """A whole number.

    Raises:
        TypeError: it is none.
    """
    number = _whole(value)
    if number is None:
        raise TypeError(f"{name} is a whole number, not {value!r}")
    return number


def positive_of(name: str, value: Any) -> float:
    """A number above 0, infinity among them.

    Raises:
        TypeError: it is no number.
        ValueError: it is not above 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a number, not {value!r}")
    if not value > 0:
        raise ValueError(f"{name} is more than 0, not {value!r}")
    return float(value)


def policy_of(name: str, value: Any) -> TerminatePolicy | None:
    """A policy, or None.

    Raises:
        TypeError: it is neither.
    """
    if value is not None and not isinstance(value, TerminatePolicy):
        raise TypeError(f"{name} is a TerminatePolicy or None, not {type(value).__name__}")
    return value


def callback_of(name: str, value: Any) -> Any:
    """A plain function, or None.

    Raises:
        TypeError: it cannot be called, or is an async function: nothing would await it.
    """
    if value is None:
        return None
    if not callable(value):
        raise TypeError(f"{name} is a function or None, not {type(value).__name__}")
    if inspect.iscoroutinefunction(value) or inspect.iscoroutinefunction(type(value).__call__):
        raise TypeError(f"{name} is a plain function, not an async one: it is called, not awaited")
    return value


def adapter_of(value: Any) -> str | int | None:
    """An adapter's index or a part of its name; None, also for an empty text: it was not given.

    Raises:
        TypeError: it is neither.
    """
    if value is None or isinstance(value, str):
        return value or None
    number = _whole(value)
    if number is None:
        raise TypeError(f"adapter is an index, a part of a name or None, not {type(value).__name__}")
    return number


def folder_of(name: str, value: Any) -> str | os.PathLike[str] | None:
    """A folder, which need not exist; None: it was not given.

    Raises:
        TypeError: it is no path.
    """
    if value is None or isinstance(value, str | os.PathLike):
        return value
    raise TypeError(f"{name} is a path or None, not {type(value).__name__}")


def shapes_of(value: Any) -> dict[str, tuple[int, ...]] | None:
    """Shapes by the names of inputs; whether the model has such inputs is not known here.

    Raises:
        TypeError: it is no mapping of names to sequences of whole numbers.
        ValueError: a size is negative.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(f"input_shapes is a dict of shapes by name, not {type(value).__name__}")
    shapes = {}
    for name, shape in value.items():
        if not isinstance(name, str):
            raise TypeError(f"input_shapes: a name is a string, not {type(name).__name__}")
        try:
            sizes = None if isinstance(shape, (str, bytes)) else [_whole(size) for size in shape]
        except TypeError:
            sizes = None
        if sizes is None or None in sizes:
            raise TypeError(f"input_shapes: the shape of {name!r} is a sequence of whole numbers, not {shape!r}")
        whole = tuple(size for size in sizes if size is not None)
        if min(whole, default=0) < 0:
            raise ValueError(f"input_shapes: the shape of {name!r} has a negative size: {whole}")
        shapes[name] = whole
    return shapes


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
