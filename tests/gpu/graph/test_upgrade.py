"""Models of opsets 1 to 6."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from trionnx.gpu.errors import UnsupportedOperator
from trionnx.gpu.graph.read import read_model

A = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
B = np.array([1, 10, 100], np.float32)


def model(
    opset: int, *nodes: onnx.NodeProto, inputs: dict[str, list[int]], weights: dict[str, Any] | None = None
) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes), "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_empty_tensor_value_info("y")],
        [onnx.numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=4)


AB = {"a": [2, 3, 4], "b": [3]}


@pytest.mark.parametrize(("op", "want"), [
    ("Add", A + B[:, None]), ("Sub", A - B[:, None]), ("Mul", A * B[:, None]), ("Less", B[:, None] > A),
])
@pytest.mark.parametrize("axis", [1, -2])
@pytest.mark.parametrize("opset", [1, 6])
def test_broadcasting_along_an_axis(op, want, axis, opset, open_model):
    if opset == 1 and op == "Less":
        assert axis in (1, -2)  # what changes is the same in both
    made = model(opset, helper.make_node(op, ["a", "b"], ["y"], broadcast=1, axis=axis), inputs=AB)
    (got,) = open_model(made).run({"a": A, "b": B})
    np.testing.assert_array_equal(got, want)


def test_broadcasting_of_several_dimensions_and_of_trailing_ones(open_model):
    add = helper.make_node("Add", ["a", "b"], ["y"], broadcast=1, axis=0)
    (got,) = open_model(model(6, add, inputs={"a": [2, 3, 4], "b": [2, 3]})).run({"a": A, "b": A[:, :, 0]})
    np.testing.assert_array_equal(got, A + A[:, :, :1])
    add = helper.make_node("Add", ["a", "b"], ["y"], broadcast=1)
    (got,) = open_model(model(6, add, inputs={"a": [2, 3, 4], "b": [3, 4]})).run({"a": A, "b": A[0]})
    np.testing.assert_array_equal(got, A + A[0])


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (2, 3, 2, 2)])
def test_a_slope_for_each_channel(shape, open_model):
    x = np.arange(-5, np.prod(shape) - 5, dtype=np.float32).reshape(shape)
    made = model(6, helper.make_node("PRelu", ["x", "s"], ["y"]), inputs={"x": list(shape)}, weights={"s": B})
    (got,) = open_model(made).run({"x": x})
    np.testing.assert_array_equal(got, np.where(x < 0, x * B.reshape(3, *[1] * (len(shape) - 2)), x))


def test_attributes_that_were_renamed(open_model):
    nodes = [
        helper.make_node("Reshape", ["a"], ["r"], shape=[2, -1], consumed_inputs=[0]),
        helper.make_node("Pad", ["r"], ["p"], paddings=[0, 1, 0, 0], value=5.0),
        helper.make_node("Concat", ["p", "r"], ["c"]),
        helper.make_node("Cast", ["c"], ["y"], to="INT32"),
    ]
    (got,) = open_model(model(1, *nodes, inputs={"a": [2, 3, 4]})).run({"a": A})
    rows = A.reshape(2, 12)
    np.testing.assert_array_equal(got, np.concatenate([np.full((2, 1), 5), rows, rows], 1))
    assert got.dtype == np.int32


def test_what_was_dropped():
    norm = helper.make_node("BatchNormalization", ["a", "s", "s", "s", "s"], ["n"], is_test=1)
    drop = helper.make_node("Dropout", ["n"], ["y"], is_test=1)
    made = read_model(model(6, norm, drop, inputs={"a": [2, 3, 4]}, weights={"s": B}), optimise=False)
    assert made.opsets == {"": 7}
    assert [(n.op, n.opset, n.attrs) for n in made.graph.nodes] == [("BatchNormalization", 7, {}), ("Dropout", 7, {})]


@pytest.mark.parametrize(("opset", "node"), [
    (6, helper.make_node("BatchNormalization", ["a", "s", "s", "s", "s"], ["y", "m"], is_test=0)),
    (6, helper.make_node("Upsample", ["a"], ["y"], width_scale=2.0, height_scale=2.0)),
    (1, helper.make_node("Tile", ["a", "s", "s"], ["y"])),
    (1, helper.make_node("Split", ["a", "s"], ["y", "z"])),
])
def test_what_is_refused_is_named(opset, node):
    made = model(opset, node, inputs={"a": [2, 3, 4]}, weights={"s": B})
    with pytest.raises(UnsupportedOperator, match=f"operator {node.op_type} .opset {opset}. of node"):
        read_model(made)
