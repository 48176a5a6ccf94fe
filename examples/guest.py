"""Trio as a guest: the loop is asyncio's, or Tk's, and its user stops runs on the GPU.

    python examples/guest.py [--toolkit asyncio|tk] [--model NAME]

The host's loop beats all the while. A model is loaded and run; the same run is stopped half way, once by
cancelling its scope and once by `RunOptions.terminate`, both out of the host's own code; then it is run again.
With Tk there is a window with a Stop button, which presses itself; it needs a display.

Exits with 1 where the GPU went on after a stop, or the next output is not the same.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import outcome
import trio

import real_models
import trionnx
from trionnx.cli.console import milliseconds, quiet_drivers

__all__ = ["Desk", "trio_as_guest", "work"]

BEAT_S = 0.005
LIMIT = trionnx.TerminatePolicy().max_in_flight


class Wrong(Exception):
    """Something is not as it should be."""


@dataclass
class Desk:
    """What the host's side and Trio's side both look at. They share one thread, so plain fields will do.

    Attributes:
        stop: what the Stop button does now; None: there is nothing to stop.
        done, total: segments of the run under way.
        pressed_at: what `done` was when the button was pressed.
        beats, longest_s: of the host's loop, since the last report.
    """

    say: Callable[[str], None] = print
    stop: Callable[[], None] | None = None
    done: int = 0
    total: int = 0
    pressed_at: int = 0
    beats: int = 0
    longest_s: float = 0.0
    _last: float = field(default_factory=time.perf_counter)

    def beat(self) -> None:
        """The host's loop is alive. Its user stops what is half done."""
        now = time.perf_counter()
        self.beats, self.longest_s, self._last = self.beats + 1, max(self.longest_s, now - self._last), now
        if self.total and 2 * self.done >= self.total:
            self.press()

    def press(self) -> None:
        """Press the Stop button."""
        stop, self.stop = self.stop, None
        if stop is not None:
            self.pressed_at = self.done
            stop()

    def progress(self, done: int, total: int) -> None:
        """Told of each segment that has finished."""
        self.done, self.total = done, total

    def report(self, what: str) -> None:
        """Say what happened, and how the host's loop fared meanwhile."""
        self.say(f"{what}\n  the host's loop: {self.beats} beats, the longest gap {milliseconds(self.longest_s)}")
        self.beats, self.longest_s = 0, 0.0


# --- Trio's side ------------------------------------------------------------------------------------


async def work(desk: Desk, source: Any, feeds: dict[str, Any], backend: str = "webgpu") -> None:
    """Load, run, be stopped in two ways, run again.

    Raises:
        Wrong: the GPU went on after a stop, or an output is not the same.

    **Cancellation:** stops what is under way, and closes the session.
    """
    async with trionnx.open_scheduler(backend=backend) as scheduler:
        session = await scheduler.load(source, input_shapes={name: np.shape(x) for name, x in feeds.items()})
        desk.report(f"loaded on {session.backend}: {session.adapter}")
        await session.run(None, feeds, trionnx.RunOptions(on_progress=desk.progress))
        before = await session.run(None, feeds, trionnx.RunOptions(on_progress=desk.progress))
        desk.report(f"run twice, {desk.total} segments each")
        for how in ("scope.cancel()", "options.terminate()"):
            await _be_stopped(desk, session, feeds, how)
        after = await session.run(None, feeds)
        if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(before, after, strict=True)):
            raise Wrong("after the stops the output is not what it was before")
        desk.report("run again to the end: the same output, bit for bit")


async def _be_stopped(desk: Desk, session: trionnx.Session, feeds: dict[str, Any], how: str) -> None:
    statistics = session.statistics()
    options = trionnx.RunOptions(on_progress=desk.progress)
    desk.done = desk.pressed_at = 0
    ending = "came to its end"
    with trio.CancelScope() as scope:
        desk.stop = scope.cancel if how == "scope.cancel()" else options.terminate
        try:
            await session.run(None, feeds, options)
        except trionnx.RunTerminated:
            ending = "raised RunTerminated"
    if scope.cancelled_caught:
        ending = "was cancelled"
    desk.stop = None
    finished = session.statistics().segments_finished - statistics.segments_finished
    if ending == "came to its end":
        raise Wrong("the run was over before the button was pressed")
    late = finished - desk.pressed_at
    desk.report(
        f"{how} by the host when {desk.pressed_at} of {desk.total} segments were done: the run {ending}\n"
        f"  the GPU finished {late} more than the host had heard of, and stopped"
    )
    # What was in flight, and what had finished while the host had the thread.
    if finished > desk.pressed_at + 2 * LIMIT + 1 or finished >= desk.total:
        raise Wrong(f"{late} segments finished after the stop")


# --- asyncio as the host ------------------------------------------------------------------------------


@asynccontextmanager
async def trio_as_guest(async_fn: Callable[..., Awaitable[Any]], *args: Any) -> AsyncIterator[asyncio.Future[Any]]:
    """Run an async function in Trio, under asyncio, for as long as the block lasts.

    Yields:
        A future of what the function returns. When the block is left, in whatever way, the function
        is cancelled, and waited for.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[outcome.Outcome[Any]] = loop.create_future()
    result: asyncio.Future[Any] = loop.create_future()
    scope = trio.CancelScope()

    async def within() -> Any:
        with scope:
            return await async_fn(*args)

    def on_end(out: outcome.Outcome[Any]) -> None:
        ended.set_result(out)
        if isinstance(out, outcome.Error):
            result.set_exception(out.error)
        else:
            result.set_result(out.unwrap())
            result.exception()  # whoever awaits it gets it; nobody has to

    trio.lowlevel.start_guest_run(
        within,
        run_sync_soon_threadsafe=loop.call_soon_threadsafe,
        run_sync_soon_not_threadsafe=loop.call_soon,
        done_callback=on_end,
        host_uses_signal_set_wakeup_fd=True,
    )
    try:
        yield result
    finally:
        if not ended.done():
            scope.cancel()
        await asyncio.shield(ended)


async def under_asyncio(desk: Desk, source: Any, feeds: dict[str, Any]) -> None:
    """An asyncio program with a heartbeat, and `work` as its guest."""

    async def beat() -> None:
        while True:
            desk.beat()
            await asyncio.sleep(BEAT_S)

    async with trio_as_guest(work, desk, source, feeds) as result:
        beating = asyncio.ensure_future(beat())
        try:
            await result
        finally:
            beating.cancel()


# --- Tk as the host -----------------------------------------------------------------------------------


def under_tk(desk: Desk, source: Any, feeds: dict[str, Any]) -> None:
    """A window with a bar and a Stop button, and `work` as the guest of its loop.

    Raises:
        RuntimeError: there is no display.
    """
    import tkinter
    from tkinter import ttk

    try:
        root = tkinter.Tk()
    except tkinter.TclError as error:
        raise RuntimeError(f"Tk opens no window: {error}") from None
    root.title("trionnx")
    said = tkinter.StringVar(root, "loading")
    bar = ttk.Progressbar(root, length=400)
    button = ttk.Button(root, text="Stop", command=desk.press)
    for widget in (ttk.Label(root, textvariable=said), bar, button):
        widget.pack(padx=16, pady=8)

    todo: collections.deque[Callable[[], object]] = collections.deque()
    ended: list[outcome.Outcome[None]] = []
    scope = trio.CancelScope()

    def soon(call: Callable[[], object]) -> None:
        todo.append(call)

    def turn() -> None:
        """A beat, and what Trio asked for."""
        desk.beat()
        bar.configure(maximum=max(1, desk.total), value=desk.done)
        button.state(["!disabled" if desk.stop is not None else "disabled"])
        root.after(round(BEAT_S * 1e3), turn)

    def serve() -> None:
        for _ in range(len(todo)):
            todo.popleft()()
        if not ended:
            root.after(1, serve)
        else:
            root.destroy()

    async def within() -> None:
        with scope:
            await work(desk, source, feeds)

    def say(line: str) -> None:
        print(line)
        said.set(line.partition("\n")[0])

    desk.say = say
    root.protocol("WM_DELETE_WINDOW", scope.cancel)
    trio.lowlevel.start_guest_run(within, run_sync_soon_threadsafe=soon, done_callback=ended.append)
    root.after(0, turn)
    root.after(0, serve)
    root.mainloop()
    for out in ended:
        out.unwrap()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--toolkit", choices=("asyncio", "tk"), default="asyncio")
    parser.add_argument("--model", choices=sorted(real_models.MODELS), default="ppocrv4_rec", metavar="NAME")
    arguments = parser.parse_args()
    source, feeds = real_models.model(arguments.model, say=print), real_models.feeds(arguments.model)
    if arguments.toolkit == "tk":
        under_tk(Desk(), source, feeds)
    else:
        asyncio.run(under_asyncio(Desk(), source, feeds))


if __name__ == "__main__":
    quiet_drivers()
    try:
        main()
    except (Wrong, RuntimeError, OSError, trionnx.NoAdapter) as error:
        sys.exit(f"guest: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
