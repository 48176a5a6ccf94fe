from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from trionnx.gpu.graph.model import Node, Value
from trionnx.gpu.host.protobuf import node_proto, tensor_type

Array = np.ndarray[Any, Any]


def _make_node(op: str, inputs: Sequence[Any], attrs: dict[str, Any], opset: int, outputs: int, domain: str) -> Node:
    values = tuple(None if x is None else Value(f"in{i}", getattr(x, "dtype", None)) for i, x in enumerate(inputs))
    made = tuple(Value(f"out{i}") for i in range(outputs))
    return Node(op, domain, opset, "the node", values, made, attrs)


@pytest.fixture
def make_node() -> Callable[..., Node]:
    """Make a node for given inputs: op, inputs, opset=, outputs=, domain=, and attributes by name."""

    def make(
        op: str, inputs: Sequence[Any], *, opset: int = 17, outputs: int = 1, domain: str = "", **attrs: Any
    ) -> Node:
        return _make_node(op, inputs, attrs, opset, outputs, domain)

    return make


@pytest.fixture
def oracle() -> Callable[[Node, Sequence[Any]], list[Array]]:
    """Compute a node by ONNX Runtime on the CPU."""

    def run(node: Node, inputs: Sequence[Any]) -> list[Array]:
        graph = onnx.GraphProto(name="g")
        graph.node.append(node_proto(node, [x is not None for x in inputs]))
        given = {f"i{i}": np.asarray(x) for i, x in enumerate(inputs) if x is not None}
        for name, x in given.items():
            graph.input.add(name=name, type=tensor_type(x.dtype, x.shape))
        for name in graph.node[0].output:
            graph.output.add(name=name)
        model = onnx.ModelProto(ir_version=8, graph=graph)
        model.opset_import.add(domain=node.domain, version=node.opset)
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return [np.asarray(x) for x in session.run(None, given)]

    return run
