"""Worker processes: how they end, how they lie, and that nothing is left of them."""

from __future__ import annotations

import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from driving import LIMIT_S, SOAK, TOYS, Driver, X, ask, asked, close, gone, source, toy, wait_for
from toy import expected
from trionnx.gpu.errors import DeviceLost, RunStopped
from trionnx.gpu.seam import (
    Begin,
    Begun,
    Closed,
    Counts,
    Cursor,
    Dropped,
    Ended,
    Failed,
    Fenced,
    Load,
    Loaded,
    Outputs,
    Read,
    Reply,
    Segment,
)

pytestmark = pytest.mark.usefixtures("nothing_left")

# --- how it ends ----------------------------------------------------------------------------------


def test_closed_means_reaped_and_says_so_to_what_comes_after() -> None:
    driver = Driver(toy(), source())
    pid = driver.engine.pid
    first, second = asked(driver.engine.close), asked(driver.engine.close)
    assert first.get(timeout=LIMIT_S) == second.get(timeout=LIMIT_S) == Closed()
    assert gone(pid)
    with pytest.raises(RunStopped):
        driver.begin({"x": X})
    assert asked(driver.engine.end, 1).get(timeout=LIMIT_S) == Ended(1, Counts())
    close(driver.engine)
    driver.engine.stop(1)
    driver.engine.kill()


def test_closing_what_was_never_loaded() -> None:
    engine = toy()
    engine.kill()
    engine.stop(1)
    close(engine)
    with pytest.raises(RunStopped):
        Driver(engine, source())


def test_a_close_during_the_start_of_a_worker_does_not_wait_for_it() -> None:
    for turn in range(4):
        engine = toy()
        loading: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        engine.load(Load(source()), loading.put, lambda progress: None)
        time.sleep(0.03 * turn)
        close(engine)
        reply = loading.get(timeout=LIMIT_S)
        assert isinstance(reply, Failed)
        assert isinstance(reply.error, DeviceLost | RunStopped)


def test_a_close_during_a_run_stops_it() -> None:
    driver = Driver(toy(), source(50, seconds=0.05))
    driver.begin({"x": X})
    replies = [asked(driver.engine.submit, Segment(1, n, Cursor(0, n), Cursor(0, n + 1))) for n in range(50)]
    replies[0].get(timeout=LIMIT_S)
    close(driver.engine)
    assert sum(isinstance(reply.get(timeout=LIMIT_S), Dropped) for reply in replies[1:]) > 40


@pytest.mark.parametrize("phase", ["load", "begin", "segment 1", "read", "close"])
def test_a_worker_that_hangs_is_killed_at_the_bound_of_a_close(phase: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    engine = toy(close_bound_s=0.3, environment={"TOY_MARK": str(mark)})
    loading: queue.SimpleQueue[Reply] = queue.SimpleQueue()
    engine.load(Load(source(faults={phase: "hang"})), loading.put, lambda progress: None)
    pending = [loading]
    if phase != "load":
        assert isinstance(loading.get(timeout=LIMIT_S), Loaded)
        pending = [asked(engine.begin, Begin(1, {"x": X}, ("y",)))]
        if phase != "begin":
            assert isinstance(pending.pop().get(timeout=LIMIT_S), Begun)
            pending = [asked(engine.submit, Segment(1, n, Cursor(0, n), Cursor(0, n + 1))) for n in range(3)]
            if phase in ("read", "close"):
                assert [type(reply.get(timeout=LIMIT_S)) for reply in pending] == [Fenced] * 3
                pending = []
            if phase == "read":
                pending = [asked(engine.read, Read(1, ("y",)))]
    if phase != "close":
        wait_for(mark.exists)
    pid = engine.pid
    assert pid is not None
    close(engine)
    assert mark.exists()
    assert gone(pid)
    replies = [reply.get(timeout=LIMIT_S) for reply in pending]
    lost = [reply.error for reply in replies if isinstance(reply, Failed)]
    assert len(lost) == len(replies) - (phase == "segment 1")
    assert all(isinstance(error, DeviceLost) and "SIGKILL" in str(error) for error in lost)


PHASES = ("load", "begin", "segment 0", "segment 1", "read", "end", "close")
DEATHS = [("kill", phase) for phase in PHASES] + [
    (fault, phase) for fault in ("abort", "exit") for phase in PHASES if SOAK or phase in ("load", "segment 1")
]


@pytest.mark.parametrize(("fault", "phase"), DEATHS)
def test_a_worker_that_dies_answers_for_everything(phase: str, fault: str) -> None:
    how = {"kill": "was ended by SIGKILL", "abort": "was ended by SIGABRT", "exit": "ended with exit code 3"}[fault]
    engine = toy()
    if phase == "close":
        Driver(engine, source(faults={phase: fault})).run({"x": X})
    else:
        with pytest.raises(DeviceLost) as caught:
            Driver(engine, source(faults={phase: fault})).run({"x": X})
        assert str(caught.value) == f"the worker process {how}"
        assert not engine.alive
        for request in (Begin(2, {"x": X}, ()), Segment(2, 0, Cursor(0), Cursor(0, 1)), Read(2, ())):
            methods: dict[type, Callable[..., Any]] = {Begin: engine.begin, Segment: engine.submit, Read: engine.read}
            reply = asked(methods[type(request)], request).get(timeout=LIMIT_S)
            assert isinstance(reply, Failed)
            assert isinstance(reply.error, DeviceLost)
    close(engine)


def killed_somewhere(dice: random.Random, phase: str) -> None:
    """A worker that is killed from here at some moment of a phase; whatever was asked is answered once."""
    engine = toy()
    pause = dice.choice([0.0, 0.0, dice.uniform(0, 0.01)])
    answers: list[Reply] = []

    def kill() -> None:
        time.sleep(pause)
        engine.kill()

    killer = threading.Thread(target=kill)

    def hear(request: Callable[..., None], *arguments: Any) -> Reply:
        reply = asked(request, *arguments).get(timeout=LIMIT_S)
        answers.append(reply)
        return reply

    def strike(now: str) -> None:
        if now == phase:
            killer.start()

    x = np.arange(dice.choice([3, 200_000]), dtype=np.float32)
    if phase == "start":
        loading: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        engine.load(Load(source(4, seconds=0.002)), loading.put, lambda progress: None)
        wait_for(lambda: engine.pid is not None or not engine.alive)
        strike("start")
        answers.append(loading.get(timeout=LIMIT_S))
    else:
        Driver(engine, source(4, seconds=0.002))
        strike("begin")
        if isinstance(hear(engine.begin, Begin(1, {"x": x}, ("y",))), Begun):
            strike("between")
            first = hear(engine.submit, Segment(1, 0, Cursor(0, 0), Cursor(0, 1)))
            replies = [asked(engine.submit, Segment(1, n, Cursor(0, n), Cursor(0, n + 1))) for n in (1, 2, 3)]
            strike("in")
            answers += [reply.get(timeout=LIMIT_S) for reply in replies]
            strike("read")
            last = hear(engine.read, Read(1, ("y",)))
            if isinstance(last, Outputs):
                assert all(isinstance(reply, Fenced) for reply in (first, *answers[1:4]))
                assert last.values["y"].tobytes() == expected(x, [4]).tobytes()
        strike("end")
        hear(engine.end, 1)
        if phase == "close":
            strike("close")
    close(engine)
    if killer.ident is None:
        killer.start()
    killer.join()
    assert all(not isinstance(reply, Failed) or isinstance(reply.error, DeviceLost) for reply in answers)
    assert not engine._asked
    pid = engine.pid
    assert pid is None or gone(pid)


@pytest.mark.parametrize("phase", ["start", "begin", "between", "in", "read", "end", "close"])
def test_a_worker_that_is_killed_in_each_phase(phase: str) -> None:
    dice = random.Random(phase)
    for _ in range(100 if SOAK else 2):
        killed_somewhere(dice, phase)


@pytest.mark.parametrize("fault", ["", "hang"])
def test_a_worker_ends_when_its_pipe_does(fault: str) -> None:
    """Also where nothing tells it of the death of its parent."""
    engine, told = toy(), threading.Event()
    loading: queue.SimpleQueue[Reply] = queue.SimpleQueue()
    engine.load(Load(source(faults={"load": fault})), loading.put, lambda progress: told.set())
    assert told.wait(LIMIT_S)
    if not fault:
        assert isinstance(loading.get(timeout=LIMIT_S), Loaded)
    process = engine._process
    assert process is not None
    assert process._child.stdin is not None
    process._child.stdin.close()
    wait_for(lambda: not engine.alive)
    assert gone(process.pid)
    if fault:
        assert isinstance(loading.get(timeout=LIMIT_S), Failed)
    with pytest.raises(DeviceLost, match="the worker process ended with exit code 0"):
        ask(lambda done: engine.begin(Begin(1, {"x": X}, ("y",)), done))
    close(engine)


def test_a_worker_that_stands_still_blocks_nobody() -> None:
    """Stopped by a signal, it reads nothing: what is sent piles up here, and a close ends it."""
    engine = toy(close_bound_s=0.3)
    Driver(engine, source(3000))
    assert isinstance(asked(engine.begin, Begin(1, {"x": X}, ("y",))).get(timeout=LIMIT_S), Begun)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)
    start = time.perf_counter()
    replies = [asked(engine.submit, Segment(1, n, Cursor(0, n), Cursor(0, n + 1))) for n in range(3000)]
    assert time.perf_counter() - start < LIMIT_S / 2
    engine.stop(1)
    close(engine)
    assert all(isinstance(reply.get(timeout=LIMIT_S), Failed) for reply in replies)


# --- what lies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["another", "names", "twice", "garbage", "truncate", "object"])
def test_a_worker_that_lies_is_killed_and_nothing_is_made_up(what: str) -> None:
    engine = toy()
    lies = (what,) if what in ("another", "names", "twice", "object") else ()
    x, faults = np.arange(100_000, dtype=np.float32), {} if lies else {"read": what}
    with pytest.raises((DeviceLost, TypeError)) as caught:
        Driver(engine, source(lies=lies, faults=faults)).run({"x": x})
    if what == "object":
        assert str(caught.value) == "builtins.object cannot be sent to a worker process"
        assert engine.alive
    else:
        assert isinstance(caught.value, DeviceLost)
        assert "said what it should not, and was killed" in str(caught.value)
        assert not engine.alive
    close(engine)


# --- this process ---------------------------------------------------------------------------------

ORPHANS = """
import os, sys, threading
sys.path.insert(0, {folder!r})
from trionnx.actors.remote import RemoteEngine
from trionnx.gpu.seam import Load
engines = [RemoteEngine("toy:ToyEngine") for _ in range(2)]
for engine, faults in zip(engines, ({{}}, {{"load": ["hang"]}})):
    heard = threading.Event()
    engine.load(Load({{"blocks": [1], "faults": faults}}), print, lambda progress, heard=heard: heard.set())
    assert heard.wait(60)
print("pids", *(engine.pid for engine in engines), flush=True)
{ending}
"""


@pytest.mark.parametrize("ending", ["", "os._exit(0)", "os.abort()", "os.kill(os.getpid(), 9)", "raise SystemExit(0)"])
def test_no_orphan_is_left_whatever_ends_this_process(ending: str) -> None:
    text = ORPHANS.format(folder=str(TOYS), ending=ending)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=LIMIT_S)
    pids = [int(pid) for pid in done.stdout.partition("pids")[2].splitlines()[0].split()]
    assert len(pids) == 2, done.stderr
    assert "Traceback" not in done.stderr
    wait_for(lambda: all(map(gone, pids)))


FORK = """
import os, sys, threading, warnings
sys.path.insert(0, {folder!r})
warnings.simplefilter("error")
import numpy as np
from trionnx.actors.remote import RemoteEngine
from trionnx.gpu.seam import Load, Begin, Closed
engine, loaded = RemoteEngine("toy:ToyEngine"), threading.Event()
engine.load(Load({{"blocks": [1]}}), lambda reply: loaded.set(), lambda p: None)
assert loaded.wait(60)
warnings.filterwarnings("ignore", category=DeprecationWarning)
child = os.fork()
if child == 0:
    begin = engine.begin, Begin(1, {{}}, ()), print
    for call, *arguments in (begin, (engine.close, print), (engine.end, 1, print), (engine.explain,)):
        try:
            call(*arguments)
        except RuntimeError as error:
            assert "forked" in str(error)
        else:
            os._exit(7)
    engine.stop(1)
    engine.kill()
    for fd in (engine._process._in, engine._process._out):
        try:
            os.fstat(fd)
        except OSError:
            continue
        os._exit(8)
    del engine
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert engine.alive
closed = threading.Event()
engine.close(lambda reply: closed.set())
assert closed.wait(60)
"""


def test_a_forked_child_is_refused_and_touches_nothing() -> None:
    text = FORK.format(folder=str(TOYS))
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
