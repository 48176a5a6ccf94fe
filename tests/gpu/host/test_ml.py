"""ai.onnx.ml against ONNX Runtime, which defines what its models mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest

from trionnx.gpu.errors import InvalidData
from trionnx.gpu.graph.model import Node
from trionnx.gpu.host.numeric import evaluate
from trionnx.gpu.host.reference import evaluate_host

Array = np.ndarray[Any, Any]
Make = Callable[..., Node]
Oracle = Callable[[Node, Sequence[Any]], list[Array]]

ML = "ai.onnx.ml"
rng = np.random.default_rng(5)
X = rng.standard_normal((7, 4)).astype(np.float32)
WORDS = np.array([["b", "a"], ["none", "c"]], object)
TRANSFORMS = ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"]


def agree(made: Node, inputs: Sequence[Any], oracle: Oracle) -> None:
    got, want = evaluate(made, inputs), oracle(made, inputs)
    assert got is not None
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if a.dtype.kind == "f":
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        else:
            np.testing.assert_array_equal(a, b)


def floats(*shape: int) -> list[float]:
    return [float(v) for v in rng.standard_normal(shape).reshape(-1)]


# Integers and strings in, floats and labels out: what a pipeline of scikit-learn exports.
INTS = rng.integers(-3, 4, (5, 3))
CASES = [
    ("Scaler", [X], {"offset": floats(4), "scale": floats(4)}, 1),
    ("Scaler", [X], {"offset": floats(1), "scale": floats(1)}, 1),
    ("Scaler", [INTS], {"offset": floats(3), "scale": floats(3)}, 1),
    *[("Normalizer", [x], {"norm": norm}, 1) for norm in ("MAX", "L1", "L2") for x in (X, X * 0, INTS)],
    ("Binarizer", [X], {"threshold": 0.25}, 1),
    ("Imputer", [np.where(X > 0, np.float32(np.nan), X)],
     {"imputed_value_floats": floats(4), "replaced_value_float": float("nan")}, 1),
    ("Imputer", [X.round()], {"imputed_value_floats": [9.0], "replaced_value_float": 1.0}, 1),
    ("Imputer", [INTS], {"imputed_value_int64s": [7], "replaced_value_int64": 2}, 1),
    ("FeatureVectorizer", [X, X[:, :2]], {"inputdimensions": [4, 2]}, 1),
    ("OneHotEncoder", [INTS[:, 0]], {"cats_int64s": [-1, 0, 2]}, 1),
    ("OneHotEncoder", [WORDS], {"cats_strings": ["a", "b", "c"]}, 1),
    ("LabelEncoder", [INTS], {"keys_int64s": [0, 1], "values_floats": [0.5, 1.5], "default_float": 9.0}, 2),
    ("LabelEncoder", [INTS], {"keys_int64s": [0, 1], "values_strings": ["zero", "one"]}, 2),
    ("LabelEncoder", [WORDS], {"keys_strings": ["a", "b"], "values_int64s": [3, 4]}, 2),
    ("LabelEncoder", [WORDS], {"classes_strings": ["a", "b"], "default_int64": 7}, 1),
    ("LabelEncoder", [INTS], {"classes_strings": ["a", "b"], "default_string": "?"}, 1),
    ("LabelEncoder", [INTS], {"keys_tensor": np.array([0, 2]), "values_tensor": np.array([5, 6]),
                              "default_tensor": np.array([-1])}, 4),
    ("CategoryMapper", [WORDS], {"cats_strings": ["a", "b"], "cats_int64s": [3, 4], "default_int64": -2}, 1),
    ("CategoryMapper", [INTS], {"cats_strings": ["a", "b"], "cats_int64s": [0, 1]}, 1),
    ("ArrayFeatureExtractor", [X, np.array([[2, 0]])], {}, 1),
    *[("LinearRegressor", [X], {"coefficients": floats(8), "intercepts": floats(2), "targets": 2,
                                "post_transform": t}, 1) for t in ("NONE", "LOGISTIC")],
    ("LinearRegressor", [X], {"coefficients": floats(4)}, 1),
    *[("LinearClassifier", [X], {"coefficients": floats(12), "intercepts": floats(3), "post_transform": t,
                                 "classlabels_strings": ["x", "y", "z"]}, 1) for t in TRANSFORMS],
    *[("LinearClassifier", [X], {"coefficients": floats(4), "intercepts": floats(1), "post_transform": t,
                                 "classlabels_ints": [3, 5]}, 1) for t in ("NONE", "LOGISTIC")],
]


@pytest.mark.parametrize(("op", "inputs", "attrs", "opset"), CASES, ids=[f"{c[0]}{i}" for i, c in enumerate(CASES)])
def test_agrees_with_onnxruntime(op, inputs, attrs, opset, make_node: Make, oracle: Oracle) -> None:
    outputs = 2 if op == "LinearClassifier" else 1
    agree(make_node(op, inputs, opset=opset, outputs=outputs, domain=ML, **attrs), inputs, oracle)


# --- trees ------------------------------------------------------------------------------------

MODES = ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ"]


def forest(prefix: str, columns: Sequence[int], positive: bool = False, modes: Sequence[str] = MODES) -> dict[str, Any]:
    """Three random trees of depth 1 to 3; each leaf gives something to one or two columns."""
    made: dict[str, list[Any]] = {}

    def add(**values: Any) -> None:
        for name, value in values.items():
            made.setdefault(name, []).append(value)

    for tree in range(3):
        inner = 2 ** (tree + 1) - 1
        for number in range(2 * inner + 1):
            leaf = number >= inner
            add(nodes_treeids=tree, nodes_nodeids=number, nodes_featureids=int(rng.integers(4)),
                nodes_values=round(float(rng.standard_normal()), 1), nodes_hitrates=1.0,
                nodes_modes="LEAF" if leaf else modes[int(rng.integers(len(modes)))],
                nodes_truenodeids=0 if leaf else 2 * number + 1, nodes_falsenodeids=0 if leaf else 2 * number + 2,
                nodes_missing_value_tracks_true=int(rng.integers(2)))
            for column in rng.permutation(columns)[: 1 + number % 2] if leaf else ():
                weight = float(rng.uniform(0.1, 0.3) if positive else rng.standard_normal())
                add(**{f"{prefix}_treeids": tree, f"{prefix}_nodeids": number, f"{prefix}_ids": int(column),
                       f"{prefix}_weights": weight})
    return dict(made)


POINTS = np.concatenate([rng.standard_normal((40, 4)).round(1), np.full((1, 4), np.nan)]).astype(np.float32)


@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("targets", [1, 3])
def test_a_forest_of_numbers(aggregate, targets, make_node: Make, oracle: Oracle) -> None:
    attrs = forest("target", range(targets)) | {"n_targets": targets, "aggregate_function": aggregate}
    agree(make_node("TreeEnsembleRegressor", [POINTS], opset=3, domain=ML, **attrs), [POINTS], oracle)
    attrs = forest("target", [0]) | {"n_targets": 1, "aggregate_function": aggregate, "base_values": [0.75]}
    agree(make_node("TreeEnsembleRegressor", [POINTS], opset=3, domain=ML, **attrs), [POINTS], oracle)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_forest_of_three_classes(transform, make_node: Make, oracle: Oracle) -> None:
    attrs = forest("class", [0, 1, 2]) | {"classlabels_strings": ["x", "y", "z"], "post_transform": transform}
    whole = {name: attrs[name] for name in attrs if not name.startswith("class_")}
    leaves = [(t, n) for t, n, mode in zip(attrs["nodes_treeids"], attrs["nodes_nodeids"], attrs["nodes_modes"],
                                           strict=True) if mode == "LEAF"]
    whole |= {"class_treeids": [t for t, _ in leaves for _ in range(3)],
              "class_nodeids": [n for _, n in leaves for _ in range(3)],
              "class_ids": [0, 1, 2] * len(leaves), "class_weights": floats(3 * len(leaves))}
    made = make_node("TreeEnsembleClassifier", [POINTS], opset=3, outputs=2, domain=ML, **whole)
    agree(made, [POINTS], oracle)


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC"])
@pytest.mark.parametrize("positive", [False, True])
def test_two_classes_with_one_score(transform, positive, make_node: Make, oracle: Oracle) -> None:
    attrs = forest("class", [0], positive) | {"classlabels_int64s": [4, 6], "post_transform": transform}
    made = make_node("TreeEnsembleClassifier", [POINTS], opset=3, outputs=2, domain=ML, **attrs)
    agree(made, [POINTS], oracle)


def test_a_class_that_no_leaf_names_is_not_chosen(make_node: Make, oracle: Oracle) -> None:
    """Its score is 0, and may be the highest."""
    attrs: dict[str, Any] = forest("class", [0, 2]) | {"classlabels_strings": ["x", "y", "z"]}
    attrs["class_weights"] = [-abs(weight) for weight in attrs["class_weights"]]
    made = make_node("TreeEnsembleClassifier", [POINTS], opset=3, outputs=2, domain=ML, **attrs)
    agree(made, [POINTS], oracle)
    got = evaluate(made, [POINTS])
    assert got is not None
    assert "y" not in got[0]


def test_integers_and_doubles_go_down_the_same_trees(make_node: Make) -> None:
    attrs = forest("target", [0], modes=MODES[:1]) | {"n_targets": 1}
    made = make_node("TreeEnsembleRegressor", [POINTS], opset=3, domain=ML, **attrs)
    rows = POINTS[:9].round()
    want = evaluate(made, [rows])
    for dtype in (np.int64, np.int32, np.float64):
        got = evaluate(made, [rows.astype(dtype)])
        assert got is not None
        assert want is not None
        np.testing.assert_array_equal(got[0], want[0])


def test_base_values_are_added_to_targets_that_no_leaf_gives_to(make_node: Make) -> None:
    attrs = forest("target", [0]) | {"n_targets": 2, "base_values": [0.5, 2.5]}
    got = evaluate(make_node("TreeEnsembleRegressor", [POINTS], opset=3, domain=ML, **attrs), [POINTS])
    assert got is not None
    assert (got[0][:, 1] == 2.5).all()


@pytest.mark.parametrize(("change", "why"), [
    ({"nodes_truenodeids": [99]}, "has no node 99"),
    ({"nodes_modes": ["BRANCH_MAYBE"]}, "node mode 'BRANCH_MAYBE' is not known"),
    ({"nodes_featureids": [4]}, "4 features for trees that read number 4"),
    ({"nodes_truenodeids": [1], "nodes_modes": ["BRANCH_LEQ", "BRANCH_LEQ"]}, "goes round in a circle"),
])
def test_a_broken_forest_is_invalid_data(change, why, make_node: Make) -> None:
    attrs: dict[str, Any] = forest("target", [0], modes=MODES[:1]) | {"n_targets": 1}
    for name, values in change.items():
        attrs[name][: len(values)] = values
    if "circle" in why:
        attrs["nodes_truenodeids"][1] = attrs["nodes_falsenodeids"][1] = 1
    with pytest.raises(InvalidData, match=why):
        evaluate(make_node("TreeEnsembleRegressor", [POINTS], opset=1, domain=ML, **attrs), [POINTS])


def test_nan_is_a_key_like_others(make_node: Make) -> None:
    x = np.array([1, np.nan, 2], np.float32)
    attrs = {"keys_floats": [float("nan"), 2.0], "values_int64s": [5, 6], "default_int64": -9}
    got = evaluate(make_node("LabelEncoder", [x], opset=4, domain=ML, **attrs), [x])
    assert got is not None
    assert got[0].tolist() == [-9, 5, 6]


# --- maps -------------------------------------------------------------------------------------


def only(made: Node, x: Any) -> Any:
    (got,) = evaluate_host(made, [x])
    return got


def test_maps_become_rows(make_node: Make) -> None:
    vectorizer = make_node("DictVectorizer", [None], opset=1, domain=ML, string_vocabulary=["a", "b", "c"])
    assert only(vectorizer, {"c": 4.5, "a": 1.0, "z": 3.0}).tolist() == [[1.0, 0.0, 4.5]]
    assert only(vectorizer, {"b": 2}).dtype == np.int64
    dense = make_node("CastMap", [None], opset=1, domain=ML)
    assert only(dense, {2: 0.5, 0: "1.5"}).tolist() == [[1.5, 0.5]]
    sparse = make_node("CastMap", [None], opset=1, domain=ML, map_form="SPARSE", max_map=3, cast_to="TO_INT64")
    assert only(sparse, {2: "7"}).tolist() == [[0, 0, 7]]
    with pytest.raises(InvalidData, match="a key is negative: -1"):
        only(dense, {-1: 0.5})


def test_rows_become_maps(make_node: Make) -> None:
    made = make_node("ZipMap", [X], opset=1, domain=ML, classlabels_strings=["a", "b", "c", "d"])
    rows = only(made, X)
    assert [list(row) for row in rows] == [["a", "b", "c", "d"]] * 7
    assert rows[3]["c"] == X[3, 2]


def test_a_value_outside_the_categories_is_invalid_data_where_zeros_are_not_allowed(make_node: Make) -> None:
    made = make_node("OneHotEncoder", [WORDS], opset=1, domain=ML, cats_strings=["a", "b", "c"], zeros=0)
    with pytest.raises(InvalidData, match="'none' is none of the categories"):
        evaluate(made, [WORDS])


def test_every_operator_is_here_or_in_the_reference(make_node: Make) -> None:
    """All of ai.onnx.ml can run: no schema without an implementation."""
    from onnx.reference.ops.aionnxml._op_list import load_op

    from trionnx.gpu.host.numeric import has_numeric

    for schema in onnx.defs.get_all_schemas():
        if schema.domain == ML and not has_numeric(make_node(schema.name, [], domain=ML)):
            assert load_op(ML, schema.name, schema.since_version)
