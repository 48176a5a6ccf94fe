"""Executes segments of blocks on an open device, and brings outputs back. Used by its queue's thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from ..graph.block import Block, Result
from ..graph.steps import Fetch, HostCall, Upload
from ..graph.tensor import as_words, from_words
from ..seam import Segment
from .clock import Clock, Stamps, spacing
from .counter import Counter
from .device import Device
from .realise import PassWriter, Realised, Realiser
from .run import Run, times_of
from .thread import QueueThread

__all__ = ["Executor"]

STAMPED = 4
"""Every so many segments are timed by the device, once the costs of their steps are known."""

Fenced = Callable[[float | None, BaseException | None], None]


class Executor:
    """An open device, and what stands beside it for runs.

    Args:
        device: where segments are executed. thread: of its queue.
        most: segments on the queue at once; a run's policy may say less.
        count: whether the device counts the segments.

    Attributes:
        counter: of segments, where they are counted. realiser: makes blocks' device objects.
    """

    def __init__(self, device: Device, thread: QueueThread, most: int, count: bool) -> None:
        self._device, self._thread, self._most = device, thread, most
        self._clock = Clock.of(device)
        self.counter = Counter(device) if count else None
        self.realiser = Realiser(device)

    def submit(self, run: Run, block: Block, segment: Segment, fenced: Fenced) -> bool:
        """Encode a segment of dispatches and copies, and submit it; False: the run does not want it any more.

        Args:
            run: whose it is.
            block: where it is in.
            segment: which steps.
            fenced: called once it has finished: with its seconds on the device, where known, or the error.
        """
        device, thread, realised = self._device, self._thread, block.device
        closely = run.request.profile or realised.unlearned(segment)
        stamps = None
        if self._clock is not None and (
            closely or realised.unsure(segment) or (segment.run + segment.seq) % STAMPED == 0
        ):
            stamps = self._clock.take()
        encoder = device.encoder()
        watch = None if realised.flags is None else realised.flags.watch(encoder, segment)
        writer = PassWriter(device, encoder)
        marks = self._encode(realised, segment, writer, stamps, closely)
        if self.counter is not None:
            self.counter.bump(writer)
        writer.end()
        if stamps is not None:
            stamps.resolve(encoder)
        if watch is not None:
            watch.bring(encoder)
        in_flight = thread.make_room(min(self._most, run.request.policy.max_in_flight))
        if run.drops(segment.seq):
            if watch is not None:
                watch.drop()
            device.drop(encoder)
            if stamps is not None:
                stamps.drop()
            return False
        commands = device.finish(encoder)
        started = time.perf_counter()
        submission = device.submit(commands)
        run.submitted += 1
        run.on_gpu += 1
        run.most_in_flight = max(run.most_in_flight, in_flight)
        unasked: BaseException | None = None
        try:
            for asking in (stamps, watch):
                if asking is not None:
                    asking.ask()
        except BaseException as error:
            unasked = error

        def landed(elapsed: float, error: BaseException | None) -> None:
            try:
                if error is not None or unasked is not None:
                    raise error or unasked  # type: ignore[misc]
                run.finished += 1
                seconds = [] if stamps is None else stamps.read()
                if seconds:
                    realised.learn(segment, marks, seconds)
                elif self._clock is None:
                    realised.learn(segment, (marks[0], marks[-1]), [elapsed])
                if run.request.profile:
                    told = (marks, seconds) if seconds else ((marks[0], marks[-1]), [elapsed])
                    run.times += times_of(block, segment, *told)
                if watch is not None:
                    watch.check()
            except BaseException as failed:
                fenced(None, failed)
            else:
                fenced(sum(seconds) if seconds else None, None)

        thread.launched(submission, started, landed)
        return True

    def _encode(
        self, realised: Realised, segment: Segment, writer: PassWriter, stamps: Stamps | None, closely: bool
    ) -> list[int]:
        """Write a segment's commands, and the time at its ends, or between its steps; where that was."""
        start, stop = segment.start, segment.stop
        first, last = start.step, stop.step + (stop.unit > 0)
        every = spacing(last - first) if closely and stamps is not None else last - first
        marks = [*range(first, last, every), last]
        if stamps is not None:
            writer.mark(stamps)
        for begin, end in pairwise(marks):
            unit = start.unit if begin == first else 0
            writer.write(realised.calls[begin:end], unit, stop.unit if end > stop.step else None)
            if stamps is not None:
                writer.mark(stamps)
        return marks

    def compute(self, run: Run, block: Block, segment: Segment) -> float:
        """Execute host steps; the seconds that they took. What is on the device has finished."""
        device, realiser, realised = self._device, self.realiser, block.device
        marks, seconds = [segment.start.step], []
        before = time.perf_counter()
        for index in range(segment.start.step, segment.stop.step):
            step = block.steps[index]
            run.check()
            if isinstance(step, Upload):
                words = as_words(run.frame[step.key], step.target.half)
                device.write(*realiser.place(block, step.target), words, run.check)
            elif isinstance(step, Fetch):
                source, count = step.source, int(np.prod(step.shape))
                data = device.read(*realiser.place(block, source), count * source.each, run.check)
                run.frame[step.key] = from_words(data, step.dtype, step.shape, source.half)
            else:
                assert isinstance(step, HostCall)
                arrays = [
                    step.fixed[n] if n in step.fixed else None if key is None else run.frame[key]
                    for n, key in enumerate(step.inputs)
                ]
                for key, array in zip(step.outputs, step.call(arrays, run.check), strict=False):
                    if key is not None:
                        run.frame[key] = array
            now = time.perf_counter()
            marks.append(index + 1)
            seconds.append(now - before)
            before = now
        realised.learn(segment, marks, seconds)
        if run.request.profile:
            run.times += times_of(block, segment, marks, seconds)
        return sum(seconds)

    def bring(self, run: Run, block: Block, result: Result, check: Callable[[], None]) -> Any:
        """An output that a run has reached, as an array of its own."""
        if result.value is not None:
            return result.value.copy()
        if result.key is not None:
            value = run.frame[result.key]
            return np.array(value) if isinstance(value, np.ndarray | np.generic) else value
        source = result.storage
        assert source is not None
        if 0 in result.shape:
            return np.empty(result.shape, result.dtype)
        place = self.realiser.place(block, source)
        data = self._device.read(*place, int(np.prod(result.shape)) * source.each, check)
        return from_words(data, result.dtype, result.shape, source.half)

    def close(self) -> None:
        """Give back what was made here; blocks have been forgotten, nothing is in flight."""
        self.realiser.close()
        if self._clock is not None:
            self._clock.close()
        if self.counter is not None:
            self.counter.close()
        # Whoever drops the last object of a device destroys it: that must be who holds the driver's lock.
        self._clock = self.counter = None
