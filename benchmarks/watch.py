"""Listens to what a session hands to its actor, and to what comes back: the segments of one run at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trionnx import Session
from trionnx.gpu.seam import Begin, BlockView, Ended, Fenced, Finished, Reply, Segment, TensorRef

__all__ = ["Watch"]


class Watch:
    """What became of the newest run of a session: ``with Watch(session) as watch``.

    Attributes:
        handed: segments that were handed over.
        fenced: segments that were seen to finish; counted on the engine's thread, as soon as it knows.
        ended: what the engine said at the run's end.
    """

    def __init__(self, session: Session) -> None:
        self._actor = session._actor
        self._begin, self._submit, self._end = self._actor.begin, self._actor.submit_nowait, self._actor.end
        self._blocks: dict[int, BlockView] = {}
        self._cut: set[tuple[int, int]] = set()
        self.handed: list[Segment] = []
        self.fenced = 0
        self.ended: Ended | None = None

    def __enter__(self) -> Watch:
        # On the handle of this session alone.
        vars(self._actor).update(begin=self._on_begin, submit_nowait=self._on_submit, end=self._on_end)
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("begin", "submit_nowait", "end"):
            del vars(self._actor)[name]

    def clear(self) -> None:
        """Forget the run before."""
        self._blocks, self._cut, self.handed, self.fenced, self.ended = {}, set(), [], 0, None

    @property
    def cuts(self) -> int:
        """Operators that were cut inside."""
        return len(self._cut)

    @property
    def longest_s(self) -> float:
        """The estimated seconds of the longest operator on the device, as known when the run began."""
        steps = (step for block in self._blocks.values() for step in block.steps)
        return max((step.cost_s for step in steps if step.kind == "gpu"), default=0.0)

    @property
    def miscounted(self) -> bool | None:
        """Whether the device's own counter differs from what was submitted; None where nothing counts."""
        if self.ended is None or self.ended.counts.counted is None:
            return None
        counts = self.ended.counts
        return counts.counted != counts.on_gpu or counts.finished != counts.submitted

    async def _on_begin(self, request: Begin) -> BlockView | Finished:
        self.clear()
        block = await self._begin(request)
        self._enter(block)
        return block

    def _on_submit(self, segment: Segment, on_reply: Callable[[Reply], None], is_news: Callable[[Reply], bool]) -> None:
        self.handed.append(segment)
        if segment.stop.unit:
            self._cut.add((segment.stop.activation, segment.stop.step))

        def heard(reply: Reply) -> bool:
            if isinstance(reply, Fenced):
                self.fenced += 1
                self._enter(reply.next)
            return is_news(reply)

        self._submit(segment, on_reply, heard)

    async def _on_end(self, run: int, kept: tuple[TensorRef, ...] = ()) -> Any:
        self.ended = await self._end(run, kept)
        return self.ended

    def _enter(self, block: BlockView | Finished | None) -> None:
        while isinstance(block, BlockView):
            self._blocks[block.activation] = block
            block = block.then
