"""One model, measured on the adapter that this process sees."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import trionnx
from moments import cancel_at_random
from overhead import compare
from record import Cancels, Cost, Record
from trionnx.cli.measure import heartbeat, quantile
from trionnx.gpu.device.engine import WebGpuEngine
from works import Work

__all__ = ["WrongBackend", "measure"]

COUNTED = "webgpu, counting"


class WrongBackend(RuntimeError):
    """Another back end than the one asked for."""


def counting(*, adapter: str | int | None, max_in_flight: int) -> WebGpuEngine:
    """An engine whose device counts the segments that it executes."""
    return WebGpuEngine(adapter, max_in_flight, count=True)


async def measure(
    work: Work,
    *,
    backend: str = "webgpu",
    adapter: str | None = None,
    policies: Sequence[str],
    rounds: int,
    pairs: int,
    check: int = 5,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> Record:
    """Load, cancel again and again under each policy, then see what checkpoints cost.

    Args:
        work: the model and its inputs.
        backend: an engine's name.
        adapter: index or part of a name; None: the best there is.
        policies: names of `moments.POLICIES`.
        rounds: cancels for each policy.
        pairs: samples of split and whole runs; 0: none.
        check: compare outputs after so many cancels.
        seed: of the moments.
        say: told what is being done.

    Raises:
        WrongBackend: the model runs on another back end.

    **Cancellation:** stops what is under way.
    """
    shapes = {name: value.shape for name, value in work.feeds.items()}
    cancels: list[Cancels] = []
    costs: list[Cost] = []
    async with trionnx.open_scheduler(backend=backend, adapter=adapter) as scheduler:

        async def load(name: str) -> trionnx.Session:
            session = await scheduler.load(work.source, input_shapes=shapes, backend=name)
            if session.backend != backend:
                raise WrongBackend(f"asked for {backend}, got {session.backend}")
            return session

        say("load")
        # The device that is measured for time has no counter, which costs a dispatch for each segment.
        trionnx.register_engine(COUNTED, counting)
        async with heartbeat() as loading:
            start = time.perf_counter()
            session = await load(COUNTED if backend == "webgpu" else backend)
            load_s = time.perf_counter() - start
        bounded = "checkpoint_interval_s" not in session._loaded.limits
        async with session, heartbeat() as running:
            for name in policies:
                say(f"cancel, {name}")
                cancels.append(
                    await cancel_at_random(
                        session,
                        work.feeds,
                        name,
                        rounds=rounds,
                        check=check,
                        seed=f"{seed} {work.name} {name}",
                        bounded=bounded,
                    )
                )
        if pairs:
            say("split and whole")
            async with await load(backend) as session:
                costs = await compare(session, work.feeds, pairs)
        return Record(
            work=work.name,
            backend=session.backend,
            adapter=session.adapter,
            load_s=load_s,
            gap_load_max_s=max(loading.gaps, default=0.0),
            gap_run_p99_s=quantile(running.gaps, 0.99) if running.gaps else 0.0,
            gap_run_max_s=max(running.gaps, default=0.0),
            cancels=cancels,
            costs=costs,
        )
