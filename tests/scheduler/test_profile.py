"""`RunOptions(profile=True)` on engines that are there."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from trionnx import RunOptions, TerminatePolicy, open_scheduler

SIZE = 256
MODEL = onnx.parser.parse_model(
    '<ir_version: 9, opset_import: ["" : 18]>'
    f"g (float[{SIZE},{SIZE}] x) => (float[{SIZE},{SIZE}] y) {{ [product] a = MatMul(x, x) [ends] y = Softmax(a) }}"
)
X = np.eye(SIZE, dtype=np.float32)
WORK = {"product": 2.0 * SIZE**3, "ends": 8.0 * SIZE**2}
MOVED = {"product": 3 * 4 * SIZE**2, "ends": 2 * 4 * SIZE**2}


@pytest.mark.parametrize("interval_s", [10.0, 1e-4])
async def test_a_profile_has_all_of_the_work_however_it_was_cut(interval_s: float) -> None:
    policy = TerminatePolicy(checkpoint_interval_s=interval_s)
    async with open_scheduler(backend="webgpu", policy=policy) as scheduler:
        session = await scheduler.load(MODEL)
        parts = []
        for _ in range(3):
            options = RunOptions(profile=True)
            await session.run(None, {"x": X}, options)
            [upload] = [time for time in options.node_times if time.kernel == "upload"]
            assert (upload.where, upload.nbytes) == ("host", X.nbytes)
            for node, flops in WORK.items():
                times = [time for time in options.node_times if time.node == node and time.where == "gpu"]
                assert sum(time.flops for time in times) == pytest.approx(flops)
                assert sum(time.nbytes for time in times) == pytest.approx(MOVED[node], abs=len(times))
                assert all(time.seconds > 0 for time in times)
                parts.append(len(times))
        assert (max(parts) > 1) == (interval_s < 1)


async def test_the_cpu_engine_tells_of_the_whole_model() -> None:
    async with open_scheduler(backend="cpu") as scheduler:
        session = await scheduler.load(MODEL)
        options = RunOptions(profile=True)
        await session.run(None, {"x": X}, options)
        [time] = options.node_times
        assert (time.where, time.kernel, time.flops, time.nbytes) == ("opaque", "ONNX Runtime", 0.0, 0)
        assert time.seconds > 0
        await session.run(None, {"x": X}, options := RunOptions())
        assert options.node_times == ()
