"""Compute at load what does not depend on the inputs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...host.numeric import has_numeric
from ...host.reference import GROWING, evaluate_host, infer_outputs
from ..model import Graph, Node

__all__ = ["RANDOM", "fold_constants"]

RANDOM = frozenset(
    ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli")
)
"""Operators whose results differ from run to run."""

_LARGE = 1 << 20
_SMALL = 4096
_REFERENCE_LIMIT = 4 << 20


def fold_constants(
    graph: Graph,
    check: Callable[[], None] = lambda: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Make constants of the results of nodes whose inputs are all constant; returns how many nodes.

    1. Nested graphs are folded too.
    2. Not: random operators, Dropout in training, operators with nested graphs, results that are
       no tensors.
    3. Not where a result is larger than 1 MiB and larger than all inputs together, nor where
       only the reference evaluator could compute it from more than 4 MiB.
    4. A node that fails stays: the run tells what is wrong with it, if it is ever reached.
    """
    folded = 0
    kept: list[Node] = []
    total = len(graph.nodes)
    for i, node in enumerate(graph.nodes):
        check()
        if not i & 31:
            progress(i, total)
        for nested in node.graphs():
            folded += fold_constants(nested, check)
        if _fold(node):
            folded += 1
        else:
            kept.append(node)
    graph.nodes[:] = kept
    return folded


def _fold(node: Node) -> bool:
    if node.op in RANDOM or (node.op == "Dropout" and len(node.inputs) > 2) or any(True for _ in node.graphs()):
        return False
    inputs = [None if v is None else v.const for v in node.inputs]
    if any(v is not None and x is None for v, x in zip(node.inputs, inputs, strict=True)):
        return False
    given = sum(x.nbytes for x in inputs if x is not None)
    if given > _REFERENCE_LIMIT and not has_numeric(node):
        return False
    limit = max(_LARGE, given)
    if node.op in GROWING or given > _SMALL:
        shapes = infer_outputs(node, [None if x is None else (x.dtype, x.shape) for x in inputs], inputs)
        if any(s is not None and float(np.prod(s[1], dtype=float)) * s[0].itemsize > limit for s in shapes):
            return False
    try:
        made = evaluate_host(node, inputs)
    except Exception:
        return False
    wanted = [(v, x) for v, x in zip(node.outputs, made, strict=False) if v is not None]
    if len(made) < len(node.outputs) and any(v is not None for v in node.outputs[len(made) :]):
        return False
    if any(not isinstance(x, np.ndarray) or x.nbytes > limit for _, x in wanted):
        return False
    for value, array in wanted:
        value.const, value.dtype = array, array.dtype
    return True
