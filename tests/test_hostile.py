"""Model files from strangers: what they may not do, each named, with a gibibyte of memory and no more."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import trio
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

import trionnx
from trionnx.gpu.errors import InvalidData, InvalidModel, OutOfDeviceMemory

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux tells, and bounds, how much a process has"
)

BIG = 1 << 50
GIB = 1 << 30
node = helper.make_node


@pytest.fixture
def scarce() -> Iterator[None]:
    """From here on this process can have one gibibyte more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + GIB, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture
async def webgpu() -> Any:
    """A scheduler whose device is open; only then memory becomes scarce."""
    async with trionnx.open_scheduler(backend="webgpu") as scheduler:
        yield scheduler


def info(name: str, kind: int = TensorProto.FLOAT, shape: Sequence[int] | None = None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def constant(name: str, value: Any, dtype: Any = np.int64) -> TensorProto:
    return numpy_helper.from_array(np.array(value, dtype), name)


def model(
    nodes: Sequence[NodeProto],
    *constants: TensorProto,
    functions: Sequence[onnx.FunctionProto] = (),
    shape: Sequence[int] = (2,),
) -> ModelProto:
    graph = helper.make_graph(nodes, "g", [info("x", shape=shape)], [info("y")], constants)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]
    made: ModelProto = helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=9)
    return made


def sizes(*given: int) -> TensorProto:
    return constant("s", given)


ONE = numpy_helper.from_array(np.array([1], np.int64))
FLOATS = node("Cast", ["z"], ["y"], to=TensorProto.FLOAT)
ROW = node("Reshape", ["x", "row"], ["r"])
AS_ROW = constant("row", [1, 1, 2])

PETABYTES = {
    "ConstantOfShape": model([node("ConstantOfShape", ["s"], ["y"])], sizes(BIG)),
    "ConstantOfShape of int64": model([node("ConstantOfShape", ["s"], ["z"], value=ONE), FLOATS], sizes(BIG)),
    "more than can be counted": model([node("ConstantOfShape", ["s"], ["y"])], sizes(1 << 40, 1 << 40)),
    "80 GiB": model([node("ConstantOfShape", ["s"], ["z"], value=ONE), FLOATS], sizes(10 * GIB)),
    "Expand": model([node("Expand", ["x", "s"], ["y"])], sizes(BIG, 2)),
    "Expand of a constant": model([node("Expand", ["k", "s"], ["z"]), FLOATS], sizes(BIG, 2), constant("k", [1, 2])),
    "Tile": model([node("Tile", ["x", "s"], ["y"])], sizes(BIG)),
    "Tile of a constant": model([node("Tile", ["k", "s"], ["z"]), FLOATS], sizes(BIG), constant("k", [1, 2])),
    "Range": model(
        [node("Range", ["a", "b", "d"], ["z"]), FLOATS], constant("a", 0), constant("b", BIG), constant("d", 1)
    ),
    "Range that the run decides": model(
        [
            node("ReduceSum", ["x"], ["sum"], keepdims=0),
            node("Cast", ["sum"], ["two"], to=TensorProto.INT64),
            node("Mul", ["two", "b"], ["many"]),
            node("Range", ["a", "many", "d"], ["z"]),
            FLOATS,
        ],
        constant("a", 0),
        constant("b", BIG),
        constant("d", 1),
    ),
    "Pad": model([node("Pad", ["x", "s"], ["y"])], sizes(BIG, BIG)),
    "Pad of a constant": model([node("Pad", ["k", "s"], ["z"]), FLOATS], sizes(BIG, BIG), constant("k", [1, 2])),
    "Resize by scales": model([node("Resize", ["x", "", "f"], ["y"])], constant("f", [1e15], np.float32)),
    "Resize to sizes": model([node("Resize", ["x", "", "", "s"], ["y"])], sizes(BIG)),
    "OneHot": model(
        [node("OneHot", ["i", "d", "v"], ["y"])],
        constant("i", [1, 2]),
        constant("d", BIG),
        constant("v", [0, 1], np.float32),
    ),
    "a product of two": model(
        [node("Expand", ["k", "s"], ["a"]), node("Reshape", ["a", "t"], ["b"]), node("Add", ["a", "b"], ["z"]), FLOATS],
        sizes(1 << 17),
        constant("t", [1 << 17, 1]),
        constant("k", [1]),
    ),
    "a product of three": model(
        [node("Expand", ["k", "s"], ["a"]), node("Einsum", ["a", "a", "a"], ["z"], equation="i,j,k->ijk"), FLOATS],
        sizes(5000),
        constant("k", [1]),
    ),
    "pads of a Conv": model(
        [ROW, node("Conv", ["r", "w"], ["y"], pads=[BIG, BIG])], AS_ROW, constant("w", [[[1]]], np.float32)
    ),
    "strides of a ConvTranspose": model(
        [ROW, node("ConvTranspose", ["r", "w"], ["y"], strides=[BIG])], AS_ROW, constant("w", [[[1]]], np.float32)
    ),
    "RandomUniform": model([node("RandomUniform", [], ["y"], shape=[BIG])]),
    "HannWindow": model([node("HannWindow", ["s"], ["y"])], constant("s", BIG)),
    "AffineGrid": model(
        [node("AffineGrid", ["t", "s"], ["y"])], sizes(1, 1, 1 << 25, 1 << 25), constant("t", np.zeros((1, 2, 3)), "f4")
    ),
    "doubled 60 times": model(
        [node("Concat", ["x", "x"], ["v0"], axis=0)]
        + [node("Concat", [f"v{n}", f"v{n}"], [f"v{n + 1}"], axis=0) for n in range(60)]
        + [node("Identity", ["v60"], ["y"])]
    ),
}


async def whole_run(scheduler: trionnx.Scheduler, proto: ModelProto) -> None:
    session = await scheduler.load(proto.SerializeToString())
    try:
        await session.run(None, {"x": np.ones(2, np.float32)})
    finally:
        await session.aclose()


@pytest.mark.parametrize("name", PETABYTES)
async def test_a_small_file_that_wants_a_petabyte(webgpu: trionnx.Scheduler, name: str, request: Any) -> None:
    proto = PETABYTES[name]
    assert proto.ByteSize() < 4096
    await whole_run(webgpu, model([node("Relu", ["x"], ["y"])]))
    request.getfixturevalue("scarce")
    with pytest.raises(OutOfDeviceMemory, match=r"^node '\w+' \(\w+\): "):
        await whole_run(webgpu, proto)
    await whole_run(webgpu, model([node("Relu", ["x"], ["y"])]))


@pytest.mark.parametrize("name", PETABYTES)
async def test_so_it_is_on_the_cpu(scarce: None, name: str) -> None:
    pytest.importorskip("onnxruntime")
    async with trionnx.open_scheduler(backend="cpu") as scheduler:
        with pytest.raises((OutOfDeviceMemory, InvalidData, InvalidModel)):
            await whole_run(scheduler, PETABYTES[name])


def sparse(*dims: int) -> ModelProto:
    made = model([node("Add", ["x", "k"], ["y"])])
    tensor = made.graph.sparse_initializer.add(dims=dims)
    tensor.values.CopyFrom(constant("k", [1], np.float32))
    tensor.indices.CopyFrom(constant("i", [0]))
    return made


def initialiser(*dims: int, kind: int = TensorProto.FLOAT, raw: bytes | None = b"") -> ModelProto:
    tensor = TensorProto(name="k", data_type=kind, dims=dims)
    if raw is not None:
        tensor.raw_data = raw
    else:
        tensor.int32_data.append(1)
    return model([node("Add", ["x", "k"], ["y"])], tensor)


def function(name: str, *nodes: NodeProto) -> onnx.FunctionProto:
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]
    made: onnx.FunctionProto = helper.make_function("mine", name, ["a"], ["b"], nodes, opsets)
    return made


def call(name: str, given: str = "a", made: str = "b") -> NodeProto:
    return node(name, [given], [made], domain="mine")


BASE = function("f0", node("Relu", ["a"], ["b"]))
LAUGHS = [BASE, *(function(f"f{n}", call(f"f{n - 1}", "a", "t"), call(f"f{n - 1}", "t", "b")) for n in range(1, 40))]
DEEP = [BASE, *(function(f"f{n}", call(f"f{n - 1}")) for n in range(1, 300))]
IN_A_BRANCH = function(
    "p",
    node("Constant", [], ["c"], value=helper.make_tensor("c", TensorProto.BOOL, [], [True])),
    node(
        "If",
        ["c"],
        ["b"],
        then_branch=GraphProto(name="t", node=[call("p", "a", "q")], output=[info("q")]),
        else_branch=GraphProto(name="e", node=[node("Neg", ["a"], ["q"])], output=[info("q")]),
    ),
)
NAN = constant("f", [np.nan], np.float32)

REFUSED = {
    "sparse, petabytes": (sparse(BIG), OutOfDeviceMemory, "sparse tensor 'k': 4,503,599,627,370,496 bytes are wanted"),
    "sparse, uncountable": (sparse(1 << 62, 1 << 62), InvalidModel, "sparse tensor 'k': shape .* is too large"),
    "sparse, negative": (sparse(-3), InvalidModel, "sparse tensor 'k': negative dimension"),
    "no elements": (initialiser(1 << 62, 1 << 62, 0), InvalidModel, "tensor 'k': shape .* is too large"),
    "short": (initialiser(1 << 40, raw=b"1234"), InvalidModel, "tensor 'k': .* takes 4398046511104 bytes, there are 4"),
    "short int4": (initialiser(1 << 50, kind=TensorProto.INT4, raw=None), InvalidModel, "tensor 'k': its data do not"),
    "100 dimensions": (initialiser(*[1] * 100, raw=b"1234"), InvalidModel, "tensor 'k': 100 dimensions are too many"),
    "reshaped to 101 dimensions": (
        model([node("Reshape", ["x", "s"], ["y"])], sizes(*[1] * 100, 2)),
        InvalidModel,
        r"node 'Reshape_0' \(Reshape\): 101 dimensions",
    ),
    "functions that double": (
        model([call("f39", "x", "y")], functions=LAUGHS),
        InvalidModel,
        "functions cannot be inlined: they stand for 549,755,813,888 nodes",
    ),
    "functions in a row": (
        model([call("f299", "x", "y")], functions=DEEP),
        InvalidModel,
        r"function 'f\d+' is called more than 100 calls deep",
    ),
    "functions in a circle": (
        model([call("p", "x", "y")], functions=[function("p", call("q")), function("q", call("p"))]),
        InvalidModel,
        "function '[pq]' calls itself",
    ),
    "a function in its own branch": (
        model([call("p", "x", "y")], functions=[IN_A_BRANCH]),
        InvalidModel,
        "function 'p' calls itself",
    ),
    "functions of one name": (model([call("f0", "x", "y")], functions=[BASE, BASE]), InvalidModel, "cannot be inlined"),
    "parts without end": (model([node("Split", ["x"], ["y"], num_outputs=1 << 40)]), InvalidModel, "Split_0.* outputs"),
    "a scale that is no number": (model([node("Resize", ["x", "", "f"], ["y"])], NAN), InvalidModel, "Resize_0.*NaN"),
    "an opset from the far future": (
        helper.make_model(model([]).graph, opset_imports=[helper.make_opsetid("other", 1 << 40)]),
        InvalidModel,
        "opset 1099511627776 of 'other' is no version",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused_before_anything_is_made(scarce: None, name: str) -> None:
    proto, error, words = REFUSED[name]
    async with trionnx.open_scheduler(backend="webgpu") as scheduler:
        with pytest.raises(error, match=words):
            await scheduler.load(proto.SerializeToString())


def body(*nodes: NodeProto, state: str = "b") -> GraphProto:
    made: GraphProto = helper.make_graph(
        nodes,
        "b",
        [info("i", TensorProto.INT64, []), info("go", TensorProto.BOOL, []), info("a")],
        [info("go", TensorProto.BOOL, []), info(state)],
    )
    return made


def loop(inside: GraphProto, turns: str = "m") -> NodeProto:
    return node("Loop", [turns, "c", "a"], ["b"], body=inside)


def nested(depth: int) -> GraphProto:
    return body(loop(nested(depth - 1)) if depth else node("Relu", ["a"], ["b"]))


YES = constant("c", True, bool)
ENDLESS = {
    "nothing, for ever": model([node("Loop", ["", "c", "x"], ["y"], body=body(state="a"))], YES),
    "something, for ever": model([node("Loop", ["", "c", "x"], ["y"], body=body(node("Relu", ["a"], ["b"])))], YES),
    "loops in loops": model([node("Loop", ["m", "c", "x"], ["y"], body=nested(4))], YES, constant("m", 60)),
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_a_loop_without_end_is_loaded_in_no_time_and_stops_when_cancelled(name: str) -> None:
    async with trionnx.open_scheduler(backend="webgpu") as scheduler:
        with trio.fail_after(60):
            session = await scheduler.load(ENDLESS[name].SerializeToString())
            for _ in range(2):  # the second run would raise DeviceHung, had the first one not stopped
                with trio.move_on_after(0.3) as scope:
                    await session.run(None, {"x": np.ones(2, np.float32)})
                assert scope.cancelled_caught


async def test_what_a_loop_collects_has_an_end(webgpu: trionnx.Scheduler, request: Any) -> None:
    inside = body(node("Identity", ["a"], ["b"]), node("Expand", ["a", "s"], ["piece"]))
    inside.output.append(info("piece"))
    proto = model([node("Loop", ["", "c", "x"], ["q", "y"], body=inside)], YES, sizes(1 << 22, 2))
    await whole_run(webgpu, model([node("Relu", ["x"], ["y"])]))
    request.getfixturevalue("scarce")
    with pytest.raises(OutOfDeviceMemory, match=r"Loop|Expand"):
        await whole_run(webgpu, proto)


# --- external data ---------------------------------------------------------------------------------------------------


def beside(folder: Path, location: str) -> Path:
    tensor = TensorProto(name="k", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    path = folder / "model.onnx"
    path.write_bytes(model([node("Add", ["x", "k"], ["y"])], tensor).SerializeToString())
    return path


@pytest.mark.parametrize("way", ["dots", "absolute", "link", "folder link", "pipe", "device", "folder"])
async def test_external_data_cannot_leave_its_folder(scarce: None, tmp_path: Path, way: str) -> None:
    folder, outside = tmp_path / "model", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "secret").write_bytes(bytes(8))
    locations = {
        "dots": "../outside/secret",
        "absolute": str(outside / "secret"),
        "folder link": "link/secret",
        "folder": ".",
    }
    if way == "pipe":
        os.mkfifo(folder / "data")
    elif way in ("link", "device"):
        (folder / "data").symlink_to("/dev/zero" if way == "device" else outside / "secret")
    elif way == "folder link":
        (folder / "link").symlink_to(outside)
    path = beside(folder, locations.get(way, "data"))
    async with trionnx.open_scheduler(backend="webgpu") as scheduler:
        why = r"tensor 'k': its data file .* (lies outside the model's folder|cannot be read)"
        with pytest.raises(InvalidModel, match=why), trio.fail_after(60):
            await scheduler.load(path)


async def test_a_model_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.onnx")
    async with trionnx.open_scheduler(backend="webgpu") as scheduler:
        with pytest.raises(OSError, match="not a regular file"), trio.fail_after(60):
            await scheduler.load(tmp_path / "model.onnx")


# --- feeds -----------------------------------------------------------------------------------------------------------

PLAIN = np.arange(24, dtype=np.float32).reshape(4, 6)


def read_only() -> Any:
    made = PLAIN.copy()
    made.flags.writeable = False
    return made


def unaligned() -> Any:
    raw = np.zeros(PLAIN.nbytes + 1, np.uint8)
    raw[1:] = PLAIN.view(np.uint8).reshape(-1)
    return raw[1:].view(np.float32).reshape(4, 6)


FEEDS: dict[str, Callable[[], Any]] = {
    "every other column": lambda: np.repeat(PLAIN, 2, axis=1)[:, ::2],
    "backwards": lambda: PLAIN[::-1, ::-1].copy()[::-1, ::-1],
    "Fortran's order": lambda: np.asfortranarray(PLAIN),
    "read-only": read_only,
    "unaligned": unaligned,
    "a masked array": lambda: np.ma.array(PLAIN),
}
OVERLAPPING = {
    "windows": lambda: np.lib.stride_tricks.sliding_window_view(np.arange(9, dtype=np.float32), 6),
    "one row four times": lambda: np.broadcast_to(np.arange(6, dtype=np.float32), (4, 6)),
}


@pytest.mark.parametrize("backend", ["webgpu", "cpu"])
async def test_feeds_of_every_layout(backend: str) -> None:
    if backend == "cpu":
        pytest.importorskip("onnxruntime")
    async with trionnx.open_scheduler(backend=backend) as scheduler:
        proto = model([node("Sub", ["x", "k"], ["y"])], constant("k", 1, np.float32), shape=(4, 6))
        session = await scheduler.load(proto.SerializeToString())
        for name, feed in FEEDS.items():
            (y,) = await session.run(None, {"x": feed()})
            np.testing.assert_array_equal(y, PLAIN - 1, name)
        for name, feed in OVERLAPPING.items():
            (y,) = await session.run(None, {"x": feed()})
            np.testing.assert_array_equal(y, feed() - 1, name)
        with pytest.raises(trionnx.InvalidInput, match=r"'x': expected float32 of shape \(4, 6\), got [<>]f4"):
            await session.run(None, {"x": PLAIN.astype(PLAIN.dtype.newbyteorder())})
