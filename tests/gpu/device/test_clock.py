from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import trionnx
from trionnx.gpu.device.clock import MARKS, spacing


def test_there_are_enough_marks_for_any_number_of_steps() -> None:
    for steps in range(1, 10 * MARKS):
        assert 1 + math.ceil(steps / spacing(steps)) <= MARKS
    assert spacing(MARKS - 1) == 1


@pytest.mark.parametrize("steps", [MARKS - 1, MARKS, 2 * MARKS - 2, 2 * MARKS - 1])
async def test_as_many_steps_as_one_segment_holds_are_timed(steps: int) -> None:
    names = ["x", *(f"v{number}" for number in range(steps - 1)), "y"]
    nodes = [helper.make_node("MatMul", [names[i], "w"], [names[i + 1]]) for i in range(steps)]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4]) for name in "xy"]
    weights = numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")
    graph = helper.make_graph(nodes, "products", infos[:1], infos[1:], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    whole = trionnx.TerminatePolicy(split_into_checkpoints=False)
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    async with trionnx.open_scheduler(backend="webgpu", policy=whole) as scheduler:
        session = await scheduler.load(onnx.load_from_string(model.SerializeToString()))
        assert [node.where for node in session.explain()] == ["gpu"] * steps
        # Over and over, so that every place for timestamps has its turn, the last one, too.
        for _ in range(8):
            (y,) = await session.run(None, {"x": x})
            assert np.array_equal(x, y)
