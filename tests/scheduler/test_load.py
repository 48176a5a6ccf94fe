from __future__ import annotations

import io
import pathlib
from typing import Any

import pytest
import trio
from trio.testing import MockClock

import trionnx
from trionnx.actors.fake import FakeEngine, FakeModel
from trionnx.gpu.errors import InvalidModel
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
