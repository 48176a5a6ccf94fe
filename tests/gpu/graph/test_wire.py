from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from trionnx.gpu.errors import InvalidModel
from trionnx.gpu.graph.tensors import TensorFiles
from trionnx.gpu.graph.wire import BLOB_KEY, Blob, skeleton

BIG = np.arange(5000, dtype=np.float32)


def model(*initializers: TensorProto, nodes: list[onnx.NodeProto] | None = None) -> onnx.ModelProto:
    graph = onnx.GraphProto(name="g")
    graph.initializer.extend(initializers)
    graph.node.extend(nodes or [])
    made = onnx.ModelProto(ir_version=8, producer_name="p", graph=graph)
    made.opset_import.add(domain="", version=17)
    return made


def merged(data: bytes, threshold: int = 4096) -> tuple[onnx.ModelProto, list[Blob]]:
    parts = skeleton(memoryview(data), "m", threshold=threshold)
    proto = onnx.ModelProto()
    for chunk in parts.chunks:
        proto.MergeFromString(chunk)
    return proto, parts.blobs


def refusal(data: bytes) -> str | None:
    try:
        skeleton(memoryview(data), "m", threshold=16)
    except InvalidModel as error:
        return str(error)
    return None


def branch(then: onnx.GraphProto) -> onnx.NodeProto:
    return helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=onnx.GraphProto(name="e"))


def test_a_model_without_large_data_is_copied_as_it_stands() -> None:
    small = model(numpy_helper.from_array(np.arange(10), "small"), nodes=[helper.make_node("Relu", ["x"], ["y"])])
    proto, blobs = merged(small.SerializeToString())
    assert proto == small
    assert not blobs


@pytest.mark.parametrize("where", ["initializer", "attribute", "branch", "function", "sparse", "tensors"])
def test_large_data_are_slices_of_the_buffer_wherever_they_are(where: str) -> None:
    big = numpy_helper.from_array(BIG, "big")
    match where:
        case "initializer":
            source = model(big)
        case "attribute":
            source = model(nodes=[helper.make_node("Constant", [], ["y"], value=big)])
        case "branch":
            then = onnx.GraphProto(name="t")
            then.initializer.append(big)
            inner = onnx.GraphProto(name="t2")
            inner.node.append(branch(then))
            source = model(nodes=[branch(inner)])
        case "function":
            source = model()
            function = source.functions.add(name="f", domain="d")
            function.node.append(helper.make_node("Constant", [], ["y"], value=big))
        case "sparse":
            source = model()
            source.graph.sparse_initializer.add().values.CopyFrom(big)
        case _:
            node = onnx.NodeProto(op_type="X", domain="d")
            node.attribute.add(name="many", type=onnx.AttributeProto.TENSORS).tensors.append(big)
            source = model(nodes=[node])
    data = source.SerializeToString()
    proto, blobs = merged(data)
    assert proto.ByteSize() < 400
    assert [blob.field for blob in blobs] == [9]
    (part,) = blobs[0].parts
    assert part.obj is data
    assert bytes(part) == BIG.tobytes()
    assert BLOB_KEY.encode() in proto.SerializeToString()


def test_training_information_is_left_out() -> None:
    source = model()
    source.training_info.add().algorithm.initializer.append(numpy_helper.from_array(BIG, "big"))
    proto, blobs = merged(source.SerializeToString())
    assert proto == model()
    assert not blobs


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (TensorProto.FLOAT, [0.5 * i for i in range(3000)]),
        (TensorProto.DOUBLE, [0.5 * i for i in range(3000)]),
        (TensorProto.INT64, [(-1) ** i * 3**i % 2**62 for i in range(3000)]),
        (TensorProto.INT32, list(range(-3000, 3000))),
        (TensorProto.UINT64, [2**64 - 1 - i for i in range(3000)]),
        (TensorProto.UINT8, [i % 256 for i in range(6000)]),
        (TensorProto.INT8, [i % 256 - 128 for i in range(6000)]),
        (TensorProto.BOOL, [i % 2 for i in range(6000)]),
        (TensorProto.FLOAT16, [i % 31000 for i in range(6000)]),
        (TensorProto.BFLOAT16, [i % 31000 for i in range(6000)]),
        (TensorProto.INT4, [i % 256 for i in range(5000)]),
    ],
)
def test_typed_fields_give_the_same_array_as_the_onnx_package(dtype: int, values: list[float]) -> None:
    tensor = TensorProto(name="big", data_type=dtype, dims=[len(values) * (2 if dtype == TensorProto.INT4 else 1)])
    field = {TensorProto.FLOAT: "float_data", TensorProto.DOUBLE: "double_data", TensorProto.INT64: "int64_data"}
    field[TensorProto.UINT64] = "uint64_data"
    getattr(tensor, field.get(dtype, "int32_data")).extend(values)  # type: ignore[call-overload]
    proto, blobs = merged(model(tensor).SerializeToString())
    assert proto.ByteSize() < 200
    got = TensorFiles("m", blobs, []).array(proto.graph.initializer[0])
    want = numpy_helper.to_array(tensor)
    assert got.dtype == want.dtype
    assert got.tobytes() == want.tobytes()


def test_raw_data_that_are_given_twice_count_once() -> None:
    tensor = TensorProto(name="t", data_type=1, dims=[5000], raw_data=bytes(20000)).SerializeToString()
    tensor += TensorProto(raw_data=BIG.tobytes()).SerializeToString()
    graph = b"\x2a" + _varint(len(tensor)) + tensor
    _, blobs = merged(b"\x3a" + _varint(len(graph)) + graph)
    assert [bytes(p) for p in blobs[0].parts] == [BIG.tobytes()]


def test_blobs_are_numbered_from_where_the_caller_says() -> None:
    data = model(numpy_helper.from_array(BIG, "big")).SerializeToString()
    parts = skeleton(memoryview(data), "m", first_blob=7)
    proto = onnx.ModelProto()
    for chunk in parts.chunks:
        proto.MergeFromString(chunk)
    assert proto.graph.initializer[0].external_data[0].value == "7"


def test_many_small_tensors_come_in_several_chunks() -> None:
    source = model(*(TensorProto(name=f"t{i}", data_type=1, dims=[500], raw_data=bytes(2000)) for i in range(2000)))
    data = source.SerializeToString()
    parts = skeleton(memoryview(data), "m")
    assert len(parts.chunks) > 3
    assert max(map(len, parts.chunks)) < 2 << 20
    assert merged(data)[0] == source


def test_check_is_called_and_what_it_raises_leaves() -> None:
    data = model(*(TensorProto(name=f"t{i}") for i in range(10000))).SerializeToString()

    def check() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        skeleton(memoryview(data), "m", check=check)


def test_every_truncation_is_an_invalid_model_or_a_smaller_model() -> None:
    tensors = [numpy_helper.from_array(np.arange(40), "a"), numpy_helper.from_array(np.arange(3), "b")]
    data = model(*tensors, nodes=[helper.make_node("Relu", ["x"], ["y"])]).SerializeToString()
    messages = [m for end in range(len(data)) if (m := refusal(data[:end]))]
    assert len(messages) > len(data) * 0.9
    assert all(re.fullmatch(r"m: truncated or damaged at byte \d+: .*", m) for m in messages)


def test_the_message_says_what_is_missing() -> None:
    data = model(numpy_helper.from_array(BIG, "big")).SerializeToString()
    with pytest.raises(InvalidModel, match=r"^m: truncated or damaged at byte \d+: the file is cut short: field 7 "):
        merged(data[: len(data) // 2])


@given(st.binary(min_size=1, max_size=200))
def test_arbitrary_bytes_never_break_the_scanner(data: bytes) -> None:
    message = refusal(data)
    assert message is None or re.fullmatch("m: (truncated or )?damaged .*", message)


@given(st.data())
def test_flipped_bytes_never_break_the_scanner(data: st.DataObject) -> None:
    then = onnx.GraphProto(name="t")
    then.initializer.append(numpy_helper.from_array(np.arange(30), "w"))
    whole = bytearray(model(numpy_helper.from_array(np.arange(9.0), "a"), nodes=[branch(then)]).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    message = refusal(bytes(whole))
    assert message is None or re.fullmatch("m: (truncated or )?damaged .*", message)


def test_endless_nesting_is_refused() -> None:
    body = b"x" * 5000
    for _ in range(400):
        body = b"\x32" + _varint(len(body)) + body
        body = b"\x2a" + _varint(len(body)) + body
        body = b"\x0a" + _varint(len(body)) + body
    with pytest.raises(InvalidModel, match="nested too deeply"):
        merged(b"\x3a" + _varint(len(body)) + body)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])
