"""Host steps: any operator on the CPU, in NumPy where numeric.py has it, else by onnx.reference.

This file does not decide where an operator runs. Its functions are called from one thread at a
time for a given node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto

from ..errors import InvalidData, OutOfDeviceMemory, UnsupportedOperator
from ..graph.model import Node, Value
from . import numeric
from .control import CONTROL, evaluate_control
from .older import modern
from .protobuf import captured, node_proto, tensor_type
from .room import check_room
from .table import Array

if TYPE_CHECKING:
    from onnx.reference import ReferenceEvaluator

__all__ = ["GROWING", "check_reference", "evaluate_host", "evaluate_reference", "infer_dtypes", "infer_outputs"]

GROWING = frozenset(
    (
        *("ConstantOfShape", "Expand", "Tile", "Range", "OneHot", "Pad", "CenterCropPad", "Resize", "Upsample"),
        *("EyeLike", "Einsum", "RandomNormal", "RandomUniform", "MaxUnpool", "ConvTranspose", "AffineGrid", "RoiAlign"),
    )
)
"""Operators whose outputs may be far larger than their inputs: attributes or values say how large."""

_MAX_IR = 10
_SMALL = 1024
_FORECAST = 1 << 16
"""From so many bytes of inputs on, the sizes of outputs are worked out before they are computed."""


def evaluate_host(
    node: Node,
    inputs: Sequence[Any],
    context: Mapping[str, Any] | None = None,
    check: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Compute a node on the host: in NumPy where there is an implementation, else by the reference.

    Args:
        node: the node.
        inputs: arrays (lists for sequences), None where an optional input is left out.
        context: name -> array for what its nested graphs take from the graphs around it;
            constants need not be in it.
        check: called before each node of a nested graph; what it raises leaves.

    Returns:
        As many outputs as the node has; those that nobody reads may be None. They may share
        memory with the inputs.

    Raises:
        InvalidData: the values break a rule of the operator; names the node.
        InvalidModel: a required attribute or input is missing.
        UnsupportedOperator: there is no implementation of the operator.
        OutOfDeviceMemory: there is no room for a result; names the node.
        KeyError: `context` lacks a value.
    """
    if not (context or any(True for _ in node.graphs())):
        return _evaluate(node, inputs, {}, check)
    given: dict[Value, Any] = {}
    for value in captured(node):
        if context is None or value.name not in context:
            raise KeyError(f"node {node.name!r} needs {value.name!r} from the graph around it")
        given[value] = context[value.name]
    return _evaluate(node, inputs, given, check)


def _evaluate(node: Node, inputs: Sequence[Any], outer: Mapping[Value, Any], check: Callable[[], None]) -> list[Any]:
    if (node.domain, node.op) in CONTROL:

        def evaluate(inner: Node, given: Sequence[Any], around: Mapping[Value, Any]) -> list[Any]:
            check()
            return _evaluate(inner, given, around, check)

        return evaluate_control(node, inputs, outer, evaluate, check)
    _forecast(node, inputs)
    try:
        return _compute(node, inputs, outer)
    except OutOfDeviceMemory:
        raise
    except MemoryError as error:
        raise OutOfDeviceMemory(f"node {node.name!r} ({node.op}): {_line(error)}") from None


def _forecast(node: Node, inputs: Sequence[Any]) -> None:
    """Refuse a node whose outputs would be larger than there is room for. Raises OutOfDeviceMemory."""
    arrays = [x if isinstance(x, np.ndarray) else None for x in inputs]
    if node.op not in GROWING and sum(x.nbytes for x in arrays if x is not None) < _FORECAST:
        return
    given = [None if x is None else (x.dtype, x.shape) for x in arrays]
    for made in infer_outputs(node, given, arrays):
        if made is not None:
            check_room(f"node {node.name!r} ({node.op})", *made)


def _compute(node: Node, inputs: Sequence[Any], outer: Mapping[Value, Any]) -> list[Any]:
    made = numeric.evaluate(node, inputs)
    if made is not None:
        return made
    instead = modern(node, inputs)
    if not instead:
        return evaluate_reference(node, inputs, outer)
    value = inputs[0]
    for newer, further in instead:
        made = evaluate_reference(newer, [value, *further], outer)
        value = made[0]
    assert made is not None
    return made


def evaluate_reference(node: Node, inputs: Sequence[Any], outer: Mapping[Value, Any] | None = None) -> list[Any]:
    """Compute a node by onnx.reference; the prepared evaluator is kept on the node.

    Args:
        node: the node.
        inputs: arrays (lists for sequences), None where an optional input is left out.
        outer: what its nested graphs capture; constants need not be in it.

    Returns:
        As many outputs as the node has; those that nobody reads may be None.

    Raises:
        InvalidData: the values break a rule of the operator; names the node.
        UnsupportedOperator: there is no implementation of the operator.
    """
    given = [*inputs, *([None] * (len(node.inputs) - len(inputs)))]
    key = tuple(x.dtype if isinstance(x, np.ndarray) else type(x) for x in given)
    prepared = node.prepared.get(key)
    if prepared is None:
        prepared = node.prepared[key] = _prepare(node, given)
    evaluator, taken = prepared
    feeds = {f"i{i}": x for i, x in enumerate(given) if x is not None}
    for i, value in enumerate(taken):
        feeds[f"c{i}"] = (outer or {})[value]
    try:
        with np.errstate(all="ignore"):
            made = evaluator.run(None, feeds)
    except _refusals() as error:
        raise _unsupported(node, error) from None
    except MemoryError:
        raise
    except Exception as error:
        raise InvalidData(node.name, f"{node.op}: {_line(error)}") from error
    places = iter(made)
    return [None if v is None and i else _array(next(places)) for i, v in enumerate(node.outputs)]


def check_reference(node: Node) -> None:
    """Raises UnsupportedOperator, which names the node, where onnx.reference cannot compute its operator."""
    _prepare(node, [None if value is None else value.name for value in node.inputs])


def _prepare(node: Node, inputs: Sequence[Any]) -> tuple[ReferenceEvaluator, list[Value]]:
    outer = captured(node)
    graph = onnx.GraphProto(name="step")
    graph.node.append(node_proto(node, [x is not None for x in inputs], outer))
    named = [(f"i{i}", x.dtype if isinstance(x, np.ndarray) else None) for i, x in enumerate(inputs) if x is not None]
    named += [(f"c{i}", v.dtype) for i, v in enumerate(outer)]
    for name, dtype in named:
        graph.input.add(name=name, type=onnx.TypeProto() if dtype is None else tensor_type(dtype))
    for name in graph.node[0].output:
        if name:
            graph.output.add(name=name)
    model = onnx.ModelProto(ir_version=_MAX_IR, graph=graph)
    for domain, version in _versions(node).items():
        model.opset_import.add(domain=domain, version=version)
    from onnx.reference import ReferenceEvaluator

    try:
        return ReferenceEvaluator(model), outer
    except Exception as error:
        known = isinstance(error, (*_refusals(), onnx.defs.SchemaError))
        raise _unsupported(node, error) from (None if known else error)


@cache
def _refusals() -> tuple[type[Exception], ...]:
    """What onnx.reference raises where it lacks an operator. Imported late: most models need none of it."""
    from onnx.reference.op_run import RuntimeContextError, RuntimeImplementationError

    return NotImplementedError, RuntimeContextError, RuntimeImplementationError


def _versions(node: Node) -> dict[str, int]:
    versions = {node.domain: node.opset}

    def walk(inner: Node) -> None:
        versions.setdefault(inner.domain, inner.opset)
        for graph in inner.graphs():
            for deeper in graph.nodes:
                walk(deeper)

    walk(node)
    versions.setdefault("", onnx.defs.onnx_opset_version())
    return versions


def _unsupported(node: Node, error: Exception) -> UnsupportedOperator:
    reason = "no kernel, and the reference evaluator has no implementation of it"
    if not isinstance(error, _refusals()):
        reason = f"no kernel, and the reference evaluator refuses it: {_line(error)}"
    return UnsupportedOperator(node.op, node.domain, node.opset, node.name, reason)


def _array(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        if x.dtype.kind in "US":
            return x.astype(object)
        return x if x.flags.c_contiguous else x.copy()
    return np.asarray(x) if isinstance(x, np.generic | bool | int | float) else x


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def infer_outputs(
    node: Node,
    inputs: Sequence[tuple[np.dtype[Any], Sequence[int]] | None],
    values: Sequence[Array | None],
) -> list[tuple[np.dtype[Any], tuple[int, ...]] | None]:
    """Dtype and shape of each output of a node, without computing it.

    Args:
        node: the node.
        inputs: dtype and shape of each input, None where left out or unknown.
        values: the contents of those inputs that are known and small.

    Returns:
        One entry per output; None where the shape depends on values that are not known, where the
        output is no tensor, or where inference fails. Never raises for a valid node.
    """
    made = _infer(node, inputs, values)
    return [_known(made.get(f"o{i}")) for i in range(len(node.outputs))]


def infer_dtypes(
    node: Node,
    inputs: Sequence[tuple[np.dtype[Any], Sequence[int] | None] | None],
    values: Sequence[Array | None],
) -> tuple[np.dtype[Any] | None, ...]:
    """Dtype of each output of a node, also where no shapes (None) are known; None as in `infer_outputs`."""
    made = _infer(node, inputs, values)
    kinds = [made.get(f"o{i}") for i in range(len(node.outputs))]
    return tuple(
        _dtype(kind.tensor_type) if kind is not None and kind.HasField("tensor_type") else None for kind in kinds
    )


def _infer(
    node: Node,
    inputs: Sequence[tuple[np.dtype[Any], Sequence[int] | None] | None],
    values: Sequence[Array | None],
) -> Mapping[str, onnx.TypeProto]:
    """What onnx infers of a node whose outputs are o0, o1, ...; nothing where it fails."""
    present = [i < len(inputs) and inputs[i] is not None for i in range(len(node.inputs))]
    if any(v is not None and not there for v, there in zip(node.inputs, present, strict=True)):
        return {}
    try:
        schema = onnx.defs.get_schema(node.op, node.opset, node.domain)
        key = ("proto", *present)
        proto = node.prepared.get(key)
        if proto is None:
            proto = node.prepared[key] = node_proto(node, present, captured(node))
        types, data = {}, {}
        for i, given in enumerate(inputs):
            if given is None:
                continue
            types[f"i{i}"] = tensor_type(*given)
            value = values[i] if i < len(values) else None
            if value is not None and value.size <= _SMALL and not value.dtype.hasobject:
                data[f"i{i}"] = onnx.numpy_helper.from_array(value)
        imports = [onnx.OperatorSetIdProto(domain=d, version=v) for d, v in _versions(node).items()]
        made: Mapping[str, onnx.TypeProto] = onnx.shape_inference.infer_node_outputs(
            schema, proto, types, data, None, imports, _MAX_IR
        )
    except Exception:
        return {}
    return made


def _known(proto: onnx.TypeProto | None) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    if proto is None or not proto.HasField("tensor_type") or not proto.tensor_type.HasField("shape"):
        return None
    dtype, dims = _dtype(proto.tensor_type), proto.tensor_type.shape.dim
    if dtype is None or any(not d.HasField("dim_value") for d in dims):
        return None
    return dtype, tuple(d.dim_value for d in dims)


def _dtype(kind: onnx.TypeProto.Tensor) -> np.dtype[Any] | None:
    if kind.elem_type == TensorProto.UNDEFINED:
        return None
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
