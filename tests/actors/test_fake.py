from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from trionnx.actors.fake import FakeEngine, FakeModel
from trionnx.gpu.engine import Engine
from trionnx.gpu.errors import RunStopped
from trionnx.gpu.seam import (
    Begin,
    BlockView,
    Closed,
    Counts,
    Cursor,
    Dropped,
    Ended,
    Failed,
    Fenced,
    Finished,
    Load,
    Loaded,
    Outputs,
    Read,
    Reply,
    Segment,
    StepView,
)

STEPS = (StepView("gpu", cost_s=1.0),) * 6


def segment(seq: int, start: int, stop: int, run: int = 0) -> Segment:
    return Segment(run, seq, Cursor(0, start), Cursor(0, stop))


class Talk:
    """Calls an engine and notes each answer with its time."""

    def __init__(self, model: FakeModel, max_in_flight: int = 2) -> None:
        self.engine = FakeEngine(None, max_in_flight, model)
        self.heard: list[tuple[float, Reply]] = []
        self.engine.load(Load(None), self.done, lambda progress: None)

    def done(self, reply: Reply) -> None:
        self.heard.append((trio.current_time(), reply))

    def begin(self, run: int = 0) -> None:
        self.engine.begin(Begin(run, {"x": np.ones(2, np.float32)}, ("y", "trace")), self.done)

    def submit(self, *segments: Segment) -> None:
        for one in segments:
            self.engine.submit(one, self.done)

    def read(self, run: int = 0) -> None:
        self.engine.read(Read(run, ("y", "trace")), self.done)

    def of(self, kind: type[Any]) -> list[Any]:
        return [reply for _, reply in self.heard if isinstance(reply, kind)]


async def trace_of(*segments: Segment) -> int:
    talk = Talk(FakeModel((STEPS,)))
    talk.begin()
    talk.submit(*segments)
    talk.read()
    await trio.sleep(100)
    (outputs,) = talk.of(Outputs)
    return int(outputs.values["trace"][0])


async def test_it_is_an_engine() -> None:
    assert isinstance(FakeEngine(), Engine)


async def test_outputs_show_a_wrong_order_a_repeated_and_a_missing_unit(autojump_clock: MockClock) -> None:
    right = await trace_of(segment(0, 0, 6))
    assert right == FakeModel((STEPS,)).expected({"x": np.ones(2)})["trace"][0]
    assert right == await trace_of(segment(0, 0, 1), segment(1, 1, 4), segment(2, 4, 6))
    wrong = {
        await trace_of(segment(0, 0, 3), segment(1, 4, 6)),
        await trace_of(segment(0, 0, 4), segment(1, 3, 6)),
        await trace_of(segment(0, 3, 6), segment(1, 0, 3)),
        await trace_of(segment(0, 0, 5)),
    }
    assert len(wrong) == 4
    assert right not in wrong


async def test_it_works_in_order_with_so_many_at_the_driver(autojump_clock: MockClock) -> None:
    talk = Talk(FakeModel((STEPS,)))
    talk.begin()
    talk.submit(*(segment(seq, seq, seq + 1) for seq in range(4)))
    talk.engine.end(0, talk.done)
    await trio.sleep(10)
    assert [at for at, reply in talk.heard if isinstance(reply, Fenced)] == [1.0, 2.0, 3.0, 4.0]
    assert talk.engine.times("driver") == [0.0, 0.0, 1.0, 2.0]
    assert talk.heard[-1] == (4.0, Ended(0, Counts(4, 4, 0, 2, 4, 4)))
    assert talk.engine.at_rest


async def test_a_stop_drops_what_the_driver_has_not_got(autojump_clock: MockClock) -> None:
    talk = Talk(FakeModel((STEPS,)))
    talk.begin()
    talk.submit(*(segment(seq, seq, seq + 1) for seq in range(4)))
    talk.engine.end(0, talk.done)
    await trio.sleep(0.5)
    talk.engine.stop(0)
    talk.engine.stop(99)
    await trio.sleep(10)
    dropped = [(at, reply.seq) for at, reply in talk.heard if isinstance(reply, Dropped)]
    assert dropped == [(0.5, 2), (0.5, 3)]
    assert talk.heard[-1] == (2.0, Ended(0, Counts(2, 2, 2, 2, 2, 2)))


@pytest.mark.parametrize("phase", ["begin", "read"])
async def test_a_stop_ends_a_begin_and_a_read(autojump_clock: MockClock, phase: str) -> None:
    talk = Talk(FakeModel((STEPS,), begin_s=3.0, read_s=3.0))
    talk.begin()
    await trio.sleep(1 if phase == "begin" else 4)
    if phase == "read":
        talk.read()
        await trio.sleep(1)
    talk.engine.stop(0)
    await trio.sleep(0.1)
    at, reply = talk.heard[-1]
    assert at == (1.0 if phase == "begin" else 5.0)
    assert isinstance(reply, Failed)
    assert isinstance(reply.error, RunStopped)


async def test_failures_come_once_and_hangs_for_ever(autojump_clock: MockClock) -> None:
    talk = Talk(FakeModel((STEPS,), failures={"begin": ValueError("a"), 1: ValueError("b")}, hangs={2}))
    talk.begin()
    talk.begin()
    talk.submit(*(segment(seq, seq, seq + 1) for seq in range(5)))
    await trio.sleep(100)
    talk.engine.close(talk.done)
    await trio.sleep(1000)
    assert [str(reply.error) for reply in talk.of(Failed)] == ["a", "b"]
    assert [reply.seq for reply in talk.of(Fenced)] == [0]
    assert talk.of(Closed) == []


async def test_what_follows_a_dynamic_block_is_told_at_its_end(autojump_clock: MockClock) -> None:
    model = FakeModel((STEPS[:1], STEPS[:2], STEPS[:3]), dynamic=frozenset({1}))
    last = BlockView(2, STEPS[:3], Finished())
    assert model.view() == BlockView(0, STEPS[:1], BlockView(1, STEPS[:2], None))
    talk = Talk(model)
    talk.begin()
    talk.submit(segment(0, 0, 1))
    talk.submit(Segment(0, 1, Cursor(1, 0), Cursor(1, 1)), Segment(0, 2, Cursor(1, 1), Cursor(1, 2)))
    talk.submit(Segment(0, 3, Cursor(2, 0), Cursor(2, 3)))
    await trio.sleep(20)
    assert [reply.next for reply in talk.of(Fenced)] == [None, None, last, None]


async def test_close_stops_a_load(autojump_clock: MockClock) -> None:
    talk = Talk(FakeModel(load_s=8.0))
    await trio.sleep(3)
    talk.engine.close(talk.done)
    await trio.sleep(0.1)
    talk.engine.close(talk.done)
    assert talk.of(Loaded) == []
    assert len(talk.of(Failed)) == 1
    assert [(at, type(reply)) for at, reply in talk.heard[1:]] == [(3.0, Closed), (pytest.approx(3.1), Closed)]
