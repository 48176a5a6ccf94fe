"""Engines driven without Trio: each request is made and waited for."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import pytest

from trionnx.gpu.device.engine import WebGpuEngine
from trionnx.gpu.engine import Engine
from trionnx.gpu.seam import (
    Begin,
    Begun,
    Counts,
    Cursor,
    Done,
    Ended,
    Failed,
    Fenced,
    Finished,
    Free,
    Freed,
    Load,
    Loaded,
    Outputs,
    Read,
    Reply,
    Segment,
    TensorRef,
)

LIMIT_S = 120


def ask(request: Callable[[Done], None]) -> Reply:
    """Make a request, wait for its answer, raise its error."""
    answers: queue.SimpleQueue[Reply] = queue.SimpleQueue()
    request(answers.put)
    reply = answers.get(timeout=LIMIT_S)
    if isinstance(reply, Failed):
        raise reply.error
    return reply


class Driver:
    """One model on one engine; each run is streamed step by step, or a block at a time."""

    def __init__(self, engine: Engine, source: Any, **load: Any) -> None:
        self.engine = engine
        loaded = ask(lambda done: engine.load(Load(source, **load), done, lambda progress: None))
        assert isinstance(loaded, Loaded)
        self.loaded = loaded
        self.model = load.get("model", 0)
        self.runs = 1000 * self.model
        self.counts = Counts()

    def begin(self, feeds: Mapping[str, Any], keep: tuple[str, ...] = ()) -> Any:
        self.runs += 1
        names = tuple(info.name for info in self.loaded.outputs)
        begun = ask(lambda done: self.engine.begin(Begin(self.runs, feeds, names, model=self.model, keep=keep), done))
        assert isinstance(begun, Begun)
        return begun.block

    def submit(self, seq: int, start: Cursor, stop: Cursor) -> Reply:
        return ask(lambda done: self.engine.submit(Segment(self.runs, seq, start, stop), done))

    def read(self) -> list[Any]:
        names = tuple(info.name for info in self.loaded.outputs)
        outputs = ask(lambda done: self.engine.read(Read(self.runs, names), done))
        assert isinstance(outputs, Outputs)
        return [outputs.values[name] for name in names]

    def end(self, kept: tuple[TensorRef, ...] = ()) -> None:
        ended = ask(lambda done: self.engine.end(self.runs, done, kept))
        assert isinstance(ended, Ended)
        self.counts = ended.counts

    def run(
        self, feeds: Mapping[str, Any], *, units: int | None = None, keep: tuple[str, ...] = ()
    ) -> list[Any]:
        """Run to the end, a step per segment, each cut every `units` units; outputs in `keep` stay on the device."""
        made: list[Any] = []
        try:
            block: Any = self.begin(feeds, keep)
            seq = 0
            while not isinstance(block, Finished):
                decided: Any = None
                for index, step in enumerate(block.steps):
                    width = min(units or step.units, step.units)
                    for first in range(0, step.units, width):
                        last = first + width
                        here = Cursor(block.activation, index)
                        stop = here._replace(step=index + 1) if last >= step.units else here._replace(unit=last)
                        reply = self.submit(seq, here._replace(unit=first), stop)
                        assert isinstance(reply, Fenced)
                        decided = reply.next or decided
                        seq += 1
                block = block.then if block.then is not None else decided
            made = self.read()
            return made
        finally:
            self.end(tuple(value for value in made if isinstance(value, TensorRef)))

    def bring(self, *refs: TensorRef) -> list[Any]:
        """Kept values as arrays."""
        self.runs += 1
        outputs = ask(lambda done: self.engine.read(Read(self.runs, tensors=refs), done))
        assert isinstance(outputs, Outputs)
        return list(outputs.tensors)

    def free(self, *refs: TensorRef, models: tuple[int, ...] = ()) -> None:
        """Give kept values, and models, back."""
        assert ask(lambda done: self.engine.free(Free(refs, models), done)) == Freed()

    def close(self) -> None:
        ask(self.engine.close)


@pytest.fixture
def open_model() -> Iterator[Callable[..., Driver]]:
    """`open_model(source, **load)`: a Driver on the WebGpu engine, closed after the test."""
    opened: list[Driver] = []

    def open_one(source: Any, *, engine: Engine | None = None, **load: Any) -> Driver:
        driver = Driver(engine or WebGpuEngine(), source, **load)
        opened.append(driver)
        return driver

    yield open_one
    for driver in opened:
        driver.close()


@pytest.fixture
def parse() -> Callable[..., onnx.ModelProto]:
    """`parse(body, opset=18)`: a model in onnx's text format."""

    def parse_one(body: str, opset: int = 18) -> onnx.ModelProto:
        return onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : {opset}]>\n{body}')

    return parse_one


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
