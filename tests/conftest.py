from __future__ import annotations

import gc
import os
import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import hypothesis
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

hypothesis.settings.register_profile("trionnx", deadline=None, max_examples=100)
hypothesis.settings.load_profile("trionnx")


@pytest.fixture(scope="session", autouse=True)
def _one_probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The drivers are probed once for all tests, with time enough for a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIONNX_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        if not os.environ.get("TRIONNX_PROBE"):
            patch.setenv("TRIONNX_PROBE", "30")
        yield


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loads may take long on a busy machine, and what got stuck in one test is sound in the next."""
    from trionnx.scheduler import Scheduler, recovery

    monkeypatch.setitem(Scheduler.load.__kwdefaults__ or {}, "init_timeout_s", 600.0)
    yield
    recovery.health.forget()


def children() -> set[int]:
    """The processes that this one has started and not reaped."""
    found = set()
    for task in pathlib.Path("/proc/self/task").iterdir():
        try:
            found |= {int(pid) for pid in (task / "children").read_text().split()}
        except OSError:  # the thread has just ended
            continue
    return found


def holdings() -> dict[str, int]:
    """What this process holds of the system: counted before and after."""
    gc.collect()
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    maps = pathlib.Path("/proc/self/maps").read_text()
    return {
        "children": len(children()),
        "pipes": sum(link.startswith("pipe:") for link in links),
        "memory": maps.count("memfd:trionnx") + sum("trionnx" in link for link in links),
        "threads": sum(thread.name.startswith("trionnx worker") for thread in threading.enumerate()),
    }


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No process, no zombie, no descriptor, no shared memory and no thread is left by the test."""
    before = holdings()
    yield
    end = time.monotonic() + 60
    while (after := holdings()) != before and time.monotonic() < end:  # a thread that answered may yet have to end
        time.sleep(0.005)
    assert after == before


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The WebGpu engines that sessions on the back end "watched" are made on.

    Each has its device count segments, and keeps what it says at the end of each run, as `ended`.
    """
    from trionnx.gpu.device.engine import WebGpuEngine
    from trionnx.scheduler import backends

    class Watched(WebGpuEngine):
        def __init__(self, adapter: Any, max_in_flight: int) -> None:
            super().__init__(adapter, max_in_flight, count=True)
            self.ended: list[Any] = []

        def end(self, run: int, done: Any, kept: Any = ()) -> None:
            def hear(reply: Any) -> None:
                self.ended.append(reply.counts)
                done(reply)

            super().end(run, hear, kept)

    made: list[Any] = []

    def factory(*, adapter: Any, max_in_flight: int) -> Watched:
        made.append(Watched(adapter, max_in_flight))
        watched: Watched = made[-1]
        return watched

    monkeypatch.setattr(backends, "_registered", {**backends._registered, "watched": factory})
    return made


def left_behind(engines: list[Any]) -> dict[str, int]:
    """What a process holds that a run or a load might leave: objects of wgpu, threads, open files.

    The engines have been closed: their threads end by themselves, which is waited for, and the list is emptied.
    Trio's own threads are not counted: they stay for a while.
    """
    from wgpu.backends.wgpu_native._helpers import generate_report

    while engines:
        engines.pop()._thread._thread.join(60)
    gc.collect()
    counts = {kind: count["allocated"] for kind, count in generate_report()["hub"].items() if "allocated" in count}
    names = [thread.name for thread in threading.enumerate()]
    counts["threads"] = sum(not name.startswith("Trio") for name in names)
    if pathlib.Path("/proc/self/fd").exists():
        counts["files"] = len(os.listdir("/proc/self/fd"))
    return counts


def layers(count: int, side: int, *, early: int | None = None, seed: int = 0) -> onnx.ModelProto:
    """x [n, side] -> MatMul, Tanh, again and again -> y; and, where asked for, what an early layer gives as "early"."""
    rng = np.random.default_rng(seed)
    nodes, weights, last = [], [], "x"
    for n in range(count):
        weight = (rng.standard_normal((side, side)) / np.sqrt(side)).astype(np.float32)
        weights.append(numpy_helper.from_array(weight, f"w{n}"))
        made = "early" if n == early else "y" if n == count - 1 else f"t{n}"
        nodes.append(helper.make_node("MatMul", [last, f"w{n}"], [f"m{n}"]))
        nodes.append(helper.make_node("Tanh", [f"m{n}"], [made]))
        last = made
    names = ["y"] if early is None else ["early", "y"]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", side]) for name in ["x", *names]]
    graph = helper.make_graph(nodes, "layers", infos[:1], infos[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.fixture(name="left_behind")
def _left_behind() -> Any:
    return left_behind


@pytest.fixture(name="layers")
def _layers() -> Any:
    return layers
