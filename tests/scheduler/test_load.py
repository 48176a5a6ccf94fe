from __future__ import annotations

import functools
import io
import pathlib
from typing import Any

import pytest
import trio
from onnx import TensorProto, helper
from trio.testing import MockClock

import trionnx
from trionnx.actors.fake import FakeEngine, FakeModel
from trionnx.gpu.errors import InvalidInput, InvalidModel
from trionnx.gpu.seam import Load


@pytest.mark.parametrize("at", [0.0, 0.3, 0.75, 0.999])
async def test_a_cancelled_load_leaves_nothing_behind(autojump_clock: MockClock, at: float) -> None:
    model = FakeModel(load_s=1.0)
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        with trio.move_on_after(at) as scope:
            await scheduler.load(model)
        assert scope.cancelled_caught
        assert trio.current_time() == pytest.approx(at)
        for engine in model.engines:
            assert engine._gone
        session = await scheduler.load(model)
        assert len(await session.run(["y"], {"x": [1]})) == 1


async def test_a_load_that_hangs_is_abandoned(autojump_clock: MockClock) -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        with trio.move_on_after(1) as scope:
            await scheduler.load(FakeModel(hangs={"load"}))
        assert scope.cancelled_caught
        assert trio.current_time() == pytest.approx(11)


async def test_a_load_that_times_out_is_told_apart(autojump_clock: MockClock) -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        with pytest.raises(trio.TooSlowError), trio.fail_after(0.5):
            await scheduler.load(FakeModel(load_s=1))


async def test_a_load_that_fails_closes_the_engine(autojump_clock: MockClock) -> None:
    model = FakeModel(failures={"load": InvalidModel("model.onnx: truncated")})
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        with pytest.raises(InvalidModel, match=r"model\.onnx: truncated"):
            await scheduler.load(model)
        assert model.engines[0]._gone
        assert len(await (await scheduler.load(model)).run(["y"], {"x": [1]})) == 1


async def test_progress_of_a_load(autojump_clock: MockClock) -> None:
    told: list[tuple[str, int, int, float]] = []

    def on_progress(phase: str, done: int, total: int) -> None:
        told.append((phase, done, total, trio.current_time()))

    async with trionnx.open_scheduler(backend="fake") as scheduler:
        await scheduler.load(FakeModel(load_s=4.0), on_progress=on_progress)
    assert told == [("compile", done, 4, float(done)) for done in range(5)]


async def test_what_on_progress_raises_ends_the_load(autojump_clock: MockClock) -> None:
    def on_progress(phase: str, done: int, total: int) -> None:
        if done == 2:
            raise LookupError("mine")

    model = FakeModel(load_s=4.0)
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        with pytest.raises(LookupError, match="mine"):
            await scheduler.load(model, on_progress=on_progress)
        assert model.engines[0]._gone
        assert trio.current_time() == pytest.approx(2.0)


async def test_a_session_lives_beyond_the_scope_that_loaded_it(autojump_clock: MockClock) -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        sessions = []
        with trio.CancelScope() as scope:
            sessions.append(await scheduler.load(FakeModel()))
            scope.cancel()
        assert len(await sessions[0].run(["y"], {"x": [1]})) == 1


async def test_sources(engines: dict[str, Any], tmp_path: pathlib.Path) -> None:
    loads: list[Load] = []

    class Spy(FakeEngine):
        def load(self, request: Load, done: Any, progress: Any) -> None:
            loads.append(request)
            super().load(request, done, progress)

    def factory(*, adapter: str | int | None, max_in_flight: int) -> Spy:
        return Spy(adapter, max_in_flight)

    trionnx.register_engine("fake", factory)
    path = tmp_path / "model.onnx"
    path.write_bytes(b"model")
    proto = object()
    async with trionnx.open_scheduler(backend="fake") as scheduler, await trio.open_file(path, "rb") as trios:
        with path.open("rb") as file:
            for source in (path, str(path), trio.Path(path), b"model", io.BytesIO(b"model"), file, trios, proto):
                await scheduler.load(source)
        assert [load.source for load in loads] == [str(path)] * 3 + [b"model"] * 4 + [proto]
        with path.open() as text, pytest.raises(TypeError, match="gives bytes, not str; open it in mode 'rb'"):
            await scheduler.load(text)
        await scheduler.load(path, input_shapes={"x": [1, 2]}, allow_host_steps=False, cpu_threads=3)
        assert loads[-1] == Load(str(path), {"x": (1, 2)}, False, 3)


async def asynchronous(*_: object) -> None:
    raise AssertionError("nobody awaits it")


class Asynchronous:
    __call__ = asynchronous


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"input_shapes": [1, 2]}, TypeError, "input_shapes is a dict of shapes by name, not list"),
        ({"input_shapes": {1: [2]}}, TypeError, "input_shapes: a name is a string, not int"),
        *(
            ({"input_shapes": {"x": shape}}, TypeError, f"'x' is a sequence of whole numbers, not {shape!r}")
            for shape in ("abc", 3, [2.5], [None], [True])
        ),
        ({"input_shapes": {"x": [1, -1]}}, ValueError, "the shape of 'x' has a negative size: (1, -1)"),
        ({"cpu_threads": -3}, ValueError, "cpu_threads is at least 1, not -3"),
        ({"cpu_threads": "2"}, TypeError, "cpu_threads is a whole number, not '2'"),
        ({"adapter": [0]}, TypeError, "adapter is an index, a part of a name or None, not list"),
        ({"on_progress": 3}, TypeError, "on_progress is a function or None, not int"),
        ({"on_progress": asynchronous}, TypeError, "on_progress is a plain function, not an async one"),
        ({"on_progress": functools.partial(asynchronous, 1)}, TypeError, "on_progress is a plain function"),
        ({"on_progress": Asynchronous()}, TypeError, "on_progress is a plain function"),
    ],
)
async def test_arguments_of_a_wrong_kind(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    model = FakeModel()
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        with pytest.raises(error) as caught:
            await scheduler.load(model, **arguments)
        assert message in str(caught.value)
        assert model.engines == []


@pytest.mark.parametrize("callback", [3, asynchronous])
def test_a_runs_on_progress_is_a_plain_function(callback: Any) -> None:
    with pytest.raises(TypeError, match="on_progress is a "):
        trionnx.RunOptions(on_progress=callback)
    options = trionnx.RunOptions(on_progress=print)
    with pytest.raises(TypeError, match="on_progress is a "):
        options.on_progress = callback
    assert options.on_progress is print
    options.on_progress = None


async def test_an_empty_path_is_no_file() -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        with pytest.raises(FileNotFoundError):
            await scheduler.load("")


@pytest.mark.parametrize("backend", ["cpu", "webgpu"])
@pytest.mark.parametrize(
    ("shapes", "name", "expected", "got"),
    [
        ({"z": [1]}, "z", "an input of the model: 'x'", "a name that it does not have"),
        ({"x": [3]}, "x", "shape (n, 3)", "(3)"),
        ({"x": [2, 4]}, "x", "shape (n, 3)", "(2, 4)"),
    ],
)
async def test_shapes_that_the_model_does_not_take(
    backend: str, shapes: dict[str, list[int]], name: str, expected: str, got: str
) -> None:
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 3]) for n in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", infos[:1], infos[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    async with trionnx.open_scheduler(backend=backend) as scheduler:
        with pytest.raises(InvalidInput) as caught:
            await scheduler.load(model, input_shapes=shapes)
    assert (caught.value.name, caught.value.expected, caught.value.got) == (name, expected, got)
