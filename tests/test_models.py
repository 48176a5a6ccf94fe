"""Real models with real weights, against ONNX Runtime's CPU provider, on the WebGpu engine.

They come out of pinned registry packages (examples/real_models.py) and are kept in the user's cache folder.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
import trio

import real_models
import trionnx

NO_HOST_STEPS = ["magika_v3_3", "oww_embedding", "ppocr_cls_v2", "ppocrv4_rec", "ddddocr_det", "opennsfw"]
LIMIT_S = 300


def fetched(name: str) -> str:
    try:
        return str(real_models.model(name))
    except real_models.Unavailable as error:
        pytest.skip(f"{name} cannot be fetched here: {error}")


def reference(path, feeds):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def assert_agrees(got, expected):
    for array, right in zip(got, expected, strict=True):
        assert array.shape == right.shape
        assert array.dtype == right.dtype
        scale = float(np.abs(right).max())
        assert float(np.abs(array - right).max()) <= 1e-3 * scale
        np.testing.assert_array_equal(array.argmax(-1), right.argmax(-1))


@pytest.mark.parametrize("name", [*NO_HOST_STEPS, "silero_vad"])
async def test_agrees_with_onnxruntime(name):
    path, feeds = fetched(name), real_models.feeds(name)
    with trio.fail_after(LIMIT_S):
        async with trionnx.open_scheduler(backend="webgpu") as scheduler:
            session = await scheduler.load(path, allow_host_steps=name not in NO_HOST_STEPS)
            assert session.backend == "webgpu"
            first = await session.run(None, feeds)
            again = await session.run(None, feeds)
    assert_agrees(first, reference(path, feeds))
    for one, other in zip(first, again, strict=True):
        assert one.tobytes() == other.tobytes()


async def test_the_recogniser_reads_at_every_width():
    path, feeds = fetched("ppocrv4_rec"), real_models.feeds("ppocrv4_rec")
    with trio.fail_after(LIMIT_S):
        async with trionnx.open_scheduler(backend="webgpu") as scheduler:
            session = await scheduler.load(path)
            alphabet = real_models.characters(session.get_modelmeta().custom_metadata_map)
            (whole,) = await session.run(None, feeds)
            assert real_models.read_line(whole, alphabet) == real_models.LINE
            for width in (319, 160, 97):
                narrow = {"x": np.ascontiguousarray(feeds["x"][..., :width])}
                assert_agrees(await session.run(None, narrow), reference(path, narrow))


async def test_state_goes_through_the_voice_detector():
    path, feeds = fetched("silero_vad"), real_models.feeds("silero_vad")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    right: Any = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    ours: dict[str, Any] = dict(feeds)
    theirs: dict[str, Any] = dict(feeds)
    with trio.fail_after(LIMIT_S):
        async with trionnx.open_scheduler(backend="webgpu") as scheduler:
            session = await scheduler.load(path)
            for _ in range(4):
                output, ours["state"] = await session.run(["output", "stateN"], ours)
                expected, theirs["state"] = right.run(["output", "stateN"], theirs)
                np.testing.assert_allclose(output, expected, atol=1e-3)
                np.testing.assert_allclose(ours["state"], theirs["state"], atol=1e-3)
