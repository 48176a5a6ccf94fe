from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from trionnx.gpu.errors import InvalidData, UnsupportedOperator
from trionnx.gpu.graph.model import Node, Value
from trionnx.gpu.graph.read import read_model
from trionnx.gpu.host.protobuf import captured, node_proto
from trionnx.gpu.host.reference import evaluate_host, evaluate_reference, infer_outputs

Make = Callable[..., Node]
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
X = np.arange(24, dtype=np.float32).reshape(2, 3, 4) - 7
info = helper.make_tensor_value_info
node = helper.make_node


def ints(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int64)


def only_node(
    proto: onnx.NodeProto, *inputs: onnx.ValueInfoProto, weights: dict[str, Any] | None = None, opset: int = 17
) -> Node:
    tensors = [numpy_helper.from_array(np.asarray(a), k) for k, a in (weights or {}).items()]
    graph = helper.make_graph([proto], "g", inputs, [info(n, FLOAT, None) for n in proto.output], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    (made,) = read_model(model, optimise=False).graph.nodes
    return made


# --- evaluation -------------------------------------------------------------------------------


def test_an_operator_without_numpy_implementation_runs_by_the_reference(make_node: Make) -> None:
    made = make_node("LeakyRelu", [X], alpha=0.5)
    (got,) = evaluate_host(made, [X])
    np.testing.assert_array_equal(got, np.where(X < 0, X * np.float32(0.5), X))


def test_the_evaluator_is_kept_for_each_set_of_dtypes(make_node: Make) -> None:
    made = make_node("LeakyRelu", [X])
    evaluate_reference(made, [X])
    first = dict(made.prepared)
    evaluate_reference(made, [X + 1])
    assert made.prepared == first
    got = evaluate_reference(made, [X.astype(np.float64)])
    assert got[0].dtype == np.float64
    assert len(made.prepared) == 2


def test_an_operator_that_onnx_defines_by_its_types(make_node: Make) -> None:
    """Its function body depends on the dtype of the input."""
    x = np.array([[1.0, 2.0, 4.0]], np.float32)
    labels = ints(2)
    made = make_node("SoftmaxCrossEntropyLoss", [x, labels], outputs=2)
    loss, probabilities = evaluate_host(made, [x, labels])
    want = np.exp(x) / np.exp(x).sum()
    np.testing.assert_allclose(probabilities, np.log(want), rtol=1e-6)
    np.testing.assert_allclose(loss, -np.log(want[0, 2]), rtol=1e-6)


def test_inputs_and_outputs_that_are_left_out(make_node: Make) -> None:
    x = np.zeros((3, 1, 2), np.float32)
    weights, recurrence = np.ones((1, 16, 2), np.float32), np.zeros((1, 16, 4), np.float32)
    made = make_node("LSTM", [x, weights, recurrence, None, None, None], outputs=3, hidden_size=4)
    made.outputs = (None, made.outputs[1], None)
    got = evaluate_host(made, [x, weights, recurrence])
    assert len(got) == 3
    assert got[1].shape == (1, 1, 4)


def test_strings_come_back_as_objects(make_node: Make) -> None:
    x = np.array(["a", "b"], object)
    (got,) = evaluate_host(make_node("StringConcat", [x, x], opset=20), [x, x])
    assert got.dtype == np.dtype(object)
    assert got.tolist() == ["aa", "bb"]


def test_sequences_are_lists(make_node: Make) -> None:
    (made,) = evaluate_host(make_node("SequenceConstruct", [X, X]), [X, X])
    assert isinstance(made, list)
    (got,) = evaluate_host(make_node("SequenceAt", [made, ints(1)[0]]), [made, np.array(1)])
    np.testing.assert_array_equal(got, X)


def test_an_unknown_operator_is_unsupported(make_node: Make) -> None:
    for made in (make_node("Nowhere", [X]), make_node("Foo", [X], domain="org.example", opset=3)):
        with pytest.raises(UnsupportedOperator) as caught:
            evaluate_host(made, [X])
        error = caught.value
        assert (error.op, error.domain, error.opset, error.node) == (made.op, made.domain, made.opset, "the node")


def test_values_that_the_reference_refuses_are_invalid_data(make_node: Make) -> None:
    made = make_node("MatMul", [X, X])
    with pytest.raises(InvalidData, match="'the node': MatMul: ") as caught:
        evaluate_reference(made, [X, X])
    assert "\n" not in str(caught.value)


def branch(name: str, *nodes: onnx.NodeProto, output: str) -> onnx.GraphProto:
    return helper.make_graph(list(nodes), name, [], [info(output, FLOAT, None)])


def test_if_takes_values_from_around_it_and_constants_by_themselves() -> None:
    inner = node("If", ["d"], ["r"], then_branch=branch("t2", node("Mul", ["x", "w"], ["q"]), output="q"),
                 else_branch=branch("e2", output="x"))
    outer = node("If", ["c"], ["y"], then_branch=branch("t", inner, output="r"),
                 else_branch=branch("e", node("Neg", ["x"], ["r"]), output="r"))
    weights = np.arange(5000, dtype=np.float32)
    made = only_node(outer, info("c", BOOL, []), info("d", BOOL, []), info("x", FLOAT, None), weights={"w": weights})
    assert {v.name for v in captured(made)} == {"d", "x"}
    x = np.full(5000, 2, np.float32)
    for c, d, want in ((True, True, x * weights), (True, False, x), (False, True, -x)):
        (got,) = evaluate_host(made, [np.array(c)], {"x": x, "d": np.array(d)})
        np.testing.assert_array_equal(got, want)
    with pytest.raises(KeyError, match="needs 'x' from the graph around it"):
        evaluate_host(made, [np.array(True)], {"d": np.array(True)})


def test_loop_and_scan() -> None:
    body = helper.make_graph(
        [node("Add", ["s", "step"], ["s2"]), node("Identity", ["k"], ["k2"]), node("Mul", ["s2", "s2"], ["out"])],
        "body",
        [info("i", INT64, []), info("k", BOOL, []), info("s", FLOAT, [1])],
        [info("k2", BOOL, []), info("s2", FLOAT, [1]), info("out", FLOAT, [1])],
    )
    loop = only_node(
        node("Loop", ["n", "", "s0"], ["last", "all"], body=body),
        info("n", INT64, []), info("s0", FLOAT, [1]), info("step", FLOAT, [1]),
    )
    one = np.ones(1, np.float32)
    last, every = evaluate_host(loop, [np.array(3), None, one], {"step": one * 2})
    np.testing.assert_array_equal(last, [7])
    np.testing.assert_array_equal(every, [[9], [25], [49]])

    body = helper.make_graph(
        [node("Add", ["a", "x"], ["a2"]), node("Identity", ["a2"], ["o"])],
        "body", [info("a", FLOAT, [2]), info("x", FLOAT, [2])], [info("a2", FLOAT, [2]), info("o", FLOAT, [2])],
    )
    scan = only_node(
        node("Scan", ["a0", "xs"], ["a", "sums"], body=body, num_scan_inputs=1),
        info("a0", FLOAT, [2]), info("xs", FLOAT, [3, 2]),
    )
    xs = np.arange(6, dtype=np.float32).reshape(3, 2)
    total, sums = evaluate_host(scan, [np.zeros(2, np.float32), xs])
    np.testing.assert_array_equal(total, xs.sum(0))
    np.testing.assert_array_equal(sums, xs.cumsum(0))


def test_a_loop_without_turns_collects_nothing() -> None:
    body = helper.make_graph(
        [node("Identity", ["k"], ["k2"]), node("Identity", ["s"], ["s2"]), node("Expand", ["s", "shape"], ["out"])],
        "body",
        [info("i", INT64, []), info("k", BOOL, []), info("s", FLOAT, [1])],
        [info("k2", BOOL, []), info("s2", FLOAT, [1]), info("out", FLOAT, [2, 1])],
        [numpy_helper.from_array(ints(2, 1), "shape")],
    )
    loop = only_node(
        node("Loop", ["n", "c", "s0"], ["last", "all"], body=body),
        info("n", INT64, []), info("c", BOOL, []), info("s0", FLOAT, [1]),
    )
    one = np.ones(1, np.float32)
    for n, c in ((np.array(0), None), (np.array(3), np.array(False))):
        last, every = evaluate_host(loop, [n, c, one])
        assert last.tolist() == [1]
        assert (every.dtype, every.shape) == (np.float32, (0, 2, 1))


def test_a_loop_ends_by_its_condition_and_check_is_called() -> None:
    body = helper.make_graph(
        [node("Less", ["s", "limit"], ["k2"]), node("Add", ["s", "s"], ["s2"])],
        "body",
        [info("i", INT64, []), info("k", BOOL, []), info("s", FLOAT, [])],
        [info("k2", BOOL, []), info("s2", FLOAT, [])],
    )
    loop = only_node(node("Loop", ["", "", "s0"], ["y"], body=body), info("s0", FLOAT, []), info("limit", FLOAT, []))
    one, calls = np.array(1, np.float32), []
    (got,) = evaluate_host(loop, [None, None, one], {"limit": np.array(20, np.float32)}, lambda: calls.append(1))
    assert got == 64
    assert len(calls) == 6 + 12  # each turn, and each node of it


def test_a_loop_without_nodes_and_without_end_can_be_left() -> None:
    body = helper.make_graph([], "body", [info("i", INT64, []), info("k", BOOL, [])], [info("k", BOOL, [])])
    loop = only_node(node("Loop", ["", "k0"], [], body=body), info("k0", BOOL, []))
    turns: list[int] = []

    def check() -> None:
        turns.append(len(turns))
        if len(turns) == 1000:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        evaluate_host(loop, [None, np.array(True)], None, check)


def test_scan_backwards_and_along_other_axes() -> None:
    body = helper.make_graph(
        [node("Add", ["a", "x"], ["a2"]), node("Identity", ["a2"], ["o"])],
        "body", [info("a", FLOAT, [2]), info("x", FLOAT, [2])], [info("a2", FLOAT, [2]), info("o", FLOAT, [2])],
    )
    scan = only_node(
        node("Scan", ["a0", "xs"], ["a", "sums"], body=body, num_scan_inputs=1, scan_input_axes=[1],
             scan_input_directions=[1], scan_output_axes=[-1], scan_output_directions=[1]),
        info("a0", FLOAT, [2]), info("xs", FLOAT, [2, 3]),
    )
    xs = np.arange(6, dtype=np.float32).reshape(2, 3)
    total, sums = evaluate_host(scan, [np.zeros(2, np.float32), xs])
    np.testing.assert_array_equal(total, xs.sum(1))
    np.testing.assert_array_equal(sums, xs[:, ::-1].cumsum(1)[:, ::-1])


def test_scan_of_opset_8_over_sequences_of_several_lengths() -> None:
    scan = only_node(
        node("Scan", ["n", "a0", "xs"], ["a", "sums"], num_scan_inputs=1, directions=[0], body=helper.make_graph(
            [node("Add", ["a", "x"], ["a2"]), node("Identity", ["a2"], ["o"])],
            "body", [info("a", FLOAT, [2]), info("x", FLOAT, [2])], [info("a2", FLOAT, [2]), info("o", FLOAT, [2])],
        )),
        info("n", INT64, [2]), info("a0", FLOAT, [2, 2]), info("xs", FLOAT, [2, 3, 2]), opset=8,
    )
    xs = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    start = np.array([[0, 0], [100, 200]], np.float32)
    total, sums = evaluate_host(scan, [ints(3, 2), start, xs])
    np.testing.assert_array_equal(total, [xs[0].sum(0), start[1] + xs[1, :2].sum(0)])
    np.testing.assert_array_equal(sums[0], xs[0].cumsum(0))
    np.testing.assert_array_equal(sums[1], [[106, 207], [114, 216], [0, 0]])
    total, _ = evaluate_host(scan, [None, start, xs])
    np.testing.assert_array_equal(total, start + xs.sum(1))
    with pytest.raises(InvalidData, match="sequence 1 is 4 long, of 3"):
        evaluate_host(scan, [ints(3, 4), start, xs])


def test_a_condition_of_several_elements_is_invalid_data() -> None:
    made = only_node(
        node("If", ["c"], ["y"], name="if", then_branch=branch("t", output="x"), else_branch=branch("e", output="x")),
        info("c", BOOL, []), info("x", FLOAT, [3]),
    )
    with pytest.raises(InvalidData, match="'if': If: its condition has 2 elements"):
        evaluate_host(made, [np.array([True, False])], {"x": X})


def test_attributes_of_every_kind_survive(make_node: Make) -> None:
    made = make_node("Constant", [], value=X)
    np.testing.assert_array_equal(evaluate_reference(made, [])[0], X)
    made = make_node("Constant", [], value_strings=["a", "b"])
    assert evaluate_reference(made, [])[0].tolist() == ["a", "b"]
    empty = node_proto(make_node("LSTM", [X], activations=[], activation_alpha=[]), [True])
    assert [a.type for a in empty.attribute] == [onnx.AttributeProto.STRINGS, onnx.AttributeProto.FLOATS]
    with pytest.raises(TypeError, match="attribute 'a' of node 'the node' is a complex"):
        node_proto(make_node("Relu", [X], a=1j), [True])


# --- inference --------------------------------------------------------------------------------


def shaped(*arrays: Any) -> list[Any]:
    return [None if a is None else (a.dtype, a.shape) for a in arrays]


def inferred(made: Node, inputs: list[Any], known: bool = True) -> list[Any]:
    return infer_outputs(made, shaped(*inputs), inputs if known else [None] * len(inputs))


F32, I64 = np.dtype(np.float32), np.dtype(np.int64)


def test_inference_from_shapes(make_node: Make) -> None:
    weights = np.zeros((5, 3, 3), np.float32)
    assert inferred(make_node("Conv", [X, weights], pads=[1, 1]), [X, weights], False) == [(F32, (2, 5, 4))]
    assert inferred(make_node("Shape", [X]), [X], False) == [(I64, (3,))]
    got = inferred(make_node("TopK", [X, ints(2)], outputs=2), [X, ints(2)])
    assert got == [(F32, (2, 3, 2)), (I64, (2, 3, 2))]
    assert inferred(make_node("Gather", [X, np.array(1)], axis=1), [X, np.array(1)], False) == [(F32, (2, 4))]


def test_inference_from_values(make_node: Make) -> None:
    for known, want in ((True, [(F32, (4, 6))]), (False, [None])):
        assert inferred(make_node("Reshape", [X, ints(4, -1)]), [X, ints(4, -1)], known) == want
    assert inferred(make_node("Expand", [X, ints(5, 1, 1, 1)]), [X, ints(5, 1, 1, 1)]) == [(F32, (5, 2, 3, 4))]


def test_what_cannot_be_inferred_is_none(make_node: Make) -> None:
    assert inferred(make_node("NonZero", [X]), [X]) == [None]
    assert inferred(make_node("Foo", [X], domain="org.example"), [X]) == [None]
    assert inferred(make_node("Nowhere", [X]), [X]) == [None]
    assert inferred(make_node("MatMul", [X, X]), [X, X]) == [None]
    assert infer_outputs(make_node("Relu", [X]), [None], [None]) == [None]
    assert inferred(make_node("SequenceConstruct", [X]), [X]) == [None]


def test_inference_leaves_out_what_nobody_reads(make_node: Make) -> None:
    made = make_node("TopK", [X, ints(2)], outputs=2)
    made.outputs = (None, made.outputs[1])
    assert inferred(made, [X, ints(2)])[1] == (I64, (2, 3, 2))


def test_inference_with_an_optional_input_left_out(make_node: Make) -> None:
    high = np.array(1, np.float32)
    made = make_node("Clip", [X, None, high])
    assert inferred(made, [X, None, high]) == [(F32, (2, 3, 4))]


def test_nested_graphs_do_not_break_inference() -> None:
    made = only_node(
        node("If", ["c"], ["y"], then_branch=branch("t", output="x"),
             else_branch=branch("e", node("Neg", ["x"], ["q"]), output="q")),
        info("c", BOOL, []), info("x", FLOAT, [3]),
    )
    assert infer_outputs(made, [(np.dtype(bool), ())], [None]) in ([None], [(F32, (3,))])


def test_captured_values_of_a_leaf_are_none(make_node: Make) -> None:
    assert captured(make_node("Relu", [X])) == []
    assert isinstance(make_node("Relu", [X]).inputs[0], Value)
