"""IOBinding: what a run reads and where its outputs stay; nothing goes over the host that need not."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import onnx
import pytest
import trio
from trio.testing import MockClock

import trionnx
from trionnx.actors.fake import FakeModel
from trionnx.gpu.device.device import Device
from trionnx.gpu.seam import TensorInfo

X = np.arange(4, dtype=np.float64)
INPUTS = (TensorInfo("x", "tensor(double)", ("n",), np.dtype(np.float64)),)
SPLIT = "g (float[n,4] x) => (float[n,4] y, float[n,4] z) { y = Neg(x) z = Exp(x) }"


def parse(body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]>\n{body}')


def device_of(session: trionnx.Session) -> Device:
    device: Device = session._actor._engine.device  # type: ignore[attr-defined]
    return device


@asynccontextmanager
async def open_session(source: Any, backend: str = "fake") -> AsyncIterator[trionnx.Session]:
    async with trionnx.open_scheduler(backend=backend) as scheduler:
        yield await scheduler.load(source)


class Traffic:
    """Bytes between host and device since the last look."""

    def __init__(self, session: trionnx.Session) -> None:
        self._device = device_of(session)
        self.look()

    def look(self) -> tuple[int, int]:
        """Bytes uploaded, bytes read back."""
        now = self._device.uploaded, self._device.read_back
        before, self._before = getattr(self, "_before", now), now
        return now[0] - before[0], now[1] - before[1]


@pytest.mark.parametrize("backend", ["webgpu", "cpu"])
async def test_inputs_and_outputs_of_both_kinds(backend: str) -> None:
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    async with open_session(parse(SPLIT), backend) as session:
        binding = session.io_binding()
        binding.bind_cpu_input("x", x)
        binding.bind_output("z", "cpu")
        binding.bind_output("y", "device")
        await session.run_with_iobinding(binding)
        z, y = binding.get_outputs()
        assert isinstance(z, np.ndarray)
        np.testing.assert_allclose(z, np.exp(x), rtol=1e-6)
        assert isinstance(y, trionnx.DeviceTensor)
        for got, want in zip(await binding.copy_outputs_to_cpu(), (np.exp(x), -x), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6)
        binding.bind_ortvalue_input("x", y)
        binding.clear_binding_outputs()
        assert binding.get_outputs() == []
        binding.bind_output("y")
        await session.run_with_iobinding(binding)
        np.testing.assert_array_equal(binding.get_outputs()[0], x)
        binding.clear_binding_inputs()
        with pytest.raises(trionnx.InvalidInput, match=r"'x': expected float32 of shape \(n, 4\), got nothing"):
            await session.run_with_iobinding(binding)
        (plain,) = await session.run(["y"], {"x": y})
        np.testing.assert_array_equal(plain, x)


def test_its_names_are_onnx_runtimes() -> None:
    ort = pytest.importorskip("onnxruntime")
    for name in [name for name in dir(trionnx.IOBinding) if not name.startswith("_")]:
        assert hasattr(ort.IOBinding, name), name
    for name in ("io_binding", "run_with_iobinding"):
        ours, theirs = (inspect.signature(getattr(cls, name)) for cls in (trionnx.Session, ort.InferenceSession))
        assert list(ours.parameters) == list(theirs.parameters)


async def test_what_is_refused_when_it_is_bound() -> None:
    model = parse(
        """g (float[n] x) => (float[n] y, int64[n] i, seq(float[n]) s) {
           y = Neg(x) i = Cast<to=7>(x) s = SequenceConstruct(x) }"""
    )
    async with open_session(model, "webgpu") as session:
        binding = session.io_binding()
        with pytest.raises(trionnx.InvalidInput, match="'w': expected an output of the model: 'y', 'i', 's'"):
            binding.bind_output("w")
        with pytest.raises(ValueError, match="device_type is \"cpu\", \"device\" or 'webgpu', not 'cuda'"):
            binding.bind_output("y", "cuda")
        with pytest.raises(trionnx.InvalidInput, match="'s': expected an output that is a tensor, to stay"):
            binding.bind_output("s", "device")
        with pytest.raises(TypeError, match="a DeviceTensor is bound here, not ndarray; arrays: bind_cpu_input"):
            binding.bind_input("x", np.zeros(3))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no output is bound"):
            await session.run_with_iobinding(binding)
        binding.bind_cpu_input("x", np.zeros(3, np.float32))
        binding.bind_output("y", "webgpu")
        binding.bind_output("s")
        await session.run_with_iobinding(binding)
        y, s = binding.get_outputs()
        assert [item.tolist() for item in s] == [[0, 0, 0]]
        with pytest.raises(TypeError, match="a DeviceTensor is bound here"):
            binding.bind_ortvalue_output("y", s)
        with pytest.raises(trionnx.InvalidInput, match="'i': expected a tensor of int64, got float32"):
            binding.bind_ortvalue_output("i", y)
        with pytest.raises(TypeError, match="iobinding is what io_binding"):
            await session.run_with_iobinding({})  # type: ignore[arg-type]


async def test_two_models_in_a_chain_copy_nothing_to_the_host_in_between() -> None:
    rng = np.random.default_rng(0)
    first = parse("g (float[n,64] x, float[64,64] w) => (float[n,64] y) { a = MatMul(x, w) y = Relu(a) }")
    second = parse("g (float[n,64] y) => (float[n,64] o) { t = Tanh(y) s = Softmax(t) o = Add(s, y) }")
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((50, 64), (64, 64)))
    async with trionnx.open_scheduler(backend="webgpu") as scheduler:
        one = await scheduler.load(first)
        two = await scheduler.load(second, beside=one)
        (y,) = await one.run(None, {"x": x, "w": w})
        (expected,) = await two.run(None, {"y": y})
        into, out = one.io_binding(), two.io_binding()
        traffic = Traffic(one)
        for turn in range(3):
            into.bind_cpu_input("x", x)
            into.bind_cpu_input("w", w)
            into.bind_output("y", "device")
            traffic.look()
            await one.run_with_iobinding(into)
            assert traffic.look() == (x.nbytes + w.nbytes, 0)
            out.bind_input("y", into.get_outputs()[0])
            out.bind_output("o")
            await two.run_with_iobinding(out)
            uploaded, read_back = traffic.look()
            assert uploaded == 0 if turn else uploaded < 1024  # the first plan's parameters
            assert read_back == expected.nbytes
            assert out.get_outputs()[0].tobytes() == expected.tobytes()


async def test_the_state_of_an_rnn_stays_where_it_is() -> None:
    rng = np.random.default_rng(1)
    model = parse(
        """g (float[1,8] x, float[1,8] h, float[8,8] w) => (float[1,8] out, float[1,8] next) {
           m = MatMul(h, w) a = Add(m, x) next = Tanh(a) out = Neg(next) }"""
    )
    w, h0 = rng.standard_normal((8, 8)).astype(np.float32), np.zeros((1, 8), np.float32)
    xs = rng.standard_normal((12, 1, 8)).astype(np.float32)
    async with open_session(model, "webgpu") as session:
        expected, h = [], h0
        for x in xs:
            out, h = await session.run(None, {"x": x, "h": h, "w": w})
            expected.append(out)
        binding = session.io_binding()
        binding.bind_cpu_input("w", w)
        binding.bind_cpu_input("h", h0)
        binding.bind_output("out")
        binding.bind_output("next", "device")
        traffic = Traffic(session)
        states: list[trionnx.DeviceTensor] = []
        for turn, x in enumerate(xs):
            binding.bind_cpu_input("x", x)
            traffic.look()
            await session.run_with_iobinding(binding)
            if turn > 1:
                assert traffic.look() == (w.nbytes + x.nbytes, x.nbytes)
            out, made = binding.get_outputs()
            assert out.tobytes() == expected[turn].tobytes()
            if not states:  # from here on it is written in place
                states.append(made)
                binding.bind_input("h", made)
                binding.bind_ortvalue_output("next", made)
            assert made is states[0]
        assert (await states[0].numpy()).tobytes() == h.tobytes()
        assert session.statistics().tensors == 1


async def test_a_cache_of_keys_and_values_grows_on_the_device() -> None:
    rng = np.random.default_rng(2)
    model = parse(
        """g (float[1,8] x, float[t,8] past) => (float[1,8] out, float[u,8] present) {
           present = Concat<axis=0>(past, x) k = Transpose<perm=[1,0]>(present)
           scores = MatMul(x, k) p = Softmax<axis=-1>(scores) out = MatMul(p, present) }"""
    )
    xs = rng.standard_normal((12, 1, 8)).astype(np.float32)
    async with open_session(model, "webgpu") as session:
        expected, past = [], np.zeros((0, 8), np.float32)
        for x in xs:
            out, past = await session.run(None, {"x": x, "past": past})
            expected.append(out)
        caches: list[trionnx.DeviceTensor] = []
        for round_ in range(2):
            binding = session.io_binding()
            binding.bind_cpu_input("past", np.zeros((0, 8), np.float32))
            binding.bind_output("out")
            binding.bind_output("present", "device")
            traffic = Traffic(session)
            for turn, x in enumerate(xs):
                binding.bind_cpu_input("x", x)
                traffic.look()
                await session.run_with_iobinding(binding)
                out, cache = binding.get_outputs()
                assert out.tobytes() == expected[turn].tobytes()
                assert cache.shape == (turn + 1, 8)
                uploaded, read_back = traffic.look()
                assert read_back == out.nbytes
                assert uploaded >= x.nbytes
                if turn == 0:
                    binding.bind_input("past", cache)
                    binding.bind_ortvalue_output("present", cache)
            assert (await cache.numpy()).tobytes() == past.tobytes()
            assert session.statistics().tensors == 1 + round_
            caches.append(cache)
        caches[0].close()
        assert session.statistics().tensor_bytes == past.nbytes


async def test_a_tensor_is_the_output_of_one_run_at_a_time(autojump_clock: MockClock) -> None:
    model = FakeModel(inputs=INPUTS)
    async with open_session(model) as session, trio.open_nursery() as nursery:
        binding, other = session.io_binding(), session.io_binding()
        binding.bind_cpu_input("x", X)
        binding.bind_output("y", "device")
        await session.run_with_iobinding(binding)
        (tensor,) = binding.get_outputs()
        before = await tensor.numpy()
        binding.bind_ortvalue_output("y", tensor)
        with pytest.raises(trionnx.InvalidInput, match="'trace': expected a tensor of int64"):
            binding.bind_ortvalue_output("trace", tensor)
        nursery.start_soon(session.run_with_iobinding, binding)
        await trio.sleep(0.001)
        other.bind_cpu_input("x", X)
        other.bind_ortvalue_output("y", tensor)
        with pytest.raises(trio.BusyResourceError, match="the tensor for 'y' is an output of another run"):
            await session.run_with_iobinding(other)
        await trio.sleep(1)
        np.testing.assert_array_equal(await tensor.numpy(), before)
        other.bind_cpu_input("x", 2 * X)
        await session.run_with_iobinding(other)
        np.testing.assert_array_equal(await tensor.numpy(), model.expected({"x": 2 * X})["y"])
        assert other.get_outputs() == [tensor]
        assert len(model.engines[0].kept) == 1


async def test_a_binding_that_is_refused_leaves_no_run_behind(autojump_clock: MockClock) -> None:
    async with open_session(FakeModel(inputs=INPUTS)) as session:
        binding, other = session.io_binding(), session.io_binding()
        binding.bind_cpu_input("x", X)
        binding.bind_output("y", "device")
        await session.run_with_iobinding(binding)
        (tensor,) = binding.get_outputs()
        for one in (binding, other):
            one.bind_cpu_input("x", X)
            one.bind_ortvalue_output("y", tensor)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.run_with_iobinding, binding)
            await trio.sleep(0.001)
            with pytest.raises(trio.BusyResourceError):
                await session.run_with_iobinding(other)
        other.bind_cpu_input("x", X.reshape(2, 2))
        with pytest.raises(trionnx.InvalidInput):
            await session.run_with_iobinding(other)
        other.bind_cpu_input("x", X)
        await session.run_with_iobinding(other)  # what was refused holds the tensor no more
        tensor.close()
        with pytest.raises(trio.ClosedResourceError):
            await session.run_with_iobinding(other)
        assert session.statistics().queued == 0
        with trio.fail_after(1):
            await session.aclose()


async def test_one_tensor_for_two_outputs_is_refused() -> None:
    async with open_session(parse(SPLIT), "webgpu") as session:
        binding = session.io_binding()
        binding.bind_cpu_input("x", np.zeros((1, 4), np.float32))
        binding.bind_output("y", "device")
        await session.run_with_iobinding(binding)
        (tensor,) = binding.get_outputs()
        binding.bind_ortvalue_output("y", tensor)
        binding.bind_ortvalue_output("y", tensor)
        with pytest.raises(trionnx.InvalidInput, match="'z': expected a tensor of its own, got the one"):
            binding.bind_ortvalue_output("z", tensor)


@pytest.mark.parametrize("at", [0.0, 0.002, 0.01, 0.03, 0.052, 0.056, 0.07])
async def test_a_run_that_is_cancelled_leaves_a_bound_tensor_as_it_was(autojump_clock: MockClock, at: float) -> None:
    model = FakeModel(inputs=INPUTS, begin_s=0.001, read_s=0.01, end_s=0.001)
    async with open_session(model) as session:
        binding = session.io_binding()
        binding.bind_cpu_input("x", X)
        binding.bind_output("y", "device")
        await session.run_with_iobinding(binding)
        (tensor,) = binding.get_outputs()
        binding.bind_cpu_input("x", 3 * X)
        binding.bind_ortvalue_output("y", tensor)
        with trio.move_on_after(at) as scope:
            await session.run_with_iobinding(binding)
        assert scope.cancelled_caught == (at < 0.07)
        want = X if scope.cancelled_caught else 3 * X
        np.testing.assert_array_equal(await tensor.numpy(), model.expected({"x": want})["y"])
        assert len(model.engines[0].kept) == session.statistics().tensors == 1
        await session.run_with_iobinding(binding)
        np.testing.assert_array_equal(await tensor.numpy(), model.expected({"x": 3 * X})["y"])


async def test_a_run_reads_what_a_tensor_owns_when_its_turn_comes(autojump_clock: MockClock) -> None:
    model = FakeModel(inputs=INPUTS)
    async with open_session(model) as session, trio.open_nursery() as nursery:
        binding = session.io_binding()
        binding.bind_cpu_input("x", X)
        binding.bind_output("y", "device")
        await session.run_with_iobinding(binding)
        (tensor,) = binding.get_outputs()
        binding.bind_ortvalue_output("y", tensor)
        binding.bind_input("x", tensor)
        for _ in range(3):
            nursery.start_soon(session.run, None, {"x": tensor})
            await trio.sleep(0.001)
        await session.run_with_iobinding(binding)
        once = model.expected({"x": X})["y"]
        twice = model.expected({"x": once})["y"]
        np.testing.assert_array_equal(await tensor.numpy(), twice)
        np.testing.assert_array_equal((await session.run(["y"], {"x": tensor}))[0], model.expected({"x": twice})["y"])
        assert len(model.engines[0].kept) == 1


async def test_closing_a_bound_tensor_during_its_run_keeps_it_closed(autojump_clock: MockClock) -> None:
    model = FakeModel(inputs=INPUTS)
    async with open_session(model) as session, trio.open_nursery() as nursery:
        binding = session.io_binding()
        binding.bind_cpu_input("x", X)
        binding.bind_output("y", "device")
        await session.run_with_iobinding(binding)
        (tensor,) = binding.get_outputs()
        binding.bind_ortvalue_output("y", tensor)
        nursery.start_soon(session.run_with_iobinding, binding)
        await trio.sleep(0.01)
        tensor.close()
        await trio.sleep(1)
        assert tensor.closed
        assert len(model.engines[0].kept) == session.statistics().tensors == 0
        with pytest.raises(trio.ClosedResourceError):
            await session.run_with_iobinding(binding)
        other = session.io_binding()
        other.bind_cpu_input("x", X)
        other.bind_output("y", "device")
        await session.run_with_iobinding(other)


async def test_a_tensor_of_a_neighbour_may_be_bound_and_changes_hands(autojump_clock: MockClock) -> None:
    model = FakeModel(inputs=INPUTS)
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        one = await scheduler.load(model)
        two = await scheduler.load(model, beside=one)
        apart = await scheduler.load(FakeModel(inputs=INPUTS))
        binding = one.io_binding()
        binding.bind_cpu_input("x", X)
        binding.bind_output("y", "device")
        await one.run_with_iobinding(binding)
        (tensor,) = binding.get_outputs()
        with pytest.raises(ValueError, match="the binding is another session's"):
            await two.run_with_iobinding(binding)
        with pytest.raises(trionnx.InvalidInput, match="'y': expected a tensor of this session or of one"):
            apart.io_binding().bind_ortvalue_output("y", tensor)
        into = two.io_binding()
        into.bind_input("x", tensor)
        into.bind_ortvalue_output("y", tensor)
        await two.run_with_iobinding(into)
        assert (one.statistics().tensors, two.statistics().tensors) == (0, 1)
        await one.aclose()
        twice = model.expected({"x": model.expected({"x": X})["y"]})["y"]
        np.testing.assert_array_equal(await tensor.numpy(), twice)


@pytest.mark.parametrize("seed", range(2))
async def test_real_runs_that_are_cancelled_anywhere_leak_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = parse(
        """g (float[n,256] x, float[256,256] w) => (float[n,256] y) {
           a = MatMul(x, w) b = MatMul(a, w) y = Tanh(b) }"""
    )
    x, w = (rng.standard_normal(shape).astype(np.float32) / 16 for shape in ((256, 256), (256, 256)))
    async with open_session(model, "webgpu") as session:
        binding = session.io_binding()
        binding.bind_cpu_input("x", x)
        binding.bind_cpu_input("w", w)
        binding.bind_output("y", "device")
        await session.run_with_iobinding(binding)
        (state,) = binding.get_outputs()
        expected = await state.numpy()
        binding.bind_ortvalue_output("y", state)
        start = trio.current_time()
        await session.run_with_iobinding(binding)
        took_s = trio.current_time() - start
        await state.numpy()  # behind what was given back
        bytes_ = device_of(session).bytes
        for _ in range(15):
            with trio.move_on_after(float(rng.uniform(0, 1.2 * took_s))):
                await session.run_with_iobinding(binding)
            assert (await state.numpy()).tobytes() == expected.tobytes()
            assert device_of(session).bytes == bytes_
        await session.run_with_iobinding(binding)
        assert (await state.numpy()).tobytes() == expected.tobytes()
        assert device_of(session).bytes == bytes_
