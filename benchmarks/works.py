"""What is run: real models with seeded inputs, single large operators, files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

import real_models
from trionnx.cli.inputs import UsageError, draw, parse_shapes
from trionnx.gpu.graph.read import read_model
from trionnx.gpu.shapes import check_shapes

__all__ = ["GIANTS", "MATMUL", "Work", "names_of", "work"]

Array = np.ndarray[Any, Any]
Made = tuple[onnx.ModelProto, dict[str, Array]]

MATMUL = "matmul_2048"
"""One product of 2048 x 2048 matrices, the second of them a weight."""


@dataclass(frozen=True)
class Work:
    """A model and its inputs.

    Attributes:
        name: for people. source: a path, or a serialised model.
    """

    name: str
    source: Path | bytes
    feeds: dict[str, Array]


def _one(op: str, feeds: dict[str, Array], weights: dict[str, Array], order: Sequence[str], **attributes: Any) -> Made:
    """A model of one operator on floats, whose first output is the model's."""
    infos = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, x.shape) for name, x in feeds.items()]
    out = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    node = helper.make_node(op, order, ["y"], **attributes)
    constants = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph([node], op, infos, [out], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), feeds


def _normal(seed: int, *shape: int, scale: float = 1.0) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def _matmul(size: int) -> Made:
    return _one("MatMul", {"x": _normal(0, size, size)}, {"w": _normal(1, size, size, scale=size**-0.5)}, ("x", "w"))


def _conv() -> Made:
    weights = {"w": _normal(1, 128, 64, 3, 3, scale=1 / 24)}
    return _one("Conv", {"x": _normal(0, 1, 64, 256, 256)}, weights, ("x", "w"), pads=[1, 1, 1, 1])


def _lstm() -> Made:
    hidden, width = 256, 128
    weights = {
        "w": _normal(1, 1, 4 * hidden, width, scale=width**-0.5),
        "r": _normal(2, 1, 4 * hidden, hidden, scale=hidden**-0.5),
    }
    return _one("LSTM", {"x": _normal(0, 1000, 8, width)}, weights, ("x", "w", "r"), hidden_size=hidden)


def _resize() -> Made:
    weights = {"scales": np.array([1, 1, 4, 4], np.float32)}
    return _one("Resize", {"x": _normal(0, 1, 4, 512, 512)}, weights, ("x", "", "scales"), mode="cubic")


_SINGLE: Mapping[str, Callable[[], Made]] = {
    MATMUL: lambda: _matmul(2048),
    "conv_giant": _conv,
    "lstm_giant": _lstm,
    "resize_giant": _resize,
}

GIANTS = tuple(name for name in _SINGLE if name != MATMUL)
"""Single operators that take long and can be cut inside."""


def names_of(wanted: Sequence[str], giants: bool = False) -> list[str]:
    """The names that are meant: "all" is every real model and the product of matrices.

    Args:
        wanted: names, "all", or paths of .onnx files.
        giants: the large single operators, too.
    """
    names: list[str] = []
    for name in wanted:
        names += [*real_models.MODELS, MATMUL] if name == "all" else [name]
    return list(dict.fromkeys([*names, *(GIANTS if giants else ())]))


def work(name: str, shapes: Sequence[str] = ()) -> Work:
    """The model of a name and its inputs, the same each time.

    Args:
        name: one that `names_of` gave.
        shapes: of a file's free dimensions, such as "x=1,3,48,320".

    Raises:
        real_models.Unavailable: the model is not here and cannot be fetched.
        UsageError: a shape makes no sense.
        OSError: the file cannot be opened.
    """
    if name in real_models.MODELS:
        return Work(name, real_models.model(name), real_models.feeds(name))
    if name in _SINGLE:
        model, feeds = _SINGLE[name]()
        return Work(name, model.SerializeToString(), feeds)
    path = Path(name)
    if path.suffix != ".onnx":
        known = ", ".join([*real_models.MODELS, *_SINGLE])
        raise UsageError(f"{name} is no .onnx file and no known model; known are {known}")
    read, given = read_model(path, optimise=False), parse_shapes(shapes)
    check_shapes((*read.inputs, *read.overridable), given)
    return Work(path.stem, path, draw(read.inputs, given, seed=0))
