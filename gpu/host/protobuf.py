"""Nodes and graphs back to protobuf, for what the onnx package computes and infers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, TypeProto
from onnx.helper import np_dtype_to_tensor_dtype

from ..graph.model import Graph, Node, Value

__all__ = ["captured", "node_proto", "tensor_type"]


def captured(node: Node) -> list[Value]:
    """The values that a node's nested graphs take from the graphs around it, constants not among them."""
    found: dict[Value, None] = {}

    def walk(graph: Graph, own: set[Value]) -> None:
        own = own | set(graph.inputs)
        for inner in graph.nodes:
            for value in inner.inputs:
                if value is not None and value not in own and value.const is None:
                    found[value] = None
            for nested in inner.graphs():
                walk(nested, own)
            own.update(v for v in inner.outputs if v is not None)
        for value in graph.outputs:
            if value not in own and value.const is None:
                found[value] = None

    for graph in node.graphs():
        walk(graph, set())
    return list(found)


def tensor_type(dtype: np.dtype[Any], shape: Sequence[int] | None = None) -> TypeProto:
    """The type of a tensor."""
    out = TypeProto()
    out.tensor_type.elem_type = np_dtype_to_tensor_dtype(dtype)
    if shape is not None:
        out.tensor_type.shape.SetInParent()
        for n in shape:
            out.tensor_type.shape.dim.add().dim_value = n
    return out


def node_proto(node: Node, present: Iterable[bool], outer: Sequence[Value] = ()) -> NodeProto:
    """A node whose inputs are called i0, i1, ..., its outputs o0, o1, ..., and `outer` c0, c1, ...

    Args:
        node: the node.
        present: for each input whether it is given.
        outer: the values that its nested graphs capture.
    """
    names = {value: f"c{i}" for i, value in enumerate(outer)}
    proto = NodeProto(op_type=node.op, domain=node.domain, name=node.name)
    proto.input.extend(f"i{i}" if there else "" for i, there in enumerate(present))
    proto.output.extend("" if v is None and i else f"o{i}" for i, v in enumerate(node.outputs))
    _add_attributes(proto, node, names)
    return proto


def _graph(graph: Graph, names: dict[Value, str]) -> GraphProto:
    out = GraphProto(name=graph.name or "graph")
    held: set[str] = set()

    def name(value: Value) -> str:
        known = names.setdefault(value, f"v{len(names)}")
        if value.const is not None and known not in held:
            held.add(known)
            tensor = _tensor(value.const)
            tensor.name = known
            out.initializer.append(tensor)
        return known

    for value in graph.inputs:
        out.input.add(name=name(value), type=TypeProto() if value.dtype is None else tensor_type(value.dtype))
    for node in graph.nodes:
        proto = out.node.add(op_type=node.op, domain=node.domain, name=node.name)
        proto.input.extend("" if v is None else name(v) for v in node.inputs)
        proto.output.extend("" if v is None else name(v) for v in node.outputs)
        _add_attributes(proto, node, names)
    for value in graph.outputs:
        out.output.add(name=name(value), type=TypeProto() if value.dtype is None else tensor_type(value.dtype))
    return out


def _add_attributes(proto: NodeProto, node: Node, names: dict[Value, str]) -> None:
    for key, value in node.attrs.items():
        _set(proto.attribute.add(name=key), value, node, names)


def _set(a: AttributeProto, value: Any, node: Node, names: dict[Value, str]) -> None:
    match value:
        case bool() | int() | np.integer():
            a.type, a.i = AttributeProto.INT, int(value)
        case float() | np.floating():
            a.type, a.f = AttributeProto.FLOAT, float(value)
        case str():
            a.type, a.s = AttributeProto.STRING, value.encode("utf-8", "surrogateescape")
        case np.ndarray():
            a.type = AttributeProto.TENSOR
            a.t.CopyFrom(_tensor(value))
        case Graph():
            a.type = AttributeProto.GRAPH
            a.g.CopyFrom(_graph(value, names))
        case onnx.SparseTensorProto():
            a.type = AttributeProto.SPARSE_TENSOR
            a.sparse_tensor.CopyFrom(value)
        case TypeProto():
            a.type = AttributeProto.TYPE_PROTO
            a.tp.CopyFrom(value)
        case list() | tuple():
            _set_list(a, list(value), node, names)
        case _:
            raise TypeError(f"attribute {a.name!r} of node {node.name!r} is a {type(value).__name__}")


def _set_list(a: AttributeProto, values: list[Any], node: Node, names: dict[Value, str]) -> None:
    match values[0] if values else None:
        case None:
            a.type = _declared(a.name, node)
        case int() | np.integer():
            a.type = AttributeProto.INTS
            a.ints.extend(int(v) for v in values)
        case float() | np.floating():
            a.type = AttributeProto.FLOATS
            a.floats.extend(float(v) for v in values)
        case str():
            a.type = AttributeProto.STRINGS
            a.strings.extend(v.encode("utf-8", "surrogateescape") for v in values)
        case np.ndarray():
            a.type = AttributeProto.TENSORS
            a.tensors.extend(_tensor(v) for v in values)
        case Graph():
            a.type = AttributeProto.GRAPHS
            a.graphs.extend(_graph(v, names) for v in values)
        case onnx.SparseTensorProto():
            a.type = AttributeProto.SPARSE_TENSORS
            a.sparse_tensors.extend(values)
        case TypeProto():
            a.type = AttributeProto.TYPE_PROTOS
            a.type_protos.extend(values)
        case other:
            raise TypeError(f"attribute {a.name!r} of node {node.name!r} lists a {type(other).__name__}")


def _declared(name: str, node: Node) -> Any:
    """The type of an attribute that is an empty list, from the operator's schema."""
    try:
        schema = onnx.defs.get_schema(node.op, node.opset, node.domain)
    except onnx.defs.SchemaError:
        return AttributeProto.INTS
    attribute: Any = schema.attributes.get(name)
    return AttributeProto.INTS if attribute is None else attribute.type.value


def _tensor(array: np.ndarray[Any, Any]) -> TensorProto:
    return onnx.numpy_helper.from_array(array)
