"""Mutated real models: typed errors only, in bounded time and memory.

    TRIONNX_SOAK=1 pytest tests/test_fuzz.py    20,000 (or TRIONNX_SOAK_EXAMPLES), new ones
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import struct
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto

import real_models
from trionnx.gpu.errors import InvalidData, InvalidModel, OutOfDeviceMemory, UnsupportedOperator
from trionnx.gpu.graph.check import check_operators
from trionnx.gpu.graph.planner import Planner
from trionnx.gpu.graph.read import read_model
from trionnx.gpu.graph.target import CPU_LIKE

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux tells, and bounds, how much a process has"
)

SOAK = bool(os.environ.get("TRIONNX_SOAK"))
EXAMPLES = int(os.environ.get("TRIONNX_SOAK_EXAMPLES", "20000")) if SOAK else 400
MODELS = ("ort_logreg_iris", "surfaces_knn_validity", "ppocr_cls_v2", "silero_vad")
FUZZED = settings(
    max_examples=EXAMPLES // (2 * len(MODELS)),
    derandomize=not SOAK,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
TYPED = (InvalidData, InvalidModel, OutOfDeviceMemory, UnsupportedOperator)
BOUND_S = 5.0
GIB = 1 << 30
SMALL = (-7, -1, 0, 1, 2, 3, 64, 65_536)
EXTREMES = (*SMALL, -(1 << 63), -(1 << 31), 1 << 31, (1 << 32) + 1, 1 << 50, 1 << 62, (1 << 63) - 1)
FLOATS = (0.0, -1.0, 1e-38, 1e30, float("inf"), float("nan"))


@pytest.fixture
def scarce() -> Iterator[None]:
    """From here on this process can have one gibibyte more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + GIB, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@cache
def original(name: str) -> bytes:
    try:
        return Path(real_models.model(name)).read_bytes()
    except real_models.Unavailable as error:
        pytest.skip(f"{name} cannot be fetched here: {error}")


def load(data: bytes) -> None:
    """All that a load does before it has a device: read, optimise, check, plan."""
    model = read_model(data)
    check_operators(model)
    feeds = {}
    for value, info in zip(model.graph.inputs, (*model.inputs, *model.overridable), strict=False):
        shape = tuple(size if isinstance(size, int) else 2 for size in info.shape or ())
        feeds[value.name] = (info.dtype or np.dtype(np.float32), shape)
    Planner(model, CPU_LIKE).start(feeds, lambda: None)


def survives(data: bytes) -> None:
    started = time.thread_time()
    with contextlib.suppress(*TYPED):
        load(data)
    assert time.thread_time() - started < BOUND_S


# --- bytes -----------------------------------------------------------------------------------------------------------


def scrambled(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        # What is not weights is near the ends, or where there are few of them.
        at = min(len(out) - 1, int(rng.choice((rng.random(), rng.random() ** 8, 1 - rng.random() ** 8)) * len(out)))
        match rng.randrange(5):
            case 0:
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                del out[at : at + rng.choice((1, 2, 9, 100))]
            case 3:
                out[at:at] = out[at : at + rng.choice((1, 9, 300))]
            case _:
                out[at:at] = rng.randbytes(rng.choice((1, 2, 10)))
        if not out:
            break
    return bytes(out)


@pytest.mark.parametrize("name", MODELS)
@FUZZED
@given(seed=st.integers(0, 1 << 32))
def test_scrambled_bytes(scarce: None, name: str, seed: int) -> None:
    survives(scrambled(original(name), random.Random(seed)))


# --- graphs ----------------------------------------------------------------------------------------------------------


def graphs(graph: GraphProto) -> list[GraphProto]:
    """A graph, and those in it."""
    found = [graph]
    for node in graph.node:
        for attribute in node.attribute:
            found += [inner for g in ([attribute.g] if attribute.HasField("g") else []) for inner in graphs(g)]
    return found


def swap_names(model: ModelProto, graph: GraphProto, node: NodeProto, rng: random.Random) -> None:
    names = [name for other in graph.node for name in (*other.input, *other.output)] or [""]
    places = [p for p in (node.input, node.output) if p]
    if places:
        place = rng.choice(places)
        place[rng.randrange(len(place))] = rng.choice((rng.choice(names), "", "nowhere"))


def fewer_or_more_inputs(model: ModelProto, graph: GraphProto, node: NodeProto, rng: random.Random) -> None:
    place = rng.choice((node.input, node.output))
    if place and rng.random() < 0.5:
        del place[rng.randrange(len(place))]
    else:
        place.append(rng.choice([name for other in graph.node for name in other.output] or ["q"]))


def another_operator(model: ModelProto, graph: GraphProto, node: NodeProto, rng: random.Random) -> None:
    schema = rng.choice(onnx.defs.get_all_schemas())
    node.op_type, node.domain = schema.name, schema.domain


def attributes(model: ModelProto, graph: GraphProto, node: NodeProto, rng: random.Random) -> None:
    if not node.attribute:
        return
    at = rng.randrange(len(node.attribute))
    attribute = node.attribute[at]
    match rng.randrange(6):
        case 0:
            del node.attribute[at]
        case 1:
            node.attribute.add().CopyFrom(attribute)
        case 2:
            kinds: Any = AttributeProto.AttributeType.values()
            attribute.type = rng.choice(kinds)
        case 3:
            attribute.i = rng.choice(EXTREMES)
            attribute.f = rng.choice(FLOATS)
        case 4:
            attribute.ints.append(rng.choice(EXTREMES))
        case _:
            if attribute.ints:
                attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice(EXTREMES)


def tensors(model: ModelProto, graph: GraphProto, node: NodeProto, rng: random.Random) -> None:
    there = [*graph.initializer, *(a.t for n in graph.node for a in n.attribute if a.HasField("t"))]
    if not there:
        return
    tensor = rng.choice(there)
    match rng.randrange(4):
        case 0:
            tensor.data_type = rng.randrange(30)
        case 1 if tensor.dims:
            tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(EXTREMES)
        case 2:
            tensor.dims.append(rng.choice(EXTREMES))
        case _:
            values(tensor, rng)


def values(tensor: onnx.TensorProto, rng: random.Random) -> None:
    """Other contents of a small tensor: shapes, axes, and the like are such."""
    if tensor.data_type == onnx.TensorProto.INT64 and 0 < len(tensor.raw_data) <= 512:
        data = bytearray(tensor.raw_data)
        at = rng.randrange(len(data) // 8)
        data[8 * at : 8 * at + 8] = struct.pack("<q", rng.choice(EXTREMES))
        tensor.raw_data = bytes(data)
    elif tensor.data_type == onnx.TensorProto.FLOAT and 0 < len(tensor.raw_data) <= 512:
        data = bytearray(tensor.raw_data)
        at = rng.randrange(len(data) // 4)
        data[4 * at : 4 * at + 4] = struct.pack("<f", rng.choice(FLOATS))
        tensor.raw_data = bytes(data)


def other_inputs(model: ModelProto, graph: GraphProto, node: NodeProto, rng: random.Random) -> None:
    infos = [*graph.input, *graph.output, *graph.value_info]
    if not infos:
        return
    kind = rng.choice(infos).type.tensor_type
    if rng.random() < 0.3:
        kind.elem_type = rng.randrange(26)
    elif kind.shape.dim and rng.random() < 0.7:
        kind.shape.dim[rng.randrange(len(kind.shape.dim))].dim_value = rng.choice(EXTREMES)
    else:
        kind.shape.dim.add(dim_value=rng.choice(EXTREMES))


def whole_nodes(model: ModelProto, graph: GraphProto, node: NodeProto, rng: random.Random) -> None:
    if rng.random() < 0.5:
        graph.node.remove(node)
    else:
        graph.node.add().CopyFrom(node)


def versions(model: ModelProto, graph: GraphProto, node: NodeProto, rng: random.Random) -> None:
    rng.choice(model.opset_import).version = rng.choice((*range(1, 28), *EXTREMES))


def into_a_branch(model: ModelProto, graph: GraphProto, node: NodeProto, rng: random.Random) -> None:
    whole = GraphProto()
    whole.CopyFrom(graph)
    if whole.ByteSize() < 100_000:
        node.attribute.add(name=rng.choice(("body", "then_branch", "x")), g=whole, type=AttributeProto.GRAPH)
        node.op_type = rng.choice((node.op_type, "Loop", "If", "Scan"))


def into_a_function(model: ModelProto, graph: GraphProto, node: NodeProto, rng: random.Random) -> None:
    made = model.functions.add(name=node.op_type, domain=node.domain, input=node.input, output=node.output)
    made.node.add().CopyFrom(node)
    made.opset_import.extend(model.opset_import)
    if rng.random() < 0.5:
        made.node[0].op_type = "Identity"


MUTATIONS: tuple[Callable[[ModelProto, GraphProto, NodeProto, random.Random], None], ...] = (
    swap_names,
    fewer_or_more_inputs,
    another_operator,
    attributes,
    attributes,
    tensors,
    tensors,
    tensors,
    other_inputs,
    whole_nodes,
    versions,
    into_a_branch,
    into_a_function,
)


def mutated(data: bytes, rng: random.Random) -> bytes:
    model = onnx.load_model_from_string(data)
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        graph = rng.choice(graphs(model.graph))
        if graph.node:
            rng.choice(MUTATIONS)(model, graph, rng.choice(graph.node), rng)
    made: Any = model.SerializeToString()
    return bytes(made)


@pytest.mark.parametrize("name", MODELS)
@example(seed=986573185)  # a variance below zero
@FUZZED
@given(seed=st.integers(0, 1 << 32))
def test_mutated_graphs(scarce: None, name: str, seed: int) -> None:
    survives(mutated(original(name), random.Random(seed)))
