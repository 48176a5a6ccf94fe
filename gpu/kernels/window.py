"""Sliding windows: how Conv, ConvTranspose and the pools walk over their input.

This file knows numbers only: no WGSL, no buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InvalidModel

if TYPE_CHECKING:
    from ..graph.lowering import Lowering

__all__ = ["MOST_TURNS", "Axis", "bad", "spread", "windows"]

MOST_TURNS = 60_000
"""Turns that all loops of one invocation may take together on a software adapter: llvmpipe stops at 65535."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A window along one axis: tap t of output o reads input o * stride + t * dilation - begin.

    Attributes:
        size: input elements. out: output elements. kernel: taps.
        begin, end: elements of padding.
    """

    size: int
    out: int
    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    begin: int = 0
    end: int = 0

    @property
    def plain(self) -> bool:
        """Whether output o reads input o and nothing else."""
        return self.kernel == 1 and self.stride == 1 and self.begin == 0 and self.end == 0


def bad(plan: Lowering, expected: str, got: object) -> InvalidModel:
    """The error for a node that breaks its operator's rules."""
    return InvalidModel(f"node {plan.node!r} ({plan.op}): expected {expected}, got {got}")


def spread(plan: Lowering, name: str, values: Sequence[int], rank: int, default: int = 1) -> tuple[int, ...]:
    """An attribute with one number per spatial axis, checked. Raises InvalidModel."""
    values = tuple(int(v) for v in values) or (default,) * rank
    if len(values) != rank or any(v < default for v in values):
        raise bad(plan, f"{rank} numbers of at least {default} in {name}", list(values))
    return values


def windows(
    plan: Lowering, sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int],
    pads: Sequence[int], auto_pad: str, *, ceil: bool = False, partial: bool = False,
) -> tuple[Axis, ...]:
    """The window along each spatial axis, as the attributes of Conv and the pools define it.

    With `partial`, a window may be larger than its input by less than a stride: there is one output, as
    ONNX's shape inference has it.

    Raises:
        InvalidModel: an attribute does not fit the rank, or a window is larger than its input.
    """
    rank = len(sizes)
    strides = spread(plan, "strides", strides, rank)
    dilations = spread(plan, "dilations", dilations, rank)
    kernel = spread(plan, "kernel_shape", kernel, rank)
    pads = spread(plan, "pads", pads if auto_pad == "NOTSET" else (), 2 * rank, 0)
    axes = []
    for a, size in enumerate(sizes):
        stride, span = strides[a], (kernel[a] - 1) * dilations[a] + 1
        begin, end = pads[a], pads[a + rank]
        if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            out = -(-size // stride)
            total = max((out - 1) * stride + span - size, 0)
            begin = total // 2 if auto_pad == "SAME_UPPER" else (total + 1) // 2
            end = total - begin
        elif auto_pad in ("NOTSET", "VALID", ""):
            room = size + begin + end - span
            if room < 0 and size > 0 and not (partial and -room < stride):
                raise bad(plan, f"spatial dimensions {list(sizes)} that hold a window, with padding, on axis {a + 2}",
                          f"a window of {span}, {begin} before and {end} after")
            out = 1 if partial and -stride < room < 0 and size > 0 else max(room // stride + 1, 0)
            if ceil:
                out = -(-room // stride) + 1
                out -= (out - 1) * stride >= size + begin
        else:
            raise bad(plan, "auto_pad NOTSET, SAME_UPPER, SAME_LOWER or VALID", auto_pad)
        axes.append(Axis(size, out, kernel[a], stride, dilations[a], begin, end))
    return tuple(axes)
