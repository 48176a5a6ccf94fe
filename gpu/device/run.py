"""A run as the engine sees it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import RunStopped
from ..graph.block import Block, Result
from ..graph.steps import Copy, Dispatch, Fetch, HostCall, Step
from ..seam import Begin, Counts, NodeTime, Segment

__all__ = ["Run", "times_of"]


@dataclass(eq=False, slots=True)
class Run:
    """A run: where it stands, and its arrays on the host.

    Attributes:
        request: what began it.
        stops: how often it was stopped, from any thread; read by the queue's just before it submits.
        latch: what else may say that a segment is not to be submitted, by the numbers of run and segment.
        fault: the error that ended it. recalled: no segment below this number is to be submitted.
        frame: feeds and results of host steps, by key.
        block: the block that its segments are of, the `activation`-th it has entered.
        reached: where the outputs lie that are computed. news: those of them that nobody was told of.
        times: of its steps, where it is profiled.
        before: what the device's counter of segments was when it began; None until then.
    """

    request: Begin
    stops: int = 0
    latch: Callable[[int, int], bool] | None = None
    fault: BaseException | None = None
    recalled: int = 0
    frame: dict[int, Any] = field(default_factory=dict)
    block: Block | None = None
    activation: int = 0
    reached: dict[str, tuple[Block, Result]] = field(default_factory=dict)
    news: list[str] = field(default_factory=list)
    times: list[NodeTime] = field(default_factory=list)
    before: int | None = None
    submitted: int = 0
    finished: int = 0
    dropped: int = 0
    most_in_flight: int = 0
    on_gpu: int = 0

    def drops(self, seq: int) -> bool:
        """Whether a segment may not be submitted."""
        if self.stops > 0 or self.fault is not None or seq < self.recalled:
            return True
        return self.latch is not None and self.latch(self.request.run, seq)

    def check(self) -> None:
        """Raises RunStopped once the run was stopped."""
        if self.stops:
            raise RunStopped

    def check_since(self, stops: int) -> None:
        """Raises RunStopped once the run was stopped again."""
        if self.stops > stops:
            raise RunStopped

    def reach(self, block: Block, steps: int) -> None:
        """So many steps of a block are done: some outputs may be there."""
        for name, (needed, result) in block.results.items():
            if needed <= steps and name not in self.reached:
                self.reached[name] = block, result
                self.news.append(name)

    def announce(self) -> tuple[str, ...]:
        """The outputs that are there since the last call."""
        names = tuple(self.news)
        self.news.clear()
        return names

    def counts(self, counted: int | None = None) -> Counts:
        """What became of its segments."""
        return Counts(self.submitted, self.finished, self.dropped, self.most_in_flight, self.on_gpu, counted)


def times_of(block: Block, segment: Segment, marks: Sequence[int], seconds: Sequence[float]) -> list[NodeTime]:
    """What the steps of a segment took, whose device has told what took the steps between marks."""
    made, times = block.device, []
    for begin, end, took in zip(marks, marks[1:], seconds, strict=False):
        parts = [made.part(segment, index) for index in range(begin, end)]
        costs = [part * cost for part, cost in zip(parts, made.costs[begin:end], strict=True)]
        for step, kind, part, cost in zip(block.steps[begin:end], made.kinds[begin:end], parts, costs, strict=True):
            share = part * _flops(step), int(part * _nbytes(step))
            times.append(NodeTime(step.node, _kernel(step), kind, took * cost / sum(costs), *share))
    return times


def _kernel(step: Step) -> str:
    if isinstance(step, Dispatch):
        return step.program.name
    return step.op if isinstance(step, HostCall) else type(step).__name__.lower()


def _flops(step: Step) -> float:
    return step.flops if isinstance(step, Dispatch) else 0.0


def _nbytes(step: Step) -> int:
    if isinstance(step, HostCall):
        return 0
    if isinstance(step, Fetch):
        return math.prod(step.shape) * step.source.each
    return 2 * step.nbytes if isinstance(step, Copy) else step.nbytes
