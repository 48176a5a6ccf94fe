"""Every message comes over the border as it was; what is no message is told from one."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

import hypothesis
import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trionnx.actors.border import codec, messages
from trionnx.actors.border.parcel import Frames, Malformed, Packing, Unpacking, frame
from trionnx.actors.border.shared import Arena, SharedFile
from trionnx.gpu import errors, seam
from trionnx.gpu.policy import TerminatePolicy
from trionnx.gpu.seam import Begin, BlockView, Cursor, Failed, Fenced, Load, Outputs, Segment, StepView

EXTENDED = (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4)


@pytest.fixture
def arena():
    file = SharedFile.create()
    yield Arena(file)
    file.close()


def sent(message: Any, arena: Arena, mapped: bool = False) -> Any:
    """A message, there and back, through a frame."""
    parcel = Packing(arena)
    frames = Frames()
    frames.feed(frame(codec.encode(message, parcel), parcel.tail, 7))
    found = frames.next()
    assert found is not None
    number, text, tail = found
    assert number == 7
    assert frames.next() is None
    there = Arena(arena._file, mapped=True) if mapped else arena
    return codec.decode(text, Unpacking(tail, there))


def same(one: Any, other: Any) -> bool:
    """Whether two values are of the same types and equal, bit for bit."""
    if type(one) is not type(other):
        return isinstance(one, bytes | bytearray | memoryview) and bytes(one) == bytes(other)
    if isinstance(one, np.ndarray):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        if one.dtype.kind == "O":
            return all(same(a, b) for a, b in zip(one.flat, other.flat, strict=True))
        return bool(one.tobytes() == other.tobytes())
    if isinstance(one, np.generic):
        return bool(one.tobytes() == other.tobytes())
    if isinstance(one, BaseException):
        return same(one.args, other.args) and same(vars(one), vars(other))
    if isinstance(one, float):
        return bool(one == other or (math.isnan(one) and math.isnan(other)))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    return bool(one == other)


# --- strategies: from the annotations, so that a new field is tried without a word here -----------

REAL = hnp.boolean_dtypes() | hnp.integer_dtypes() | hnp.floating_dtypes(sizes=(16, 32, 64))
NATIVE = REAL | hnp.complex_number_dtypes(sizes=(64, 128))
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6)
ARRAYS = hnp.arrays(NATIVE | hnp.unicode_string_dtypes(max_len=4) | hnp.byte_string_dtypes(max_len=4), SHAPES)
TEXTS = st.text(max_size=8) | st.sampled_from(["", "\udcff", "ü\x00", '"', "\\"])
OBJECTS = st.lists(TEXTS | st.binary(max_size=5), max_size=5).map(lambda items: np.array([*items, None], object)[:-1])
LARGE = st.integers(5000, 300_000).map(lambda n: np.arange(n) % 251)
NARROW = st.tuples(st.sampled_from(EXTENDED), SHAPES).map(lambda a: np.ones(a[1], a[0]))
NUMBERS = st.booleans() | st.integers() | st.floats() | st.complex_numbers(allow_nan=False)
SCALARS = st.none() | NUMBERS | TEXTS | st.binary(max_size=9)
GENERICS = st.sampled_from([np.float32(1.5), np.int64(-3), np.bool_(True), np.float16(0), ml_dtypes.bfloat16(2)])
SHAPES = st.lists(st.integers(0, 1 << 40), max_size=8).map(tuple)
REFS = st.builds(seam.TensorRef, *[st.integers()] * 3, NATIVE | st.sampled_from([*map(np.dtype, EXTENDED)]), SHAPES)
LEAVES = SCALARS | ARRAYS | OBJECTS | NARROW | GENERICS | LARGE | REFS
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(TEXTS | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)
ERRORS = st.one_of(
    st.builds(errors.InvalidInput, TEXTS, TEXTS, TEXTS),
    st.builds(errors.InvalidData, TEXTS, TEXTS),
    st.builds(errors.UnsupportedOperator, TEXTS, TEXTS, st.integers(), TEXTS, TEXTS),
    st.builds(errors.RunTerminated, st.integers(), st.integers(), st.booleans()),
    *(st.builds(getattr(errors, name), TEXTS) for name in ("InvalidModel", "NoAdapter", "DeviceLost", "DeviceHung")),
    st.just(errors.RunStopped()),
    st.builds(errors.OutOfDeviceMemory, TEXTS),
    st.builds(ValueError, TEXTS, st.integers()),
    st.builds(OSError, st.integers(1, 20), TEXTS),
    st.builds(KeyError, TEXTS),
)


SECONDS = st.floats(1e-6, allow_nan=False)
POLICIES = st.builds(
    TerminatePolicy,
    split_into_checkpoints=st.booleans(),
    checkpoint_interval_s=SECONDS,
    max_in_flight=st.integers(1, 9),
    on_terminate=st.sampled_from(["throw_cancel", "stop_submit"]),
    drain_timeout_s=SECONDS,
    hang_timeout_s=SECONDS,
)


def of(hint: Any) -> st.SearchStrategy[Any]:
    """What a field with this annotation may hold."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return VALUES
    if hint is int:
        return st.integers() | st.integers(0, 9)
    if hint is float:
        return st.floats()
    if hint is str:
        return TEXTS
    if hint is bool:
        return st.booleans()
    if hint is types.NoneType:
        return st.none()
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is np.dtype:
        return NATIVE | st.sampled_from([np.dtype(object), *map(np.dtype, EXTENDED)])
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(of, arguments))
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(of(arguments[0]), max_size=9).map(tuple)
    if origin is Mapping:
        return st.dictionaries(TEXTS, of(arguments[1]), max_size=3)
    if isinstance(hint, type) and issubclass(hint, BaseException):
        return ERRORS
    if isinstance(hint, type) and issubclass(hint, tuple):
        return st.builds(hint, *map(of, typing.get_type_hints(hint).values()))
    if hint is TerminatePolicy:
        return POLICIES
    if hint is seam.TensorRef:
        return REFS
    assert dataclasses.is_dataclass(hint), hint
    hints, cls = typing.get_type_hints(hint), typing.cast(type, hint)
    return st.deferred(lambda: st.builds(cls, **{f.name: of(hints[f.name]) for f in dataclasses.fields(hint)}))


@pytest.mark.parametrize("cls", messages.MESSAGES, ids=lambda cls: cls.__name__)
@hypothesis.given(data=st.data())
@hypothesis.settings(
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large], max_examples=60
)
def test_every_message_comes_back_as_it_was(cls, data):
    message = data.draw(of(cls))
    file = SharedFile.create()
    try:
        assert same(message, sent(message, Arena(file), mapped=data.draw(st.booleans())))
    finally:
        file.close()


def test_every_type_of_the_seam_is_of_the_list_or_within():
    parts = {"BlockView", "Counts", "Cursor", "Explained", "Finished", "ModelMetadata", "NodeTime", "StepView"}
    parts |= {"TensorRef"}
    names = {cls.__name__ for cls in messages.MESSAGES}
    types_ = {name for name in seam.__all__ if isinstance(getattr(seam, name), type)}
    assert types_ - parts - {"Done", "Reply", "TensorInfo"} <= names


def test_what_is_made_later_needs_nothing_here(arena):
    """A field that is added to a message, with a default or without, frozen or keyword-only."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Policy:
        every: Literal["op", "graph"] = "graph"
        interval_s: float = 0.005

    later = dataclasses.make_dataclass(
        "Later", [("run", int), ("policy", Policy | None), ("more", tuple[str, ...], ())], frozen=True
    )
    one = codec._codec(later)
    for message in (later(1, Policy(interval_s=1.0)), later(2, None, ("a",))):
        parcel = Packing(arena)
        item = json.loads(json.dumps(one.packed(message, parcel)))
        assert one.unpack(item, Unpacking(b"", arena)) == message
    with pytest.raises(Malformed):
        one.unpack([1, ["never", 1.0], []], Unpacking(b"", arena))


# --- arrays, models, errors -----------------------------------------------------------------------


def test_who_receives_owns_the_arrays(arena):
    arrays = {"small": np.arange(3.0), "large": np.arange(99_999), "none": np.empty((0, 3)), "one": np.array(5)}
    outputs = sent(Outputs(1, arrays), arena)
    for name, array in outputs.values.items():
        assert same(array, arrays[name])
        assert array.flags.writeable
        assert array.flags.c_contiguous
        array += 1
    arena.clear()
    arena.put([memoryview(bytes(800_000))])
    assert same(outputs.values["large"], arrays["large"] + 1)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24).reshape(4, 6).T,
        np.arange(30_000)[::-3],
        np.asfortranarray(np.ones((30, 40), np.float32)),
        np.arange(5, dtype=">i4"),
        np.broadcast_to(np.float32(3), (50, 60)),
        np.array(["a", "bcd"], np.dtypes.StringDType()),
    ],
    ids=["transposed", "stepped", "fortran", "byte order", "broadcast", "strings"],
)
def test_arrays_that_lie_otherwise_in_memory(arena, array):
    back = sent(Begin(1, {"x": array}, ()), arena, mapped=True).feeds["x"]
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, lambda: None, np.zeros(2, "i4,f4"), np.array(["2020-01-01"], "M8[D]"), [Ellipsis], range(3)],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_data_is_refused_by_the_sender(arena, value):
    with pytest.raises(TypeError):
        codec.encode(Begin(1, {"x": value}, ()), Packing(arena))


def test_what_is_no_message_is_refused_by_the_sender(arena):
    with pytest.raises(TypeError, match="StepView is no message"):
        codec.encode(StepView("gpu"), Packing(arena))
    with pytest.raises(TypeError, match="dict may not cross here"):
        codec.encode(Fenced(1, 2, None, typing.cast(Any, {"no": "block"})), Packing(arena))


def test_sources_of_models(arena, tmp_path):
    nodes = [onnx.helper.make_node("Add", ["x", "w"], [f"y{n}"], name=f"n{n}") for n in range(300)]
    info = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2000])
    weights = onnx.numpy_helper.from_array(np.arange(2000, dtype=np.float32), "w")
    graph = onnx.helper.make_graph(nodes, "g", [info], [], [weights], doc_string="doc")
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], producer_name="me")
    model.metadata_props.add(key="a", value="b")
    back = sent(Load(model, {"x": (3,)}), arena)
    assert back.source == model
    assert back.input_shapes == {"x": (3,)}
    data = model.SerializeToString()
    for given in (data, bytearray(data), memoryview(data)):
        assert sent(Load(given), arena).source == data
    assert sent(Load(tmp_path / "m.onnx"), arena).source == str(tmp_path / "m.onnx")
    empty = onnx.ModelProto()
    assert sent(Load(empty), arena).source == empty
    empty.graph.SetInParent()
    assert sent(Load(empty), arena).source.HasField("graph")


@pytest.mark.parametrize("name", [name for name in errors.__all__ if isinstance(getattr(errors, name), type)])
def test_every_error_of_ours_arrives_as_what_it_was(arena, name):
    cls = getattr(errors, name)
    count = cls.__init__.__code__.co_argcount - 1 if "__init__" in vars(cls) else 1
    error = cls(*(f"argument {n}" for n in range(count)))
    back = sent(Failed(error), arena).error
    assert type(back) is cls
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_errors_of_python_and_of_others(arena):
    class Ours(Exception):
        pass

    with pytest.raises(FileNotFoundError) as caught:
        os.stat("/nowhere/at/all")
    missing = sent(Failed(caught.value), arena).error
    assert type(missing) is FileNotFoundError
    assert (missing.errno, missing.filename) == (2, "/nowhere/at/all")
    assert "in the worker process" in "".join(missing.__notes__)
    for error in (Ours("why"), KeyboardInterrupt("why"), ValueError(object(), "why")):
        back = sent(Failed(error), arena).error
        assert type(back) is RuntimeError
        assert type(error).__name__ in str(back)
        assert "why" in str(back)


# --- what is no message ---------------------------------------------------------------------------


def read_all(data: bytes, arena: Arena) -> list[Any]:
    """What a receiver makes of bytes."""
    frames, found = Frames(), []
    frames.feed(data)
    while (one := frames.next()) is not None:
        found.append(codec.decode(one[1], Unpacking(one[2], arena)))
    return found


@hypothesis.given(st.binary(max_size=200))
def test_random_bytes_are_malformed(data):
    arena = Arena(SharedFile(-1, ""))
    with pytest.raises(Malformed):
        codec.decode(data, Unpacking(b"", arena))
    with contextlib.suppress(Malformed):
        assert read_all(data, arena) == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from("agltdcbm"),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@hypothesis.given(st.sampled_from(messages.MESSAGES), JSON, st.binary(max_size=64))
@hypothesis.settings(max_examples=300)
def test_texts_that_fit_no_annotation_are_malformed(cls, item, tail):
    file = SharedFile.create()
    try:
        message = codec.decode(json.dumps([cls.__name__, item]).encode(), Unpacking(tail, Arena(file)))
        assert type(message) is cls
    except Malformed:
        pass
    finally:
        file.close()


MESSAGE = Outputs(3, {"y": np.arange(2000.0), "t": ["a", {"b": 1}], "small": np.ones(3)})
BLOCK = messages.Explanation(0, tuple(seam.Explained(f"n{n}", "Add", "gpu", "why") for n in range(5)))


@pytest.mark.parametrize("message", [MESSAGE, BLOCK, Segment(1, 2, Cursor(0), Cursor(0, 1)), Failed(KeyError("x"))])
@hypothesis.given(data=st.data())
def test_a_message_with_a_wrong_byte_is_malformed_or_another_message(message, data):
    file = SharedFile.create()
    try:
        parcel = Packing(Arena(file))
        whole = frame(codec.encode(message, parcel), parcel.tail, 1)
        at = data.draw(st.integers(0, len(whole) - 1))
        wrong = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
        for changed in (wrong, whole[:at], whole[:at] + whole[at + 1 :]):
            with contextlib.suppress(Malformed):
                assert all(type(found) in messages.MESSAGES for found in read_all(changed, Arena(file)))
    finally:
        file.close()


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("left", [0, 1, 7999, 15999])
def test_shared_memory_that_ends_too_early_is_malformed(arena, mapped, left):
    parcel = Packing(arena)
    text = codec.encode(Outputs(1, {"y": np.arange(2000.0)}), parcel)
    arena._file.resize(left)
    with pytest.raises(Malformed, match="shared memory"):
        codec.decode(text, Unpacking(parcel.tail, Arena(arena._file, mapped=mapped)))


def test_sizes_that_nothing_could_hold_are_malformed(arena):
    shapes = ([1 << 61, 8], [1 << 40], [-1], [1 << 62], [2] * 70)
    for shape, dtype in itertools.product(shapes, ("<f8", "|u1")):
        text = f'["Outputs",[1,{{"y":["a","{dtype}",{shape},1,0]}}]]'.encode()
        with pytest.raises(Malformed):
            codec.decode(text, Unpacking(b"", arena))


def test_nesting_without_end_is_malformed(arena):
    depth = sys.getrecursionlimit() * 60
    for text in (b"[" * depth, b'["Outputs",[1,{"y":' + b'["l",' * depth + b"1" + b"]" * depth + b"}]]"):
        with pytest.raises(Malformed):
            codec.decode(text, Unpacking(b"", arena))


def test_a_block_of_many_steps_is_small_and_whole(arena):
    steps = tuple(StepView("gpu" if n % 3 else "host", n + 1, n * 1e-4, 4) for n in range(3000))
    begun = seam.Begun(1, BlockView(0, steps, BlockView(1, steps[:1], None)))
    assert sent(begun, arena) == begun
    assert len(codec.encode(begun, Packing(arena))) < 30 * len(steps)
