"""What a kernel sees of the plan that is being made: tensors in, steps out.

The part that is about one node: its inputs and outputs in the dtypes that kernels know, checks,
and the ways between device and host. How steps are emitted and fused: emission.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import numpy as np

from ..errors import InvalidModel
from .emission import Emission
from .places import Undecided
from .target import Target
from .tensor import HELD, NARROW, Tensor

__all__ = ["Lowering", "Undecided"]


class Lowering(Emission):
    """The plan, as kernels see it.

    Attributes:
        given: the dtypes of the node's inputs, None where left out; narrow ones are shown as they are held.
        raw: the node's inputs themselves.
        declare: gives `dtypes`.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._shown: dict[Tensor, Tensor] = {}
        self._dtypes: tuple[np.dtype[Any] | None, ...] | None = None
        self.given: tuple[np.dtype[Any] | None, ...] = ()
        self.raw: tuple[Tensor | None, ...] = ()
        self.declare: Callable[[], tuple[np.dtype[Any] | None, ...]] = tuple

    def fork(self) -> Self:
        """A copy that goes on from here with an empty list of steps."""
        other = super().fork()
        other._shown = dict(self._shown)
        return other

    def axis(self, axis: int, rank: int) -> int:
        """A possibly negative axis, checked. Raises InvalidModel."""
        if not -rank <= axis < rank:
            raise InvalidModel(f"node {self.node!r} ({self.op}): axis {axis} is out of range for {rank} dimensions")
        return axis % rank if rank else 0

    def held(self, tensor: Tensor) -> Tensor:
        """A tensor as kernels see it: a narrow dtype as the one that the device holds it in."""
        wide = HELD.get(tensor.dtype)
        if wide is None:
            return tensor
        shown = self._shown.get(tensor)
        if shown is None:
            if self.known_value(tensor) is not None:
                shown = self.derive(tensor, ("held", wide), lambda array: array.astype(wide))
            elif self.is_lazy(tensor):
                shown = self.map("x", {"x": tensor}, dtype=wide)
            else:
                shown = self.retyped(tensor, wide)
            self._shown[tensor] = shown
        return shown

    def retyped(self, tensor: Tensor, dtype: np.dtype[Any]) -> Tensor:
        """The same bytes under another dtype that the device holds alike."""
        made = Tensor(dtype, tensor.shape)
        self.placed[made] = self.storage(tensor)
        return made

    def enter(
        self, given: Sequence[Tensor | None], declare: Callable[[], tuple[np.dtype[Any] | None, ...]]
    ) -> list[Tensor | None]:
        """A node is going to be lowered: its inputs as its kernel sees them."""
        self.given = tuple(None if t is None else t.dtype for t in given)
        self.raw = tuple(given)
        self.declare, self._dtypes = declare, None
        return [None if t is None else self.held(t) for t in given]

    def leave(self, outputs: Sequence[Tensor | None], *, moves: bool) -> list[Tensor | None]:
        """A node was lowered: its outputs in their own dtypes, narrowed where the device holds them wider.

        Args:
            outputs: as the kernel gave them.
            moves: the kernel's outputs hold nothing but its inputs' values: they need no narrowing.
        """
        if not any(d in HELD for d in self.given if d is not None) and not any(
            t.dtype in HELD for t in outputs if t is not None
        ):
            return list(outputs)
        made: list[Tensor | None] = []
        for tensor, dtype in zip(outputs, self.dtypes, strict=False):
            wide = None if dtype is None else HELD.get(dtype)
            if tensor is None or dtype is None or dtype == tensor.dtype or wide != HELD.get(tensor.dtype, tensor.dtype):
                made.append(tensor)
            elif self.known_value(tensor) is not None:
                made.append(self.derive(tensor, ("as", dtype), partial(np.ndarray.astype, dtype=dtype)))
            elif moves and not self.is_lazy(tensor):
                made.append(self.retyped(tensor, dtype))
            else:
                made.append(self.map(NARROW[dtype], {"x": tensor}, dtype=dtype, label=dtype.name))
        return made

    @property
    def dtypes(self) -> tuple[np.dtype[Any] | None, ...]:
        """The dtypes that ONNX gives the node's outputs, None where that is not known."""
        if self._dtypes is None:
            self._dtypes = self.declare()
        return self._dtypes
