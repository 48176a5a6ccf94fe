"""Inputs of a model: from files, or at random. Pure but for reading files."""

from __future__ import annotations

import argparse
import math
import os
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..gpu.errors import InvalidInput
from ..gpu.graph.model import Model
from ..gpu.graph.read import read_model
from ..gpu.seam import TensorInfo
from ..gpu.shapes import check_shapes

__all__ = ["UsageError", "check_names", "describe", "draw", "feeds_of", "parse_shapes", "read_arrays", "shape_of"]

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

DRAWN_AT_ONCE = 1 << 20
"""Random numbers that are drawn as one piece: what is drawn in float32 or int64 stays small beside its array."""


class UsageError(Exception):
    """The command line does not mean anything; the message says what would."""


def feeds_of(arguments: argparse.Namespace) -> dict[str, Array]:
    """The feeds that a command line means: arrays of files, and the other inputs at random.

    Args:
        arguments: `model`, and the words of `inputs`, `shape` and `seed`.

    Raises:
        UsageError, InvalidInput, InvalidModel, MemoryError, OSError: as the functions below, and as reading the model.
    """
    shapes, feeds = parse_shapes(arguments.shape), read_arrays(arguments.inputs)
    model = read_model(arguments.model, optimise=False)
    check_shapes((*model.inputs, *model.overridable), shapes)
    check_names(model, feeds)
    for name in shapes:
        if name in feeds:
            raise UsageError(f"--shape {name}: the shape is that of the array in the file")
    missing = [info for info in model.inputs if info.name not in feeds and not info.type.startswith("optional")]
    return {**feeds, **draw(missing, shapes, arguments.seed)}


def parse_shapes(words: Iterable[str]) -> dict[str, Shape]:
    """The shapes of ``--shape NAME=1,3,48,320`` options; ``NAME=`` is a scalar's.

    Raises:
        UsageError: a word is not of that form, or a name occurs twice.
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
        if name in shapes:
            raise UsageError(f"--shape {word}: {name} has been given a shape before")
        shapes[name] = shape
    return shapes


def read_arrays(words: Iterable[str]) -> dict[str, Array]:
    """The arrays of ``NAME=FILE.npy`` and ``FILE.npz`` words.

    Raises:
        UsageError: a word is not of that form, the file holds no such arrays, or a name occurs twice.
        OSError: a file cannot be opened.
    """
    arrays: dict[str, Array] = {}

    def add(name: str, array: Array) -> None:
        if name in arrays:
            raise UsageError(f"{word}: input {name!r} has been given before")
        arrays[name] = array

    for word in words:
        name, found, path = word.rpartition("=")
        try:
            loaded = np.load(path, allow_pickle=False)
        except (ValueError, EOFError, zipfile.BadZipFile):
            raise UsageError(f"{path}: not a .npy or .npz file of plain arrays") from None
        if isinstance(loaded, np.ndarray):
            if not found:
                raise UsageError(f"{word}: which input is it? Write NAME={word}")
            add(name, loaded)
            continue
        with loaded:
            if found:
                raise UsageError(f"{word}: a .npz file names its arrays itself; write {path}")
            try:
                held = {key: loaded[key] for key in loaded.files}
            except ValueError:
                raise UsageError(f"{path}: holds something other than plain arrays") from None
            for key, array in held.items():
                add(key, array)
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
        MemoryError: they would take more than half of the memory that is free.
    """
    left = _free_bytes() // 2
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
        nbytes = math.prod(shape) * info.dtype.itemsize
        left -= nbytes
        if left < 0:
            size = f"{nbytes:,} bytes, drawn at random"
            raise MemoryError(f"input {info.name!r}: {size}, would take over half of the free memory")
        arrays[info.name] = array = np.empty(shape, info.dtype)
        flat = array.reshape(-1)
        for start in range(0, flat.size, DRAWN_AT_ONCE):
            part = flat[start : start + DRAWN_AT_ONCE]
            part[...] = _drawn(rng, info.dtype, part.size)
    return arrays


def _drawn(rng: np.random.Generator, dtype: np.dtype[Any], count: int) -> Array:
    if dtype.kind == "b":
        return rng.random(count, np.float32) < 0.5
    if dtype.kind in "iu":
        return rng.integers(0, 10, count)
    return rng.standard_normal(count, np.float64 if dtype == np.float64 else np.float32)


def _free_bytes() -> int:
    """The memory that may still be had, as far as the system says; else no bound."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return sys.maxsize


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
