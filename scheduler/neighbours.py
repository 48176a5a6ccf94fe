"""The sessions beside each other on one actor, and what they share: its queue, one run at a time."""

from __future__ import annotations

from collections.abc import Callable

import trio

from ..actors import CLOSE_BOUND_S, Actor
from ..gpu.errors import DeviceHung, SessionInitTimeout
from ..gpu.seam import Free, Load, Loaded
from .governor import governor_of
from .line import Errand, Line
from .run import BEGIN_BOUND_S, Run

__all__ = ["Neighbours"]


class Neighbours:
    """What the sessions on one actor share.

    Args:
        actor: with its first model, number 0.
        forget: called when a model has been given back.
        fault: told of each fault of the engine.

    Attributes:
        governor: of the adapter. line: the wait for the queue. runs: those that wait, and that of the moment.
        hung: whether the device did not come back within a bound.
    """

    def __init__(self, actor: Actor, forget: Callable[[], None], fault: Callable[[Exception], None]) -> None:
        self.actor = actor
        loaded = actor.loaded
        self.governor = governor_of(loaded.identity or f"{loaded.backend}: {loaded.adapter}")
        self.line = Line(self.governor)
        self.runs: set[Run] = set()
        self.hung = False
        self._forget = forget
        self._fault = fault
        self._models = {0}
        self._next = 1

    def number(self) -> int:
        """A number for a model to be; the actor lives on at least until it is given back by `leave`."""
        model = self._next
        self._next += 1
        self._models.add(model)
        return model

    async def load(
        self, request: Load, on_progress: Callable[[str, int, int], None] | None, timeout_s: float
    ) -> Loaded:
        """Load a model, of a number that `number` gave, once the queue is free.

        Raises:
            SessionInitTimeout: it took longer than `timeout_s` seconds, the wait for the queue not counted.
            Exception: what the engine failed with; what `on_progress` raised.

        **Cancellation:** the load is stopped, and waited for, shielded, for a bounded time.
        """
        try:
            async with self.line.turn(Errand(self.governor.new_run())):
                self.check()
                return await self.actor.load(request, on_progress, timeout_s)
        except BaseException as error:
            late = False
            if isinstance(error, SessionInitTimeout):
                late = True
                self._fault(error)
            gone = self.leave(request.model)
            with trio.move_on_after(CLOSE_BOUND_S if late else BEGIN_BOUND_S, shield=True) as bound:
                await gone.wait()
            if late and bound.cancelled_caught:
                self.hang(DeviceHung(f"{self.actor.loaded.adapter} did not come back from a load"))
            raise

    def before_s(self, mine: Run) -> float:
        """Estimated seconds of the runs that go before one."""
        return sum(run.remaining_s for run in self.runs if not run.waits or run.rank <= mine.rank)

    def hang(self, error: DeviceHung) -> None:
        """The device did not come back within a bound."""
        if not self.hung:
            self.hung = True
            self._fault(error)

    def check(self) -> None:
        """Raise DeviceHung where the device did not come back within a bound."""
        if self.hung or any(run.hung for run in self.runs):
            raise DeviceHung(f"{self.actor.loaded.adapter} did not finish an earlier run; load the model anew")

    def leave(self, model: int) -> trio.Event:
        """Give a model back, and with the last one the actor, also one that hangs; none of its runs is under way.

        Args:
            model: its number, which has not left yet.

        Returns:
            What is set once everything is given back.
        """
        self._models.discard(model)
        if self.hung or not self._models:
            self.actor.close_nowait(abandon=self.hung)
            return self.actor.closed
        gone = trio.Event()

        def on_reply(_: object) -> None:
            gone.set()
            self._forget()

        self.actor.free_nowait(Free(models=(model,)), on_reply)
        return gone
