"""Inputs of a model: from files, or at random. Pure but for reading files."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..gpu.errors import InvalidInput
from ..gpu.graph.model import Model
from ..gpu.seam import TensorInfo

__all__ = ["UsageError", "check_names", "describe", "draw", "parse_shapes", "read_arrays", "shape_of"]

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]


class UsageError(Exception):
    """The command line does not mean anything; the message says what would."""


def parse_shapes(words: Iterable[str]) -> dict[str, Shape]:
    """The shapes of ``--shape NAME=1,3,48,320`` options; ``NAME=`` is a scalar's.

    Raises:
        UsageError: a word is not of that form.
    """
    shapes: dict[str, Shape] = {}
    for word in words:
        name, found, sizes = word.rpartition("=")
        try:
            shape = tuple(int(size) for size in sizes.split(",") if sizes)
        except ValueError:
            shape = (-1,)
        if not found or any(size < 0 for size in shape):
            raise UsageError(f"--shape {word}: expected NAME=SIZE,SIZE,..., such as x=1,3,48,320")
        shapes[name] = shape
    return shapes


def read_arrays(words: Iterable[str]) -> dict[str, Array]:
    """The arrays of ``NAME=FILE.npy`` and ``FILE.npz`` words.

    Raises:
        UsageError: a word is not of that form, or the file holds no such arrays.
        OSError: a file cannot be opened.
    """
    arrays: dict[str, Array] = {}
    for word in words:
        name, found, path = word.rpartition("=")
        try:
            loaded = np.load(path, allow_pickle=False)
        except (ValueError, EOFError, zipfile.BadZipFile):
            raise UsageError(f"{path}: not a .npy or .npz file of plain arrays") from None
        if isinstance(loaded, np.ndarray):
            if not found:
                raise UsageError(f"{word}: which input is it? Write NAME={word}")
            arrays[name] = loaded
            continue
        with loaded:
            if found:
                raise UsageError(f"{word}: a .npz file names its arrays itself; write {path}")
            try:
                arrays.update({key: loaded[key] for key in loaded.files})
            except ValueError:
                raise UsageError(f"{path}: holds something other than plain arrays") from None
    return arrays


def check_names(model: Model, names: Iterable[str]) -> None:
    """Refuse names that are no inputs of the model.

    Raises:
        InvalidInput: the first of them.
    """
    known = [info.name for info in (*model.inputs, *model.overridable)]
    for name in names:
        if name not in known:
            expected = f"an input of the model: {', '.join(map(repr, known))}"
            raise InvalidInput(name, expected, "a name that it does not have")


def shape_of(info: TensorInfo, shapes: Mapping[str, Shape]) -> Shape | None:
    """The shape of an input: as given, else as declared; None where it has free dimensions."""
    if info.name in shapes:
        return shapes[info.name]
    if info.shape is None:
        return None
    sizes = tuple(size for size in info.shape if isinstance(size, int))
    return sizes if len(sizes) == len(info.shape) else None


def draw(infos: Sequence[TensorInfo], shapes: Mapping[str, Shape], seed: int) -> dict[str, Array]:
    """Random arrays: floats of a normal distribution, integers from 0 to 9, both truth values.

    An input gets the same values whichever others there are.

    Raises:
        InvalidInput: an input is no tensor of numbers.
        UsageError: an input has free dimensions, and no shape was given.
    """
    arrays: dict[str, Array] = {}
    for info in infos:
        if info.dtype is None or info.dtype.hasobject:
            raise InvalidInput(info.name, f"an array from a file ({info.type})", "nothing")
        shape = shape_of(info, shapes)
        if shape is None:
            example = "" if info.shape is None else ",".join(str(s) if isinstance(s, int) else "1" for s in info.shape)
            needed = f"give its shape, such as --shape {info.name}={example}, or a file"
            raise UsageError(f"input {info.name!r} is {describe(info)}: {needed}")
        rng = np.random.default_rng([seed, *info.name.encode()])
        if info.dtype.kind == "b":
            arrays[info.name] = rng.random(shape) < 0.5
        elif info.dtype.kind in "iu":
            arrays[info.name] = rng.integers(0, 10, shape).astype(info.dtype)
        else:
            arrays[info.name] = np.asarray(rng.standard_normal(shape)).astype(info.dtype)
    return arrays


def describe(info: TensorInfo) -> str:
    """An input or output's type and shape, for people."""
    if info.dtype is None or info.type != f"tensor({_plain(info.type)})":
        return info.type
    kind = "string" if info.dtype.hasobject else str(info.dtype)
    if info.shape is None:
        return f"{kind} of any shape"
    return f"{kind} [{', '.join('?' if size is None else str(size) for size in info.shape)}]"


def _plain(text: str) -> str:
    return text.removeprefix("tensor(").removesuffix(")")
