"""`TerminatePolicy`: its fields, which of them wins, and that every engine in the registry obeys each of them.

The engines come from the registry and the fields from the class: a new engine is tried as it is, and a field
without a check fails. What a check sees it sees through the public API, and through the engine's own `Ended`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import onnx
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

import trionnx
from trionnx import DeviceHung, RunTerminated, TerminatePolicy
from trionnx.actors.fake import FakeEngine, FakeModel
from trionnx.gpu.engine import Engine
from trionnx.gpu.seam import (
    Begin,
    Counts,
    Done,
    Ended,
    Explained,
    Fenced,
    Load,
    Loaded,
    Progress,
    Read,
    Reply,
    Segment,
    StepView,
)
from trionnx.scheduler import backends

Feed = dict[str, np.ndarray[Any, Any]]
FIELDS = [field.name for field in dataclasses.fields(TerminatePolicy)]
LIMIT_S = 300

# --- the fields -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("split_into_checkpoints", 1, TypeError, "split_into_checkpoints is True or False, not int"),
        ("poll_after", "every_node", ValueError, "poll_after is 'every_subgraph' or 'every_op', not 'every_node'"),
        ("poll_after", None, ValueError, "not None"),
        ("checkpoint_interval_s", 0, ValueError, "checkpoint_interval_s is a number of seconds, more than 0, not 0"),
        ("checkpoint_interval_s", -1.0, ValueError, "more than 0, not -1.0"),
        ("checkpoint_interval_s", math.nan, ValueError, "more than 0, not nan"),
        ("checkpoint_interval_s", "5", TypeError, "checkpoint_interval_s is a number, not str"),
        ("checkpoint_interval_s", True, TypeError, "checkpoint_interval_s is a number, not bool"),
        ("max_in_flight", 0, ValueError, "max_in_flight is at least 1, not 0"),
        ("max_in_flight", 2.0, TypeError, "max_in_flight is a whole number, not float"),
        ("max_in_flight", True, TypeError, "max_in_flight is a whole number, not bool"),
        ("on_terminate", "raise", ValueError, "on_terminate is 'throw_cancel' or 'stop_submit', not 'raise'"),
        ("drain_timeout_s", -0.1, ValueError, "drain_timeout_s is a number of seconds, at least 0, not -0.1"),
        ("drain_timeout_s", math.nan, ValueError, "at least 0, not nan"),
        ("drain_timeout_s", None, TypeError, "drain_timeout_s is a number, not NoneType"),
        ("hang_timeout_s", 0, ValueError, "hang_timeout_s is a number of seconds, more than 0, not 0"),
        ("hang_timeout_s", [1], TypeError, "hang_timeout_s is a number, not list"),
    ],
)
def test_values_that_are_refused(field: str, value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        TerminatePolicy(**{field: value})  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_every_field_is_checked_and_frozen() -> None:
    for field in FIELDS:
        with pytest.raises((TypeError, ValueError), match=field):
            TerminatePolicy(**{field: object()})  # type: ignore[arg-type]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(TerminatePolicy(), field, 1)
    with pytest.raises(TypeError):
        TerminatePolicy(True)  # type: ignore[call-arg]


positive = st.floats(min_value=1e-6, allow_nan=False) | st.integers(1, 100)
policies = st.builds(
    TerminatePolicy,
    split_into_checkpoints=st.booleans(),
    poll_after=st.sampled_from(["every_subgraph", "every_op"]),
    checkpoint_interval_s=positive,
    max_in_flight=st.integers(1, 9),
    on_terminate=st.sampled_from(["throw_cancel", "stop_submit"]),
    drain_timeout_s=positive | st.just(0),
    hang_timeout_s=positive,
)


@given(policies)
def test_a_policy_as_a_dict_and_in_words(policy: TerminatePolicy) -> None:
    assert list(policy.as_dict()) == FIELDS
    assert TerminatePolicy(**policy.as_dict()) == policy
    assert hash(TerminatePolicy(**policy.as_dict())) == hash(policy)
    lines = policy.describe().splitlines()
    assert [line.split(" = ")[0] for line in lines] == FIELDS
    for field, value, line in zip(FIELDS, policy.as_dict().values(), lines, strict=True):
        assert line.startswith(f"{field} = {value!r}: ")
        assert "NOT HONOURED" not in line
    limited = policy.describe({"poll_after": "it looks away.", "unknown": "?"}).splitlines()
    assert limited[1] == lines[1] + " NOT HONOURED HERE: it looks away."
    assert limited[:1] + limited[2:] == lines[:1] + lines[2:]


def test_each_value_that_has_a_meaning_of_its_own_is_told_in_other_words() -> None:
    changes: dict[str, Any] = {
        "split_into_checkpoints": False,
        "poll_after": "every_op",
        "checkpoint_interval_s": 0.05,
        "max_in_flight": 1,
        "on_terminate": "stop_submit",
        "drain_timeout_s": 7,
        "hang_timeout_s": 8,
    }
    assert list(changes) == FIELDS
    before = TerminatePolicy().describe().splitlines()
    for number, (field, value) in enumerate(changes.items()):
        after = TerminatePolicy(**{field: value}).describe().splitlines()
        assert [a == b for a, b in zip(before, after, strict=True)] == [n != number for n in range(len(FIELDS))]
        assert before[number].split(": ", 1)[1] != after[number].split(": ", 1)[1]


# --- which one wins ---------------------------------------------------------------------------------


async def test_options_win_over_the_session_and_that_over_the_scheduler(
    autojump_clock: MockClock, feed: Feed
) -> None:
    def steps(count: int) -> TerminatePolicy:
        return TerminatePolicy(checkpoint_interval_s=0.005 * count)

    async with trionnx.open_scheduler(backend="fake", policy=steps(5)) as scheduler:
        session, own = await scheduler.load(FakeModel()), await scheduler.load(FakeModel(), policy=steps(2))
        assert (session.policy, own.policy) == (steps(5), steps(2))
        for one, options, segments in (
            (session, None, 2),
            (own, None, 5),
            (own, trionnx.RunOptions(policy=steps(10)), 1),
            (session, trionnx.RunOptions(), 2),
        ):
            before = one.statistics().segments_submitted
            await one.run(None, feed, options)
            assert one.statistics().segments_submitted - before == segments
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        assert (await scheduler.load(FakeModel())).policy == TerminatePolicy()


@pytest.mark.parametrize(("cap", "asked", "had"), [(1, 2, 1), (2, 1, 1), (3, 3, 3), (2, 9, 2)])
async def test_max_in_flight_is_only_lowered(
    autojump_clock: MockClock, feed: Feed, cap: int, asked: int, had: int
) -> None:
    policy = TerminatePolicy(max_in_flight=asked)
    for where in ("scheduler", "load", "run"):
        model, at = FakeModel(), {where: policy}
        async with trionnx.open_scheduler(
            backend="fake", max_in_flight=cap, policy=at.get("scheduler")
        ) as scheduler, trio.open_nursery() as nursery:
            session = await scheduler.load(model, policy=at.get("load"))
            nursery.start_soon(session.run, None, feed, trionnx.RunOptions(policy=at.get("run")))
            await trio.sleep(0.02)
            (run,) = model.engines[0]._runs.values()
            assert run.most == had
            if where != "run":
                assert session.policy.max_in_flight == had
                assert f"at most {had} segments" in session.describe_policy(), "what holds is told"


@pytest.mark.parametrize("wrong", [{"max_in_flight": 1}, "every_op", 5, TerminatePolicy])
async def test_what_is_no_policy_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="policy is a "):
        trionnx.RunOptions(policy=wrong)
    with pytest.raises(TypeError, match="policy is a "):
        async with trionnx.open_scheduler(backend="fake", policy=wrong):
            pass
    async with trionnx.open_scheduler(backend="fake") as scheduler:
        with pytest.raises(TypeError, match="policy is a "):
            await scheduler.load(FakeModel(), policy=wrong)


# --- every engine -----------------------------------------------------------------------------------


class Outside:
    """An engine from outside the repository: it has one of ours do the work, and cannot tell when a device hangs."""

    def __init__(self, *, adapter: Any, max_in_flight: int) -> None:
        self._inner = FakeEngine(adapter, max_in_flight)

    def load(self, request: Load, done: Done, progress: Callable[[Progress], None]) -> None:
        def hear(reply: Reply) -> None:
            if isinstance(reply, Loaded):
                limits = {"checkpoint_interval_s": "its steps are all of one length."}
                reply = dataclasses.replace(reply, backend="outside", limits=limits)
            done(reply)

        self._inner.load(request, hear, progress)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Proxy:
    """Any engine, watched: keeps what it says at the end of runs, and holds its replies back where a test says so."""

    def __init__(self, engine: Engine, made: list[Proxy]) -> None:
        self._engine = engine
        self.counts: list[Counts] = []
        self.holding, self.after = False, 0
        self.held: list[tuple[Done, Reply]] = []
        made.append(self)

    def _through(self, done: Done) -> Done:
        def hear(reply: Reply) -> None:
            if isinstance(reply, Ended):
                self.counts.append(reply.counts)
            if self.holding and (isinstance(reply, Ended) or (isinstance(reply, Fenced) and reply.seq >= self.after)):
                self.held.append((done, reply))
            else:
                done(reply)

        return hear

    def release(self) -> None:
        """Let go of what was held back, in order."""
        self.holding = False
        while self.held:
            done, reply = self.held.pop(0)
            done(reply)

    def load(self, request: Load, done: Done, progress: Callable[[Progress], None]) -> None:
        self._engine.load(request, done, progress)

    def begin(self, request: Begin, done: Done) -> None:
        self._engine.begin(request, done)

    def submit(self, segment: Segment, done: Done) -> None:
        self._engine.submit(segment, self._through(done))

    def stop(self, run: int) -> None:
        self._engine.stop(run)

    def recall(self, run: int, seq: int) -> None:
        self._engine.recall(run, seq)

    def read(self, request: Read, done: Done) -> None:
        self._engine.read(request, done)

    def end(self, run: int, done: Done) -> None:
        self._engine.end(run, self._through(done))

    def explain(self) -> tuple[Explained, ...]:
        return self._engine.explain()

    def close(self, done: Done) -> None:
        self._engine.close(done)


def model() -> onnx.ModelProto:
    """x [9216] -> twelve MatMuls, each with a Tanh -> y. To the Fake engine it is ten steps of 5 ms."""
    rng = np.random.default_rng(0)
    weights = [(rng.standard_normal((96, 96)) / 10).astype(np.float32) for _ in range(12)]
    nodes = [onnx.helper.make_node("Reshape", ["x", "square"], ["t0"])]
    for n in range(12):
        nodes.append(onnx.helper.make_node("MatMul", [f"t{n}", f"w{n}"], [f"m{n}"]))
        nodes.append(onnx.helper.make_node("Tanh", [f"m{n}"], [f"t{n + 1}" if n < 11 else "y"]))
    graph = onnx.helper.make_graph(
        nodes,
        "walked",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [96 * 96])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [96, 96])],
        [
            onnx.numpy_helper.from_array(np.array([96, 96]), "square"),
            *(onnx.numpy_helper.from_array(w, f"w{n}") for n, w in enumerate(weights)),
        ],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)


FEED = {"x": np.random.default_rng(1).standard_normal(96 * 96).astype(np.float32)}


class Bench:
    """A session on an engine to be tried."""

    def __init__(self, session: trionnx.Session, proxy: Proxy) -> None:
        self.session, self.proxy = session, proxy

    async def counts(self, **policy: Any) -> Counts:
        """What a whole run with a policy made of its segments; its outputs are the first run's."""
        options = trionnx.RunOptions(policy=TerminatePolicy(**policy))
        outputs = await self.session.run(None, FEED, options)
        right = await self.session.run(None, FEED)
        assert all(np.array_equal(a, b) for a, b in zip(outputs, right, strict=True))
        return self.proxy.counts[-2]


async def splits(bench: Bench) -> bool:
    whole = await bench.counts(split_into_checkpoints=False, checkpoint_interval_s=1e-4)
    cut = await bench.counts(checkpoint_interval_s=1e-4)
    return whole.submitted < cut.submitted


async def polls(bench: Bench) -> bool:
    by_op = await bench.counts(poll_after="every_op", checkpoint_interval_s=100)
    by_time = await bench.counts(poll_after="every_subgraph", checkpoint_interval_s=100)
    return by_op.submitted >= 10 > by_time.submitted


async def minds_the_interval(bench: Bench) -> bool:
    counts = [await bench.counts(checkpoint_interval_s=interval_s) for interval_s in (1e-4, 100)]
    return counts[0].submitted > counts[1].submitted


async def bounds_what_is_in_flight(bench: Bench) -> bool:
    most = [(await bench.counts(poll_after="every_op", max_in_flight=n)).most_in_flight for n in (1, 3)]
    return most[0] == 1 < most[1] <= 3


async def obeys_terminate(bench: Bench) -> bool:
    """"throw_cancel" raises, "stop_submit" returns, and nothing runs on; stopped when the first segment is done."""
    for on_terminate in ("throw_cancel", "stop_submit"):
        options = trionnx.RunOptions(policy=TerminatePolicy(on_terminate=on_terminate, poll_after="every_op"))
        options.on_progress = lambda done, total, options=options: options.terminate()
        outputs: list[Any] | None = None
        try:
            outputs = await bench.session.run(None, FEED, options)
        except RunTerminated:
            assert on_terminate == "throw_cancel"
        assert (outputs is None) == (on_terminate == "throw_cancel")
        assert options.terminated
        counts = bench.proxy.counts[-1]
        if counts.submitted > 1:
            assert counts.submitted < 10
            assert outputs is None or outputs[0] is None
    return True


async def gives_up_a_drain(bench: Bench) -> bool:
    """In time where there is next to none, and not where there is plenty."""
    for bound_s, hung in ((1000.0, False), (0.0, True)):
        options = trionnx.RunOptions(policy=TerminatePolicy(drain_timeout_s=bound_s, hang_timeout_s=1000))
        bench.proxy.holding = True
        left = trio.Event()

        async def run(options: trionnx.RunOptions = options, left: trio.Event = left) -> None:
            with pytest.raises(RunTerminated) as caught:
                await bench.session.run(None, FEED, options)
            assert caught.value.drained != hung  # noqa: B023
            left.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            while not bench.proxy.held:
                await wait_all_tasks_blocked(0.001)
            options.terminate()
            if not hung:
                await wait_all_tasks_blocked(0.01)
                if left.is_set():
                    return False
                bench.proxy.release()
            with trio.move_on_after(20):
                await left.wait()
            if not left.is_set():
                bench.proxy.release()
                return False
        if not hung:
            assert await bench.session.run(None, FEED)
    with pytest.raises(DeviceHung):
        await bench.session.run(None, FEED)
    return True


async def calls_a_device_hung(bench: Bench) -> bool:
    await bench.session.run(None, FEED)
    bench.proxy.holding, bench.proxy.after = True, 1  # the first segment may be a step on the CPU, which has no bound
    options = trionnx.RunOptions(policy=TerminatePolicy(hang_timeout_s=0.01))
    with trio.move_on_after(20):
        with pytest.raises(DeviceHung):
            await bench.session.run(None, FEED, options)
        return True
    return False


CHECKS: dict[str, Callable[[Bench], Awaitable[bool]]] = {
    "split_into_checkpoints": splits,
    "poll_after": polls,
    "checkpoint_interval_s": minds_the_interval,
    "max_in_flight": bounds_what_is_in_flight,
    "on_terminate": obeys_terminate,
    "drain_timeout_s": gives_up_a_drain,
    "hang_timeout_s": calls_a_device_hung,
}


@pytest.fixture
def with_outside(engines: dict[str, Any]) -> None:
    factory: Any = Outside
    trionnx.register_engine("outside", factory)


def names() -> list[str]:
    return sorted({*backends._BUILT_IN, *backends._registered, "outside"})


@asynccontextmanager
async def bench_on(backend: str) -> AsyncIterator[Bench]:
    factory = await backends.engine_factory(backend)
    made: list[Proxy] = []

    def watched(*, adapter: str | int | None, max_in_flight: int) -> Any:
        return Proxy(factory(adapter=adapter, max_in_flight=max_in_flight), made)

    trionnx.register_engine("tried", watched)
    async with trionnx.open_scheduler(backend="tried", max_in_flight=4) as scheduler:
        session = await scheduler.load(model())
        assert session.backend == ("fake" if backend == "lumped" else backend)
        for _ in range(3):  # costs are learned
            await session.run(None, FEED)
        yield Bench(session, made[0])
        made[0].release()


def test_there_is_a_check_for_every_field() -> None:
    assert list(CHECKS) == FIELDS


@pytest.mark.usefixtures("with_outside")
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("backend", names())
async def test_every_engine_obeys_every_field_or_says_that_it_does_not(backend: str, field: str) -> None:
    with trio.fail_after(LIMIT_S):
        async with bench_on(backend) as bench:
            line = bench.session.describe_policy().splitlines()[FIELDS.index(field)]
            assert line.startswith(f"{field} = ")
            if "NOT HONOURED HERE: " in line:
                assert line.split("NOT HONOURED HERE: ")[1].endswith(".")
                assert field not in ("on_terminate", "drain_timeout_s"), "these two need nothing of an engine"
            else:
                assert await CHECKS[field](bench), f"{backend} ignores {field}, and does not say so"


async def test_an_engine_that_ignores_fields_is_found_out(engines: dict[str, Any]) -> None:
    """The checks can fail: an engine that has everything in one piece, and keeps still about it."""

    def lumped(*, adapter: Any, max_in_flight: int) -> FakeEngine:
        return FakeEngine(adapter, max_in_flight, FakeModel(((StepView("opaque", cost_s=0.001),),)))

    trionnx.register_engine("lumped", lumped)
    obeyed = []
    for field in FIELDS[:4]:
        async with bench_on("lumped") as bench:
            if await CHECKS[field](bench):
                obeyed.append(field)
    assert FIELDS[:4] == ["split_into_checkpoints", "poll_after", "checkpoint_interval_s", "max_in_flight"]
    assert obeyed == []
