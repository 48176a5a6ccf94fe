"""Random small graphs equal float64 NumPy within their dtypes' tolerance, fused and unfused alike.

Each value carries a bound of its error: what the errors of its operands make of it, and a rounding
of its own. Integers and booleans have none, and only what has none is compared, or cut to integers.

    TRIONNX_SOAK=1 pytest tests/gpu/graph/test_random_graphs.py    a thousand (or TRIONNX_SOAK_EXAMPLES), new ones
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

import trionnx.gpu.graph.emission as emission
from trionnx.gpu.graph import placement

SOAK = bool(os.environ.get("TRIONNX_SOAK"))
EXAMPLES = int(os.environ.get("TRIONNX_SOAK_EXAMPLES", "1000"))
UNBOTHERED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
F32, F16, I32, I64, U8, BOOL = (np.dtype(t) for t in (np.float32, np.float16, np.int32, np.int64, np.uint8, np.bool_))
EPS = {F32: 2.0**-22, F16: 2.0**-10}
TINY = {F32: 1e-30, F16: 1e-7}
MOST, LARGEST = 600, 1e3
"""Elements, and absolute value of floats, at most."""


@dataclass(eq=False)
class Value:
    """A value of the graph: what NumPy has for it, floats in float64, and how far the device may be off."""

    name: str
    array: Any
    dtype: np.dtype[Any]
    error: float = 0.0

    @property
    def top(self) -> float:
        return float(np.abs(self.array).max(initial=0))

    @property
    def low(self) -> float:
        return float(np.abs(self.array).min(initial=math.inf))

    @property
    def floats(self) -> bool:
        return self.dtype in EPS

    @property
    def exact(self) -> bool:
        return self.error == 0


@dataclass(eq=False)
class Builder:
    """A graph in the making. A shorter one of the same seed has the same first nodes."""

    random: random.Random
    opset: int
    values: list[Value] = field(default_factory=list)
    feeds: dict[str, Any] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)

    def one(self, options: Any) -> Any:
        return self.random.choice(list(options))

    def chance(self) -> bool:
        return self.random.random() < 0.5

    def value(self, wanted: Callable[[Value], bool] = lambda value: True) -> Value | None:
        options = [value for value in self.values[-8:] if wanted(value)]
        return self.one(options) if options else None

    def partner(self, x: Value, wanted: Callable[[Value], bool] = lambda value: True) -> Value | None:
        """A value of the same dtype that broadcasts with another one."""

        def fits(y: Value) -> bool:
            try:
                shape = np.broadcast_shapes(x.array.shape, y.array.shape)
            except ValueError:
                return False
            return y.dtype == x.dtype and math.prod(shape) <= MOST and wanted(y)

        return self.value(fits)

    def constant(self, array: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(onnx.numpy_helper.from_array(np.asarray(array), name))
        return name

    def add(
        self,
        op: str,
        inputs: list[Value | str],
        array: Any,
        dtype: np.dtype[Any] | None = None,
        error: float = 0.0,
        rounds: bool = True,
        **attrs: Any,
    ) -> None:
        """A node, unless its result is too large. `error`: what those of its operands make of it."""
        first = next(x for x in inputs if isinstance(x, Value))
        made = Value(f"v{len(self.nodes)}", np.asarray(array), dtype or first.dtype, error)
        if made.array.size > MOST or (made.floats and made.top > LARGEST):
            return
        if made.floats and rounds:
            made.error += EPS[made.dtype] * (made.top + error) + TINY[made.dtype]
        if made.error > 0.1 * max(1.0, made.top):
            return
        names = [x.name if isinstance(x, Value) else x for x in inputs]
        self.nodes.append(helper.make_node(op, names, [made.name], **attrs))
        self.values.append(made)


def source(graph: Builder, number: int, full: tuple[int, ...]) -> None:
    """An input, or a constant, whose shape broadcasts to `full`."""
    shape = [1 if graph.random.randint(0, 3) == 0 else n for n in full]
    shape = shape[graph.random.randint(0, len(shape)) if graph.chance() else 0 :]
    dtype = graph.one([F32, F32, F32, F16, I32, I64, U8, BOOL])
    rng = np.random.default_rng(graph.random.randint(0, 999))
    if dtype in EPS:
        array = (rng.standard_normal(shape) * rng.choice([0.3, 2.0])).astype(dtype)
    elif dtype == BOOL:
        array = np.asarray(rng.random(shape) < 0.5)
    else:
        array = np.asarray(rng.integers(0 if dtype == U8 else -9, 10, shape)).astype(dtype)
    name = f"x{number}"
    if graph.random.randint(0, 3) == 0:
        name = graph.constant(array)
    else:
        graph.feeds[name] = array
    graph.values.append(Value(name, array.astype(np.float64) if dtype in EPS else array, dtype))


# --- elementwise ------------------------------------------------------------------------------


def unary(graph: Builder) -> None:
    x = graph.value(lambda v: v.floats)
    if x is None:
        return
    a, e = x.array, x.error
    options: dict[str, Any] = {
        "Relu": (np.maximum(a, 0), e, False),
        "Neg": (-a, e, False),
        "Abs": (np.abs(a), e, False),
        "Identity": (a, e, False),
        "Tanh": (np.tanh(a), e, True),
        "Sigmoid": (1 / (1 + np.exp(-a)), e, True),
        "Softplus": (np.log1p(np.exp(-np.abs(a))) + np.maximum(a, 0), e, True),
        "LeakyRelu": (np.where(a < 0, 0.01 * a, a), e, True),
        "Sin": (np.sin(a), e + 2e-7 * x.top, True),
    }
    if x.top < 5:
        options["Exp"] = (np.exp(a), 2 * math.exp(x.top) * (e + 2e-7), True)
    if x.low > 0.05 and x.error < 0.01:
        options["Reciprocal"] = (1 / a, 2 * e / x.low**2, True)
        if (a > 0).all():
            options["Sqrt"] = (np.sqrt(a), e / x.low**0.5, True)
    if x.exact:
        options |= {"Floor": (np.floor(a), 0.0, False), "Ceil": (np.ceil(a), 0.0, False)}
        if graph.opset >= 11:
            options["Round"] = (np.rint(a), 0.0, False)
        if graph.opset >= 9:
            options["Sign"] = (np.sign(a), 0.0, False)
    op = graph.one(options)
    array, error, rounds = options[op]
    graph.add(op, [x], array, error=error, rounds=rounds)


def binary(graph: Builder) -> None:
    x = graph.value(lambda v: v.floats)
    y = x and graph.partner(x)
    if x is None or y is None:
        return
    a, b, e, f = x.array, y.array, x.error, y.error
    options = {
        "Add": (a + b, e + f, True),
        "Sub": (a - b, e + f, True),
        "Mul": (a * b, e * (y.top + f) + f * x.top, True),
        "Max": (np.maximum(a, b), max(e, f), False),
        "Min": (np.minimum(a, b), max(e, f), False),
    }
    if y.low > 0.05 and f < 0.01:
        options["Div"] = (a / b, 2 * (e / y.low + f * x.top / y.low**2), True)
    op = graph.one(options)
    array, error, rounds = options[op]
    graph.add(op, [x, y], array, error=error, rounds=rounds)


def integers(graph: Builder) -> None:
    kinds = [I32, I64, U8] if graph.opset >= 14 else [I32, I64]
    x = graph.value(lambda v: v.dtype in kinds)
    y = x and graph.partner(x)
    if x is None or y is None:
        return
    a, b = x.array, y.array
    options = {"Add": a + b, "Sub": a - b, "Mul": a * b}
    if graph.opset >= 12:
        options |= {"Max": np.maximum(a, b), "Min": np.minimum(a, b)}
    if (b != 0).all() and abs(x.top) < 2**30:
        quotient = np.abs(a.astype(np.int64)) // np.abs(b.astype(np.int64))
        options["Div"] = (quotient * np.sign(a).astype(np.int64) * np.sign(b).astype(np.int64)).astype(x.dtype)
    if x.dtype != U8:
        options |= {"Abs": np.abs(a), "Neg": -a}
    op = graph.one(options)
    graph.add(op, [x] if op in ("Abs", "Neg") else [x, y], options[op])


def logic(graph: Builder) -> None:
    x = graph.value(lambda v: v.exact and v.dtype != U8)
    y = x and graph.partner(x, lambda v: v.exact)
    if x is None or y is None:
        return
    a, b = x.array, y.array
    if x.dtype == BOOL:
        options = {"And": a & b, "Or": a | b, "Xor": a ^ b, "Equal": a == b, "Not": ~a}
    elif graph.opset < 11 and x.floats:
        options = {"Greater": a > b, "Less": a < b}
    else:
        options = {"Equal": a == b, "Greater": a > b, "Less": a < b}
    op = graph.one(options)
    graph.add(op, [x] if op == "Not" else [x, y], options[op], BOOL)


def where(graph: Builder) -> None:
    condition, x = graph.value(lambda v: v.dtype == BOOL), graph.value()
    y = x and graph.partner(x)
    if condition is None or x is None or y is None or graph.opset < 9:
        return
    try:
        array = np.where(condition.array, x.array, y.array)
    except ValueError:
        return
    graph.add("Where", [condition, x, y], array, x.dtype, max(x.error, y.error), rounds=False)


def cast(graph: Builder) -> None:
    x = graph.value(lambda v: v.exact or v.floats)
    to = graph.one([F32, F16, I32, I64, U8, BOOL])
    if x is None:
        return
    if x.floats and to not in EPS:
        if not x.exact or to == U8:
            return
        array = (x.array != 0) if to == BOOL else np.trunc(x.array).astype(to)
        error = 0.0
    elif to in EPS:
        array, error = x.array.astype(np.float64), x.error
        wide = x.floats and EPS[to] <= EPS[x.dtype]
        if not wide and not (array.astype(to).astype(np.float64) == array).all():
            if array.size and np.abs(array).max() > LARGEST:
                return
            error += EPS[to] * float(np.abs(array).max(initial=0))
        error += TINY[F16] if F16 in (to, x.dtype) and error else 0
    else:
        array, error = x.array.astype(to), 0.0
    graph.add("Cast", [x], array, to, error, rounds=False, to=helper.np_dtype_to_tensor_dtype(to))


# --- sums and products ------------------------------------------------------------------------


def reduce(graph: Builder) -> None:
    x = graph.value(lambda v: v.floats or v.dtype in (I32, I64))
    if x is None:
        return
    rank = x.array.ndim
    axes = sorted(graph.random.sample(range(rank), graph.random.randint(1, rank))) if rank and graph.chance() else None
    keep = graph.random.randint(0, 1)
    over = tuple(range(rank)) if axes is None else tuple(axes)
    count = math.prod(x.array.shape[n] for n in over)
    options = ["ReduceSum"]
    if count:
        options += ["ReduceMax", "ReduceMin"] + (["ReduceMean", "ReduceL1", "ReduceSumSquare"] if x.floats else [])
    op = graph.one(options)
    a, top = x.array, x.top
    array, error = {
        "ReduceSum": lambda: (a.sum(over, keepdims=bool(keep), dtype=a.dtype), count * x.error),
        "ReduceMax": lambda: (a.max(over, keepdims=bool(keep)), x.error),
        "ReduceMin": lambda: (a.min(over, keepdims=bool(keep)), x.error),
        "ReduceMean": lambda: (a.mean(over, keepdims=bool(keep)), x.error + EPS[F32] * top),
        "ReduceL1": lambda: (np.abs(a).sum(over, keepdims=bool(keep)), count * x.error),
        "ReduceSumSquare": lambda: ((a * a).sum(over, keepdims=bool(keep)), 2 * count * (top + x.error) * x.error),
    }[op]()
    if x.floats and op not in ("ReduceMax", "ReduceMin"):
        error += EPS[F32] * count * (top * top if op == "ReduceSumSquare" else top)
    inputs: list[Value | str] = [x]
    attrs: dict[str, Any] = {"keepdims": keep}
    if axes is not None:
        signed = [n - rank if graph.opset >= 11 and graph.chance() else n for n in axes]
        if graph.opset >= (13 if op == "ReduceSum" else 18):
            inputs.append(graph.constant(np.array(signed, np.int64)))
        else:
            attrs["axes"] = signed
    graph.add(op, inputs, array, error=error, rounds=x.floats and op not in ("ReduceMax", "ReduceMin"), **attrs)


def softmax(graph: Builder) -> None:
    x = graph.value(lambda v: v.floats and v.array.ndim > 0)
    if x is None:
        return
    axis = x.array.ndim - 1 if graph.opset < 13 else graph.random.randint(0, x.array.ndim - 1)
    if not x.array.shape[axis]:
        return
    wide = np.exp(x.array - x.array.max(axis, keepdims=True))
    graph.add("Softmax", [x], wide / wide.sum(axis, keepdims=True), error=4 * x.error + 1e-6, axis=axis)


def matmul(graph: Builder) -> None:
    x = graph.value(lambda v: v.array.ndim > 0 and (v.floats or (v.dtype == I32 and graph.opset >= 9)))
    if x is None:
        return
    if graph.chance() and x.array.ndim > 1:
        perm = [*range(x.array.ndim - 2), x.array.ndim - 1, x.array.ndim - 2]
        graph.add("Transpose", [x], x.array.transpose(perm), error=x.error, rounds=False, perm=perm)

    def fits(y: Value) -> bool:
        try:
            return y.dtype == x.dtype and y.array.ndim > 0 and (x.array @ y.array).size <= MOST
        except ValueError:
            return False

    y = graph.value(fits)
    if y is None:
        return
    depth = x.array.shape[-1]
    error = depth * (x.error * (y.top + y.error) + y.error * x.top + EPS[F32] * x.top * y.top) if x.floats else 0.0
    graph.add("MatMul", [x, y], x.array @ y.array, error=error)


# --- shapes -----------------------------------------------------------------------------------


def transpose(graph: Builder) -> None:
    x = graph.value()
    assert x is not None
    perm = graph.random.sample(range(x.array.ndim), x.array.ndim)
    attrs: dict[str, Any] = {"perm": perm} if perm else {}
    graph.add("Transpose", [x], x.array.transpose(perm), error=x.error, rounds=False, **attrs)


def reshape(graph: Builder) -> None:
    x = graph.value(lambda v: v.array.size > 0)
    if x is None:
        return
    left, shape = x.array.size, []
    for _ in range(graph.random.randint(0, 3)):
        shape.append(graph.one([n for n in range(1, left + 1) if left % n == 0]))
        left //= shape[-1]
    shape = [*shape, left] if left > 1 or graph.chance() else shape
    written = graph.constant(np.array([-1 if n == len(shape) - 1 else s for n, s in enumerate(shape)], np.int64))
    graph.add("Reshape", [x, written], x.array.reshape(shape), error=x.error, rounds=False)


def unsqueeze(graph: Builder) -> None:
    x = graph.value(lambda v: v.array.ndim < 4)
    if x is None:
        return
    ones = [n for n, size in enumerate(x.array.shape) if size == 1]
    op = graph.one(["Unsqueeze", "Squeeze"]) if ones else "Unsqueeze"
    axis = graph.one(ones) if op == "Squeeze" else graph.random.randint(0, x.array.ndim)
    array = np.squeeze(x.array, axis) if op == "Squeeze" else np.expand_dims(x.array, axis)
    if graph.opset < 13:
        graph.add(op, [x], array, error=x.error, rounds=False, axes=[axis])
    else:
        graph.add(op, [x, graph.constant(np.array([axis]))], array, error=x.error, rounds=False)


def expand(graph: Builder) -> None:
    x = graph.value(lambda v: v.array.ndim < 4)
    if x is None:
        return
    shape = [graph.one([1, 2, 3]) if size == 1 else size for size in x.array.shape]
    shape = [graph.one([0, 1, 2, 3]), *shape] if graph.chance() else shape
    array = np.broadcast_to(x.array, shape)
    graph.add("Expand", [x, graph.constant(np.array(shape, np.int64))], array, error=x.error, rounds=False)


def concat(graph: Builder) -> None:
    x = graph.value(lambda v: v.array.ndim > 0)
    if x is None:
        return
    axis = graph.random.randint(0, x.array.ndim - 1)

    def fits(y: Value) -> bool:
        shape = list(y.array.shape)
        return y.dtype == x.dtype and len(shape) == x.array.ndim and shape[:axis] + shape[axis + 1 :] == rest

    rest = [size for n, size in enumerate(x.array.shape) if n != axis]
    y = graph.value(fits)
    if y is not None:
        array = np.concatenate([x.array, y.array, x.array], axis)
        graph.add("Concat", [x, y, x], array, error=max(x.error, y.error), rounds=False, axis=axis)


def cut(graph: Builder) -> None:
    x = graph.value(lambda v: v.array.ndim > 0)
    if x is None:
        return
    axis = graph.random.randint(0, x.array.ndim - 1)
    size = x.array.shape[axis]
    if size and graph.chance():
        wanted = np.array([graph.random.randrange(-size, size) for _ in range(graph.random.randint(0, 4))], np.int64)
        wanted = wanted if graph.opset >= 11 else np.abs(wanted) % size
        array = np.take(x.array, wanted, axis)
        graph.add("Gather", [x, graph.constant(wanted)], array, error=x.error, rounds=False, axis=axis)
        return
    first, last = graph.random.randint(-size, size), graph.random.randint(-size - 1, size + 2)
    step = graph.one([1, 1, 2, -1, -2]) if graph.opset >= 10 else 1
    array = x.array[(slice(None),) * axis + (slice(first, last, step),)]
    if step < 0 and last < -size:
        array = x.array[(slice(None),) * axis + (slice(first, None, step),)]
    if graph.opset < 10:
        graph.add("Slice", [x], array, error=x.error, rounds=False, axes=[axis], starts=[first], ends=[last])
        return
    given: list[Value | str] = [graph.constant(np.array([n], np.int64)) for n in (first, last, axis, step)]
    graph.add("Slice", [x, *given], array, error=x.error, rounds=False)


KINDS = [*[unary] * 6, *[binary] * 4, *[integers] * 3, logic, where, cast, cast, reduce, reduce, softmax, matmul]
KINDS += [transpose, reshape, unsqueeze, expand, concat, cut]


@st.composite
def graphs(draw: Any) -> Builder:
    numbers = random.Random(draw(st.integers(0, 2**32 - 1)))
    graph = Builder(numbers, numbers.choice([9, 11, 13, 18, 21]))
    side = numbers.choice([1, 2, 3, 4, 9])
    sizes = [numbers.choice([0, 1, 1, 2, 2, 2, 3, 3, 3, 5, 5, 7]) for _ in range(numbers.randint(0, 2))]
    for number in range(numbers.randint(3, 5)):
        source(graph, number, (*sizes, side, side))
    with np.errstate(all="ignore"):
        for _ in range(draw(st.integers(1, 40))):
            numbers.choice(KINDS)(graph)
    return graph


def model_of(graph: Builder, wanted: list[Value]) -> onnx.ModelProto:
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in graph.feeds.items()
    ]
    outputs = [
        helper.make_tensor_value_info(v.name, helper.np_dtype_to_tensor_dtype(v.dtype), v.array.shape) for v in wanted
    ]
    made = helper.make_graph(graph.nodes, "g", inputs, outputs, graph.constants)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", graph.opset)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def compare(got: list[Any], wanted: list[Value]) -> None:
    for array, value in zip(got, wanted, strict=True):
        assert array.dtype == value.dtype, value.name
        assert array.shape == value.array.shape, value.name
        if value.exact:
            np.testing.assert_array_equal(array, value.array.astype(value.dtype), err_msg=value.name)
        else:
            np.testing.assert_allclose(
                array.astype(np.float64), value.array, rtol=0, atol=4 * value.error, err_msg=value.name
            )


@settings(
    max_examples=EXAMPLES if SOAK else 25,
    derandomize=not SOAK,
    database=None,
    print_blob=SOAK,
    suppress_health_check=UNBOTHERED,
)
@given(graph=graphs(), small_on_host=st.booleans(), pick=st.randoms(use_true_random=False))
def test_random_graphs_equal_numpy(open_model, graph, small_on_host, pick):
    made = graph.values[-len(graph.nodes) :] if graph.nodes else []
    if not made:
        return
    some = [v for v in made if v is made[-1] or pick.random() < 0.2]
    with pytest.MonkeyPatch.context() as patch:
        if not small_on_host:
            patch.setattr(placement, "HOST_LIMIT", 0)
        for limit, wanted in ((emission.INLINE_LIMIT, some), (0, made)):
            patch.setattr(emission, "INLINE_LIMIT", limit)
            driver = open_model(model_of(graph, wanted))
            try:
                compare(driver.run(graph.feeds), wanted)
            finally:
                driver.close()


def test_the_generator_makes_every_operator():
    seen: dict[str, set[str]] = {}

    @settings(max_examples=400, derandomize=True, database=None, suppress_health_check=UNBOTHERED)
    @given(graph=graphs())
    def collect(graph: Builder) -> None:
        for value, node in zip(graph.values[-len(graph.nodes) :], graph.nodes, strict=False):
            seen.setdefault(node.op_type, set()).add(value.dtype.name)

    collect()
    assert seen.keys() >= {"Add", "Div", "Tanh", "Exp", "Equal", "Where", "Cast", "ReduceSum", "ReduceMax", "Softmax"}
    assert seen.keys() >= {"MatMul", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Expand", "Concat", "Gather"}
    assert set().union(*seen.values()) == {"float32", "float16", "int32", "int64", "uint8", "bool"}
