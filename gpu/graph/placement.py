"""Where a node is done: while planning, on the host, or on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..host.reference import GROWING, infer_outputs
from .lowering import Lowering
from .model import Node
from .steps import Dispatch
from .tensor import Array, Tensor

__all__ = [
    "CARRIES",
    "MOVES",
    "RANDOM",
    "described",
    "is_integral",
    "is_large",
    "is_small",
    "kernel_of",
    "shape_of",
    "types",
]

Kind = tuple[np.dtype[Any], tuple[int, ...]]

MOVES = frozenset(
    ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Transpose", "Slice", "Split", "Concat", "Expand")
) | frozenset(("Tile", "Gather", "GatherElements", "GatherND", "DepthToSpace", "SpaceToDepth", "Pad", "MaxPool"))
"""Operators whose outputs hold nothing but values of their inputs."""
CARRIES = MOVES - {"Concat", "Pad", "MaxPool"}
"""Those of them that may move int64 as int32, where it lies on the device like that: nothing is mixed into it."""
RANDOM = {
    ("", op)
    for op in (
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
        "Bernoulli",
        "Multinomial",
        "Dropout",
    )
}
FOLD_LIMIT = 1 << 16
HOST_LIMIT = 1 << 12


def is_integral(inputs: Sequence[Tensor | None]) -> bool:
    """Whether a node is host work whichever way: no input has a dtype that kernels compute floats in."""
    return not any(t is not None and t.type == "f32" for t in inputs)


def shape_of(node: Node, tensor: Tensor) -> Array:
    """What a Shape or a Size gives."""
    if node.op == "Size":
        return np.array(tensor.size, np.int64)
    start, end = node.attrs.get("start", 0), node.attrs.get("end")
    return np.array(tensor.shape[start:end], np.int64)


def is_small(plan: Lowering, node: Node, inputs: Sequence[Tensor | None], values: Sequence[Array | None]) -> bool:
    """Whether a node is cheaper on the host: few integers, and they are all there."""
    given = [t for t in inputs if t is not None]
    if not given or not all(
        t.size <= HOST_LIMIT
        and t.dtype.kind in "iub"
        and (plan.known_value(t) is not None or plan.host_key(t) is not None)
        for t in given
    ):
        return False
    return all(made is not None and math.prod(made[1]) <= HOST_LIMIT for made in described(node, inputs, values))


def described(node: Node, inputs: Sequence[Tensor | None], values: Sequence[Array | None]) -> list[Kind | None]:
    """Dtype and shape of each output; None where only the run will know."""
    return infer_outputs(node, types(inputs), values)


def types(inputs: Sequence[Tensor | None]) -> list[Kind | None]:
    """Dtype and shape of each input that is given."""
    return [None if t is None else (t.dtype, t.shape) for t in inputs]


def is_large(node: Node, inputs: Sequence[Tensor | None], values: Sequence[Array | None]) -> bool:
    """Whether folding a node would make a large array out of small ones, or take long."""
    if any(t is not None and t.size > FOLD_LIMIT for t in inputs):
        return True
    if node.op not in GROWING and sum(t.size for t in inputs if t is not None) <= HOST_LIMIT:
        return False
    return any(o is not None and math.prod(o[1]) > FOLD_LIMIT for o in described(node, inputs, values))


def kernel_of(
    plan: Lowering, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None], before: int
) -> tuple[str, str]:
    """Where a node was lowered to, and what that is, in words; `before`: how many steps there were then."""
    made = next((plan.narrowed(t) or t for t in outputs if t is not None), None)
    if made is None or plan.known_value(made) is not None:
        return "folded", "known with the shapes of the inputs"
    if any(
        made in (t, plan.narrowed(t)) or (t in plan.placed and plan.placed[t] is plan.placed.get(made))
        for t in inputs
        if t
    ):
        return "view", "the same bytes under another shape"
    if made.pending is not None:
        return "gpu", f"kernel {made.pending.kernel.name}"
    if made.apply is not None:
        return "gpu", "elementwise: fuses with its neighbours"
    kernels = dict.fromkeys(s.program.name for s in plan.steps[before:] if isinstance(s, Dispatch))
    return "gpu", f"kernel {', '.join(kernels)}" if kernels else "buffer copies"
