from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from trionnx.gpu.graph.model import Model, Node, Value
from trionnx.gpu.graph.passes import (
    drop_identities,
    drop_unused,
    fold_affine,
    fold_constants,
    merge_repeated,
    optimise,
)
from trionnx.gpu.graph.passes.uses import graphs_of
from trionnx.gpu.graph.read import read_model
from trionnx.gpu.host.protobuf import captured
from trionnx.gpu.host.reference import evaluate_host

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
info = helper.make_tensor_value_info
node = helper.make_node
rng = np.random.default_rng(5)
C = info("c", BOOL, [])


def build(
    nodes: Sequence[onnx.NodeProto],
    outputs: Sequence[str] = ("y",),
    inputs: Sequence[onnx.ValueInfoProto] = (info("x", FLOAT, None),),
    opset: int = 17,
    weights: dict[str, Any] | None = None,
    **more: Any,
) -> Model:
    tensors = [numpy_helper.from_array(np.asarray(a), k) for k, a in {**(weights or {}), **more}.items()]
    infos = [info(n, FLOAT, None) for n in outputs]
    graph = helper.make_graph(list(nodes), "g", list(inputs), infos, tensors)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    return read_model(proto, optimise=False)


def branch(*nodes: onnx.NodeProto, output: str) -> onnx.GraphProto:
    return helper.make_graph(list(nodes), "branch", [], [info(output, FLOAT, None)])


def choose(output: str, then: onnx.GraphProto, otherwise: onnx.GraphProto) -> onnx.NodeProto:
    return node("If", ["c"], [output], then_branch=then, else_branch=otherwise)


def ops(model: Model) -> list[str]:
    return [n.op for g in graphs_of(model.graph) for n in g.nodes]


def run(model: Model, **feeds: Any) -> list[Any]:
    values: dict[Value, Any] = {v: feeds[v.name] for v in model.graph.inputs}

    def get(value: Value | None) -> Any:
        return None if value is None else values[value] if value.const is None else value.const

    for n in model.graph.nodes:
        made = evaluate_host(n, [get(v) for v in n.inputs], {v.name: get(v) for v in captured(n)})
        values.update((v, x) for v, x in zip(n.outputs, made, strict=False) if v is not None)
    return [get(v) for v in model.graph.outputs]


def output_names(model: Model) -> list[str]:
    return [v.name for v in model.graph.outputs]


X = rng.standard_normal((2, 3, 5, 5)).astype(np.float32)


# --- folding ----------------------------------------------------------------------------------


def test_what_is_constant_is_folded_in_chains_and_branches() -> None:
    model = build(
        [
            node("Shape", ["w"], ["s"]),
            node("Gather", ["s", "i"], ["d"]),
            node("Unsqueeze", ["d", "zero"], ["u"]),
            node("Concat", ["u", "minus"], ["t"], axis=0),
            node("Reshape", ["x", "t"], ["r"]),
            choose("y", branch(node("Neg", ["w"], ["q"]), node("Add", ["q", "r"], ["p"]), output="p"),
                   branch(node("Relu", ["r"], ["p"]), output="p")),
        ],
        inputs=[info("x", FLOAT, None), C],
        w=np.ones((4, 1), np.float32), i=np.int64(0), zero=[0], minus=[-1],
    )  # fmt: skip
    assert fold_constants(model.graph) == 5
    assert ops(model) == ["Reshape", "If", "Relu", "Add"]
    target = model.graph.nodes[0].inputs[1]
    assert target is not None
    assert target.const is not None
    assert target.const.tolist() == [4, -1]
    assert target.dtype == np.int64


def test_an_output_may_become_a_constant_and_keeps_its_name() -> None:
    model = build([node("Neg", ["w"], ["y"])], w=np.float32(2))
    optimise(model)
    assert output_names(model) == ["y"]
    assert model.graph.nodes == []
    assert run(model, x=X)[0] == -2


@pytest.mark.parametrize(
    "kept",
    [
        node("RandomNormalLike", ["w"], ["y"]),
        node("RandomUniform", [], ["y"], shape=[2]),
        node("Bernoulli", ["w"], ["y"]),
        node("Dropout", ["w", "half", "true"], ["y"]),
        node("Expand", ["w", "huge"], ["y"]),
        node("ConstantOfShape", ["huge"], ["y"]),
        node("Nowhere", ["w"], ["y"]),
        node("Gather", ["w", "far"], ["y"]),
        node("SequenceConstruct", ["w"], ["y"]),
        node("Add", ["w", "x"], ["y"]),
        node("MatMul", ["large", "large"], ["y"]),
        node("If", ["true"], ["y"], then_branch=branch(output="x"), else_branch=branch(output="w")),
    ],
    ids=lambda n: n.op_type,
)
def test_what_is_not_folded(kept: onnx.NodeProto) -> None:
    model = build(
        [kept], w=np.zeros(3, np.float32), half=np.float32(0.5), true=np.array(True), far=[9],
        huge=np.array([1 << 20, 3]), large=np.zeros((1024, 1024), np.float32),
    )  # fmt: skip
    assert fold_constants(model.graph) == 0
    assert ops(model) == [kept.op_type]


def test_a_large_result_that_is_not_larger_than_its_inputs_is_folded() -> None:
    large = rng.standard_normal((1024, 512)).astype(np.float32)
    model = build([node("Transpose", ["w"], ["t"]), node("MatMul", ["x", "t"], ["y"])], w=large)
    assert fold_constants(model.graph) == 1
    folded = model.graph.nodes[0].inputs[1]
    assert folded is not None
    np.testing.assert_array_equal(folded.const, large.T)


def test_check_leaves_the_folding() -> None:
    def check() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fold_constants(build([node("Neg", ["w"], ["y"])], w=np.float32(2)).graph, check)


# --- unused -----------------------------------------------------------------------------------


def test_what_nobody_reads_is_dropped_in_every_graph() -> None:
    then = branch(node("Neg", ["a"], ["q"]), node("Abs", ["b"], ["lost"]), output="q")
    model = build(
        [
            node("Relu", ["x"], ["a"]),
            node("Exp", ["x"], ["b"]),
            node("Sqrt", ["b"], ["unread"]),
            choose("y", then, branch(output="x")),
        ],
        inputs=[info("x", FLOAT, None), C],
    )
    assert drop_unused(model.graph) == 3
    assert ops(model) == ["Relu", "If", "Neg"]


def test_results_that_nobody_reads_become_none_and_keep_their_place() -> None:
    model = build([node("Split", ["x"], ["a", "b", "d"], axis=1), node("Relu", ["b"], ["y"])], opset=11)
    assert drop_unused(model.graph) == 0
    assert [v and v.name for v in model.graph.nodes[0].outputs] == [None, "b", None]
    np.testing.assert_array_equal(run(model, x=X)[0], np.maximum(X[:, 1:2], 0))


def test_outputs_and_what_branches_capture_are_kept() -> None:
    model = build(
        [node("TopK", ["x", "k"], ["y", "i"]), node("Relu", ["x"], ["a"]),
         choose("z", branch(output="a"), branch(output="x"))],
        ["y", "z"], [info("x", FLOAT, None), C], k=[1],
    )  # fmt: skip
    assert drop_unused(model.graph) == 0
    assert ops(model) == ["TopK", "Relu", "If"]
    assert [v and v.name for v in model.graph.nodes[0].outputs] == ["y", None]


# --- identities -------------------------------------------------------------------------------


def test_identities_between_nodes_are_dropped_in_chains_and_for_branches() -> None:
    model = build(
        [
            node("Identity", ["x"], ["a"]),
            node("Identity", ["a"], ["b"]),
            node("Dropout", ["b"], ["d", "mask"]),
            node("Dropout", ["d", "half", "false"], ["e"]),
            choose("r", branch(node("Neg", ["e"], ["q"]), output="q"), branch(node("Abs", ["b"], ["q"]), output="q")),
            node("Add", ["r", "e"], ["y"]),
        ],
        inputs=[info("x", FLOAT, None), C], half=np.float32(0.5), false=np.array(False),
    )  # fmt: skip
    want = run(model, x=X, c=np.array(True))
    assert drop_identities(model.graph) == 4
    assert ops(model) == ["If", "Add", "Abs", "Neg"]
    np.testing.assert_array_equal(run(model, x=X, c=np.array(True)), want)


def test_an_identity_that_makes_an_output_gives_its_name_to_the_maker() -> None:
    model = build(
        [node("Relu", ["x"], ["a"]), node("Identity", ["a"], ["y"]), node("Neg", ["a"], ["z"]),
         node("Identity", ["y"], ["again"]), node("Abs", ["again"], ["w"])],
        ["y", "z", "w"],
    )  # fmt: skip
    want = run(model, x=X)
    assert drop_identities(model.graph) == 2
    assert output_names(model) == ["y", "z", "w"]
    assert ops(model) == ["Relu", "Neg", "Abs"]
    for got, wanted in zip(run(model, x=X), want, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_identities_that_stay() -> None:
    """Inputs, constants and other outputs cannot take an output's name; a mask and training are work."""
    model = build(
        [
            node("Identity", ["x"], ["y"]),
            node("Identity", ["k"], ["of_constant"]),
            node("Relu", ["x"], ["r"]),
            node("Identity", ["r"], ["of_output"]),
            node("Dropout", ["r"], ["d", "mask"]),
            node("Dropout", ["r", "half", "true"], ["training"]),
            node("Dropout", ["r", "half", "fed"], ["perhaps"]),
        ],
        ["y", "of_constant", "r", "of_output", "d", "mask", "training", "perhaps"],
        [info("x", FLOAT, None), info("fed", BOOL, [])],
        k=np.float32(1), half=np.float32(0.5), true=np.array(True),
    )  # fmt: skip
    assert drop_identities(model.graph) == 0
    assert len(set(model.graph.outputs)) == 8


def test_an_identity_that_is_a_branch_s_output_is_safe() -> None:
    """As in silero_vad: the branch hands on a value of the graph around it, or makes one."""
    model = build(
        [
            node("Relu", ["x"], ["h"]),
            choose(
                "y",
                branch(node("Identity", ["h"], ["q"]), output="q"),
                branch(node("Neg", ["h"], ["n"]), node("Identity", ["n"], ["q"]), output="q"),
            ),
        ],
        inputs=[info("x", FLOAT, None), C],
    )
    assert drop_identities(model.graph) == 1
    assert ops(model) == ["Relu", "If", "Neg", "Identity"]
    np.testing.assert_array_equal(run(model, x=X, c=np.array(True))[0], np.maximum(X, 0))
    np.testing.assert_array_equal(run(model, x=X, c=np.array(False))[0], -np.maximum(X, 0))


def test_two_identities_of_one_value_make_two_outputs() -> None:
    model = build(
        [node("Relu", ["x"], ["a"]), node("Identity", ["a"], ["y"]), node("Identity", ["a"], ["z"])], ["y", "z"]
    )
    assert drop_identities(model.graph) == 1
    assert output_names(model) == ["y", "z"]
    assert ops(model) == ["Relu", "Identity"]
    for got in run(model, x=X):
        np.testing.assert_array_equal(got, np.maximum(X, 0))


# --- repeated ---------------------------------------------------------------------------------


def test_what_is_computed_twice_is_computed_once() -> None:
    model = build(
        [
            node("Clip", ["x", "low", "high"], ["a"]),
            node("Clip", ["x", "low2", "high"], ["b"]),
            node("Relu", ["a"], ["p"]),
            node("Relu", ["b"], ["q"]),
            choose("r", branch(node("Neg", ["q"], ["n"]), output="n"), branch(node("Abs", ["p"], ["n"]), output="n")),
            node("Add", ["p", "q"], ["s"]),
            node("Add", ["s", "r"], ["y"]),
        ],
        inputs=[info("x", FLOAT, None), C],
        low=np.float32(-0.5), low2=np.float32(-0.5), high=np.float32(1),
    )  # fmt: skip
    want = run(model, x=X, c=np.array(True))
    assert merge_repeated(model.graph) == 2
    assert ops(model) == ["Clip", "Relu", "If", "Add", "Add", "Abs", "Neg"]
    np.testing.assert_array_equal(run(model, x=X, c=np.array(True)), want)


@pytest.mark.parametrize(
    "pair",
    [
        (node("Relu", ["x"], ["a"]), node("Abs", ["x"], ["b"])),
        (node("LeakyRelu", ["x"], ["a"], alpha=0.1), node("LeakyRelu", ["x"], ["b"], alpha=0.2)),
        (node("Clip", ["x", "zero"], ["a"]), node("Clip", ["x", "", "zero"], ["b"])),
        (node("Add", ["x", "zero"], ["a"]), node("Add", ["x", "minus_zero"], ["b"])),
        (node("RandomNormalLike", ["x"], ["a"]), node("RandomNormalLike", ["x"], ["b"])),
        (node("Dropout", ["x", "half", "true"], ["a"]), node("Dropout", ["x", "half", "true"], ["b"])),
        (choose("a", branch(output="x"), branch(output="x")), choose("b", branch(output="x"), branch(output="x"))),
        (node("TopK", ["x", "k"], ["", "a"]), node("TopK", ["x", "k"], ["b", ""])),
    ],
    ids=lambda pair: f"{pair[0].op_type}-{pair[1].op_type}",
)
def test_what_is_not_the_same(pair: tuple[onnx.NodeProto, onnx.NodeProto]) -> None:
    model = build(
        [*pair, node("Max", ["a", "b"], ["y"])], inputs=[info("x", FLOAT, None), C],
        zero=np.float32(0), minus_zero=np.float32(-0.0), half=np.float32(0.5), true=np.array(True), k=[1],
    )  # fmt: skip
    assert merge_repeated(model.graph) == 0


def test_an_output_is_not_merged_away_and_branches_are_apart() -> None:
    model = build(
        [
            node("Relu", ["x"], ["a"]),
            node("Relu", ["x"], ["y"]),
            choose("z", branch(node("Relu", ["x"], ["q"]), node("Neg", ["q"], ["p"]), output="p"), branch(output="a")),
        ],
        ["y", "z"], [info("x", FLOAT, None), C],
    )  # fmt: skip
    assert merge_repeated(model.graph) == 0
    assert output_names(model) == ["y", "z"]


# --- affine -----------------------------------------------------------------------------------

W = rng.standard_normal((4, 3, 3, 3)).astype(np.float32)
V = rng.standard_normal((6, 2, 3, 3)).astype(np.float32)
BIAS = rng.standard_normal(4).astype(np.float32)
CHANNEL = rng.uniform(0.5, 2, (4, 1, 1)).astype(np.float32)
NORM: dict[str, Any] = {k: rng.uniform(0.5, 2, 4).astype(np.float32) for k in ("scale", "shift", "mean", "var")}
NORMALISE = node("BatchNormalization", ["h", *NORM], ["y"], epsilon=1e-3)


def agree(model: Model, x: Any = X) -> None:
    want = run(model, x=x)
    before = output_names(model)
    assert fold_affine(model.graph) > 0
    assert output_names(model) == before
    for got, wanted in zip(run(model, x=x), want, strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("after", "constants"),
    [
        (NORMALISE, NORM),
        (node("Mul", ["h", "k"], ["y"]), {"k": CHANNEL}),
        (node("Mul", ["k", "h"], ["y"]), {"k": np.float32(3)}),
        (node("Add", ["h", "k"], ["y"]), {"k": CHANNEL[None]}),
        (node("Add", ["k", "h"], ["y"]), {"k": np.array([3], np.float32)}),
        (node("Sub", ["h", "k"], ["y"]), {"k": CHANNEL}),
        (node("Sub", ["k", "h"], ["y"]), {"k": CHANNEL}),
        (node("Div", ["h", "k"], ["y"]), {"k": CHANNEL}),
    ],
    ids=lambda v: v.op_type + "-" + "-".join(v.input) if isinstance(v, onnx.NodeProto) else "",
)
@pytest.mark.parametrize("bias", [False, True])
def test_what_follows_a_convolution_is_folded(after: onnx.NodeProto, constants: dict[str, Any], bias: bool) -> None:
    conv = node("Conv", ["x", "w", "b"] if bias else ["x", "w"], ["h"], pads=[1, 1, 1, 1])
    model = build([conv, after], w=W, b=BIAS, weights=constants)
    agree(model)
    assert ops(model) == ["Conv"]
    assert model.graph.nodes[0].outputs[0] is model.graph.outputs[0]


@pytest.mark.parametrize("group", [1, 2])
def test_a_transposed_convolution_scales_its_second_dimension(group: int) -> None:
    conv = node("ConvTranspose", ["x", "w"], ["h"], group=group)
    model = build([conv, NORMALISE], w=V if group == 2 else V.reshape(3, 4, 3, 3), weights=NORM)
    x = rng.standard_normal((1, 6 if group == 2 else 3, 4, 4)).astype(np.float32)
    agree(model, x)
    assert ops(model) == ["ConvTranspose"]


def test_several_fold_in_a_row_also_in_a_branch_and_over_one_dimension() -> None:
    inner = [
        node("Conv", ["x", "w"], ["a"]), node("BatchNormalization", ["a", *NORM], ["b"]),
        node("Mul", ["b", "k"], ["d"]), node("Add", ["d", "k"], ["e"]),
    ]  # fmt: skip
    x = X[:, :, 0]
    model = build(
        [choose("y", branch(*inner, output="e"), branch(output="x"))], inputs=[info("x", FLOAT, None), C],
        w=W[..., 0], k=CHANNEL[..., 0], weights=NORM,
    )  # fmt: skip
    want = run(model, x=x, c=np.array(True))
    assert fold_affine(model.graph) == 3
    assert ops(model) == ["If", "Conv"]
    np.testing.assert_allclose(run(model, x=x, c=np.array(True)), want, rtol=1e-4, atol=1e-4)


def test_weights_that_two_convolutions_share_are_not_changed_for_the_other() -> None:
    model = build(
        [node("Conv", ["x", "w"], ["h"]), node("Mul", ["h", "k"], ["y"]), node("Conv", ["x", "w"], ["z"])],
        ["y", "z"], w=W, k=CHANNEL,
    )  # fmt: skip
    agree(model)
    assert ops(model) == ["Conv", "Conv"]


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        ([node("Conv", ["x", "w"], ["h"]), node("Mul", ["h", "k"], ["y"])], ["y", "h"]),
        ([node("Conv", ["x", "w"], ["h"]), node("Mul", ["h", "k"], ["q"]), node("Add", ["q", "h"], ["y"])], ["y"]),
        ([node("Conv", ["x", "w"], ["h"]), node("Mul", ["h", "h"], ["y"])], ["y"]),
        ([node("Conv", ["x", "w"], ["h"]), node("Div", ["k", "h"], ["y"])], ["y"]),
        ([node("Conv", ["x", "w"], ["h"]), node("Div", ["h", "zero"], ["y"])], ["y"]),
        ([node("Conv", ["x", "w"], ["h"]), node("Add", ["h", "row"], ["y"])], ["y"]),
        ([node("Conv", ["x", "w"], ["h"]), node("Add", ["h", "batch"], ["y"])], ["y"]),
        ([node("Conv", ["x", "w"], ["h"]), node("Add", ["h", "deep"], ["y"])], ["y"]),
        ([node("Conv", ["x", "w"], ["h"]), node("Add", ["h", "x"], ["y"])], ["y"]),
        ([node("Conv", ["x", "w"], ["h"]), node("Mul", ["h", "infinite"], ["y"])], ["y"]),
        ([node("Conv", ["x", "x"], ["h"]), node("Mul", ["h", "k"], ["y"])], ["y"]),
        ([node("Conv", ["x", "w"], ["h"]), node("Relu", ["h"], ["y"])], ["y"]),
        ([node("Conv", ["x", "w"], ["h"]),
          node("BatchNormalization", ["h", *NORM], ["y", "m", "v"], training_mode=1)], ["y"]),
        ([node("Conv", ["x", "w"], ["h"]), node("BatchNormalization", ["h", *list(NORM)[:3], "x"], ["y"])], ["y"]),
        ([node("Conv", ["x", "w"], ["h"]),
          choose("y", branch(node("Mul", ["h", "k"], ["q"]), output="q"), branch(output="x"))], ["y"]),
    ],
)  # fmt: skip
def test_what_does_not_fold_into_a_convolution(nodes: list[onnx.NodeProto], outputs: list[str]) -> None:
    model = build(
        nodes, outputs, [info("x", FLOAT, None), C], w=W, k=CHANNEL, zero=np.float32(0),
        row=np.ones((1, 3), np.float32), batch=np.ones((2, 1, 1, 1), np.float32), deep=np.ones((1,) * 5, np.float32),
        infinite=np.float32(np.inf), weights=NORM,
    )  # fmt: skip
    before = ops(model)
    assert fold_affine(model.graph) == 0
    assert ops(model) == before


def test_half_precision_weights_are_left_alone() -> None:
    model = build(
        [node("Conv", ["x", "w"], ["h"]), node("Mul", ["h", "k"], ["y"])],
        w=W.astype(np.float16),
        k=CHANNEL.astype(np.float16),
    )
    assert fold_affine(model.graph) == 0


# --- all together -----------------------------------------------------------------------------


def test_all_passes_keep_the_numbers_and_the_outputs() -> None:
    model = build(
        [
            node("Identity", ["w"], ["w2"]),
            node("Conv", ["x", "w2"], ["h"]),
            node("BatchNormalization", ["h", *NORM], ["n"]),
            node("Dropout", ["n"], ["d"]),
            node("Constant", [], ["half"], value_float=0.5),
            node("Constant", [], ["half2"], value_float=0.5),
            node("Mul", ["d", "half"], ["a"]),
            node("Mul", ["d", "half2"], ["b"]),
            node("Add", ["a", "b"], ["s"]),
            node("Shape", ["s"], ["unread"]),
            node("Identity", ["s"], ["y"]),
            node("Identity", ["y"], ["z"]),
        ],
        ["y", "z"], w=W, weights=NORM,
    )  # fmt: skip
    want = run(model, x=X)
    seen: list[tuple[str, int, int]] = []
    optimise(model, progress=lambda *args: seen.append(args))
    assert ops(model) == ["Conv", "Add", "Identity"]
    assert output_names(model) == ["y", "z"]
    assert seen[-1] == ("optimise", 1, 1)
    for got, wanted in zip(run(model, x=X), want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_a_node_without_results_is_dropped() -> None:
    model = build([node("Relu", ["x"], ["y"])])
    model.graph.nodes.append(Node("Abs", "", 17, "a", (model.graph.inputs[0],), (None,)))
    optimise(model)
    assert ops(model) == ["Relu"]
