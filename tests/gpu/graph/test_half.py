"""Float16 as f16 on the device: half the bytes, and bit for bit what f32 that is rounded gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

import trionnx.gpu.device.device as device_module
from trionnx.gpu.device import adapters
from trionnx.gpu.graph.emission import Emission
from trionnx.gpu.graph.steps import Copy, Dispatch, Upload
from trionnx.gpu.graph.target import Target
from trionnx.gpu.graph.tensor import Storage, Tensor, as_words, from_words
from trionnx.gpu.kernels.kernel import Binding, Kernel

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
ALL = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
few = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@dataclass
class Ways:
    """Runs a model with float16 as f32 and as f16 and compares every bit; NaN is NaN."""

    open_model: Callable[..., Any]
    force: Callable[[bool, bool], None]

    def run(self, model: onnx.ModelProto, feeds: dict[str, Any], *, cpu: bool = True) -> list[Any]:
        made: list[list[Any]] = []
        sizes = []
        for f16 in (False, True):
            self.force(f16, cpu)
            driver = self.open_model(model.SerializeToString())
            made.append(driver.run(feeds))
            assert {e.where for e in driver.engine.explain()} <= {"gpu", "view", "folded"}
            device = driver.engine.device
            sizes.append(sum(b.size for b in driver.engine._realiser.weights.values()))
            offered = device.target.f16
        for one, other in zip(*made, strict=True):
            same_bits(one, other)
        if sizes[0] > 4096 and offered:
            assert sizes[1] <= sizes[0] / 2 + 1024
        return made[1]


def same_bits(one: Any, other: Any) -> None:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    nan = np.isnan(one)
    np.testing.assert_array_equal(np.isnan(other), nan)
    whole = np.dtype(f"u{one.itemsize}")
    np.testing.assert_array_equal(one[~nan].view(whole), other[~nan].view(whole))


@pytest.fixture
def ways(open_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Ways:
    real = adapters.target_of

    def force(f16: bool, cpu: bool) -> None:
        monkeypatch.setattr(device_module, "target_of", lambda info: replace(real(info), f16=f16, cpu=cpu))

    return Ways(open_model, force)


def with_constants(model: onnx.ModelProto, **arrays: Any) -> onnx.ModelProto:
    model.graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in arrays.items())
    return model


@pytest.mark.parametrize("cpu", [True, False])
def test_every_value_is_moved_as_it_is(ways, parse, cpu):
    model = parse(
        "g (float16[256,256] x) => (float16[256,256] t, float16[257,256] c, float16[255,255] s, float16[256,256] n)"
        " <int64[1] one = {1}, int64[2] starts = {1, 0}, int64[2] ends = {256, 255}>"
        " { t = Transpose(x) r = Slice(x, one0, one) c = Concat<axis=0>(x, r) s = Slice(x, starts, ends)"
        " m = Neg(x) n = Neg(m) }"
    )
    with_constants(model, one0=np.array([0]))
    x = ALL.reshape(256, 256)
    t, c, s, n = ways.run(model, {"x": x}, cpu=cpu)
    for got, want in ((t, x.T), (c, np.concatenate([x, x[:1]])), (s, x[1:, :255]), (n, x)):
        same_bits(got, np.ascontiguousarray(want))


@few
@given(data=st.data())
def test_pieces_of_odd_lengths_leave_their_neighbours_alone(ways, data):
    rank = data.draw(st.integers(1, 3))
    axis = data.draw(st.integers(0, rank - 1))
    shape = [data.draw(st.integers(1, 7)) for _ in range(rank)]
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=4))
    rng = np.random.default_rng(0)
    pieces = [rng.standard_normal([*shape[:axis], n, *shape[axis + 1 :]]).astype(F16) for n in lengths]
    names = [f"x{k}" for k in range(len(pieces))]
    nodes = [onnx.helper.make_node("Concat", names, ["y"], axis=axis)]
    nodes.append(onnx.helper.make_node("Split", ["y", "sizes"], [f"z{k}" for k in range(len(pieces))], axis=axis))
    feeds = dict(zip(names, pieces, strict=True))
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT16, p.shape) for n, p in feeds.items()],
        [onnx.ValueInfoProto(name=n) for n in ["y", *nodes[1].output]],
        [numpy_helper.from_array(np.array(lengths), "sizes")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    whole, *parts = ways.run(model, feeds, cpu=data.draw(st.booleans()))
    np.testing.assert_array_equal(whole, np.concatenate(pieces, axis))
    for part, piece in zip(parts, pieces, strict=True):
        np.testing.assert_array_equal(part, piece)


NETWORK = """g (float16[2,3,H,W] x, int64[K] i) => (float16[N,7] y, float16[A,B] z)
{
    c = Conv<pads=[1,1,1,1]>(x, w, b)
    r = Relu(c)
    p = MaxPool<kernel_shape=[2,2],strides=[2,2]>(r)
    d = Conv<group=5>(p, dw)
    a = Pad(d, pads)
    q = AveragePool<kernel_shape=[2,2]>(a)
    f = Flatten<axis=2>(q)
    n = LayerNormalization(f, s)
    t = Transpose<perm=[1,0]>(n)
    m = MatMul(n, t)
    e = Softmax<axis=0>(m)
    h = MatMul(e, n)
    k = ReduceMean<keepdims=0>(h, last)
    l = Reshape(k, shape)
    o = Gemm<transB=1>(l, u, v)
    y = Tanh(o)
    j = Gather<axis=1>(h, i)
    z = Mul(j, half)
}
"""


@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize("size", [(9, 11), (12, 16)])
def test_a_network_gives_the_same_bits(ways, parse, rng, size, cpu):
    def some(*shape: int, scale: float = 0.3) -> Any:
        return (rng.standard_normal(shape) * scale).astype(F16)

    height, width = ((n // 2) + 3 for n in size)
    model = with_constants(
        parse(NETWORK),
        w=some(5, 3, 3, 3), b=some(5), dw=some(5, 1, 1, 1), s=some((height - 1) * (width - 1)), u=some(7, 5),
        pads=np.array([0, 0, 1, 1, 0, 0, 2, 2]), v=some(7, scale=1e-7), last=np.array([1]), shape=np.array([-1, 5]),
        half=np.array(0.5, F16),
    )  # fmt: skip
    y, z = ways.run(model, {"x": some(2, 3, *size, scale=1.0), "i": np.array([3, 0, 5])}, cpu=cpu)
    assert (y.shape, z.shape) == ((2, 7), (10, 3))
    assert np.isfinite(y).all()
    assert np.ptp(y.astype(F32)) > 0


@pytest.mark.parametrize("cpu", [True, False])
def test_weights_lie_as_f16(ways, parse, rng, cpu):
    model = parse("g (float16[3,99] x) => (float16[3,101] y) { p = MatMul(x, w) y = Add(p, b) }")
    w, b = rng.standard_normal((99, 101)).astype(F16), rng.standard_normal((3, 101)).astype(F16)
    x = rng.standard_normal((3, 99)).astype(F16)
    (y,) = ways.run(with_constants(model, w=w, b=b), {"x": x}, cpu=cpu)
    product = (x.astype(np.float64) @ w.astype(np.float64)).astype(F16)
    np.testing.assert_allclose(y, product + b, atol=0.05)


def test_where_a_step_is_cut_changes_nothing(ways, open_model, parse, rng):
    ways.force(True, True)
    driver = open_model(parse("g (float16[1031,3] x) => (float16[1031,3] y) { s = Softmax(x) y = Mul(s, x) }"))
    feeds = {"x": rng.standard_normal((1031, 3)).astype(F16)}
    (whole,) = driver.run(feeds)
    (cut,) = driver.run(feeds, units=1)
    same_bits(whole, cut)


@pytest.mark.parametrize("cpu", [True, False])
def test_what_is_float32_keeps_its_bits_beside_it(ways, parse, rng, cpu):
    model = parse(
        "g (float16[5,7] x, float[5,7] f) => (float[10,7] y, float[5,3] s, float16[15,7] z)"
        " <int64[2] b = {0, 1}, int64[2] e = {5, 4}, float third = {0.3333}>"
        " { w = Cast<to=1>(x) p = Mul(w, third) y = Concat<axis=0>(p, f) s = Slice(p, b, e)"
        " h = Cast<to=10>(f) z = Concat<axis=0>(x, h, x) }"
    )
    x, f = rng.standard_normal((5, 7)).astype(F16), rng.standard_normal((5, 7)).astype(F32)
    y, s, z = ways.run(model, {"x": x, "f": f}, cpu=cpu)
    product = x.astype(F32) * np.float32(0.3333)
    np.testing.assert_array_equal(y, np.concatenate([product, f]))
    np.testing.assert_array_equal(s, product[:, 1:4])
    np.testing.assert_array_equal(z, np.concatenate([x, f.astype(F16), x]))


# --- the plan, without a device -------------------------------------------------------------------


@pytest.fixture
def plan() -> Emission:
    return Emission(Target(f16=True))


def fed(plan: Emission, shape: tuple[int, ...], dtype: Any = F16) -> Tensor:
    tensor = Tensor(np.dtype(dtype), shape)
    plan.new_host(tensor)
    return tensor


def test_two_bytes_an_element_where_the_adapter_can(plan):
    made = plan.storage(fed(plan, (1000,)))
    (upload,) = plan.steps
    assert isinstance(upload, Upload)
    assert (upload.target, made.nbytes, made.half, upload.nbytes) == (made, 2000, True, 2000)
    other = Emission(Target(f16=False))
    assert (other.storage(fed(other, (1000,))).nbytes, other.storage(fed(other, (3,))).half) == (4000, False)
    assert not plan.storage(fed(plan, (3,), F32)).half


def test_kernels_that_look_at_bits_get_f32(plan):
    kernel = Kernel("bits", "store(group, bitcast<f32>(x[lane]));", reads=(Binding("x", "u32"),))
    made = plan.storage(plan.pending(kernel, [plan.storage(fed(plan, (5,)))], {}, 1, F32, (5,)))
    upload, widening, dispatch = plan.steps
    assert isinstance(upload, Upload)
    assert isinstance(widening, Dispatch)
    assert isinstance(dispatch, Dispatch)
    assert widening.reads == (upload.target,)
    assert dispatch.reads == widening.writes
    assert (dispatch.reads[0].half, dispatch.reads[0].nbytes, made.half) == (False, 32, False)


@pytest.mark.parametrize(
    ("first", "second", "places", "copied"),
    [
        (True, True, (0, 0, 6), True),
        (True, True, (2, 4, 8), True),
        (True, True, (1, 0, 6), False),
        (True, True, (0, 3, 6), False),
        (True, True, (0, 0, 5), False),
        (True, False, (0, 0, 6), False),
        (False, True, (0, 0, 6), False),
        (False, False, (1, 3, 5), True),
    ],
)
def test_buffers_are_copied_in_whole_words_only(plan, first, second, places, copied):
    source, target = Storage(64, half=first), Storage(64, half=second)
    plan.copy(source, places[0], target, places[1], places[2])
    (step,) = plan.steps
    if copied:
        each = 2 if first else 4
        assert isinstance(step, Copy)
        assert (step.source_offset, step.target_offset, step.nbytes) == tuple(n * each for n in places)
    else:
        assert isinstance(step, Dispatch)
        assert (step.reads, step.writes) == ((source,), (target,))


def test_weights_that_float16_does_not_have_stay_f32(plan):
    shown = plan.derive(plan.constant(np.arange(9, dtype=F16)), "held", lambda array: array.astype(F32))
    kept = plan.weight(shown, "turned", lambda array: array[::-1])
    scaled = plan.weight(shown, "scaled", lambda array: array * np.float32(1.1))
    nothing = plan.weight(shown, "nan", lambda array: np.full_like(array, np.nan))
    assert [(s.half, s.nbytes) for s in (kept, scaled, nothing)] == [(True, 32), (False, 48), (True, 32)]
    assert kept.fill is not None
    np.testing.assert_array_equal(kept.fill(), [8, 7, 6, 5, 4, 3, 2, 1, 0, 0])
    assert not plan.weight(plan.constant(np.arange(9, dtype=F32)), "plain", lambda array: array).half


@pytest.mark.parametrize("size", [0, 1, 2, 7])
@pytest.mark.parametrize("dtype", [F16, F32])
def test_halves_and_back(size, dtype):
    x = np.arange(size).astype(dtype)
    words = as_words(x, True)
    assert words.nbytes % 4 == 0
    np.testing.assert_array_equal(from_words(bytearray(words.tobytes()[: 2 * size]), dtype, (size,), True), x)
