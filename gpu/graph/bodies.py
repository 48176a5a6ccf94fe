"""Operators that ONNX defines as functions of others: their bodies, as graphs to walk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import defs, helper

from ..errors import InvalidModel
from ..host.protobuf import node_proto, tensor_type
from .model import Graph, Node
from .tensor import Tensor

__all__ = ["body_of"]

_DOMAIN = "trionnx.body"


def body_of(node: Node, inputs: Sequence[Tensor | None]) -> Graph | None:
    """The body of a function, for inputs of these dtypes; None where the operator is none.

    The graph's inputs are the node's inputs that are given, its outputs those of the node's
    outputs that are read, both in order. Made once per node, dtypes and ranks.
    """
    key = ("body", tuple(None if t is None else (t.dtype, t.rank) for t in inputs))
    if key not in node.prepared:
        node.prepared[key] = _make(node, inputs)
    made: Graph | None = node.prepared[key]
    return made


def _make(node: Node, inputs: Sequence[Tensor | None]) -> Graph | None:
    from .read import read_model

    if any(t is not None and t.dtype == object for t in inputs):
        return None
    try:
        schema = defs.get_schema(node.op, node.opset, node.domain)
    except defs.SchemaError:
        return None
    proto = node_proto(node, [t is not None for t in inputs])
    given_names = {a.name for a in proto.attribute}
    for name, attribute in schema.attributes.items():
        if name not in given_names and attribute.default_value.name:
            proto.attribute.append(attribute.default_value)
    function = _function(schema, node.opset, proto, inputs)
    if function is None:
        return None
    function.domain = proto.domain = _DOMAIN
    given = [(f"i{n}", t) for n, t in enumerate(inputs) if t is not None]
    outputs = [name for name, value in zip(proto.output, node.outputs, strict=True) if value is not None]
    graph = helper.make_graph(
        [proto],
        node.name,
        [helper.make_value_info(name, tensor_type(t.dtype, t.shape)) for name, t in given],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
    )
    opsets = [helper.make_opsetid("", _opset(function, node)), helper.make_opsetid(_DOMAIN, 1)]
    model = helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=10)
    try:
        read = read_model(model)
    except InvalidModel:
        return None
    made = read.graph
    for inner in made.nodes:
        inner.name = f"{node.name}/{inner.name}"
    return made if [v.name for v in made.outputs] == outputs else None


def _opset(function: onnx.FunctionProto, node: Node) -> int:
    other = defs.onnx_opset_version() if node.domain else node.opset
    return next((o.version for o in function.opset_import if not o.domain), other)


def _function(
    schema: Any, opset: int, node: onnx.NodeProto, inputs: Sequence[Tensor | None]
) -> onnx.FunctionProto | None:
    function = onnx.FunctionProto()
    try:
        if schema.has_context_dependent_function:
            known = schema.context_dependent_function_opset_versions
            version = max((v for v in known if v <= opset), default=known[0])
            types = [onnx.TypeProto() if t is None else tensor_type(t.dtype, t.shape) for t in inputs]
            data = schema.get_context_dependent_function_with_opset_version(
                version, node.SerializeToString(), [t.SerializeToString() for t in types]
            )
        elif schema.has_function:
            known = schema.function_opset_versions
            data = schema.get_function_with_opset_version(max((v for v in known if v <= opset), default=known[0]))
        else:
            return None
        function.ParseFromString(data)
    except RuntimeError:
        return None
    return function if function.node else None
