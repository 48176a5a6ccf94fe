"""Turns a block of steps into device objects, once: pipelines, bind groups, buffers, weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..graph.block import Block
from ..graph.memory import Slot, touched
from ..graph.steps import Copy, Dispatch
from ..graph.tensor import Storage
from ..seam import BlockView, Cursor, Finished, Segment, StepView
from .clock import Stamps
from .device import COPY_DST, UNIFORM, Check, Device, Pipeline
from .flags import Flags
from .pool import Pool

__all__ = ["PassWriter", "Realised", "Realiser"]

SAMPLES = 2
"""A step's cost is measured by itself so many times, and then so many times with its whole segment: the
time between two timestamps holds what the second one takes, so that short steps seem longer than they are."""
RATE = 0.2
"""The weight of a further measurement against those before it."""


def _differ(costs: list[float], shown: list[float]) -> bool:
    """Whether costs have changed so much that blocks should be cut anew."""
    return any(abs(now - then) > 0.15 * then + 2e-4 for now, then in zip(costs, shown, strict=True))


@dataclass(eq=False, slots=True)
class Realised:
    """The device's side of a block.

    Attributes:
        calls: per step what encoding needs: a dispatch (pipeline, bind group, workgroups), a copy
            (source, offset, target, offset, bytes), None for a host step.
        costs: seconds per step, estimated first, then learned.
        samples: how often a step's cost was measured by itself. wholes: how often with its whole segment.
        groups: the bind group of each dispatch, and where its parameters lie.
        given: the buffers of inputs on the device that are bound now.
        shown: the costs, and the view of them, that the scheduler was told.
        flags: where there are steps that check values.
    """

    calls: list[Any]
    costs: list[float]
    samples: list[int]
    wholes: list[int]
    kinds: list[str]
    units: list[int]
    multiples: list[int]
    slots: list[Slot]
    weights: list[Storage]
    params: Any = None
    flags: Flags | None = None
    groups: dict[int, tuple[Any, int]] = field(default_factory=dict)
    given: dict[Storage, Any] = field(default_factory=dict)
    shown: tuple[list[float], BlockView] | None = None
    _expected: dict[tuple[Cursor, Cursor], float] = field(default_factory=dict)
    _learned: bool = False

    def view(self, activation: int, decided: bool) -> BlockView | Finished:
        """What the scheduler may know; the same object as long as the costs stay about the same."""
        if not self.calls:
            return Finished()
        shown = self.shown
        stale, self._learned = self._learned, False
        if shown is not None and shown[1].activation == activation and not (stale and _differ(self.costs, shown[0])):
            return shown[1]
        steps = tuple(
            StepView("gpu" if kind == "gpu" else "host", units, cost, multiple)
            for kind, units, cost, multiple in zip(self.kinds, self.units, self.costs, self.multiples, strict=True)
        )
        view = BlockView(activation, steps, None if decided else Finished())
        self.shown = list(self.costs), view
        return view

    def unlearned(self, segment: Segment) -> bool:
        """Whether a step of the segment is still to be measured by itself."""
        return min(self.samples[segment.start.step : _end(segment)]) < SAMPLES

    def unsure(self, segment: Segment) -> bool:
        """Whether the segment is still to be measured as a whole."""
        return min(self.wholes[segment.start.step : _end(segment)]) < SAMPLES

    def learn(self, segment: Segment, marks: Sequence[int], seconds: Sequence[float]) -> None:
        """Correct the costs of a segment's steps by how long they took.

        Args:
            segment: what was executed.
            marks: seconds[n] is what the steps from marks[n] on took, up to marks[n + 1]; its
                last one is behind the segment's last step.
            seconds: measured.
        """
        closely = len(marks) > 2
        if closely and not self.unlearned(segment):
            return  # a profile
        whole = self.expected(segment)
        sure = not closely and not self.unsure(segment) and not self.unlearned(segment)
        if sure and 0.9 * whole < seconds[0] < 1.1 * whole:
            return
        self._expected.clear()
        self._learned = True
        for begin, end, took in zip(marks, marks[1:], seconds, strict=False):
            parts = [self.part(segment, index) for index in range(begin, end)]
            expected = sum(self.costs[begin + n] * part for n, part in enumerate(parts))
            ratio = took / max(expected, 1e-9)
            for index in range(begin, end):
                known = (self.samples if closely else self.wholes)[index]
                rate = 1 / (known + 1) if known < SAMPLES else RATE
                self.costs[index] = max(1e-6, self.costs[index] * (1 - rate + rate * ratio))
                self.samples[index] += closely or end - begin == 1
                self.wholes[index] += not closely

    def expected(self, segment: Segment) -> float:
        """Estimated seconds of a segment."""
        key = segment.start, segment.stop
        found = self._expected.get(key)
        if found is None:
            steps = range(segment.start.step, _end(segment))
            found = self._expected[key] = sum(self.costs[index] * self.part(segment, index) for index in steps)
        return found

    def part(self, segment: Segment, index: int) -> float:
        """The share of a step that a segment holds."""
        units = self.units[index]
        begin = segment.start.unit if index == segment.start.step else 0
        end = segment.stop.unit if index == segment.stop.step else units
        return (end - begin) / units


def _end(segment: Segment) -> int:
    """The first step that the segment holds nothing of."""
    return segment.stop.step + (segment.stop.unit > 0)


class Realiser:
    """Makes device objects for one session's blocks.

    Attributes:
        weights: the buffer of each weight that was uploaded.
        given: the buffers of the inputs that the run of the moment has on the device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pool = Pool(device)
        self.weights: dict[Storage, Any] = {}
        self.given: Mapping[Storage, Any] = {}
        self._weight_users: dict[Storage, int] = {}

    def place(self, block: Block, storage: Storage) -> tuple[Any, int]:
        """The buffer that a storage lies in, and the byte where it begins."""
        if storage.role == "weight":
            return self.weights[storage], 0
        if storage.role == "input":
            return self.given[storage], 0
        place = block.slots.where[storage]
        return self._pool.behind(place.slot), place.offset

    def _bound(self, block: Block, made: Realised, storage: Storage) -> tuple[Any, int, int]:
        if storage.role == "flag":
            assert made.flags is not None
            return made.flags.buffer, 0, storage.nbytes
        return *self.place(block, storage), storage.nbytes

    def realise(self, block: Block, check: Check, progress: Callable[[str, int, int], None]) -> Realised:
        """Compile, allocate, upload and bind; kept in `block.device`. What `check` raises is let through."""
        if block.device is not None:
            self._rebind(block, block.device)
            return block.device  # type: ignore[no-any-return]
        programs = [s.program for s in block.steps if isinstance(s, Dispatch)]
        pipelines = self._compile(programs, check, progress)
        made = Realised([], [], [], [], [], [], [], [], [])
        try:
            self._upload(block, made, check, progress)
            made.slots = self._pool.provide(block.slots.all)
            self._bind(block, made, pipelines)
            self._warm(
                [call for call in made.calls if call is not None and isinstance(call[0], Pipeline)], check, progress
            )
        except BaseException:
            self._give_back(made)
            raise
        block.device = made
        return made

    def _compile(
        self, programs: Sequence[Any], check: Check, progress: Callable[[str, int, int], None]
    ) -> dict[Any, Pipeline]:
        distinct = list(dict.fromkeys(programs))
        made = {}
        for number, program in enumerate(distinct):
            check()
            made[program] = self._device.pipeline(program)
            progress("compile", number + 1, 2 * len(distinct))
        return made

    def _warm(self, calls: Sequence[Any], check: Check, progress: Callable[[str, int, int], None]) -> None:
        """Have the driver compile what it leaves to the first dispatch, by a dispatch of no workgroups."""
        cold: dict[Pipeline, Any] = {}
        for call in calls:
            if not call[0].warm:
                cold.setdefault(call[0], call)
        device = self._device
        for number, (pipeline, call) in enumerate(cold.items()):
            check()
            encoder = device.encoder()
            writer = PassWriter(device, encoder)
            writer.dispatch(pipeline, call[1], 0, 0)
            writer.end()
            device.wait(device.submit(device.finish(encoder)))
            pipeline.warm = True
            progress("compile", len(cold) + number + 1, 2 * len(cold))

    def _upload(self, block: Block, made: Realised, check: Check, progress: Callable[[str, int, int], None]) -> None:
        wanted = dict.fromkeys(s for step in block.steps for s in touched(step) if s.role == "weight")
        total = sum(s.nbytes for s in wanted if s not in self.weights)
        done = 0
        for storage in wanted:
            check()
            if storage in self.weights:
                self._weight_users[storage] += 1
                made.weights.append(storage)
                continue
            assert storage.fill is not None
            array = storage.fill()
            buffer = self._device.buffer(storage.nbytes)
            try:
                self._device.write(buffer, 0, array, check)
            except BaseException:
                self._device.release(buffer)
                raise
            self.weights[storage] = buffer
            self._weight_users[storage] = 1
            made.weights.append(storage)
            done += storage.nbytes
            progress("upload", done, total)

    def _bind(self, block: Block, made: Realised, pipelines: dict[Any, Pipeline]) -> None:
        device = self._device
        offsets, size = [], 0
        for step in block.steps:
            if isinstance(step, Dispatch):
                offsets.append(size)
                size = device.align(size + max(16, (len(step.params) + 15) // 16 * 16))
        packed = np.zeros(size // 4, np.uint32)
        if size:
            made.params = device.buffer(size, UNIFORM | COPY_DST)
        place = iter(offsets)
        checks = [(n, s.check) for n, s in enumerate(block.steps) if isinstance(s, Dispatch) and s.check is not None]
        if checks:
            made.flags = Flags(device, checks)
        for step in block.steps:
            call: Any = None
            units, multiple, kind, cost = 1, 1, "host", 50e-6
            if isinstance(step, Dispatch):
                offset = next(place)
                packed[offset // 4 : offset // 4 + len(step.params) // 4] = np.frombuffer(step.params, np.uint32)
                pipeline = pipelines[step.program]
                group = self._group(block, made, step, pipeline, offset)
                made.groups[len(made.calls)] = group, offset
                call = (pipeline, group._internal, step.groups)
                units, multiple = step.groups, step.program.multiple * device.target.width
                kind, cost = "gpu", step.cost_s
            elif isinstance(step, Copy):
                call = self._copy(block, step)
                kind, cost = "gpu", step.cost_s
            elif hasattr(step, "cost_s"):
                cost = step.cost_s
            made.calls.append(call)
            made.costs.append(cost)
            made.samples.append(0)
            made.wholes.append(0)
            made.kinds.append(kind)
            made.units.append(units)
            made.multiples.append(multiple)
            made.given.update((s, self.given[s]) for s in touched(step) if s.role == "input")
        if size:
            device.write(made.params, 0, packed, lambda: None)

    def _rebind(self, block: Block, made: Realised) -> None:
        """Where inputs on the device lie elsewhere than in the run before: bind their steps anew."""
        moved = {s for s, buffer in made.given.items() if buffer is not self.given[s]}
        if not moved:
            return
        for index, step in enumerate(block.steps):
            if moved.isdisjoint(touched(step)):
                continue
            if isinstance(step, Copy):
                made.calls[index] = self._copy(block, step)
            elif isinstance(step, Dispatch):
                (_, offset), (pipeline, _, units) = made.groups[index], made.calls[index]
                group = self._group(block, made, step, pipeline, offset)
                made.groups[index], made.calls[index] = (group, offset), (pipeline, group._internal, units)
        made.given.update((s, self.given[s]) for s in moved)

    def _group(self, block: Block, made: Realised, step: Dispatch, pipeline: Pipeline, offset: int) -> Any:
        bound = [self._bound(block, made, s) for s in (*step.reads, *step.writes)]
        return self._device.bind(pipeline, made.params, offset, bound)

    def _copy(self, block: Block, step: Copy) -> Any:
        (source, begin), (target, end) = self.place(block, step.source), self.place(block, step.target)
        return source._internal, begin + step.source_offset, target._internal, end + step.target_offset, step.nbytes

    def forget(self, block: Block) -> None:
        """Give back what a block, and those made after it, hold. Nothing of it is in flight."""
        for following in block.following.values():
            self.forget(following)
        block.following.clear()
        if block.device is not None:
            self._give_back(block.device)
            block.device = None

    def _give_back(self, made: Realised) -> None:
        made.calls.clear()
        made.groups.clear()
        if made.params is not None:
            self._device.release(made.params)
            made.params = None
        if made.flags is not None:
            made.flags.release()
            made.flags = None
        self._pool.forget(made.slots)
        made.slots = []
        for storage in made.weights:
            self._weight_users[storage] -= 1
            if not self._weight_users[storage]:
                del self._weight_users[storage]
                self._device.release(self.weights.pop(storage))
        made.weights = []

    def close(self) -> None:
        """Give the weights back that are left."""
        for buffer in self.weights.values():
            self._device.release(buffer)
        self.weights.clear()
        self._weight_users.clear()


class PassWriter:
    """Writes dispatches and copies into a command encoder, opening and ending compute passes as needed."""

    def __init__(self, device: Device, encoder: Any) -> None:
        self._lib, self._null = device.lib, device.ffi.NULL
        self._encoder = encoder
        self._pass: Any = None
        self._pipeline: Any = None
        self._base = device.ffi.new("uint32_t[1]")
        self._most = device.target.max_workgroups

    def dispatch(self, pipeline: Pipeline, group: Any, start: int, stop: int) -> None:
        """Workgroups start <= n < stop of a step."""
        self.write(((pipeline, group, stop),), start)

    def write(self, calls: Sequence[Any], start: int = 0, stop: int | None = None) -> None:
        """Steps one after the other.

        Args:
            calls: of each what `Realised.calls` holds.
            start: the workgroup that the first one begins with.
            stop: the workgroup before which the last one ends; None: all of them.
        """
        lib, null, base, most = self._lib, self._null, self._base, self._most
        begin_pass, set_pipeline = lib.wgpuCommandEncoderBeginComputePass, lib.wgpuComputePassEncoderSetPipeline
        set_group, set_base = lib.wgpuComputePassEncoderSetBindGroup, lib.wgpuComputePassEncoderSetImmediates
        dispatch = lib.wgpuComputePassEncoderDispatchWorkgroups
        into, bound = self._pass, self._pipeline
        last = calls[-1]
        for call in calls:
            if len(call) != 3:
                self.copy(*call)
                into = None
                continue
            pipeline, group, groups = call
            if stop is not None and call is last:
                groups = stop
            if into is None:
                into = self._pass = begin_pass(self._encoder, null)
                bound = None
            if bound is not pipeline:
                set_pipeline(into, pipeline.handle)
                bound = pipeline
            set_group(into, 0, group, 0, null)
            while True:
                base[0] = start
                set_base(into, 0, base, 4)
                if groups - start <= most:
                    dispatch(into, groups - start, 1, 1)
                    break
                dispatch(into, most, 1, 1)
                start += most
            start = 0
        self._pipeline = bound

    def copy(self, source: Any, source_offset: int, target: Any, target_offset: int, nbytes: int) -> None:
        """A stretch of one buffer into another."""
        self.end()
        self._lib.wgpuCommandEncoderCopyBufferToBuffer(
            self._encoder, source, source_offset, target, target_offset, nbytes
        )

    def mark(self, stamps: Stamps) -> None:
        """Write the time."""
        stamps.mark(self._encoder, self._pass)

    def end(self) -> None:
        """End the pass that is open, if one is."""
        if self._pass is not None:
            self._lib.wgpuComputePassEncoderEnd(self._pass)
            self._lib.wgpuComputePassEncoderRelease(self._pass)
            self._pass = None
