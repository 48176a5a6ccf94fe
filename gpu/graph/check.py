"""What is wrong with a graph whatever the shapes: refused at load.

Shapes and values have their say later, in kernels and host steps (planner.py). What the checks
of this file let pass may still be wrong there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from onnx import TensorProto, defs

from ..errors import InvalidModel, UnsupportedOperator
from ..host.control import CONTROL
from ..host.numeric import has_numeric
from ..host.reference import check_reference, infer_dtypes
from ..kernels.registry import find
from .model import Graph, Model, Node, Value

__all__ = ["check_kernels", "check_nodes", "check_operators"]

PLANNED = {("", op) for op in ("If", "Loop", "Scan", "Shape", "Size")}
"""Operators that the planner itself knows."""
_TYPES: dict[str, Any] = {
    "INT": int,
    "INTS": int,
    "FLOAT": (int, float),
    "FLOATS": (int, float),
    "STRING": str,
    "STRINGS": str,
}
_DTYPES = {"to", "dtype", "output_dtype"}


def check_nodes(graph: Graph, check: Callable[[], None] = lambda: None) -> None:
    """Compare nodes, also those of nested graphs, with what ONNX says of their operators.

    1. Required inputs and attributes are there, and no more of them than the operator has.
    2. Attributes have the operator's types; one that names a dtype names one that there is.
    3. Operators that onnx does not know are let pass.

    Args:
        graph: as the file has it.
        check: called between nodes; what it raises is let through.

    Raises:
        InvalidModel: names the node.
    """
    for node in graph.nodes:
        check()
        for nested in node.graphs():
            check_nodes(nested, check)
        try:
            schema = defs.get_schema(node.op, node.opset, node.domain)
        except defs.SchemaError:
            continue
        why = _arity(node, schema) or _attributes(node, schema)
        if why:
            raise InvalidModel(f"node {node.name!r} ({node.op}): {why}")


def _arity(node: Node, schema: Any) -> str | None:
    required = defs.OpSchema.FormalParameterOption.Single
    for number, formal in enumerate(schema.inputs):
        if formal.option == required and (number >= len(node.inputs) or node.inputs[number] is None):
            return f"its input {formal.name!r} is missing"
    for what, given, most in (("inputs", node.inputs, schema.max_input), ("outputs", node.outputs, schema.max_output)):
        if len(given) > most:
            return f"expected at most {most} {what}, got {len(given)}"
    return None


def _attributes(node: Node, schema: Any) -> str | None:
    if (node.domain, node.op) == ("", "Constant") and len(node.attrs) != 1:
        return f"expected one value, got {len(node.attrs)}"
    for name, formal in schema.attributes.items():
        if formal.required and name not in node.attrs:
            return f"its attribute {name!r} is missing"
    for name, value in node.attrs.items():
        formal = schema.attributes.get(name)
        if formal is None:
            return f"it has no attribute {name!r}"
        kind = formal.type.name
        of = _TYPES.get(kind)
        values = value if kind.endswith("S") else [value]
        if of is not None and not (isinstance(values, list) and all(isinstance(v, of) for v in values)):
            return f"expected its attribute {name!r} as {kind}, got {value!r}"
        if (node.op, name) == ("Split", "num_outputs") and value != len(node.outputs):
            return f"{value} outputs are asked for, and there are {len(node.outputs)}"
        if kind == "INT" and name in _DTYPES and value not in TensorProto.DataType.values():
            return f"its attribute {name!r} is {value}, which is no dtype"
    return None


def check_operators(model: Model, check: Callable[[], None] = lambda: None) -> None:
    """Refuse a model whose main graph has an operator that nobody here knows.

    Args:
        model: optimised.
        check: called between nodes; what it raises is let through.

    Raises:
        UnsupportedOperator: names the first such node.
    """
    for node in model.graph.nodes:
        check()
        if not (_has_kernel(node) or has_numeric(node) or (node.domain, node.op) in CONTROL):
            check_reference(node)


def check_kernels(model: Model, check: Callable[[], None] = lambda: None) -> None:
    """Refuse a model with a node on floats that can only be a host step.

    1. Nodes of nested graphs count, of an If with a constant condition those of its branch.
    2. What constants and shapes determine does not count: it is computed while planning.
    3. What has no kernel for its shapes or dtypes only is left to the planner.

    Args:
        model: optimised.
        check: called between nodes; what it raises is let through.

    Raises:
        UnsupportedOperator: names the first such node.
    """
    nodes = list(_nodes(model.graph))
    if all(_has_kernel(node) for node in nodes):
        return
    dtypes: dict[Value, np.dtype[Any] | None] = {}
    fixed: set[Value] = set()
    for node in nodes:
        check()
        given = [v for v in node.inputs if v is not None]
        ahead = not any(True for _ in node.graphs()) and all(v.const is not None or v in fixed for v in given)
        types = [None if v is None else _type(v, dtypes) for v in node.inputs]
        floats = any(t is not None and np.issubdtype(t, np.floating) for t in types)
        if floats and not ahead and not _has_kernel(node):
            reason = "host steps are not allowed, and no kernel for it yet"
            raise UnsupportedOperator(node.op, node.domain, node.opset, node.name, reason)
        outputs = [v for v in node.outputs if v is not None]
        if (given and ahead) or (not node.domain and node.op in ("Shape", "Size")):
            fixed.update(outputs)
        if any(v.dtype is None for v in outputs):
            values = [None if v is None else v.const for v in node.inputs]
            made = infer_dtypes(node, [None if t is None else (t, None) for t in types], values)
            dtypes.update((v, t) for v, t in zip(node.outputs, made, strict=False) if v is not None)


def _nodes(graph: Graph) -> Iterator[Node]:
    """The nodes that may be walked, in order; nested ones before the node that holds them."""
    for node in graph.nodes:
        graphs = list(node.graphs())
        if node.op == "If" and not node.domain and node.inputs[0] is not None and node.inputs[0].const is not None:
            taken = bool(node.inputs[0].const.reshape(-1)[0])
            graphs = [node.attrs["then_branch" if taken else "else_branch"]]
        for inner in graphs:
            yield from _nodes(inner)
        yield node


def _type(value: Value, dtypes: dict[Value, np.dtype[Any] | None]) -> np.dtype[Any] | None:
    return value.const.dtype if value.const is not None else value.dtype or dtypes.get(value)


def _has_kernel(node: Node) -> bool:
    """Whether an operator has a kernel for some shapes, or is a function of others."""
    if (node.domain, node.op) in PLANNED or find(node.op, node.domain, node.opset) is not None:
        return True
    try:
        schema: Any = defs.get_schema(node.op, node.opset, node.domain)
    except defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)
