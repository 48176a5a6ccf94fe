"""The table of operators that have a NumPy implementation here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..graph.model import Node

__all__ = ["ANYTHING", "STRINGS", "TABLE", "Array", "Function", "Inputs", "axes_of", "axis_of", "op"]

Array: TypeAlias = np.ndarray[Any, Any]
Inputs: TypeAlias = Sequence[Any]
Function: TypeAlias = Callable[[Node, Inputs], "list[Any] | None"]

TABLE: dict[tuple[str, str], Function] = {}
STRINGS: set[tuple[str, str]] = set()
ANYTHING: set[tuple[str, str]] = set()


def op(
    *names: str, domain: str = "", strings: bool = False, anything: bool = False
) -> Callable[[Function], Function]:
    """Register a function for operators: it takes the node and its inputs, None where left out.

    Args:
        names: the operators.
        domain: their domain.
        strings: it takes arrays of strings, too.
        anything: it takes sequences and maps, too.

    It returns the outputs (arrays, or NumPy scalars), or None where it has no implementation for
    these. It raises ValueError or IndexError where values break the operator's rules.
    """

    def register(function: Function) -> Function:
        for name in names:
            TABLE[domain, name] = function
            STRINGS.update([(domain, name)] if strings or anything else [])
            ANYTHING.update([(domain, name)] if anything else [])
        return function

    return register


def axis_of(axis: int, rank: int) -> int:
    """A possibly negative axis, counted from the front. Raises ValueError where out of range."""
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} is out of range for {rank} dimensions")
    return axis + rank if axis < 0 else axis


def axes_of(node: Node, inputs: Inputs, position: int) -> list[int] | None:
    """Axes from the attribute of older opsets or the input of newer ones; None where left out."""
    if len(inputs) > position and inputs[position] is not None:
        return [int(a) for a in inputs[position].reshape(-1)]
    axes = node.attrs.get("axes")
    return None if axes is None else list(axes)
