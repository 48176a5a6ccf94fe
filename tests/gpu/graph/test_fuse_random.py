"""Random graphs of elementwise operators, products and views: however they fuse, the numbers are NumPy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

UNARY: dict[str, Callable[[Any], Any]] = {
    "Relu": lambda x: np.maximum(x, 0),
    "Neg": np.negative,
    "Abs": np.abs,
    "Identity": lambda x: x,
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Max": np.maximum,
}


def random_graph(rng):
    """A model of about 15 nodes, its feeds, and its outputs as NumPy computes them in float64."""
    side = int(rng.integers(1, 7))
    shapes = [(2, 3, side, side), (3, 1, 1), (1, side), (2, 3, side, side), ()]
    feeds = {f"x{n}": (rng.standard_normal(s) * 0.5).astype(np.float32) for n, s in enumerate(shapes)}
    values = {name: array.astype(np.float64) for name, array in feeds.items()}
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape) for n, a in feeds.items()]
    nodes = []
    for number in range(int(rng.integers(6, 16))):
        name, kind = f"v{number}", rng.choice(["unary", "binary", "binary", "matmul", "flip"])
        names = list(values)
        x = str(rng.choice(names[-6:]))
        if kind in ("matmul", "flip") and (values[x].ndim < 2 or values[x].shape[-1] != values[x].shape[-2]):
            kind = "unary"
        if kind == "unary":
            op = str(rng.choice(list(UNARY)))
            nodes.append(helper.make_node(op, [x], [name]))
            values[name] = UNARY[op](values[x])
        elif kind == "binary":
            op, y = str(rng.choice(list(BINARY))), str(rng.choice(names))
            nodes.append(helper.make_node(op, [x, y], [name]))
            values[name] = np.tanh(BINARY[op](values[x], values[y]))
            nodes[-1].output[0] = f"{name}_raw"
            nodes.append(helper.make_node("Tanh", [f"{name}_raw"], [name]))
        elif kind == "matmul":
            nodes.append(helper.make_node("MatMul", [x, x], [name]))
            values[name] = values[x] @ values[x]
        else:
            perm = [*range(values[x].ndim - 2), values[x].ndim - 1, values[x].ndim - 2]
            nodes.append(helper.make_node("Transpose", [x], [name], perm=perm))
            values[name] = np.transpose(values[x], perm)
    made = [n for n in values if n.startswith("v")]
    wanted = [made[-1], *rng.choice(made[:-1], size=2, replace=False)]
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, values[n].shape) for n in wanted]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return model, feeds, [values[n] for n in wanted]


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs(open_model, seed):
    model, feeds, expected = random_graph(np.random.default_rng(seed))
    driver = open_model(model)
    got = driver.run(feeds)
    for array, value in zip(got, expected, strict=True):
        scale = max(1.0, float(np.abs(value).max(initial=0)))
        assert array.shape == value.shape
        np.testing.assert_allclose(array / scale, value / scale, atol=1e-4)
    assert all(e.where != "host" for e in driver.engine.explain())
