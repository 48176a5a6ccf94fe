"""The actor's task, with an engine that does nothing but remember what it was asked."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trionnx.actors import Actor, run_actor
from trionnx.gpu.errors import DeviceLost, RunStopped
from trionnx.gpu.seam import (
    Begin,
    Begun,
    Closed,
    Counts,
    Cursor,
    Done,
    Dropped,
    Ended,
    Explained,
    Failed,
    Fenced,
    Finished,
    Load,
    Loaded,
    ModelMetadata,
    Outputs,
    Progress,
    Read,
    Reply,
    Segment,
)

LOADED = Loaded((), (), (), ModelMetadata(), "stub", "stub", ())
SEGMENT = Segment(7, 0, Cursor(0), Cursor(0, 1))


class StubEngine:
    """Keeps each `done`, so that a test answers when and from where it likes."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.done: dict[str, Done] = {}
        self.progress: Callable[[Progress], None] = lambda progress: None
        self.answers: dict[str, Reply] = {"load": LOADED, "close": Closed()}
        self.raises: dict[str, Exception] = {}

    def _ask(self, what: str, request: Any, done: Done) -> None:
        self.asked.append((what, request))
        if what in self.raises:
            raise self.raises[what]
        self.done[what] = done
        if what in self.answers:
            done(self.answers[what])

    def load(self, request: Load, done: Done, progress: Callable[[Progress], None]) -> None:
        self.progress = progress
        self._ask("load", request, done)

    def begin(self, request: Begin, done: Done) -> None:
        self._ask("begin", request, done)

    def submit(self, segment: Segment, done: Done) -> None:
        self._ask("submit", segment, done)

    def stop(self, run: int) -> None:
        self.asked.append(("stop", run))

    def read(self, request: Read, done: Done) -> None:
        self._ask("read", request, done)

    def end(self, run: int, done: Done) -> None:
        self._ask("end", run, done)

    def explain(self) -> tuple[Explained, ...]:
        return ()

    def close(self, done: Done) -> None:
        self._ask("close", None, done)

    def asks(self) -> list[str]:
        return [what for what, _ in self.asked]


@asynccontextmanager
async def open_actor(engine: StubEngine) -> AsyncIterator[Actor]:
    async with trio.open_nursery() as nursery:
        actor: Actor = await nursery.start(run_actor, lambda: engine, Load("model"))
        yield actor
        actor.close_nowait()


def in_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


async def test_requests_arrive_in_order_and_replies_come_from_any_thread() -> None:
    engine = StubEngine()
    heard: list[Reply] = []
    async with open_actor(engine) as actor:
        assert actor.loaded is LOADED
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                assert await actor.begin(Begin(7, {"x": 1}, ("y",))) == Finished()
                actor.submit_nowait(SEGMENT, heard.append)
                assert await actor.read(7, ("y",)) == {"y": 2}
                assert await actor.end(7) == Ended(7, Counts(1, 1, 0))

            nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            in_thread(lambda: engine.done["begin"](Begun(7, Finished())))
            await wait_all_tasks_blocked()
            assert engine.asks() == ["load", "begin", "submit", "read"]
            in_thread(lambda: engine.done["submit"](Fenced(7, 0)))
            in_thread(lambda: engine.done["read"](Outputs(7, {"y": 2})))
            await wait_all_tasks_blocked()
            engine.done["end"](Ended(7, Counts(1, 1, 0)))
    assert heard == [Fenced(7, 0)]
    assert engine.asked[:2] == [("load", Load("model")), ("begin", Begin(7, {"x": 1}, ("y",)))]
    assert engine.asks()[-1] == "close"
    assert actor.closed.is_set()


async def test_stop_overtakes_what_waits_in_the_mailbox(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = StubEngine()
    engine.answers |= {"begin": Begun(7, Finished()), "end": Ended(7, Counts())}
    async with open_actor(engine) as actor:
        await actor.begin(Begin(7, {}, ()))
        post = actor._post

        def post_and_stop(request: Any) -> None:
            post(request)
            actor.stop_nowait(7)

        with monkeypatch.context() as patch:
            patch.setattr(actor, "_post", post_and_stop)
            with pytest.raises(RunStopped):
                await actor.read(7, ())
        assert engine.asked[-1] == ("stop", 7)
        await actor.end(7)
        actor.stop_nowait(7)
        assert engine.asks() == ["load", "begin", "stop", "end"]


async def test_a_segment_goes_to_the_engine_at_once_and_none_after_a_stop() -> None:
    engine = StubEngine()
    heard: list[Reply] = []
    engine.answers |= {"begin": Begun(7, Finished()), "end": Ended(7), "read": Outputs(7, {"y": 1})}
    async with open_actor(engine) as actor:
        await actor.begin(Begin(7, {}, ()))
        actor.submit_nowait(SEGMENT, heard.append)
        assert engine.asked[-1] == ("submit", SEGMENT)
        actor.stop_nowait(7)
        actor.submit_nowait(SEGMENT, heard.append)
        assert heard == [Dropped(7, 0)]
        assert await actor.read(7, ("y",)) == {"y": 1}, "what is ready can be read after a stop"
        await actor.end(7)
        assert engine.asks() == ["load", "begin", "submit", "stop", "read", "end"]


async def test_a_begin_that_was_stopped_before_it_was_sent_is_not_sent() -> None:
    engine = StubEngine()
    engine.answers["end"] = Ended(7, Counts())
    async with open_actor(engine) as actor:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(actor.begin, Begin(7, {}, ()))
                nursery.start_soon(trio.lowlevel.checkpoint)
                scope.cancel()
        actor.stop_nowait(7)
        await actor.end(7)
        assert engine.asks()[-1] == "end"


@pytest.mark.parametrize("what", ["begin", "read", "end"])
async def test_an_error_of_a_request_is_raised_in_the_caller(what: str) -> None:
    engine = StubEngine()
    engine.answers |= {"begin": Begun(7, Finished()), "read": Outputs(7, {}), "end": Ended(7, Counts())}

    async def ask_all(actor: Actor) -> None:
        await actor.begin(Begin(7, {}, ()))
        await actor.read(7, ())
        await actor.end(7)

    async with open_actor(engine) as actor:
        good = engine.answers[what]
        engine.answers[what] = Failed(DeviceLost("gone"))
        with pytest.raises(DeviceLost):
            await ask_all(actor)
        engine.raises[what] = ArithmeticError("a bug in the engine")
        with pytest.raises(ArithmeticError):
            await ask_all(actor)
        del engine.raises[what]
        engine.answers[what] = Closed()
        with pytest.raises(TypeError, match="the engine answered Closed, not"):
            await ask_all(actor)
        engine.answers[what] = good
        await ask_all(actor)


async def test_the_reply_to_an_abandoned_request_is_consumed() -> None:
    engine = StubEngine()
    engine.answers["end"] = Ended(7, Counts())
    async with open_actor(engine) as actor:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(actor.begin, Begin(7, {}, ()))
                await wait_all_tasks_blocked()
                scope.cancel()
        assert engine.asks()[-1] == "begin"
        engine.done["begin"](Begun(7, Finished()))
        await wait_all_tasks_blocked()
        assert not actor._pending
        # A second answer is none.
        engine.done["begin"](Failed(DeviceLost()))
        await actor.end(7)


async def test_what_is_not_answered_when_the_actor_ends_is_closed(autojump_clock: MockClock) -> None:
    engine = StubEngine()
    engine.answers.pop("close")
    heard: list[Reply] = []
    async with trio.open_nursery() as nursery:
        async with open_actor(engine) as actor:
            engine.answers["begin"] = Begun(7, Finished())
            await actor.begin(Begin(7, {}, ()))
            actor.submit_nowait(SEGMENT, heard.append)

            async def read() -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await actor.read(7, ())

            nursery.start_soon(read)
            await wait_all_tasks_blocked()
        assert trio.current_time() == pytest.approx(10.0), "the engine's answer to close is waited for, with a bound"
        actor.submit_nowait(SEGMENT, heard.append)
    assert [type(reply) for reply in heard] == [Failed, Failed]
    assert all(isinstance(reply.error, trio.ClosedResourceError) for reply in heard if isinstance(reply, Failed))


async def test_an_engine_that_hangs_is_abandoned_at_once(autojump_clock: MockClock) -> None:
    engine = StubEngine()
    engine.answers.pop("close")
    async with open_actor(engine) as actor:
        actor.close_nowait(abandon=True)
    assert engine.asks() == ["load", "close"]
    assert trio.current_time() == 0.0


def test_a_reply_after_the_trio_run_is_nothing() -> None:
    engine = StubEngine()
    engine.answers.pop("close")

    async def main() -> None:
        async with open_actor(engine):
            pass

    trio.run(main, clock=MockClock(autojump_threshold=0))
    engine.done["close"](Closed())
    engine.progress(Progress("compile", 0, 0))


async def test_a_bug_in_who_hears_the_reply_ends_the_task_and_not_the_loop() -> None:
    engine = StubEngine()
    engine.answers["submit"] = Fenced(7, 0)

    def hear(reply: Reply) -> None:
        raise ArithmeticError("a bug")

    async def main() -> None:
        async with open_actor(engine) as actor:
            actor._stops[7] = []
            actor.submit_nowait(SEGMENT, hear)
            await trio.sleep_forever()

    with pytest.raises(ExceptionGroup) as caught:
        await main()
    assert caught.group_contains(ArithmeticError, match="a bug")
    assert engine.asks()[-1] == "close"


async def test_a_failed_load_is_raised_and_the_engine_closed() -> None:
    engine = StubEngine()
    engine.answers["load"] = Failed(DeviceLost("gone"))
    async with trio.open_nursery() as nursery:
        with pytest.raises(DeviceLost):
            await nursery.start(run_actor, lambda: engine, Load("model"))
    assert engine.asks() == ["load", "close"]


async def test_progress_of_a_load_comes_from_any_thread_and_is_told_on_trios() -> None:
    engine, told = StubEngine(), []
    engine.answers.pop("load")

    def on_progress(phase: str, done: int, total: int) -> None:
        told.append((phase, done, total, threading.current_thread()))

    async with trio.open_nursery() as nursery:

        async def start() -> None:
            actor = await nursery.start(run_actor, lambda: engine, Load("model"), on_progress)
            actor.close_nowait()

        nursery.start_soon(start)
        await wait_all_tasks_blocked()
        in_thread(lambda: engine.progress(Progress("compile", 1, 2)))
        in_thread(lambda: engine.progress(Progress("compile", 2, 2)))
        in_thread(lambda: engine.done["load"](LOADED))
    here = threading.current_thread()
    assert told == [("compile", 1, 2, here), ("compile", 2, 2, here)]


async def test_a_cancelled_load_closes_the_engine_and_waits_for_it() -> None:
    engine = StubEngine()
    engine.answers.clear()
    left = False
    async with trio.open_nursery() as nursery:

        async def load() -> None:
            nonlocal left
            with trio.CancelScope() as scope:
                nursery.start_soon(cancel, scope)
                await nursery.start(run_actor, lambda: engine, Load("model"))
            assert scope.cancelled_caught
            left = True

        async def cancel(scope: trio.CancelScope) -> None:
            await wait_all_tasks_blocked()
            scope.cancel()
            await wait_all_tasks_blocked()
            assert engine.asks() == ["load", "close"]
            assert not left
            engine.done["close"](Closed())

        nursery.start_soon(load)
    assert left
