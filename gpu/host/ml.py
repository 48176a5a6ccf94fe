"""Operators of ai.onnx.ml on rows of features: linear models, scalers, encoders, maps."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import InvalidData
from ..graph.model import Node
from .scores import labels_of, transform, two_columns
from .table import Array, Inputs, op

__all__: list[str] = []

_ML = "ai.onnx.ml"


@op("ZipMap", domain=_ML)
def _zip_map(node: Node, inputs: Inputs) -> list[Any]:
    labels = node.attrs.get("classlabels_int64s") or node.attrs["classlabels_strings"]
    rows = inputs[0].reshape(-1, len(labels))
    return [[dict(zip(labels, row.tolist(), strict=True)) for row in rows]]


def _linear(node: Node, x: Array, count: int) -> Array:
    """Scores: x [rows, features] @ coefficients [count, features]; coefficients beyond these are not read."""
    x = (x.reshape(1, -1) if x.ndim == 1 else x).astype(np.float32, copy=False)
    weights, wanted = np.array(node.attrs["coefficients"], np.float32), count * x.shape[1]
    if weights.size < wanted:
        raise ValueError(f"{weights.size} coefficients for {count} times {x.shape[1]} features")
    bias = np.array(node.attrs.get("intercepts") or [0] * count, np.float32)
    return np.asarray(x @ weights[:wanted].reshape(count, -1).T + bias)


@op("LinearRegressor", domain=_ML)
def _linear_regressor(node: Node, inputs: Inputs) -> list[Array]:
    made = _linear(node, inputs[0], node.attrs.get("targets", 1))
    return [transform(node.attrs.get("post_transform", "NONE"), made)]


@op("LinearClassifier", domain=_ML)
def _linear_classifier(node: Node, inputs: Inputs) -> list[Array] | None:
    """Two classes may have one score: then it is that of the second."""
    attrs, labels = node.attrs, labels_of(node.attrs, "classlabels_ints")
    features = inputs[0].shape[-1]
    count = len(attrs.get("intercepts") or ()) or len(attrs["coefficients"]) // max(features, 1)
    name = attrs.get("post_transform", "NONE")
    scores = _linear(node, inputs[0], count)
    if count > 1 and len(labels) == count:
        return [labels[scores.argmax(1)], transform(name, scores)]
    if count == 1 and len(labels) == 2:
        return [labels[(scores[:, 0] > 0).astype(np.int64)], two_columns(name, scores[:, 0], True)]
    return None


@op("Scaler", domain=_ML)
def _scaler(node: Node, inputs: Inputs) -> list[Array]:
    offset, scale = (np.array(node.attrs.get(name) or [d], np.float32) for name, d in (("offset", 0), ("scale", 1)))
    return [(inputs[0].astype(np.float32) - offset) * scale]


@op("Normalizer", domain=_ML)
def _normalizer(node: Node, inputs: Inputs) -> list[Array]:
    """Rows of norm 0 stay as they are."""
    x = inputs[0].astype(np.float32)
    match node.attrs.get("norm", "MAX"):
        case "MAX":
            norm = x.max(-1, keepdims=True)
        case "L1":
            norm = np.abs(x).sum(-1, keepdims=True)
        case "L2":
            norm = np.sqrt(np.square(x).sum(-1, keepdims=True))
        case other:
            raise ValueError(f"norm {other!r} is not known")
    return [x / np.where(norm == 0, np.float32(1), norm)]


@op("Binarizer", domain=_ML)
def _binarizer(node: Node, inputs: Inputs) -> list[Array]:
    x = inputs[0]
    return [(x > node.attrs.get("threshold", 0.0)).astype(x.dtype)]


@op("Imputer", domain=_ML)
def _imputer(node: Node, inputs: Inputs) -> list[Array]:
    x, attrs = inputs[0], node.attrs
    if x.dtype.kind == "f":
        values, replaced = attrs["imputed_value_floats"], attrs.get("replaced_value_float", 0.0)
    else:
        values, replaced = attrs["imputed_value_int64s"], attrs.get("replaced_value_int64", 0)
    if len(values) not in (1, x.shape[-1]):
        raise ValueError(f"{len(values)} imputed values for {x.shape[-1]} features")
    hit = np.isnan(x) if replaced != replaced else x == np.array(replaced, x.dtype)
    return [np.where(hit, np.array(values, x.dtype), x)]


@op("FeatureVectorizer", domain=_ML)
def _feature_vectorizer(node: Node, inputs: Inputs) -> list[Array]:
    parts = []
    for x, width in zip(inputs, node.attrs["inputdimensions"], strict=True):
        rows = (x.reshape(1, -1) if x.ndim == 1 else x.reshape(len(x), -1)).astype(np.float32)
        parts.append(np.pad(rows[:, :width], ((0, 0), (0, max(0, width - rows.shape[1])))))
    return [np.concatenate(parts, 1)]


@op("OneHotEncoder", domain=_ML, strings=True)
def _one_hot_encoder(node: Node, inputs: Inputs) -> list[Array]:
    x, attrs = inputs[0], node.attrs
    if x.dtype.kind == "O":
        out = x[..., None] == np.array(attrs["cats_strings"], object)
    else:
        out = x[..., None].astype(np.int64) == np.array(attrs["cats_int64s"], np.int64)
    if not attrs.get("zeros", 1) and not out.any(-1).all():
        raise ValueError(f"{x[~out.any(-1)].reshape(-1)[0]!r} is none of the categories")
    return [out.astype(np.float32)]


_KINDS: dict[str, Any] = {"float": np.float32, "int64": np.int64, "string": object}
_DEFAULTS: dict[str, Any] = {"float": -0.0, "int64": -1, "string": "_Unused"}


@op("LabelEncoder", domain=_ML, strings=True)
def _label_encoder(node: Node, inputs: Inputs) -> list[Array]:
    x, attrs = inputs[0], node.attrs
    if "classes_strings" in attrs or node.opset < 2:
        return [_categories(x, attrs["classes_strings"], range(len(attrs["classes_strings"])), attrs)]
    keys, _ = _listed(attrs, "keys")
    values, dtype = _listed(attrs, "values")
    kind = next(k for k, d in _KINDS.items() if np.dtype(d).kind == dtype.kind)
    default = attrs.get(f"default_{kind}", _DEFAULTS[kind])
    if attrs.get("default_tensor") is not None:
        default = attrs["default_tensor"].reshape(-1)[0]
    return [_looked_up(x, dict(zip(map(_key, keys), values, strict=True)), default, dtype)]


def _listed(attrs: dict[str, Any], name: str) -> tuple[list[Any], np.dtype[Any]]:
    tensor = attrs.get(f"{name}_tensor")
    if tensor is not None:
        return tensor.reshape(-1).tolist(), tensor.dtype
    for kind, dtype in _KINDS.items():
        if attrs.get(f"{name}_{kind}s"):
            return list(attrs[f"{name}_{kind}s"]), np.dtype(dtype)
    raise KeyError(name)


def _key(x: Any) -> Any:
    return None if isinstance(x, float) and x != x else x


def _looked_up(x: Array, table: dict[Any, Any], default: Any, dtype: Any) -> Array:
    """What a table says of each element; NaN is a key like others."""
    out = np.empty(x.size, dtype)
    for i, item in enumerate(x.reshape(-1).tolist()):
        out[i] = table.get(_key(item), default)
    return out.reshape(x.shape)


@op("CategoryMapper", domain=_ML, strings=True)
def _category_mapper(node: Node, inputs: Inputs) -> list[Array]:
    return [_categories(inputs[0], node.attrs["cats_strings"], node.attrs["cats_int64s"], node.attrs)]


def _categories(x: Array, strings: Any, numbers: Any, attrs: dict[str, Any]) -> Array:
    """Strings to their numbers, or back."""
    if x.dtype.kind == "O":
        table = dict(zip(strings, numbers, strict=True))
        return _looked_up(x, table, attrs.get("default_int64", -1), np.int64)
    table = dict(zip(numbers, strings, strict=True))
    return _looked_up(x, table, attrs.get("default_string", "_Unused"), object)


@op("DictVectorizer", domain=_ML, anything=True)
def _dict_vectorizer(node: Node, inputs: Inputs) -> list[Array]:
    """A map (or several) -> one row for each, one column for each word; what a map lacks is 0."""
    words = node.attrs.get("string_vocabulary") or node.attrs["int64_vocabulary"]
    maps = [inputs[0]] if isinstance(inputs[0], dict) else list(inputs[0])
    values = [value for each in maps for value in each.values()]
    if any(isinstance(value, str) for value in values):
        return [np.array([[each.get(word, "") for word in words] for each in maps], object)]
    dtype: Any = np.int64 if values and all(isinstance(v, int | np.integer) for v in values) else np.float32
    return [np.array([[each.get(word, 0) for word in words] for each in maps], dtype)]


@op("CastMap", domain=_ML, anything=True)
def _cast_map(node: Node, inputs: Inputs) -> list[Array]:
    """A map from integers -> one row: its values by key (DENSE), or at the places that the keys say (SPARSE)."""
    attrs, items = node.attrs, sorted(inputs[0].items())
    if any(key < 0 for key, _ in items):
        raise InvalidData(node.name, f"CastMap: a key is negative: {items[0][0]}")
    kind: Any = {"TO_FLOAT": np.float32, "TO_INT64": np.int64, "TO_STRING": object}[attrs.get("cast_to", "TO_FLOAT")]
    convert: Any = {np.float32: float, np.int64: int, object: str}[kind]
    if attrs.get("map_form", "DENSE") == "DENSE":
        return [_row([convert(value) for _, value in items], kind)]
    row = [convert(0) if kind is not object else "0"] * attrs.get("max_map", 1)
    for key, value in items:
        if key < len(row):
            row[key] = convert(value)
    return [_row(row, kind)]


def _row(values: list[Any], dtype: Any) -> Array:
    out = np.empty((1, len(values)), dtype)
    out[0, :] = values
    return out
