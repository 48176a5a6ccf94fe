"""A model as the planner walks it: plain nodes and values, no protobuf, no wgpu.

This file does not know how models are read (read.py) nor what becomes of them (planner.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..seam import ModelMetadata, TensorInfo

if TYPE_CHECKING:
    import onnx

__all__ = ["Graph", "Model", "Node", "Value"]

Array = np.ndarray[Any, Any]
FLOAT16 = 10
"""What ONNX numbers float16 as."""


@dataclass(eq=False, slots=True)
class Value:
    """An edge of the graph. Compared by identity: two values may have one name in two graphs.

    Attributes:
        name: unique within its graph; outputs have the model's names.
        dtype: the element type, None where unknown or no tensor (sequence, map, optional).
        const: its array where it is an initialiser or was folded at load; never written to.
    """

    name: str
    dtype: np.dtype[Any] | None = None
    const: Array | None = field(default=None, repr=False)


@dataclass(eq=False, slots=True)
class Node:
    """One operator.

    Attributes:
        op: such as "Conv". domain: "" for ai.onnx. opset: the version that the model imports for
            that domain.
        name: never empty; made up from the op and a number where the file has none.
        inputs: None where an optional input is left out; trailing ones are cut off.
        outputs: None where nobody reads it.
        attrs: int, float, str, lists of them, arrays (tensors), Graph (branches and bodies).
        proto: gives the node as protobuf, for the reference evaluator.
        prepared: what host/ keeps to run the node again quickly.
    """

    op: str
    domain: str
    opset: int
    name: str
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value | None, ...]
    attrs: dict[str, Any] = field(default_factory=dict, repr=False)
    proto: onnx.NodeProto | None = field(default=None, repr=False)
    prepared: dict[Any, Any] = field(default_factory=dict, repr=False)

    def graphs(self) -> Iterator[Graph]:
        """The nested graphs of If, Loop and Scan."""
        return (a for a in self.attrs.values() if isinstance(a, Graph))


@dataclass(eq=False, slots=True)
class Graph:
    """Nodes in an order in which they can be computed.

    Nested graphs may read values of the graphs around them (the same Value objects).

    Attributes:
        captures: which those are, once somebody (walk.py) has looked; None before.
    """

    name: str
    inputs: list[Value]
    outputs: list[Value]
    nodes: list[Node] = field(repr=False)
    captures: list[Value] | None = field(default=None, repr=False)

    def has_float16(self) -> bool:
        """Whether any tensor is known to be of float16 before shapes are: an input, a constant, or what is cast."""
        half = np.dtype(np.float16)
        for node in self.nodes:
            known = [v.dtype if v.const is None else v.const.dtype for v in node.inputs if v is not None]
            if half in [dtype for dtype in known if dtype is not None]:
                return True
            for name, attr in node.attrs.items():
                if isinstance(attr, Graph) and attr.has_float16():
                    return True
                if isinstance(attr, np.ndarray) and attr.dtype == half:
                    return True
                if name in ("to", "dtype", "output_dtype") and attr == FLOAT16:
                    return True
        return any(v.dtype == half for v in (*self.inputs, *self.outputs))


@dataclass(eq=False, slots=True)
class Model:
    """A model that was read and optimised.

    Attributes:
        graph: the main graph. Its inputs are those that must be fed, then the overridable ones.
        defaults: what an overridable input is when it is not fed: an initialiser that the file
            lists as an input too (IR version 4 on; before that such initialisers are constants).
        opsets: domain -> version, "" for ai.onnx.
        infos: input and output infos by kind.
    """

    graph: Graph
    opsets: Mapping[str, int]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    overridable: tuple[TensorInfo, ...]
    metadata: ModelMetadata
    defaults: Mapping[str, Array] = field(default_factory=dict)
    ir_version: int = 0
