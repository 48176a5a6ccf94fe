"""Einsum: two operands at a time, by views, sums and one matrix product."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..graph.tensor import contiguous_strides
from .elementwise import one_dtype, operands
from .matmul import product
from .move import strided
from .reduce import SUM, fold, to_rows
from .registry import NoKernel, Operator, op
from .window import bad

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Tensor

__all__ = ["parse"]

_TERM = re.compile(r"[A-Za-z]*(\.\.\.)?[A-Za-z]*")


@dataclass(frozen=True, slots=True)
class Labelled:
    """A tensor with a letter for each of its dimensions, all different."""

    tensor: Tensor
    labels: str


def parse(equation: str, ranks: list[int]) -> tuple[list[str], str] | None:
    """The labels of each operand and of the result, "..." as digits from the last dimension on.

    Returns:
        None where the equation does not fit operands of these ranks.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks) or not all(_TERM.fullmatch(t) for t in (*terms, right)):
        return None
    made, most = [], 0
    for term, rank in zip(terms, ranks, strict=True):
        letters = term.replace("...", "")
        hidden = rank - len(letters)
        if hidden < 0 or (hidden and "..." not in term) or hidden > 10:
            return None
        most = max(most, hidden)
        made.append(term.replace("...", "".join(str(n) for n in reversed(range(hidden)))))
    dots = "".join(str(n) for n in reversed(range(most)))
    every = "".join(made)
    if arrow:
        result = right.replace("...", dots)
        if len(set(result)) < len(result) or not set(result) <= set(every):
            return None
    else:
        result = dots + "".join(sorted(c for c in set(every) - set(dots) if every.count(c) == 1))
    return made, result


@op("Einsum", since=12)
class Einsum(Operator):
    """y = the sum of products that the equation says: f32 | i32 | u32."""

    equation: str

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernels; the last one may be fused onto."""
        tensors = operands(plan, inputs, max(1, len(inputs)))
        one_dtype(plan, tensors)
        parsed = parse(self.equation, [t.rank for t in tensors])
        if parsed is None:
            raise bad(plan, f"an equation that fits {[list(t.shape) for t in tensors]}", repr(self.equation))
        if tensors[0].type not in ("f32", "i32", "u32"):
            raise NoKernel(f"no kernel for {tensors[0].dtype.name}")
        terms, result = parsed
        sizes: dict[str, int] = {}
        for tensor, term in zip(tensors, terms, strict=True):
            for label, n in zip(term, tensor.shape, strict=True):
                if n != 1 and sizes.setdefault(label, n) != n and sizes[label] != 1:
                    raise bad(plan, f"dimension {label!r} to be {sizes[label]} in {self.equation!r}", n)
                sizes[label] = n if sizes.get(label, 1) == 1 else sizes[label]
        given = [_diagonal(plan, tensor, term, sizes) for tensor, term in zip(tensors, terms, strict=True)]
        made = given[0]
        for n, other in enumerate(given[1:], 1):
            wanted = set(result).union(*(later.labels for later in given[n + 1 :]))
            made = _pair(plan, _summed(plan, made, wanted | set(other.labels)),
                         _summed(plan, other, wanted | set(made.labels)), wanted)
        made = _summed(plan, made, set(result))
        ordered = _ordered(plan, made, "".join(c for c in result if c in made.labels))
        shape = tuple(sizes[c] for c in result)
        return ordered if ordered.shape == shape else plan.view(ordered, shape)  # dimensions of size 1 come back


def _diagonal(plan: Lowering, x: Tensor, term: str, sizes: dict[str, int]) -> Labelled:
    """Each letter once: repeated ones walk the diagonal; dimensions of size 1 are dropped."""
    steps: dict[str, int] = {}
    for label, n, step in zip(term, x.shape, contiguous_strides(x.shape), strict=True):
        if n != 1:
            steps[label] = steps.get(label, 0) + step
    labels = "".join(steps)
    shape = tuple(sizes[c] for c in labels)
    return Labelled(strided(plan, x, shape, shape, [steps[c] for c in labels], 0) if labels or x.rank else x, labels)


def _summed(plan: Lowering, x: Labelled, wanted: set[str]) -> Labelled:
    """The sum over the letters that nobody wants any more."""
    axes = [a for a, c in enumerate(x.labels) if c not in wanted]
    if not axes:
        return x
    shape = tuple(n for a, n in enumerate(x.tensor.shape) if a not in axes)
    rows, outer, size, inner = to_rows(plan, x.tensor, axes)
    return Labelled(fold(plan, rows, outer, size, inner, SUM, shape), "".join(c for c in x.labels if c in wanted))


def _ordered(plan: Lowering, x: Labelled, labels: str) -> Tensor:
    known = plan.known_value(x.tensor)
    if known is not None and labels != x.labels:
        return plan.constant(np.ascontiguousarray(known.transpose([x.labels.index(c) for c in labels])))
    strides = contiguous_strides(x.tensor.shape)
    places = [x.labels.index(c) for c in labels]
    shape = tuple(x.tensor.shape[a] for a in places)
    return strided(plan, x.tensor, shape, shape, [strides[a] for a in places], 0) if places else x.tensor


def _pair(plan: Lowering, a: Labelled, b: Labelled, wanted: set[str]) -> Labelled:
    """The product of two, summed over the letters that both have and nobody wants."""
    both = [c for c in a.labels if c in b.labels]
    batch = "".join(c for c in both if c in wanted)
    inner = "".join(c for c in both if c not in wanted)
    rows = "".join(c for c in a.labels if c not in both)
    columns = "".join(c for c in b.labels if c not in both)
    sizes = dict(zip(a.labels + b.labels, a.tensor.shape + b.tensor.shape, strict=True))

    def count(labels: str) -> int:
        return math.prod(sizes[c] for c in labels)

    shape = tuple(sizes[c] for c in batch + rows + columns)
    left, right = _ordered(plan, a, batch + rows + inner), _ordered(plan, b, batch + inner + columns)
    lead, m, n, k = count(batch), count(rows), count(columns), count(inner)
    if not inner:
        made = plan.map("x * y", {"x": plan.view(left, (lead, m, 1)), "y": plan.view(right, (lead, 1, n))})
        return Labelled(plan.view(made, shape), batch + rows + columns)
    made = product(plan, plan.view(left, (lead, m, k)), plan.view(right, (lead, k, n)), shape)
    return Labelled(made, batch + rows + columns)
