"""Real models with real weights, against ONNX Runtime's CPU provider, on the WebGpu engine.

They come out of pinned registry packages (examples/real_models.py) and are kept in the user's cache folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import trio

import real_models
import trionnx
from trionnx.gpu.device.executor import Executor
from trionnx.gpu.graph.placement import MOVES
from trionnx.gpu.graph.planner import Planner
from trionnx.gpu.graph.read import read_model
from trionnx.gpu.graph.steps import Dispatch
from trionnx.gpu.host.reference import evaluate_host

T5 = "t5small_title_encoder_int8"
HOST_STEPS = {"ort_logreg_iris", "surfaces_knn_validity"}
CLASSES = {"magika_v3_3", "oww_embedding", "ppocr_cls_v2", "ppocrv4_rec", "ddddocr_det", "opennsfw", "silero_vad"}
LIMIT_S = 300
LARGE = 1e8
"""Models of more floating point operations than this do nearly all of them on the GPU."""


def fetched(name: str) -> str:
    try:
        return str(real_models.model(name))
    except real_models.Unavailable as error:
        pytest.skip(f"{name} cannot be fetched here: {error}")


def reference(path, feeds):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def assert_agrees(got, expected, *, classes=True):
    for value, right in zip(got, expected, strict=True):
        if isinstance(right, list):  # of maps from classes to probabilities
            assert [list(one) for one in value] == [list(one) for one in right]
            value, right = (np.array([list(one.values()) for one in x], np.float32) for x in (value, right))
        assert value.shape == right.shape
        assert value.dtype == right.dtype
        if right.dtype.kind != "f":
            np.testing.assert_array_equal(value, right)
            continue
        scale = float(np.nanmax(np.abs(right)))
        np.testing.assert_allclose(value, right, rtol=0, atol=1e-3 * scale)
        if classes:
            np.testing.assert_array_equal(value.argmax(-1), right.argmax(-1))


def bits(value):
    return value.tobytes() if isinstance(value, np.ndarray) else value


# --- what was computed where ------------------------------------------------------------------

PRODUCTS = {"Conv", "ConvTranspose", "Gemm", "GRU", "LSTM", "MatMul", "MatMulInteger", "RNN"}


def flops(op, attrs, inputs, outputs):
    """Floating point operations of a node, by its operator and shapes; a multiply-add is two.

    Products of integers count too, for they stand in for products of floats. What is neither a
    product nor a pool counts as one operation for each element of its largest tensor.
    """
    given, made = [t for t in inputs if t is not None], [t for t in outputs if t is not None]
    if op in ("MatMul", "MatMulInteger"):
        return 2 * made[0].size * given[0].shape[-1]
    if op == "Gemm":
        return 2 * made[0].size * given[0].shape[0 if attrs.get("transA") else 1]
    if op == "Conv":
        return 2 * made[0].size * math.prod(given[1].shape[1:])
    if op == "ConvTranspose":
        return 2 * given[0].size * math.prod(given[1].shape[1:])
    if op in ("LSTM", "GRU", "RNN"):
        return 2 * math.prod(given[0].shape[:2]) * (given[1].size + given[2].size)
    if op in ("AveragePool", "MaxPool"):
        return made[0].size * math.prod(attrs["kernel_shape"])
    if op in MOVES or not any(np.issubdtype(t.dtype, np.floating) for t in (*given, *made)):
        return 0
    return max(t.size for t in (*given, *made))


@dataclass
class Work:
    """What runs have computed: floating point operations on the GPU and on the host.

    Attributes:
        planned: name, operator, operations, and where the plan has them, of each node of each block.
        dispatched: names of the nodes whose kernels were submitted.
    """

    planned: list[tuple[str, str, float, str]] = field(default_factory=list)
    dispatched: set[str] = field(default_factory=set)

    def split(self) -> tuple[float, float]:
        """Operations on the GPU, and elsewhere.

        A product counts as the GPU's if a dispatch of its own was submitted. What is smaller may be
        fused into another node's dispatch: of that the plan knows.
        """
        gpu = host = 0.0
        for name, op, count, where in self.planned:
            if where == "gpu" and (op not in PRODUCTS or name in self.dispatched):
                gpu += count
            elif where in ("gpu", "host"):
                host += count
        return gpu, host


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    """The work of the runs to come. A block is planned when it is first reached, so run but once."""
    made = Work()
    lower: Callable[..., Any] = Planner._lower
    submit: Callable[..., Any] = Executor.submit

    def _lower(self, walk, node, inputs):
        depth = len(walk.scopes)
        outputs, decision = lower(self, walk, node, inputs)
        if len(walk.scopes) == depth:  # else a function: its nodes come by themselves
            count = flops(node.op, node.attrs, inputs, outputs)
            made.planned.append((node.name, node.op, count, walk.notes[node.name].where))
        return outputs, decision

    def _submit(self, run, block, segment, fenced):
        last = segment.stop.step + (segment.stop.unit > 0)
        steps = block.steps[segment.start.step : last]
        submitted = submit(self, run, block, segment, fenced)
        made.dispatched |= {step.node for step in steps if isinstance(step, Dispatch)}
        return submitted

    monkeypatch.setattr(Planner, "_lower", _lower)
    monkeypatch.setattr(Executor, "submit", _submit)
    return made


async def test_work_is_counted(work):
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 18]>
        g (float[64,32] a, float[32,16] b, double[64,32] c, double[32,16] d) => (float[64,16] y, double[64,16] z) {
            ab = MatMul(a, b) y = Relu(ab) z = MatMul(c, d)
        }""")
    shapes = {"a": (64, 32), "b": (32, 16), "c": (64, 32), "d": (32, 16)}
    feeds = {n: np.ones(s, np.float32 if n in "ab" else np.float64) for n, s in shapes.items()}
    async with trionnx.open_scheduler(backend="webgpu") as scheduler:
        session = await scheduler.load(model)
        await session.run(None, feeds)
    product = 2 * 64 * 32 * 16
    assert work.split() == (product + 64 * 16, product)
    work.dispatched.clear()
    assert work.split() == (64 * 16, 2 * product)


# --- the models -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(real_models.MODELS.keys() - {T5}))
async def test_agrees_with_onnxruntime(name, work):
    path, feeds = fetched(name), real_models.feeds(name)
    with trio.fail_after(LIMIT_S):
        async with trionnx.open_scheduler(backend="webgpu") as scheduler:
            session = await scheduler.load(path, allow_host_steps=name in HOST_STEPS)
            assert session.backend == "webgpu"
            first = await session.run(None, feeds)
            gpu, host = work.split()
            again = await session.run(None, feeds)
    assert_agrees(first, reference(path, feeds), classes=name in CLASSES)
    assert [bits(value) for value in first] == [bits(value) for value in again]
    assert gpu + host < LARGE or gpu >= 0.95 * (gpu + host)


async def test_the_quantised_encoder_agrees_node_by_node(work):
    # A value that lies on the edge between two steps of a quantised tensor falls to this side or that by the last
    # bit of its scale, and later layers make much of it: float64 arithmetic is 3 % away from ONNX Runtime's.
    # So each node is compared on what the engine gave it. The products of integers are exact.
    path, feeds = fetched(T5), real_models.feeds(T5)
    proto = onnx.load(path)
    graph = read_model(path).graph
    whole = [value.name for value in graph.outputs]
    made = [value.name for node in graph.nodes for value in node.outputs if value is not None]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in made if name not in whole)
    with trio.fail_after(LIMIT_S):
        async with trionnx.open_scheduler(backend="webgpu") as scheduler:
            session = await scheduler.load(path, allow_host_steps=False)
            fused = await session.run(whole, feeds)
            gpu, host = work.split()
            assert gpu >= 0.95 * (gpu + host) > 0.95 * LARGE
            every = await scheduler.load(proto, allow_host_steps=False)
            values = dict(feeds, **dict(zip(made, await every.run(made, feeds), strict=True)))
    exact = dict(feeds)
    for node in graph.nodes:
        outputs = [value for value in node.outputs if value is not None]
        for right, value in zip(evaluated(node, values), outputs, strict=True):
            assert_same(node.op, values[value.name], right)
        exact |= {value.name: right for right, value in zip(evaluated(node, exact), outputs, strict=True)}
    for name, value in zip(whole, fused, strict=True):
        right = exact[name]
        assert value.shape == right.shape
        assert float(np.abs(value - right).max()) <= 0.06 * float(np.abs(right).max())
        assert float((value * right).sum() / np.sqrt((value**2).sum() * (right**2).sum())) > 0.995


def evaluated(node: Any, values: Mapping[str, Any]) -> Iterator[Any]:
    """A node's outputs, of those of its inputs that are in `values`, on the host."""
    given = [None if v is None else v.const if v.const is not None else values[v.name] for v in node.inputs]
    made = zip(evaluate_host(node, given), node.outputs, strict=True)
    return (array for array, value in made if value is not None)


def assert_same(op: str, value: Any, right: Any) -> None:
    assert (value.dtype, value.shape) == (right.dtype, right.shape)
    if value.dtype.kind == "f":
        finite = right[np.isfinite(right)]
        scale = float(np.abs(finite).max(initial=0))
        np.testing.assert_allclose(value, right, rtol=0, atol=2e-6 * scale, err_msg=op)
    elif op == "DynamicQuantizeLinear":
        steps = np.abs(value.astype(int) - right)
        assert steps.max() <= 1
        assert (steps > 0).mean() < 1e-3
    else:
        np.testing.assert_array_equal(value, right, err_msg=op)


async def test_the_recogniser_reads_at_every_width():
    path, feeds = fetched("ppocrv4_rec"), real_models.feeds("ppocrv4_rec")
    with trio.fail_after(LIMIT_S):
        async with trionnx.open_scheduler(backend="webgpu") as scheduler:
            session = await scheduler.load(path)
            alphabet = real_models.characters(session.get_modelmeta().custom_metadata_map)
            (whole,) = await session.run(None, feeds)
            assert real_models.read_line(whole, alphabet) == real_models.LINE
            for width in (319, 160, 97):
                narrow = {"x": np.ascontiguousarray(feeds["x"][..., :width])}
                assert_agrees(await session.run(None, narrow), reference(path, narrow))


async def test_state_goes_through_the_voice_detector():
    path, feeds = fetched("silero_vad"), real_models.feeds("silero_vad")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    right: Any = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    ours: dict[str, Any] = dict(feeds)
    theirs: dict[str, Any] = dict(feeds)
    with trio.fail_after(LIMIT_S):
        async with trionnx.open_scheduler(backend="webgpu") as scheduler:
            session = await scheduler.load(path)
            for _ in range(4):
                output, ours["state"] = await session.run(["output", "stateN"], ours)
                expected, theirs["state"] = right.run(["output", "stateN"], theirs)
                np.testing.assert_allclose(output, expected, atol=1e-3)
                np.testing.assert_allclose(ours["state"], theirs["state"], atol=1e-3)
