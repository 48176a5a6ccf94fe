"""Tree ensembles of ai.onnx.ml, versions 1 and 3: all rows go down all trees at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..graph.model import Node
from .scores import labels_of, transform, two_columns
from .table import Array, Inputs, op

__all__: list[str] = []

_ML = "ai.onnx.ml"
_CELLS = 1 << 22
"""How many (row, tree, target) are worked on at once."""

_COMPARE: dict[str, Callable[[Array, Array], Any]] = {
    "BRANCH_LEQ": np.less_equal,
    "BRANCH_LT": np.less,
    "BRANCH_GTE": np.greater_equal,
    "BRANCH_GT": np.greater,
    "BRANCH_EQ": np.equal,
    "BRANCH_NEQ": np.not_equal,
}


@dataclass(eq=False, slots=True)
class _Forest:
    """The nodes of all trees in one list.

    Attributes:
        mode: per node the place in `modes`, -1 for a leaf. yes, no: where to go, a node's number.
        given: per node, target and weight what it adds there; `holds`: whether it does.
    """

    modes: list[str]
    mode: Array
    feature: Array
    value: Array
    unknown: Array
    yes: Array
    no: Array
    roots: Array
    given: Array
    holds: Array

    def leaves(self, x: Array) -> Array:
        """For each row of x [rows, features] and each tree the leaf that it ends in."""
        at = np.broadcast_to(self.roots, (len(x), len(self.roots))).copy()
        rows = np.arange(len(x))[:, None]
        for _ in range(len(self.mode)):
            inner = self.mode[at] >= 0
            if not inner.any():
                return at
            seen, split = x[rows, self.feature[at]], self.value[at]
            up = np.isnan(seen) & self.unknown[at]
            for number, name in enumerate(self.modes):
                up |= (self.mode[at] == number) & _COMPARE[name](seen, split)
            at = np.where(inner, np.where(up, self.yes[at], self.no[at]), at)
        raise ValueError("a tree goes round in a circle")


def _forest(node: Node, prefix: str, count: int) -> _Forest:
    attrs = node.attrs
    keys = list(zip(attrs["nodes_treeids"], attrs["nodes_nodeids"], strict=True))
    number = {key: i for i, key in enumerate(keys)}
    if len(number) != len(keys):
        raise ValueError("two nodes of a tree have one number")
    names = list(attrs["nodes_modes"])
    modes = sorted(set(names) - {"LEAF"})
    if unknown := [name for name in modes if name not in _COMPARE]:
        raise ValueError(f"node mode {unknown[0]!r} is not known")

    def target(which: str) -> Array:
        ids = attrs[f"nodes_{which}nodeids"]
        pairs = zip(keys, ids, names, strict=True)
        return np.array([0 if name == "LEAF" else _place(number, (tree, i)) for (tree, _), i, name in pairs], np.int64)

    yes, no = target("true"), target("false")
    inside = [name != "LEAF" for name in names]
    reached = set(yes[inside]) | set(no[inside])
    trees = list(dict.fromkeys(attrs["nodes_treeids"]))
    tops = {tree: i for i, (tree, _) in reversed(list(enumerate(keys))) if i not in reached}
    values = _tensor_or_floats(attrs, "nodes_values")
    given = np.zeros((len(keys), count), _tensor_or_floats(attrs, f"{prefix}_weights").dtype)
    holds = np.zeros(given.shape, np.bool_)
    rows = zip(
        attrs[f"{prefix}_treeids"],
        attrs[f"{prefix}_nodeids"],
        attrs[f"{prefix}_ids"],
        _tensor_or_floats(attrs, f"{prefix}_weights"),
        strict=True,
    )
    for tree, leaf, column, weight in rows:
        place = _place(number, (tree, leaf))
        given[place, column] += weight
        holds[place, column] = True
    return _Forest(
        modes,
        np.array([-1 if name == "LEAF" else modes.index(name) for name in names], np.int64),
        np.array(attrs["nodes_featureids"], np.int64),
        values,
        np.array(attrs.get("nodes_missing_value_tracks_true") or [0] * len(keys), np.bool_),
        yes,
        no,
        np.array([tops[tree] for tree in trees], np.int64),
        given,
        holds,
    )


def _place(number: dict[tuple[int, int], int], key: tuple[int, int]) -> int:
    place = number.get(key)
    if place is None:
        raise ValueError(f"tree {key[0]} has no node {key[1]}")
    return place


def _tensor_or_floats(attrs: dict[str, Any], name: str) -> Array:
    tensor = attrs.get(f"{name}_as_tensor")
    return np.asarray(attrs.get(name) or (), np.float32) if tensor is None else tensor


def _totals(node: Node, x: Array, prefix: str, count: int, how: str) -> tuple[Array, Array]:
    """Per row and target what the trees give together, and whether any gives something."""
    forest: _Forest | None = node.prepared.get("forest")
    if forest is None:
        forest = node.prepared["forest"] = _forest(node, prefix, count)
    if x.dtype not in (np.float32, np.float64):
        x = x.astype(np.float32)
    x = x.reshape(1, -1) if x.ndim == 1 else x
    if forest.feature.size and x.shape[1] <= forest.feature.max():
        raise ValueError(f"{x.shape[1]} features for trees that read number {forest.feature.max()}")
    totals, found = np.zeros((len(x), count), forest.given.dtype), np.zeros((len(x), count), np.bool_)
    step = max(1, _CELLS // max(1, len(forest.roots) * count))
    for start in range(0, len(x), step):
        leaves = forest.leaves(x[start : start + step])
        given, holds = forest.given[leaves], forest.holds[leaves]
        some = holds.any(1)
        match how:
            case "MIN":
                made = np.where(some, np.where(holds, given, np.inf).min(1), 0)
            case "MAX":
                made = np.where(some, np.where(holds, given, -np.inf).max(1), 0)
            case "SUM" | "AVERAGE":
                made = given.sum(1, np.float64) / (len(forest.roots) if how == "AVERAGE" else 1)
            case _:
                raise ValueError(f"aggregate_function {how!r} is not known")
        totals[start : start + step], found[start : start + step] = made, some
    return totals, found


@op("TreeEnsembleRegressor", domain=_ML)
def _regressor(node: Node, inputs: Inputs) -> list[Array]:
    attrs = node.attrs
    count = attrs.get("n_targets") or 1 + max(attrs["target_ids"])
    totals, _ = _totals(node, inputs[0], "target", count, attrs.get("aggregate_function", "SUM"))
    base = _tensor_or_floats(attrs, "base_values")
    if base.size:
        totals = totals + base.astype(totals.dtype)
    return [transform(attrs.get("post_transform", "NONE"), totals)]


@op("TreeEnsembleClassifier", domain=_ML)
def _classifier(node: Node, inputs: Inputs) -> list[Array]:
    """The class with the highest score, of those that a leaf gave one to.

    Where two classes share one score it is that of the second: its sign, or 0.5 for positive weights, decides.
    """
    attrs = node.attrs
    labels = labels_of(attrs, "classlabels_int64s")
    name, base = attrs.get("post_transform", "NONE"), _tensor_or_floats(attrs, "base_values")
    count = len(labels)
    totals, found = _totals(node, inputs[0], "class", max(count, 1 + max(attrs["class_ids"])), "SUM")
    if count == 2 and len(set(attrs["class_ids"])) == 1:
        score = totals[:, attrs["class_ids"][0]].astype(np.float32)
        if base.size:
            score = score + base[-1].astype(np.float32)
        positive = bool((_tensor_or_floats(attrs, "class_weights") >= 0).all())
        second = score > (0.5 if positive else 0)
        return [labels[second.astype(np.int64)], two_columns(name, score, positive)]
    if base.size:
        totals = totals + base.astype(totals.dtype)
    totals = totals.astype(np.float32)
    return [labels[np.where(found, totals, -np.inf).argmax(1)], transform(name, totals)]
