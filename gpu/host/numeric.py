"""Operators in NumPy, for what planning needs at once and for small work on the host.

Rules of this file and of those it imports:
1. Dtypes are exact: int64 stays int64, and integers wrap around as in C.
2. Right for the opset version that the node names, back to 7.
3. Outputs are contiguous; they may share memory with the inputs.
4. What is not here is no error: the reference evaluator (reference.py) is next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import InvalidData, InvalidModel
from ..graph.model import Node
from . import (
    arithmetic,
    chance,
    contrib,
    indexing,
    ml,
    movement,
    neural,
    recurrent,
    reductions,
    sequences,
    trees,
    windows,
)
from .table import ANYTHING, STRINGS, TABLE, Array

__all__ = ["evaluate", "has_numeric"]

_FAMILIES = (
    arithmetic,
    chance,
    contrib,
    indexing,
    ml,
    movement,
    neural,
    recurrent,
    reductions,
    sequences,
    trees,
    windows,
)


def has_numeric(node: Node) -> bool:
    """Whether there is an implementation here for a node's operator (for some dtypes, at least)."""
    return (node.domain, node.op) in TABLE


def evaluate(node: Node, inputs: Sequence[Any]) -> list[Array] | None:
    """Compute a node, if there is a NumPy implementation of it.

    Args:
        node: its name, operator, opset and attributes are used.
        inputs: arrays; None where an optional input is left out; fewer than the node's are
            optional ones left out.

    Returns:
        As many outputs as the operator computes, at most as many as the node has; None where
        there is no implementation for this operator or these dtypes.

    Raises:
        InvalidData: the values break a rule of the operator; names the node.
        InvalidModel: a required attribute or input is missing.
    """
    function = TABLE.get((node.domain, node.op))
    if function is None:
        return None
    if not all(x is None or _takes(node, x) for x in inputs):
        return None
    try:
        with np.errstate(all="ignore"):
            made = function(node, inputs)
    except InvalidData:
        raise
    except (ValueError, IndexError, ZeroDivisionError, OverflowError, KeyError, AttributeError, TypeError) as error:
        if not _complete(node, inputs):
            why = f"node {node.name!r} ({node.op}): a required attribute or input is missing"
            raise InvalidModel(why) from None
        if isinstance(error, KeyError) and _is_attribute(node, error.args[0]):
            raise InvalidModel(f"node {node.name!r} ({node.op}): its attribute {error.args[0]!r} is missing") from None
        if isinstance(error, KeyError | AttributeError | TypeError):
            raise
        raise InvalidData(node.name, f"{node.op}: {_line(error)}") from None
    return None if made is None else [_settled(x) for x in made]


def _takes(node: Node, x: Any) -> bool:
    key = (node.domain, node.op)
    if not isinstance(x, np.ndarray):
        return key in ANYTHING
    return not x.dtype.hasobject or key in STRINGS


def _settled(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return x if x.flags.c_contiguous else x.copy()
    return np.asarray(x) if isinstance(x, np.generic) else x


def _line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def _is_attribute(node: Node, name: Any) -> bool:
    """Whether an operator has an attribute of a name: one that may be left out, unless others say otherwise."""
    import onnx.defs

    try:
        return name in onnx.defs.get_schema(node.op, node.opset, node.domain).attributes
    except onnx.defs.SchemaError:
        return False


def _complete(node: Node, inputs: Sequence[Any]) -> bool:
    """Whether a node has all that its operator's schema requires."""
    import onnx.defs

    try:
        schema = onnx.defs.get_schema(node.op, node.opset, node.domain)
    except onnx.defs.SchemaError:
        return True
    if any(a.required and a.name not in node.attrs for a in schema.attributes.values()):
        return False
    given = [x is not None for x in inputs]
    return len(given) >= schema.min_input and all(
        has or str(formal.option).endswith("Optional") for has, formal in zip(given, schema.inputs, strict=False)
    )
