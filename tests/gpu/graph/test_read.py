from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from trionnx.gpu.errors import InvalidModel
from trionnx.gpu.graph.model import Graph, Model
from trionnx.gpu.graph.read import OLDEST_OPSET, newest_opset, read_model
from trionnx.gpu.graph.upgrade import UPGRADED

BIG = np.arange(5000, dtype=np.float32)
FLOAT = TensorProto.FLOAT
info = helper.make_tensor_value_info
node = helper.make_node


def make(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto] | None = None,
    outputs: list[onnx.ValueInfoProto] | None = None,
    initializers: list[TensorProto] | None = None,
    *,
    opset: int = 17,
    ir_version: int = 8,
    **more: Any,
) -> onnx.ModelProto:
    inputs = [info("x", FLOAT, ["n", 3])] if inputs is None else inputs
    outputs = [info("y", FLOAT, None)] if outputs is None else outputs
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], **more)
    model.ir_version = ir_version
    return model


def with_weights() -> onnx.ModelProto:
    add = node("Add", ["x", "big"], ["y"], name="add")
    return make([add], [info("x", FLOAT, [5000])], initializers=[from_array(BIG, "big")])


def from_array(array: Any, name: str) -> TensorProto:
    return numpy_helper.from_array(np.asarray(array), name)


def plain(source: Any) -> Model:
    return read_model(source, optimise=False)


def weights(model: Model) -> np.ndarray[Any, Any]:
    value = model.graph.nodes[0].inputs[1]
    assert value is not None
    assert value.const is not None
    return value.const


class Reader:
    def __init__(self, data: bytes) -> None:
        self.file = io.BytesIO(data)

    def read(self, size: int) -> bytes:
        return self.file.read(min(size, 7001))


SOURCES: dict[str, Callable[[onnx.ModelProto, Path], Any]] = {
    "path": lambda m, p: p,
    "str": lambda m, p: str(p),
    "bytes": lambda m, p: m.SerializeToString(),
    "bytearray": lambda m, p: bytearray(m.SerializeToString()),
    "memoryview": lambda m, p: memoryview(m.SerializeToString()),
    "strided": lambda m, p: memoryview(bytes(b for v in m.SerializeToString() for b in (v, 0)))[::2],
    "BytesIO": lambda m, p: io.BytesIO(m.SerializeToString()),
    "reader": lambda m, p: Reader(m.SerializeToString()),
    "proto": lambda m, p: m,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_model_is_the_same_from_every_source(kind: str, tmp_path: Path) -> None:
    proto = with_weights()
    onnx.save(proto, tmp_path / "m.onnx")
    model = read_model(SOURCES[kind](proto, tmp_path / "m.onnx"))
    (add,) = model.graph.nodes
    assert (add.op, add.domain, add.opset, add.name) == ("Add", "", 17, "add")
    assert [v.name for v in model.graph.inputs] == ["x"]
    assert [v.name for v in model.graph.outputs] == ["y"]
    assert weights(model).tobytes() == BIG.tobytes()
    assert not weights(model).flags.writeable
    assert model.opsets == {"": 17}
    assert model.ir_version == 8


def test_an_open_file_is_read_from_its_path_s_folder(tmp_path: Path) -> None:
    onnx.save(with_weights(), tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    with open(tmp_path / "m.onnx", "rb") as file:
        assert weights(plain(file)).tobytes() == BIG.tobytes()


def test_writing_to_the_source_afterwards_changes_nothing() -> None:
    source = bytearray(with_weights().SerializeToString())
    model = plain(source)
    source[:] = bytes(len(source))
    assert weights(model).tobytes() == BIG.tobytes()


def test_a_large_model_proto_is_taken_apart_piecewise() -> None:
    tensors = [from_array(np.full(2_000_000, i, np.float32), f"w{i}") for i in range(3)]
    tensors += [from_array(np.full(300, i, np.float32), f"s{i}") for i in range(1000)]
    names = [t.name for t in tensors]
    nodes = [node("Identity", [n], [f"{n}_out"]) for n in names]
    proto = make(nodes, [], [info(f"{n}_out", FLOAT, None) for n in names], tensors)
    model = plain(proto)
    assert len(model.graph.nodes) == 1003
    for made, tensor in zip(model.graph.nodes, tensors, strict=True):
        source = made.inputs[0]
        assert source is not None
        np.testing.assert_array_equal(source.const, numpy_helper.to_array(tensor))


def test_infos_and_metadata() -> None:
    inputs = [
        info("a", TensorProto.FLOAT16, ["batch", 3, None]),
        info("b", TensorProto.INT64, []),
        info("c", TensorProto.STRING, None),
        helper.make_tensor_sequence_value_info("d", FLOAT, None),
        info("e", TensorProto.BFLOAT16, [-1]),
        info("f", FLOAT, ["-1"]),
    ]
    outputs = [info("a", TensorProto.FLOAT16, None)]
    mapped = onnx.ValueInfoProto(name="p")
    mapped.type.sequence_type.elem_type.map_type.key_type = TensorProto.INT64
    mapped.type.sequence_type.elem_type.map_type.value_type.tensor_type.elem_type = FLOAT
    outputs.append(mapped)
    proto = make(
        [node("ZipMap", ["z"], ["p"], domain="ai.onnx.ml", classlabels_int64s=[0, 1])],
        [*inputs, info("z", FLOAT, [1, 2])],
        outputs,
        producer_name="maker",
        doc_string="about it",
        domain="org.example",
        model_version=3,
    )
    helper.set_model_props(proto, {"k": "v"})
    proto.opset_import.add(domain="ai.onnx.ml", version=1)
    proto.opset_import.add(domain="never.used", version=9)
    model = read_model(proto)
    assert [(i.type, i.shape, i.dtype) for i in model.inputs[:6]] == [
        ("tensor(float16)", ("batch", 3, None), np.float16),
        ("tensor(int64)", (), np.int64),
        ("tensor(string)", None, np.dtype(object)),
        ("seq(tensor(float))", None, None),
        ("tensor(bfloat16)", (None,), ml_dtypes.bfloat16),
        ("tensor(float)", (None,), np.float32),
    ]
    assert model.outputs[1].type == "seq(map(int64,tensor(float)))"
    data = model.metadata
    assert (data.producer_name, data.description, data.domain) == ("maker", "about it", "org.example")
    assert (data.graph_name, data.version, data.custom_metadata_map) == ("g", 3, {"k": "v"})
    assert model.opsets == {"": 17, "ai.onnx.ml": 1, "never.used": 9}


def test_initialisers_that_are_inputs_may_be_fed_from_ir_version_4() -> None:
    nodes = [node("Add", ["x", "w"], ["y"])]
    inputs = [info("w", FLOAT, [3]), info("x", FLOAT, [3])]
    tensors = [from_array(np.ones(3, np.float32), "w")]
    new = read_model(make(nodes, inputs, initializers=tensors, ir_version=4))
    assert [i.name for i in new.inputs] == ["x"]
    assert [i.name for i in new.overridable] == ["w"]
    assert [v.name for v in new.graph.inputs] == ["x", "w"]
    assert new.graph.nodes[0].inputs[1] is new.graph.inputs[1]
    assert new.graph.inputs[1].const is None
    assert new.defaults["w"].tolist() == [1, 1, 1]

    old = read_model(make(nodes, inputs, initializers=tensors, ir_version=3))
    assert [i.name for i in old.inputs] == ["x"]
    assert old.overridable == ()
    assert [v.name for v in old.graph.inputs] == ["x"]
    assert weights(old).tolist() == [1, 1, 1]
    assert old.defaults == {}


@pytest.mark.parametrize(
    ("attribute", "want"),
    [
        ({"value": from_array(np.array([1, 2], np.int8), "")}, np.array([1, 2], np.int8)),
        ({"value_float": 1.5}, np.array(1.5, np.float32)),
        ({"value_floats": [1.5, 2.0]}, np.array([1.5, 2], np.float32)),
        ({"value_int": 7}, np.array(7, np.int64)),
        ({"value_ints": [7, -1]}, np.array([7, -1], np.int64)),
        ({"value_string": "ä"}, np.array("ä", object)),
        ({"value_strings": ["a", "b"]}, np.array(["a", "b"], object)),
    ],
)
def test_constant_nodes_become_constants(attribute: dict[str, Any], want: np.ndarray[Any, Any]) -> None:
    model = plain(make([node("Constant", [], ["c"], **attribute), node("Foo", ["c"], ["y"], domain="d")]))
    (foo,) = model.graph.nodes
    (value,) = foo.inputs
    assert value is not None
    assert value.const is not None
    assert value.const.dtype == value.dtype == want.dtype
    assert value.const.shape == want.shape
    assert value.const.tolist() == want.tolist()


def test_sparse_constants_and_initialisers_become_dense() -> None:
    sparse = onnx.SparseTensorProto(dims=[2, 3])
    sparse.values.CopyFrom(from_array(np.array([5, 6], np.float32), "s"))
    sparse.indices.CopyFrom(from_array(np.array([1, 5]), ""))
    pairs = onnx.SparseTensorProto(dims=[2, 3])
    pairs.values.CopyFrom(from_array(np.array([7.0], np.float32), "p"))
    pairs.indices.CopyFrom(from_array(np.array([[1, 2]]), ""))
    proto = make([node("Constant", [], ["c"], sparse_value=pairs), node("Add", ["s", "c"], ["y"])], [])
    proto.graph.sparse_initializer.append(sparse)
    add = plain(proto).graph.nodes[0]
    assert [v.const.tolist() for v in add.inputs if v is not None and v.const is not None] == [
        [[0, 5, 0], [0, 0, 6]],
        [[0, 0, 0], [0, 0, 7]],
    ]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(20000).astype(ml_dtypes.bfloat16),
        (np.arange(20000) % 400).astype(ml_dtypes.float8_e4m3fn),
        np.arange(20001).astype(ml_dtypes.int4),
        np.arange(20001).astype(ml_dtypes.uint4),
        np.arange(20000).astype(np.complex64),
        np.arange(20000) % 3 == 0,
        np.zeros((0, 5), np.float16),
        np.array(["a", "ä" * 3000], object),
        np.array(3.5),
    ],
    ids=lambda a: f"{a.dtype}{list(a.shape)}",
)
@pytest.mark.parametrize("external", [False, True])
def test_arrays_of_every_dtype(array: np.ndarray[Any, Any], external: bool, tmp_path: Path) -> None:
    proto = make([node("Foo", ["x", "w"], ["y"], domain="d")], initializers=[from_array(array, "w")])
    if external and not array.dtype.hasobject:
        onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="w", size_threshold=0)
        got = weights(plain(tmp_path / "m.onnx"))
    else:
        got = weights(plain(proto.SerializeToString()))
    assert got.dtype == array.dtype
    assert got.shape == array.shape
    assert got.tolist() == array.tolist()


def test_attributes_become_plain_values() -> None:
    made = node("Foo", ["x"], ["y"], domain="d", i=3, f=0.5, s="ä", ints=[1, 2], floats=[1.0, 2.5], strings=["a"])
    made.attribute.append(helper.make_attribute("t", from_array(np.arange(3), "")))
    made.attribute.append(helper.make_attribute("none", [], attr_type=onnx.AttributeProto.FLOATS))
    old = made.attribute.add(name="untyped")
    old.ints.extend([4, 5])
    (got,) = plain(make([made])).graph.nodes
    assert got.attrs.pop("t").tolist() == [0, 1, 2]
    assert got.attrs == {
        "i": 3,
        "f": 0.5,
        "s": "ä",
        "ints": [1, 2],
        "floats": [1.0, 2.5],
        "strings": ["a"],
        "none": [],
        "untyped": [4, 5],
    }
    assert type(got.attrs["floats"][0]) is float


def test_missing_inputs_and_outputs_are_none_and_names_are_made_up() -> None:
    nodes = [
        node("Clip", ["x", "", "m"], ["a"], name="same"),
        node("Clip", ["a", "", ""], ["b"], name="same"),
        node("LSTM", ["b", "b", "b", "", ""], ["", "y"]),
        node("Relu", ["b"], ["c"]),
    ]
    graph = plain(make(nodes, initializers=[from_array(np.float32(1), "m")])).graph
    assert [v and v.name for v in graph.nodes[0].inputs] == ["x", None, "m"]
    assert [v and v.name for v in graph.nodes[1].inputs] == ["a"]
    assert [v and v.name for v in graph.nodes[2].inputs] == ["b", "b", "b"]
    assert [v and v.name for v in graph.nodes[2].outputs] == [None, "y"]
    names = [n.name for n in graph.nodes]
    assert all(names)
    assert len(set(names)) == 4
    assert names[0] == "same"


def branch(name: str, *nodes: onnx.NodeProto, output: str) -> onnx.GraphProto:
    return helper.make_graph(list(nodes), name, [], [info(output, FLOAT, None)])


def test_nested_graphs_capture_the_same_values() -> None:
    inner = node(
        "If",
        ["c"],
        ["r"],
        then_branch=branch("t2", node("Neg", ["x"], ["q"]), output="q"),
        else_branch=branch("e2", output="h"),
    )
    outer = node(
        "If",
        ["c"],
        ["y"],
        then_branch=branch("t", inner, output="r"),
        else_branch=branch("e", node("Relu", ["h"], ["r"]), output="r"),
    )
    proto = make([node("Abs", ["x"], ["h"]), outer], [info("x", FLOAT, None), info("c", TensorProto.BOOL, [])])
    graph = plain(proto).graph
    x, h = graph.inputs[0], graph.nodes[0].outputs[0]
    then = graph.nodes[1].attrs["then_branch"]
    assert isinstance(then, Graph)
    assert graph.nodes[1].attrs["else_branch"].nodes[0].inputs == (h,)
    assert then.nodes[0].attrs["then_branch"].nodes[0].inputs == (x,)
    assert then.nodes[0].attrs["else_branch"].outputs == [h]
    assert then.outputs == [then.nodes[0].outputs[0]]


def test_a_nested_graph_may_reuse_a_name() -> None:
    then = branch("t", node("Neg", ["x"], ["h"]), output="h")
    proto = make(
        [
            node("Abs", ["x"], ["h"]),
            node("If", ["c"], ["z"], then_branch=then, else_branch=branch("e", output="h")),
            node("Add", ["h", "z"], ["y"]),
        ],
        [info("x", FLOAT, None), info("c", TensorProto.BOOL, [])],
    )
    graph = plain(proto).graph
    assert graph.nodes[2].inputs[0] is graph.nodes[0].outputs[0]
    (inner,) = graph.nodes[1].attrs["then_branch"].outputs
    assert inner is not graph.nodes[0].outputs[0]
    assert inner.name == "h'"


def test_nodes_out_of_order_are_sorted() -> None:
    then = branch("t", node("Neg", ["b"], ["q"]), output="q")
    nodes = [
        node("If", ["c"], ["y"], name="3", then_branch=then, else_branch=branch("e", output="x")),
        node("Relu", ["a"], ["b"], name="2"),
        node("Abs", ["x"], ["a"], name="1"),
    ]
    graph = plain(make(nodes, [info("x", FLOAT, None), info("c", TensorProto.BOOL, [])])).graph
    assert [n.name for n in graph.nodes] == ["1", "2", "3"]


def test_local_functions_are_inlined_with_large_constants_and_attributes() -> None:
    proto = make([node("Outer", ["x"], ["y"], domain="local", slope=0.25)], [info("x", FLOAT, [5000])])
    leaky = node("LeakyRelu", ["a"], ["b"])
    leaky.attribute.add(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    inner = helper.make_function("local", "Inner", ["a"], ["b"], [leaky], opsets, ["slope"])
    call = node("Inner", ["s"], ["o"], domain="local")
    call.attribute.add(name="slope", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    constant = node("Constant", [], ["k"], value=from_array(BIG, "k"))
    outer = helper.make_function(
        "local", "Outer", ["i"], ["o"], [constant, node("Add", ["i", "k"], ["s"]), call], opsets, ["slope"]
    )
    proto.functions.extend([inner, outer])
    proto.opset_import.add(domain="local", version=1)
    add, relu = read_model(proto.SerializeToString()).graph.nodes
    assert (add.op, relu.op, relu.attrs) == ("Add", "LeakyRelu", {"alpha": 0.25})
    assert relu.outputs[0] is not None
    assert relu.outputs[0].name == "y"
    assert add.inputs[1] is not None
    np.testing.assert_array_equal(add.inputs[1].const, BIG)


def test_a_function_of_another_opset_is_converted() -> None:
    proto = make([node("F", ["x"], ["y"], domain="local")], opset=17)
    squeeze = node("Squeeze", ["a"], ["b"], axes=[0])
    proto.functions.append(helper.make_function("local", "F", ["a"], ["b"], [squeeze], [helper.make_opsetid("", 11)]))
    proto.opset_import.add(domain="local", version=1)
    (got,) = read_model(proto).graph.nodes
    assert (got.op, got.opset) == ("Squeeze", 17)
    assert weights(read_model(proto)).tolist() == [0]


# --- what is refused --------------------------------------------------------------------------


def refused(source: Any) -> str:
    with pytest.raises(InvalidModel) as caught:
        read_model(source)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    return message


@pytest.mark.parametrize("opset", [OLDEST_OPSET - 1, newest_opset() + 1])
def test_an_opset_that_is_too_old_or_too_new(opset: int) -> None:
    message = refused(make([node("Relu", ["x"], ["y"])], opset=opset))
    assert f"opset {opset} of ai.onnx; opsets {OLDEST_OPSET} to {newest_opset()} are supported" in message


@pytest.mark.parametrize("opset", [OLDEST_OPSET, newest_opset()])
def test_the_oldest_and_the_newest_opset(opset: int) -> None:
    read = read_model(make([node("Relu", ["x"], ["y"])], opset=opset))
    assert read.opsets[""] == max(opset, UPGRADED)


def test_no_opset_at_all() -> None:
    proto = make([node("Relu", ["x"], ["y"], name="r")])
    del proto.opset_import[:]
    assert "node 'r' (Relu) is of ai.onnx, but the model imports no opset" in refused(proto)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty, no ONNX model"),
        (b"Hello, this is no model.\n", "a text file, no ONNX model"),
        ("grüße ".encode() * 200, "a text file, no ONNX model"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n", "a Git LFS pointer"),
        (b"\x08\x08", "no ONNX model: it holds no graph"),
        (b"PK\x03\x04" + bytes(100), "damaged or no ONNX model"),
        (b"\x3a\x04\x0a\x02\xff\xff", "cannot be decoded"),
    ],
)
def test_files_that_are_no_models(data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(data)
    message = refused(tmp_path / "m.onnx")
    assert message.startswith(f"{tmp_path / 'm.onnx'}: ")
    assert words in message
    assert words in refused(data)


def test_a_truncated_file(tmp_path: Path) -> None:
    data = with_weights().SerializeToString()
    (tmp_path / "m.onnx").write_bytes(data[:9000])
    message = refused(tmp_path / "m.onnx")
    assert "m.onnx: truncated or damaged at byte" in message
    assert "9000" not in message
    assert "are left" in message


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    assert "a folder, not an ONNX file" in refused(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.onnx"):
        read_model(tmp_path / "nowhere.onnx")


@pytest.mark.parametrize("source", [None, 3, ["m.onnx"], io.StringIO("text")])
def test_sources_of_the_wrong_type(source: Any) -> None:
    with pytest.raises(TypeError, match="binary"):
        read_model(source)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([node("Relu", ["q"], ["y"], name="r")], "node 'r' (Relu): its input 'q' is produced by nothing"),
        ([node("Relu", ["x"], ["z"])], "the output 'y' of the model is produced by nothing"),
        ([node("Relu", ["x"], ["y"]), node("Abs", ["x"], ["y"], name="b")], "node 'b' (Abs): its output 'y' is"),
        ([node("Relu", ["x"], ["x"], name="r"), node("Abs", ["x"], ["y"])], "node 'r' (Relu): its output 'x' is prod"),
        ([node("Add", ["x", "b"], ["a"], name="a"), node("Abs", ["a"], ["b"]), node("Abs", ["b"], ["y"])], "depends"),
        ([node("If", ["x"], ["y"], then_branch=branch("t", node("Neg", ["q"], ["p"]), output="p"),
               else_branch=branch("e", output="x"))], "(If, without a name): its input 'q' is produced by nothing"),
        ([node("If", ["x"], ["y"], then_branch=branch("t", output="q"), else_branch=branch("e", output="x"))], "'q'"),
    ],
)  # fmt: skip
def test_graphs_that_break_the_rules(nodes: list[onnx.NodeProto], words: str) -> None:
    assert words in refused(make(nodes))


def test_initialisers_that_break_the_rules() -> None:
    relu = [node("Relu", ["w"], ["y"])]
    tensor = from_array(np.zeros(3, np.float32), "w")
    assert "two initialisers called 'w'" in refused(make(relu, [], initializers=[tensor, tensor]))
    short = TensorProto(name="w", data_type=1, dims=[3], raw_data=b"1234")
    message = refused(make(relu, [], initializers=[short]))
    assert "tensor 'w': shape [3] of float32 takes 12 bytes, there are 4" in message
    typed = TensorProto(name="w", data_type=1, dims=[3], float_data=[1.0])
    assert "tensor 'w': its data do not fit shape [3] of float32" in refused(make(relu, [], initializers=[typed]))
    unknown = TensorProto(name="w", data_type=99, dims=[3])
    assert "tensor 'w': unknown data type 99" in refused(make(relu, [], initializers=[unknown]))
    negative = TensorProto(name="w", data_type=1, dims=[-1])
    assert "tensor 'w': negative dimension" in refused(make(relu, [], initializers=[negative]))


def test_a_function_that_calls_itself() -> None:
    proto = make([node("F", ["x"], ["y"], domain="local")])
    call = node("F", ["a"], ["b"], domain="local")
    proto.functions.append(helper.make_function("local", "F", ["a"], ["b"], [call], [helper.make_opsetid("local", 1)]))
    proto.opset_import.add(domain="local", version=1)
    refused(proto)


# --- external data ----------------------------------------------------------------------------


def external(folder: Path, location: str, **entries: str) -> Path:
    proto = with_weights()
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=value)
    folder.mkdir(exist_ok=True)
    (folder / "m.onnx").write_bytes(proto.SerializeToString())
    return folder / "m.onnx"


def test_external_data_at_an_offset(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"abc" + BIG.tobytes() + b"rest")
    got = weights(read_model(external(tmp_path, "w.bin", offset="3", length="20000")))
    np.testing.assert_array_equal(got, BIG)
    (tmp_path / "v.bin").write_bytes(BIG.tobytes())
    np.testing.assert_array_equal(weights(read_model(external(tmp_path, "v.bin"))), BIG)


def test_external_data_beside_a_linked_file(tmp_path: Path) -> None:
    """Download caches keep the files in one folder and links to them in another."""
    path = external(tmp_path / "blobs", "w.bin")
    (tmp_path / "blobs" / "hash").write_bytes(BIG.tobytes())
    (tmp_path / "snapshot").mkdir()
    os.symlink(path, tmp_path / "snapshot" / "m.onnx")
    os.symlink(tmp_path / "blobs" / "hash", tmp_path / "snapshot" / "w.bin")
    np.testing.assert_array_equal(weights(read_model(tmp_path / "snapshot" / "m.onnx")), BIG)


def test_external_data_that_are_wrong(tmp_path: Path) -> None:
    here = tmp_path / "here"
    (tmp_path / "secret").write_bytes(BIG.tobytes())
    path = external(here, "w.bin")
    message = refused(path)
    assert message.startswith(f"{path}: tensor 'big': its data file 'w.bin' does not exist")
    (here / "w.bin").write_bytes(BIG.tobytes()[:-1])
    assert "tensor 'big': its data file 'w.bin' is too short" in refused(path)
    (here / "w.bin").write_bytes(b"")
    assert "tensor 'big': its data file 'w.bin' is too short" in refused(path)
    for location in ("../secret", str(tmp_path / "secret"), "x/../../secret"):
        assert "lies outside the model's folder" in refused(external(here, location))
    os.symlink(tmp_path / "secret", here / "link")
    assert "lies outside the model's folder" in refused(external(here, "link"))
    assert "takes 20000 bytes" in refused(external(here, "w.bin", length="0", offset="0"))
    assert "is no number" in refused(external(here, "w.bin", offset="x"))
    assert "have no location" in refused(external(here, ""))
    assert "cannot be found: the model came without a path" in refused(external(here, "w.bin").read_bytes())
    forged = external(here, "w.bin", **{"trionnx.blob": "12"})
    assert "its data are missing" in refused(forged)


# --- progress and cancel ----------------------------------------------------------------------


def test_progress_and_check_are_called_and_check_may_raise() -> None:
    nodes = [node("Relu", [f"v{i}" if i else "x"], [f"v{i + 1}"]) for i in range(100)]
    proto = make(nodes, outputs=[info("v100", FLOAT, None)])
    seen: list[tuple[str, int, int]] = []
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1

    read_model(proto, check=check, progress=lambda *args: seen.append(args))
    assert seen[0] == ("read", 0, 0)
    assert {phase for phase, _, _ in seen} == {"read", "optimise"}
    assert all(done <= total for _, done, total in seen)
    assert checks > 100

    for stop in range(checks):
        left = stop

        def count() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            read_model(proto, check=count)
