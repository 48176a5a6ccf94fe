"""The probe: a process of its own opens the drivers first, so that it is not this one that they crash or hang.

`open_probe` gives what is known of the drivers; an adapter's `attempt` tells whether it computes, and computes right.
What is known already, in this process or in the user's cache folder, is not tried again while it holds.

Rules of this file: it decides nothing (scheduler/backends.py does). One probe at a time in a process; a second one
waits, and finds the first one's results. Nothing is tried twice. A child is killed and reaped on every way out.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import platformdirs
import trio

from ..gpu.device import probe_child
from ..gpu.device.adapters import AdapterInfo
from ..gpu.device.drivers import apply, boot, driver_files, environment, machine, variables
from ..gpu.device.verdicts import Book, Outcome, Survey, Verdict, adapter_info

__all__ = ["ANSWER_S", "Probe", "answer_bound", "cache_folder", "open_probe", "remembered", "unwritten"]

ANSWER_S = 2.5
"""Within how many seconds a driver is to answer; `TRIONNX_PROBE` says another number."""

WHOLE = 4
"""A child lives for this many times as long, its start and its imports included."""

REAP_S = 1.0
LONGEST_LINE = 1 << 20
COMMAND = (sys.executable, "-P", str(Path(probe_child.__file__)))


def answer_bound() -> float:
    """Within how many seconds a driver is to answer; 0: there shall be no probe, or there can be none.

    Raises:
        ValueError: ``TRIONNX_PROBE`` is no number from 0 on.
    """
    if getattr(sys, "frozen", False) or not sys.executable:  # what would be started is the program itself
        return 0.0
    text = os.environ.get("TRIONNX_PROBE") or str(ANSWER_S)
    try:
        bound = float(text)
    except ValueError:
        bound = -1.0
    if not 0 <= bound < math.inf:
        raise ValueError(f"TRIONNX_PROBE is a number of seconds, or 0 for no probe, not {text!r}")
    return bound


def cache_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Where things are remembered: as given, else as ``TRIONNX_CACHE_DIR`` says, else the user's cache folder."""
    said = folder or os.environ.get("TRIONNX_CACHE_DIR")
    return Path(said) if said else Path(platformdirs.user_cache_dir("trionnx", appauthor=False))


class _Failed(Exception):
    """A child did not answer as it should."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(outcome, reason)
        self.verdict = Verdict(outcome, reason)


class _Child:
    """One process that tries drivers. Its answers are waited for, for a bounded time."""

    def __init__(self, process: trio.Process, bound_s: float) -> None:
        self._process = process
        self._bound_s = bound_s
        self._end = trio.current_time() + WHOLE * bound_s
        self._buffer = bytearray()

    @classmethod
    async def start(cls, drivers: Sequence[str] | None, bound_s: float) -> _Child:
        """Start one that may open these drivers only; None: all. Raises _Failed."""
        variables = dict(os.environ)
        apply(environment(drivers), variables)
        command = [*COMMAND, str(WHOLE * bound_s + 2 * REAP_S)]
        devices: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        try:
            return cls(await trio.lowlevel.open_process(command, env=variables, **devices), bound_s)
        except OSError as error:
            raise _Failed("error", f"the process that tries it cannot be started: {error}") from None

    async def adapters(self) -> tuple[AdapterInfo, ...]:
        """What the drivers list. Raises _Failed."""
        up = await self._answer(self._end)
        if up.get("up") is not True:
            raise _refusal(up)
        listed = await self._answer(trio.current_time() + self._bound_s)
        if "adapters" not in listed:
            raise _refusal(listed)
        try:
            return tuple(adapter_info(facts) for facts in listed["adapters"])
        except (ValueError, TypeError, KeyError) as error:
            raise _Failed("error", f"the list of adapters cannot be understood: {error}") from None

    async def attempt(self, index: int) -> None:
        """Have an adapter compute. Raises _Failed."""
        assert self._process.stdin is not None
        with contextlib.suppress(trio.BrokenResourceError):  # it has ended; what follows says how
            await self._process.stdin.send_all(b"%d\n" % index)
        answer = await self._answer(trio.current_time() + self._bound_s)
        if answer.get("ok") is not True:
            raise _refusal(answer)

    async def close(self) -> None:
        """Kill it, and reap it within `REAP_S`; shielded."""
        with trio.move_on_after(REAP_S, shield=True):
            self._process.kill()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                await trio.aclose_forcefully(pipe)
            await self._process.wait()

    async def _answer(self, deadline: float) -> dict[str, Any]:
        with trio.move_on_at(min(deadline, self._end)):
            line = await self._line()
            try:
                answer = json.loads(line)
            except (ValueError, RecursionError):
                answer = None
            if not isinstance(answer, dict):
                raise _Failed("error", f"an answer that cannot be understood: {bytes(line[:80])!r}")
            return answer
        wait = f"TRIONNX_PROBE={WHOLE * self._bound_s:g} waits longer"
        raise _Failed("timeout", f"the driver did not answer within {self._bound_s:g} s ({wait})")

    async def _line(self) -> bytearray:
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            if len(self._buffer) > LONGEST_LINE:
                raise _Failed("error", "an answer without end")
            data = await self._process.stdout.receive_some()
            if not data:
                how = _how(await self._process.wait())
                raise _Failed("crash", f"the driver ended the process that tried it ({how})")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def _refusal(answer: Mapping[str, Any]) -> _Failed:
    reason = answer.get("reason")
    outcome: Outcome = "wrong" if answer.get("wrong") is True else "error"
    return _Failed(outcome, reason[:500] if isinstance(reason, str) else f"an unexpected answer: {str(answer)[:80]}")


def _how(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"


class _Process:
    """What this process knows, by what decides it; and the lock of the one probe at a time."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.surveys: dict[object, Survey] = {}
        self.unwritten: dict[object, OSError] = {}

    def acquire(self) -> None:
        """For a thread of Trio's: the holder may belong to another Trio run."""
        while not self.lock.acquire(timeout=0.05):
            trio.from_thread.check_cancelled()


_process = _Process()
_turn: trio.lowlevel.RunVar[trio.Lock] = trio.lowlevel.RunVar("trionnx probe")


class Probe:
    """What is known of the drivers, and the way to know more. Made by `open_probe`.

    Attributes:
        survey: what is known.
    """

    survey: Survey

    def __init__(self, process: _Process, folder: Path, bound_s: float) -> None:
        self._known, self._unwritten = process.surveys, process.unwritten
        self._key = folder, variables()
        self._book = Book(folder)
        self._bound_s = bound_s
        self._machine = ""
        self._child: _Child | None = None
        self._listed: tuple[AdapterInfo, ...] = ()

    async def attempt(self, adapter: AdapterInfo) -> Verdict:
        """Whether an adapter computes, and computes right; tried now, unless it is known.

        Args:
            adapter: one of `survey.adapters`.

        **Cancellation:** felt at once; the child is gone when the probe is closed.
        """
        known = self.survey.trial(adapter, time.time(), boot())
        if known is not None:
            return known
        try:
            if self._child is None:
                await self._list(self.survey.drivers)
            same = [there for there in self._listed if there.identity == adapter.identity]
            if not same:
                raise _Failed("error", "it is gone")
            assert self._child is not None
            await self._child.attempt(same[0].index)
            verdict = Verdict("ok")
        except _Failed as fault:
            verdict = fault.verdict
            await self._close()  # what has failed may have left anything behind
        await self._learn(self.survey.tried(adapter, verdict))
        return verdict

    async def _open(self) -> None:
        now, this = time.time(), boot()
        known = self._known.get(self._key)
        if known is None or not known.holds(now, this):
            self._machine, known = await trio.to_thread.run_sync(self._remembered, abandon_on_cancel=True)
        if known is not None and known.holds(now, this):
            self.survey = self._known[self._key] = known
        else:
            await self._learn(await self._ask())

    def _remembered(self) -> tuple[str, Survey | None]:
        this = machine()
        return this, self._book.get(this)

    async def _ask(self) -> Survey:
        """List the adapters; where the drivers crash or hang, find those that do not, and list theirs."""
        try:
            return Survey(Verdict("ok"), await self._list(None))
        except _Failed as fault:
            listing = fault.verdict
        await self._close()
        files = driver_files() if listing.outcome in ("crash", "timeout") else []
        refused = await self._each(files)
        sound = tuple(file for file in files if file not in refused)
        if sound and refused:
            try:
                return Survey(Verdict("ok"), await self._list(sound), sound, refused)
            except _Failed as fault:
                listing = fault.verdict
                await self._close()
        return Survey(listing, refused=refused)

    async def _each(self, files: Sequence[str]) -> dict[str, Verdict]:
        """Those drivers that cannot be opened alone."""
        refused: dict[str, Verdict] = {}
        some = trio.CapacityLimiter(max(2, os.cpu_count() or 1))

        async def one(file: str) -> None:
            async with some:
                try:
                    child = await _Child.start((file,), self._bound_s)
                    try:
                        await child.adapters()
                    finally:
                        await child.close()
                except _Failed as fault:
                    refused[file] = fault.verdict

        async with trio.open_nursery() as nursery:
            for file in files:
                nursery.start_soon(one, file)
        return refused

    async def _list(self, drivers: Sequence[str] | None) -> tuple[AdapterInfo, ...]:
        self._child = await _Child.start(drivers, self._bound_s)
        self._listed = await self._child.adapters()
        return self._listed

    async def _learn(self, survey: Survey) -> None:
        self.survey = self._known[self._key] = survey
        if not self._machine:
            self._machine = await trio.to_thread.run_sync(machine, abandon_on_cancel=True)
        try:
            await trio.to_thread.run_sync(self._book.put, self._machine, self.survey, abandon_on_cancel=True)
        except OSError as error:  # this process knows it all the same
            self._unwritten[self._key] = error
        else:
            self._unwritten.pop(self._key, None)

    async def _close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.close()


def remembered(cache_dir: str | os.PathLike[str] | None = None) -> Survey | None:
    """What this process knows of the drivers, asking nobody; the folder as for `open_probe`."""
    return _process.surveys.get((cache_folder(cache_dir), variables()))


def unwritten(cache_dir: str | os.PathLike[str] | None = None) -> OSError | None:
    """Why what this process found out could not be written for the next one; None: it could, or there was nothing."""
    return _process.unwritten.get((cache_folder(cache_dir), variables()))


@asynccontextmanager
async def open_probe(cache_dir: str | os.PathLike[str] | None = None, *, anew: bool = False) -> AsyncIterator[Probe]:
    """Have the process's probe, for ``async with``; other ones wait until this one is left.

    Args:
        cache_dir: where results are remembered; None: see `cache_folder`.
        anew: forget all that is known there, and try again.

    Raises:
        ValueError: see `answer_bound`.
        OSError: with `anew`, what is remembered cannot be removed.

    **Cancellation:** felt at once; the child is killed, and reaped within `REAP_S` seconds.
    """
    global _process
    if _process.pid != os.getpid():  # a forked child has none of the threads that may hold the lock
        _process = _Process()
    process = _process
    try:
        turn = _turn.get()
    except LookupError:
        turn = trio.Lock()
        _turn.set(turn)
    probe = Probe(process, cache_folder(cache_dir), answer_bound() or ANSWER_S)
    async with turn:
        if not process.lock.acquire(blocking=False):
            await trio.to_thread.run_sync(process.acquire)
        try:
            if anew:
                process.surveys.clear()
                process.unwritten.clear()
                await trio.to_thread.run_sync(partial(Book.forget, probe._book), abandon_on_cancel=True)
            await probe._open()
            yield probe
        finally:
            try:
                await probe._close()
            finally:
                process.lock.release()
