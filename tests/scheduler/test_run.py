"""What a run gives, on an engine that plays its part by Trio's clock."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock, assert_checkpoints, wait_all_tasks_blocked

import trionnx
from trionnx.actors.fake import FakeModel
from trionnx.gpu.errors import DeviceLost, InvalidData, InvalidInput
from trionnx.gpu.seam import StepView, TensorInfo
from trionnx.scheduler.governor import governor_of
from trionnx.scheduler.run import AHEAD

Feed = dict[str, np.ndarray[Any, Any]]
MIXED = (
    (StepView("gpu", cost_s=0.002),) * 4 + (StepView("host", cost_s=0.001),) + (StepView("gpu", 64, 0.03, 4),),
    (StepView("host"), StepView("gpu", cost_s=0.004)),
    (StepView("gpu", 7, 0.02, 2), StepView("opaque", cost_s=0.05)),
)


def same(got: list[Any], model: FakeModel, feed: Feed) -> bool:
    expected = model.expected(feed)
    return all(np.array_equal(a, b) for a, b in zip(got, (expected["y"], expected["trace"]), strict=True))


@pytest.mark.parametrize("dynamic", [frozenset(), {0}, {1}, {0, 1}, {0, 1, 2}])
@pytest.mark.parametrize("max_in_flight", [1, 2, 5])
async def test_every_unit_is_executed_once_and_in_order(
    autojump_clock: MockClock, feed: Feed, dynamic: set[int], max_in_flight: int
) -> None:
    model = FakeModel(MIXED, frozenset(dynamic))
    async with trionnx.open_scheduler(backend="fake", max_in_flight=max_in_flight) as scheduler:
        session = await scheduler.load(model)
        for _ in range(2):
            assert same(await session.run(None, feed), model, feed)
        assert model.engines[0].at_rest


async def test_outputs_by_name_and_order(autojump_clock: MockClock, feed: Feed) -> None:
    model = FakeModel()
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        trace, y, again = await session.run(["trace", "y", "trace"], feed)
        assert same([y, trace], model, feed)
        assert same([y, again], model, feed)
        assert len(await session.run(["y"], feed)) == 1


@pytest.mark.parametrize("contended", [False, True])
async def test_few_more_than_max_in_flight_are_handed_over(
    autojump_clock: MockClock, feed: Feed, contended: bool
) -> None:
    models = [FakeModel() for _ in range(1 + contended)]
    async with trionnx.open_scheduler(backend="fake", max_in_flight=2) as scheduler, trio.open_nursery() as nursery:
        for model in models:
            nursery.start_soon((await scheduler.load(model)).run, None, feed)
    log = sorted(line for model in models for line in model.engines[0].log)
    flying, most = 0, []
    for line in log:
        flying += {"handed": 1, "finish": -1, "drop": -1}.get(line.what, 0)
        most.append(flying)
    assert max(most) <= 2 + AHEAD
    if not contended:
        assert max(most) == 2 + AHEAD
    else:
        assert max(most[len(most) // 3 : len(most) * 2 // 3]) == 2


async def test_the_queue_never_runs_dry(autojump_clock: MockClock, feed: Feed) -> None:
    model = FakeModel()
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        start = trio.current_time()
        await session.run(None, feed)
        assert trio.current_time() - start == pytest.approx(10 * 0.005)


async def test_progress(autojump_clock: MockClock, feed: Feed) -> None:
    told: list[tuple[int, int]] = []
    options = trionnx.RunOptions(on_progress=lambda done, total: told.append((done, total)))
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        await (await scheduler.load(FakeModel())).run(None, feed, options)
        assert told == [(done, 10) for done in range(1, 11)]

        told.clear()
        await (await scheduler.load(FakeModel(MIXED, frozenset({0})))).run(None, feed, options)
        totals = [total for _, total in told]
        assert [done for done, _ in told] == list(range(1, len(told) + 1))
        assert totals == sorted(totals)
        assert totals[0] < totals[-1] == len(told)


async def test_what_on_progress_raises_stops_the_run_and_leaves_it(autojump_clock: MockClock, feed: Feed) -> None:
    def on_progress(done: int, total: int) -> None:
        if done == 4:
            raise LookupError("mine")

    model = FakeModel()
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        with pytest.raises(LookupError, match="mine"):
            await session.run(None, feed, trionnx.RunOptions(on_progress=on_progress))
        assert model.engines[0].at_rest
        assert session.statistics().segments_finished < 10
        assert same(await session.run(None, feed), model, feed)


async def test_concurrent_runs_of_a_session_queue_in_order(autojump_clock: MockClock) -> None:
    model = FakeModel()
    order = []

    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)

        async def one(number: int) -> None:
            feed = {"x": np.full(2, number, np.float32)}
            assert same(await session.run(None, feed), model, feed)
            order.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(one, number)
                await wait_all_tasks_blocked()
            assert session.statistics().queued == 3
            assert scheduler.statistics().queued == 3
        assert order == [0, 1, 2, 3]
        assert session.statistics() == trionnx.Statistics(4, 0, 40, 40, 0)

    # Begin to end of one run, then the next.
    whose = [line.run for line in model.engines[0].log if line.run >= 0]
    assert whose == sorted(whose)


async def test_sessions_on_one_adapter_take_turns(autojump_clock: MockClock, feed: Feed) -> None:
    models = [FakeModel(((StepView("gpu", cost_s=0.005),) * 30,)) for _ in range(3)]
    done = [0, 0, 0]

    async def one(number: int, session: trionnx.Session) -> None:
        def on_progress(count: int, _: int) -> None:
            done[number] = count
            assert governor_of("fake: fake").state.in_flight <= 2 + AHEAD
            # Turns go to who asks first, and who asks first within a tick is random: nobody falls far behind.
            assert max(done) - min(done) <= 15

        assert same(await session.run(None, feed, trionnx.RunOptions(on_progress=on_progress)), models[number], feed)

    async with trionnx.open_scheduler(backend="fake") as scheduler:
        sessions = [await scheduler.load(model) for model in models]
        async with trio.open_nursery() as nursery:
            for number, session in enumerate(sessions):
                nursery.start_soon(one, number, session)
    assert done == [30, 30, 30]
    assert governor_of("fake: fake").state.held == {}


async def test_a_low_priority_ends_within_its_aging_bound(autojump_clock: MockClock, feed: Feed) -> None:
    """Others of a high priority run without end: each segment waits `aging_s`, and for one in flight."""
    models = [FakeModel(((StepView("gpu", cost_s=0.005),) * 8,)) for _ in range(4)]
    async with trionnx.open_scheduler(backend="fake", aging_s=0.3, max_in_flight=1) as scheduler:
        low, *high = [await scheduler.load(model) for model in models]

        async def busy(session: trionnx.Session) -> None:
            while True:
                await session.run(None, feed, trionnx.RunOptions(priority=5))

        async with trio.open_nursery() as nursery:
            for session in high:
                nursery.start_soon(busy, session)
            await trio.sleep(0.1)
            begin = trio.current_time()
            assert same(await low.run(None, feed), models[0], feed)
            took_s = trio.current_time() - begin
            nursery.cancel_scope.cancel()
        assert 8 * 0.3 <= took_s <= 8 * (0.3 + 2 * 0.005)


async def test_sessions_on_two_adapters_do_not_wait_for_each_other(autojump_clock: MockClock, feed: Feed) -> None:
    models = [FakeModel(adapter=name) for name in ("a", "b")]
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        sessions = [await scheduler.load(model) for model in models]
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            for session in sessions:
                nursery.start_soon(session.run, None, feed)
        assert trio.current_time() - start == pytest.approx(0.05)


@pytest.mark.parametrize("key", ["begin", "read", 0, 3, 9])
async def test_an_engines_error_leaves_the_run_and_the_session_stays_usable(
    autojump_clock: MockClock, feed: Feed, key: str | int
) -> None:
    model = FakeModel(failures={key: InvalidData("Gather_7", "index 9 of 4")})
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        with pytest.raises(InvalidData, match="node 'Gather_7': index 9 of 4"):
            await session.run(None, feed)
        assert model.engines[0].at_rest
        assert same(await session.run(None, feed), model, feed)


async def test_an_error_is_not_kept_waiting_for_a_turn(autojump_clock: MockClock, feed: Feed) -> None:
    failing = FakeModel(((StepView("gpu", cost_s=0.5),) * 9,), failures={0: DeviceLost("gone")})
    busy = FakeModel(((StepView("gpu", cost_s=10.0),) * 9,))
    async with trionnx.open_scheduler(backend="fake", max_in_flight=1) as scheduler, trio.open_nursery() as nursery:
        session, *others = [await scheduler.load(model) for model in (failing, busy, busy)]

        async def others_come() -> None:
            await trio.sleep(0.1)
            for other in others:
                nursery.start_soon(other.run, None, feed)

        # What the failing run has handed over ahead is recalled; the others get its turns.
        nursery.start_soon(others_come)
        with pytest.raises(DeviceLost):
            await session.run(None, feed)
        assert trio.current_time() == pytest.approx(0.5)
        nursery.cancel_scope.cancel()


async def test_an_engine_that_decides_nothing_is_not_waited_for(autojump_clock: MockClock, feed: Feed) -> None:
    class Undecided(FakeModel):
        def view(self, activation: int = 0) -> Any:
            return None if activation else super().view()

    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(Undecided(dynamic=frozenset({0})))
        with pytest.raises(RuntimeError, match="the engine decided nothing"):
            await session.run(None, feed)


async def test_an_end_that_fails_does_not_cost_the_outputs(autojump_clock: MockClock, feed: Feed) -> None:
    model = FakeModel(failures={"end": DeviceLost("gone")})
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        assert same(await session.run(None, feed), model, feed)


async def test_wrong_inputs_are_refused_before_anything_is_sent(autojump_clock: MockClock, feed: Feed) -> None:
    model = FakeModel()
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        for names, wrong in (
            (None, {}),
            (None, {"y": feed["x"]}),
            (None, {"x": feed["x"].astype(np.float64)}),
            (None, {"x": feed["x"][None]}),
            (["nothing"], feed),
        ):
            with pytest.raises(InvalidInput):
                await session.run(names, wrong)
        with pytest.raises(TypeError, match=r"run_options is a trionnx\.RunOptions or None, not dict"):
            await session.run(None, feed, {})  # type: ignore[arg-type]
        assert [line.what for line in model.engines[0].log] == ["load"]
        assert session.statistics().runs == 0


async def test_feeds_arrive_contiguous_also_large_ones(feed: Feed) -> None:
    declared = (TensorInfo("x", "tensor(float)", ("h", "w"), np.dtype(np.float32)),)
    model = FakeModel(inputs=declared)
    turned = np.arange(2**20, dtype=np.float32).reshape(1024, 1024).T
    seen = []

    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(model)
        engine, begin = model.engines[0], model.engines[0].begin

        def spy(request: Any, done: Any) -> None:
            seen.append(request.feeds["x"])
            begin(request, done)

        engine.begin = spy  # type: ignore[method-assign]
        for array in (turned, turned[:8, :8]):
            (y,) = await session.run(["y"], {"x": array})
            assert y.shape == array.shape
            assert seen[-1].flags.c_contiguous
            assert np.array_equal(seen[-1], array)


async def test_what_a_session_tells_of_its_model(autojump_clock: MockClock) -> None:
    overridable = (TensorInfo("w", "tensor(float)", (1,), np.dtype(np.float32)),)
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session = await scheduler.load(FakeModel(adapter="Toy 3000", overridable=overridable))
        assert [(info.name, info.type, info.shape) for info in session.get_inputs()] == [("x", "tensor(float)", ("n",))]
        assert [info.name for info in session.get_outputs()] == ["y", "trace"]
        assert [info.name for info in session.get_overridable_initializers()] == ["w"]
        assert session.get_modelmeta().graph_name == "fake"
        assert session.get_providers() == ["FakeProvider"]
        assert (session.backend, session.adapter) == ("fake", "Toy 3000")
        assert len(session.explain()) == 10
        assert repr(session) == "<trionnx.Session 'fake' on fake, Toy 3000: open>"


async def test_every_way_that_ends_well_passes_a_checkpoint(autojump_clock: MockClock, feed: Feed) -> None:
    with assert_checkpoints():
        manager = trionnx.open_scheduler(backend="fake")
        scheduler = await manager.__aenter__()
    with assert_checkpoints():
        session = await scheduler.load(FakeModel())
    with assert_checkpoints():
        await session.run(None, feed)
    with assert_checkpoints():
        await session.aclose()
    with assert_checkpoints():
        await session.aclose()
    with assert_checkpoints():
        await scheduler.aclose()
    with assert_checkpoints():
        await scheduler.aclose()
    with assert_checkpoints():
        await manager.__aexit__(None, None, None)


async def test_what_was_done_is_counted_beyond_a_sessions_end(autojump_clock: MockClock, feed: Feed) -> None:
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        session, other = await scheduler.load(FakeModel()), await scheduler.load(FakeModel())
        await session.run(None, feed)
        await session.aclose()
        await other.run(None, feed)
        assert scheduler.statistics() == trionnx.Statistics(2, 0, 20, 20, 0)
