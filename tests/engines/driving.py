"""What tests of engines in worker processes share: toys, requests that are waited for, processes that are gone."""

from __future__ import annotations

import os
import queue
import runpy
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx

from trionnx.actors.remote import RemoteEngine
from trionnx.gpu.engine import Engine
from trionnx.gpu.seam import Closed, Reply

__all__ = [
    "LIMIT_S",
    "PLACES",
    "SOAK",
    "TOYS",
    "Driver",
    "X",
    "ask",
    "asked",
    "close",
    "gone",
    "parse",
    "source",
    "toy",
    "wait_for",
]

ENGINES = runpy.run_path(str(Path(__file__).parent.parent / "gpu" / "conftest.py"))
Driver, ask = ENGINES["Driver"], ENGINES["ask"]
PLACES = {
    "toy": "toy:ToyEngine",
    "cpu": "trionnx.gpu.cpu.engine:OrtCpuEngine",
    "webgpu": "trionnx.gpu.device.engine:WebGpuEngine",
}
TOYS = Path(__file__).parent.parent / "engines"
SOAK = os.environ.get("TRIONNX_SOAK") == "1"
LIMIT_S = 60.0
NONE: Mapping[str, str] = MappingProxyType({})
X = np.arange(5, dtype=np.float32)


def toy(**options: Any) -> RemoteEngine:
    return RemoteEngine(PLACES["toy"], **options)


def source(
    *blocks: int, seconds: float = 0.0, lies: tuple[str, ...] = (), faults: Mapping[str, str] = NONE
) -> dict[str, Any]:
    """What a toy plays; faults by their phases, several of one phase parted by blanks."""
    return {
        "blocks": list(blocks or (3,)),
        "seconds": seconds,
        "lies": list(lies),
        "faults": {phase: fault.split(" ") for phase, fault in faults.items()},
    }


def parse(body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]>\ng {body}')


def asked(request: Callable[..., Any], *arguments: Any) -> queue.SimpleQueue[Reply]:
    answers: queue.SimpleQueue[Reply] = queue.SimpleQueue()
    request(*arguments, answers.put)
    return answers


def close(engine: Engine) -> None:
    assert isinstance(asked(engine.close).get(timeout=LIMIT_S), Closed)


def wait_for(true: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def gone(pid: int) -> bool:
    """Whether there is no such process, not even a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
