"""Optionals: a value, or None; the reference evaluator wraps them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import InvalidData
from ..graph.model import Node
from .table import Inputs, op

__all__: list[str] = []


@op("Optional", anything=True)
def _optional(node: Node, inputs: Inputs) -> list[Any]:
    return [inputs[0] if inputs else None]


@op("OptionalGetElement", anything=True)
def _optional_get_element(node: Node, inputs: Inputs) -> list[Any]:
    if not inputs or inputs[0] is None:
        raise InvalidData(node.name, "OptionalGetElement: the optional has no value")
    return [inputs[0]]


@op("OptionalHasElement", anything=True)
def _optional_has_element(node: Node, inputs: Inputs) -> list[Any]:
    return [np.array(bool(inputs) and inputs[0] is not None)]
