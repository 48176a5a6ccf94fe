"""What is wrong with a model or with data is a typed error that names the node, through the public API."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import pytest
import trio
from onnx import TensorProto, helper

import trionnx
from trionnx import InvalidData, InvalidModel, UnsupportedOperator


def parse(body: str, opset: int = 18, imports: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : {opset}{imports}]>\n{body}')


def feeds_of(model: onnx.ModelProto, **given: Any) -> dict[str, Any]:
    """Ones for each input that is not given."""
    feeds = {}
    for info in model.graph.input:
        kind = info.type.tensor_type
        shape = [d.dim_value or 2 for d in kind.shape.dim]
        feeds[info.name] = given.get(info.name, np.ones(shape, helper.tensor_dtype_to_np_dtype(kind.elem_type)))
    return feeds


async def run(model: onnx.ModelProto, feeds: dict[str, Any] | None = None, **load: Any) -> list[Any]:
    async with trionnx.open_scheduler(backend="webgpu") as scheduler:
        session = await scheduler.load(model, **load)
        return await session.run(None, feeds_of(model) if feeds is None else feeds)


async def load(model: onnx.ModelProto, **options: Any) -> None:
    async with trionnx.open_scheduler(backend="webgpu") as scheduler:
        await scheduler.load(model, **options)


# --- unknown operators ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "domain", "opset", "imports"),
    [
        ("Frobnicate", "", 18, ""),
        ("Frobnicate", "org.example", 3, ', "org.example" : 3'),
        ("Relu", "org.example", 3, ', "org.example" : 3'),
        ("Gelu", "", 13, ""),
    ],
)
async def test_an_unknown_operator_is_named_at_load(operator, domain, opset, imports):
    version = 18 if domain else opset
    model = parse("g (float[N] x) => (float[N] y) { a = Neg(x) y = Relu(a) }", version, imports)
    node = model.graph.node[1]
    node.op_type, node.domain, node.name = operator, domain, "culprit"
    with pytest.raises(UnsupportedOperator) as caught:
        await load(model)
    error = caught.value
    assert (error.op, error.domain, error.opset, error.node) == (operator, domain, opset, "culprit")
    name = f"{domain}.{operator}" if domain else operator
    assert str(error).startswith(f"operator {name} (opset {opset}) of node 'culprit': ")


async def test_an_unknown_operator_that_is_not_reached_is_no_reason_to_refuse():
    model = parse("""g (bool c, float[2] x) => (float[2] y) {
        y = If(c) <then_branch = t () => (float[2] a) { a = Frobnicate(x) },
                   else_branch = e () => (float[2] b) { b = Neg(x) }>
    }""")
    (y,) = await run(model, {"c": np.array(False), "x": np.ones(2, np.float32)})
    np.testing.assert_array_equal(y, [-1, -1])
    with pytest.raises(UnsupportedOperator, match="Frobnicate"):
        await run(model, {"c": np.array(True), "x": np.ones(2, np.float32)})


# --- bad attributes ---------------------------------------------------------------------------

IMAGE = "float[1,2,8,8] x"
BAD_ATTRIBUTES = {
    "MaxPool<kernel_shape = [-3, 3]>(x)": r"kernel_shape, got \[-3, 3\]",
    "MaxPool<kernel_shape = [3, 3], strides = [0, 1]>(x)": r"strides, got \[0, 1\]",
    'MaxPool<kernel_shape = [3, 3], auto_pad = "SOMEHOW">(x)': "got SOMEHOW",
    "MaxPool(x)": "'kernel_shape' is missing",
    "Softmax<axis = 5>(x)": "axis 5 is out of range for 4 dimensions",
    "Softmax<axis = -5>(x)": "axis -5 is out of range for 4 dimensions",
    "Softmax<axis = 1.5>(x)": "'axis' as INT, got 1.5",
    'Softmax<axis = "last">(x)': "'axis' as INT, got 'last'",
    "Concat<axis = 4>(x, x)": "axis 4 is out of range for 4 dimensions",
    "Concat(x, x)": "'axis' is missing",
    "Flatten<axis = 7>(x)": "axis 7 is out of range for 4 dimensions",
    "ArgMax<axis = 4>(x)": "axis 4 is out of range for 4 dimensions",
    "Gather<axis = 4>(x, i)": "axis 4 is out of range for 4 dimensions",
    "Transpose<perm = [0, 1, 1, 2]>(x)": r"perm \[0, 1, 1, 2\] does not fit 4 dimensions",
    'Pad<mode = "wobbly">(x, p)': "unknown mode 'wobbly'",
    'Resize<mode = "wobbly">(x, , f)': "wobbly",
    "Conv<group = 3>(x, w)": "expected X with 2 x 3 channels",
    "Conv<kernel_shape = [5, 5]>(x, w)": r"expected kernel_shape \[3, 3\] as in W, got \[5, 5\]",
    "Conv<dilations = [1]>(x, w)": "dilations",
    "LRN<size = 0>(x)": "size of at least 1, got 0",
    "DepthToSpace<blocksize = 2>(x)": "2 channels do not make blocks of 2 by 2",
    "Cast<to = 99>(x)": "'to' is 99, which is no dtype",
    "Relu<slope = 0.5>(x)": "it has no attribute 'slope'",
    'Einsum<equation = "ab->a">(x)': "an equation that fits",
    'ScatterElements<reduction = "foo">(x, j, x)': "got foo",
}


@pytest.mark.parametrize("call", BAD_ATTRIBUTES)
async def test_a_bad_attribute_is_the_models_fault_and_names_the_node(call):
    model = parse(f"""g ({IMAGE}, float[4,2,3,3] w, int64[1] i, int64[1,2,8,8] j) => (float[N] y) {{
        p = Constant<value = int64[8] {{0, 0, 1, 1, 0, 0, 1, 1}}>()
        f = Constant<value = float[4] {{1.0, 1.0, 2.0, 2.0}}>() y = {call}
    }}""")
    model.graph.node[2].name = "culprit"
    name = re.escape(f"node 'culprit' ({call.partition('<')[0].partition('(')[0]}): ")
    with pytest.raises(InvalidModel, match=f"^{name}.*{BAD_ATTRIBUTES[call]}"):
        await run(model)


# --- shapes that do not fit -------------------------------------------------------------------

SHAPES = "float[2,3] a, float[4,5] b, float[1,3,8,8] x, float[4,2,3,3] w, float[7] c"
BAD_SHAPES = {
    "Add(a, b)": r"shapes \[2, 3\] and \[4, 5\] do not broadcast",
    "Where(k, a, b)": "do not broadcast",
    "MatMul(a, b)": r"shapes \[2, 3\] and \[4, 5\] do not multiply",
    "Gemm(a, b)": "do not multiply",
    "Conv(x, w)": r"as in W \[4, 2, 3, 3\], got \[1, 3, 8, 8\]",
    "ConvTranspose(x, w)": "expected X with 4 channels",
    "Concat<axis = 0>(a, b)": "differ outside of axis 0",
    "Reshape(a, s)": r"cannot reshape \[2, 3\] to \[4, 2\]",
    "Expand(a, s)": r"shapes \[2, 3\] and \[4, 2\] do not broadcast",
    "Split(a, s)": "do not make up dimension 0 of size 2",
    "Squeeze(a, z)": r"expected size 1 in dimension 0, got shape \[2, 3\]",
    "InstanceNormalization(x, c, c)": r"expected shape \[3\] for 3 channels, got \[7\]",
    "GatherND(a, j)": "do not fit",
}


@pytest.mark.parametrize("call", BAD_SHAPES)
@pytest.mark.parametrize("known", [True, False], ids=["at load", "at run"])
async def test_shapes_that_do_not_fit_are_the_models_fault(call, known):
    model = parse(f"""g ({SHAPES}, bool[2,1] k, int64[1,4] j) => (float[N] y) {{
        s = Constant<value = int64[2] {{4, 2}}>() z = Constant<value = int64[1] {{0}}>() y = {call}
    }}""")
    model.graph.node[2].name = "culprit"
    feeds = feeds_of(model)
    name = re.escape(f"node 'culprit' ({call.partition('<')[0].partition('(')[0]}): ")
    expected = pytest.raises(InvalidModel, match=f"^{name}.*{BAD_SHAPES[call]}")
    if known:
        with expected:
            await load(model)
        return
    for info in model.graph.input:
        for number, dim in enumerate(info.type.tensor_type.shape.dim):
            dim.dim_param = f"{info.name}{number}"
    async with trionnx.open_scheduler(backend="webgpu") as scheduler:
        session = await scheduler.load(model)
        with expected:
            await session.run(None, feeds)


# --- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "given"),
    [
        ("Gather(x, i)", {"i": np.array([1, 5])}),
        ("Gather<axis = 1>(x, i)", {"i": np.array([0, -4])}),
        ("GatherElements(x, e)", {"e": np.array([[0, 1, 2]])}),
        ("GatherND(x, e)", {"e": np.array([[0, 3]])}),
        ("ScatterElements(x, e, u)", {"e": np.array([[0, 0, -3]])}),
        ("ScatterND(x, e, u)", {"e": np.array([[7]]), "u": np.ones((1, 3), np.float32)}),
    ],
)
async def test_an_index_out_of_range_is_the_datas_fault(call, given):
    model = parse(f"""g (float[2,3] x, int64[N] i, int64[N,M] e, float[K,3] u) => (float[P,Q] y) {{
        y = {call}
    }}""")
    model.graph.node[0].name = "culprit"
    good = {"x": np.ones((2, 3), np.float32), "i": np.zeros(1, np.int64), "u": np.ones((1, 3), np.float32)}
    good["e"] = np.zeros_like(given.get("e", np.zeros((1, 1), np.int64)))
    async with trionnx.open_scheduler(backend="webgpu") as scheduler:
        session = await scheduler.load(model)
        before = await session.run(None, good | {"u": given.get("u", good["u"])})
        with pytest.raises(InvalidData, match=r"^node 'culprit': .*out of range") as caught:
            await session.run(None, good | given)
        assert caught.value.node == "culprit"
        after = await session.run(None, good | {"u": given.get("u", good["u"])})
        np.testing.assert_array_equal(before[0], after[0])


COMPUTED = {
    "Gather(x, i)": ("Gather", 5),
    "Gather<axis = 1>(t, i)": ("Gather", -4),
    "GatherElements(x, j)": ("GatherElements", 3),
    "ScatterElements<axis = 1>(t, k, u)": ("ScatterElements", 9),
}
"""Per call, with indices that the GPU computed, its operator and an index that is out of range."""


def computed(call: str) -> onnx.ModelProto:
    model = parse(f"""g (float[3,3] x, float[N] f) => (float[P,Q] y) {{
        i = Cast<to = 6>(f) o = Constant<value = int64[2] {{-1, 1}}>() j = Reshape(i, o)
        r = Constant<value = int64[2] {{1, -1}}>() k = Reshape(i, r) u = Reshape(f, r) t = Neg(x) y = {call}
    }}""")
    model.graph.node[-1].name = "culprit"
    return model


@pytest.mark.parametrize("call", COMPUTED)
async def test_an_index_that_the_gpu_computed_is_checked_there(call):
    _, bad = COMPUTED[call]
    good = {"x": np.arange(9, dtype=np.float32).reshape(3, 3), "f": np.array([2, -1], np.float32)}
    axis, size = int("axis = 1" in call), 3
    async with trionnx.open_scheduler(backend="webgpu") as scheduler:
        session = await scheduler.load(computed(call))
        before = await session.run(None, good)
        where = {n.node: n.where for n in session.explain()}
        assert where["culprit"] == "gpu"
        with pytest.raises(InvalidData) as caught:
            await session.run(None, good | {"f": np.array([0, bad], np.float32)})
        text = f"index {bad} is out of range for dimension {axis} of size {size}"
        assert str(caught.value) == f"node 'culprit': {text}"
        after = await session.run(None, good)
        assert before[0].tobytes() == after[0].tobytes()


@pytest.mark.parametrize("by", ["scope", "terminate"])
@pytest.mark.parametrize("at", [1, 2, 3, 10**6])
async def test_a_stop_outranks_an_index_out_of_range(by, at):
    """Stopped after one of its first segments, else by the fault; the check itself is cut."""
    good = {"x": np.arange(9, dtype=np.float32).reshape(3, 3), "f": np.zeros(400_000, np.float32)}
    bad = good["f"].copy()
    bad[-1] = 9
    async with trionnx.open_scheduler(backend="webgpu") as scheduler:
        session = await scheduler.load(computed("Gather(x, i)"))
        before = await session.run(None, good)
        seen = 0
        outcome = None
        with trio.CancelScope() as scope:

            def stop(done: int, total: int) -> None:
                nonlocal seen
                seen = done
                if done == at:
                    options.terminate() if by == "terminate" else scope.cancel()

            options = trionnx.RunOptions(on_progress=stop)
            try:
                await session.run(None, good | {"f": bad}, options)
            except (InvalidData, trionnx.RunTerminated) as error:
                outcome = error
        if seen < at:
            assert isinstance(outcome, InvalidData)
        elif by == "scope":
            assert scope.cancelled_caught
            assert outcome is None
        else:
            assert isinstance(outcome, trionnx.RunTerminated)
        after = await session.run(None, good)
        assert before[0].tobytes() == after[0].tobytes()


# --- models that onnx.checker rejects ---------------------------------------------------------


def graph(*nodes: onnx.NodeProto, initializer: Any = ()) -> onnx.ModelProto:
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in "xy"]
    made = helper.make_graph(list(nodes), "g", infos[:1], infos[1:], list(initializer))
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def without_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    del model.opset_import[:]
    return model


def short_tensor() -> onnx.TensorProto:
    tensor = onnx.numpy_helper.from_array(np.zeros((2, 3), np.float32), "w")
    tensor.raw_data = tensor.raw_data[:-4]
    return tensor


node = helper.make_node
REJECTED = {
    "an input that nothing computes": (graph(node("Neg", ["q"], ["y"])), "'q' is produced by nothing"),
    "an output that nothing computes": (graph(node("Neg", ["x"], ["a"])), "'y' of the model is produced by nothing"),
    "a name twice": (graph(node("Neg", ["x"], ["y"]), node("Relu", ["x"], ["y"])), "'y' is produced twice"),
    "a cycle": (graph(node("Add", ["x", "b"], ["a"]), node("Neg", ["a"], ["b"]), node("Neg", ["b"], ["y"])), "its own"),
    "too few inputs": (graph(node("Add", ["x"], ["y"], "n")), r"node 'n' \(Add\): its input 'B' is missing"),
    "too many inputs": (graph(node("Neg", ["x", "x"], ["y"], "n")), r"'n' \(Neg\): expected at most 1 inputs, got 2"),
    "too many outputs": (graph(node("Neg", ["x"], ["y", "z"], "n")), r"'n' \(Neg\): expected at most 1 outputs, got 2"),
    "an attribute missing": (graph(node("Concat", ["x", "x"], ["y"], "n")), r"'n' \(Concat\): its attribute 'axis'"),
    "an attribute too many": (graph(node("Neg", ["x"], ["y"], "n", slope=1.0)), r"'n' \(Neg\): it has no .* 'slope'"),
    "no opset": (without_opset(graph(node("Neg", ["x"], ["y"]))), "imports no opset"),
    "too few bytes": (graph(node("Add", ["x", "w"], ["y"]), initializer=[short_tensor()]), "24 bytes, there are 20"),
}


@pytest.mark.parametrize("what", REJECTED)
async def test_what_the_checker_rejects_is_refused_at_load(what):
    model, message = REJECTED[what]
    with pytest.raises((onnx.checker.ValidationError, onnx.shape_inference.InferenceError)):
        onnx.checker.check_model(model)
    with pytest.raises(InvalidModel, match=message):
        await load(model)


async def test_a_constant_without_a_value_is_refused_at_load():
    with pytest.raises(InvalidModel, match=r"node 'n' \(Constant\): expected one value, got 0"):
        await load(graph(node("Constant", [], ["c"], "n"), node("Add", ["x", "c"], ["y"])))


async def test_damaged_bytes_are_no_model():
    with pytest.raises(InvalidModel, match="no ONNX model"):
        await load(b"\x08\x09not a model")  # type: ignore[arg-type]


# --- no host steps ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["N", "8"])
async def test_a_host_step_of_floats_is_refused_at_load(size):
    model = parse(f"""g (float[1,{size},4] b, float[1,1,{size}] s) => (int64[K,3] i) {{
        c = Relu(b) t = Sigmoid(s) n = Constant<value = int64[1] {{3}}>() i = NonMaxSuppression(c, t, n)
    }}""")
    model.graph.node[3].name = "culprit"
    with pytest.raises(UnsupportedOperator, match="host steps are not allowed") as caught:
        await load(model, allow_host_steps=False)
    assert (caught.value.op, caught.value.domain, caught.value.opset, caught.value.node) == (
        "NonMaxSuppression",
        "",
        18,
        "culprit",
    )


async def test_a_host_step_in_a_branch_is_refused_at_load():
    model = parse("""g (bool c, float[N] x) => (float[M] y) {
        y = If(c) <then_branch = t () => (float[M] a) { a, i = Unique(x) },
                   else_branch = e () => (float[M] b) { b = Neg(x) }>
    }""")
    with pytest.raises(UnsupportedOperator, match="Unique"):
        await load(model, allow_host_steps=False)


async def test_what_is_known_while_planning_is_no_host_step():
    model = parse("""g (float[N] x) => (float[N] y) {
        s = Shape(x) f = Cast<to = 1>(s) u, i = Unique(f) d = ReduceSum<keepdims = 0>(u) y = Mul(x, d)
    }""")
    (y,) = await run(model, {"x": np.ones(3, np.float32)}, allow_host_steps=False)
    np.testing.assert_array_equal(y, [3, 3, 3])


async def test_host_steps_of_integers_are_allowed():
    model = parse("g (int64[N] x, float[N] a) => (int64[M] y, float[N] b) { y, i = Unique(x) b = Neg(a) }")
    given = {"x": np.array([3, 1, 3]), "a": np.ones(3, np.float32)}
    y, _ = await run(model, given, allow_host_steps=False)
    np.testing.assert_array_equal(y, [1, 3])
