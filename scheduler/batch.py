"""Runs of one session that go to the device as one, put together along their first dimension: `Batches`.

While the session has enough to do, a batch waits where it is, and takes in more; so of all that waits little is
copied. A batch is a run in a task of its own. What it fails with is told to nobody: each of its runs is then done by
itself, so that no run pays for what another one was fed.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import trio

from ..gpu.errors import RunTerminated
from ..gpu.policy import TerminatePolicy
from ..gpu.seam import TensorInfo
from .feeds import SLOW_BYTES
from .home import Home
from .latch import Latch
from .line import Line
from .options import RunOptions
from .turns import Ask

__all__ = ["MOST_RUNS", "Batches"]

Array = np.ndarray[Any, Any]
Perform = Callable[[Sequence[str], Mapping[str, Any], RunOptions], Awaitable[list[Any]]]

MOST_RUNS = 32
"""Runs in one batch."""


class Key(NamedTuple):
    """What runs must have in common to go together."""

    wanted: tuple[str, ...]
    priority: int
    policy: TerminatePolicy | None
    feeds: frozenset[tuple[str, str, tuple[int, ...]]]


class Member:
    """One run in a batch; its options hold it, so that `terminate` finds it.

    Attributes:
        scope: what the run waits in. deadline: that of its caller. ending: how it ends.
    """

    def __init__(self, home: Home, feeds: Mapping[str, Array], rows: int) -> None:
        self._home = home
        self.ending: Latch[str] = Latch()
        self.feeds = feeds
        self.rows = rows
        self.scope = trio.CancelScope()
        self.deadline = trio.current_effective_deadline()

    @property
    def terminated(self) -> bool:
        """Whether `terminate` came before the outputs."""
        return self.ending.value == "terminated"

    def terminate(self) -> bool:
        """Leave the batch, from any thread; whether this is what ends the run."""
        if not self.ending.settle("terminated"):
            return False
        self._home.cancel(self.scope)
        return True


class Batch:
    """Runs that go together.

    Args:
        number: no other batch of the session has it. priority: of each run.

    Attributes:
        scope: the batch's; cancelled when its last run has left. full: no more are waited for. over: it has ended.
        outputs: of each run, where all went well.
    """

    def __init__(self, number: int, priority: int) -> None:
        self._number, self._priority = number, priority
        self.members: dict[Member, None] = {}
        self.scope = trio.CancelScope()
        self.full = trio.Event()
        self.over = trio.Event()
        self.outputs: dict[Member, list[Any]] = {}

    @property
    def deadline(self) -> float:
        """The earliest of its runs'."""
        return min((member.deadline for member in self.members), default=math.inf)

    def claim(self) -> Ask:
        """How urgent it is."""
        return Ask(self._number, 1, priority=self._priority, deadline=self.deadline)

    def look(self) -> None:
        """It goes on as it does."""


class Batches:
    """Gathers the runs of a session.

    Args:
        nursery: where batches run. line: what a batch waits in until the session has little to do.
        wait_s: seconds that the first run of a batch waits for others.
        home, policy: the session's.
        inputs, outputs: the model's.
        perform: does a run by itself.

    Attributes:
        runs: how many runs ended, besides those that `perform` did.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        line: Line,
        wait_s: float,
        home: Home,
        policy: TerminatePolicy,
        inputs: Sequence[TensorInfo],
        outputs: Sequence[TensorInfo],
        perform: Perform,
    ) -> None:
        self._nursery = nursery
        self._line = line
        self._wait_s = wait_s
        self._home = home
        self._policy = policy
        self._perform = perform
        self.runs = 0
        self._batches = 0
        self._gathering: dict[Key, Batch] = {}
        firsts = {info.shape[0] if info.shape else None for info in inputs}
        symbol = firsts.pop() if len(firsts) == 1 else None
        self._inputs = frozenset(info.name for info in inputs) if isinstance(symbol, str) else frozenset[str]()
        self._outputs = frozenset(i.name for i in outputs if self._inputs and i.shape and i.shape[0] == symbol)

    def fits(self, wanted: Sequence[str], feeds: Mapping[str, Any], options: RunOptions) -> bool:
        """Whether a run may be put together with others.

        So it may where the first dimension of all inputs and of the outputs wanted is one named dimension of the
        model, all arrays fed have as many rows, and the run is not to be measured or followed by itself.
        """
        if options.profile or options.on_progress is not None:
            return False
        if not self._inputs or feeds.keys() != self._inputs or not self._outputs.issuperset(wanted):
            return False
        if not all(isinstance(feed, np.ndarray) and feed.dtype.kind != "O" for feed in feeds.values()):
            return False
        rows = {feed.shape[0] for feed in feeds.values()}
        return len(rows) == 1 and rows != {0}

    async def run(self, wanted: Sequence[str], feeds: Mapping[str, Array], options: RunOptions) -> list[Any]:
        """Do a run that fits, with others where there are some within the time.

        Returns:
            The outputs wanted; None for each where the run was terminated and its policy says "stop_submit".

        Raises:
            RunTerminated: `options.terminate()` was called.
            Exception: as the run by itself does.

        **Cancellation:** the run leaves the batch at once; with the last one the batch is stopped, and waited for
        as any run is.
        """
        shapes = frozenset((name, feed.dtype.str, feed.shape[1:]) for name, feed in feeds.items())
        key = Key(tuple(wanted), options.priority, options.policy, shapes)
        batch = self._gathering.get(key)
        if batch is None or len(batch.members) == MOST_RUNS:
            self._batches += 1
            batch = self._gathering[key] = Batch(self._batches, key.priority)
            self._nursery.start_soon(self._gather, key, batch)
        member = Member(self._home, feeds, next(iter(feeds.values())).shape[0])
        batch.members[member] = None
        if len(batch.members) == MOST_RUNS:
            batch.full.set()
        options._runs.add(member)
        try:
            with member.scope:
                await batch.over.wait()
                member.ending.settle("over")
        finally:
            options._runs.discard(member)
            if not batch.over.is_set():
                await self._leave(key, batch, member)
        if member.terminated:
            self.runs += 1
            await trio.lowlevel.checkpoint_if_cancelled()
            if (options.policy or self._policy).on_terminate == "stop_submit":
                return [None] * len(wanted)
            raise RunTerminated(0, 1, batch.over.is_set())
        outputs = batch.outputs.get(member)
        if outputs is not None:
            self.runs += 1
            return outputs
        return await self._perform(wanted, feeds, options)

    def close(self) -> None:
        """Wait for no more runs."""
        for batch in self._gathering.values():
            batch.full.set()

    async def _leave(self, key: Key, batch: Batch, member: Member) -> None:
        del batch.members[member]
        self.runs += not member.terminated
        if batch.members:
            return
        if self._gathering.get(key) is batch:
            del self._gathering[key]
        batch.scope.cancel()
        with trio.CancelScope(shield=True):
            await batch.over.wait()

    async def _gather(self, key: Key, batch: Batch) -> None:
        try:
            with batch.scope:
                with trio.move_on_after(self._wait_s):
                    await batch.full.wait()
                async with self._line.turn(batch):
                    if self._gathering.get(key) is batch:
                        del self._gathering[key]
                    await self._together(key, batch, tuple(batch.members))
        except Exception:  # each run is told by itself
            batch.outputs.clear()
        finally:
            if self._gathering.get(key) is batch:
                del self._gathering[key]
            batch.over.set()

    async def _together(self, key: Key, batch: Batch, members: Sequence[Member]) -> None:
        if len(members) < 2:
            return
        options = RunOptions(priority=key.priority, policy=key.policy, tag=f"{len(members)} runs together")
        options._deadline = batch.deadline
        first = members[0].feeds
        large = sum(feed.nbytes for member in members for feed in member.feeds.values()) > SLOW_BYTES

        def put_together() -> dict[str, Array]:
            return {name: np.concatenate([member.feeds[name] for member in members]) for name in first}

        def take_apart(made: Sequence[Array]) -> None:
            parts = [np.split(array, ends[:-1]) for array in made]
            for number, member in enumerate(members):
                batch.outputs[member] = [part[number].copy() for part in parts]

        ends = np.cumsum([member.rows for member in members])
        feeds = await trio.to_thread.run_sync(put_together) if large else put_together()
        self.runs -= 1
        made = await self._perform(key.wanted, feeds, options)
        if all(isinstance(array, np.ndarray) and array.shape[:1] == (ends[-1],) for array in made):
            if large:
                await trio.to_thread.run_sync(take_apart, made)
            else:
                take_apart(made)
