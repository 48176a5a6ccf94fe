"""The plans of a session: of each of its models, for the input shapes that it has met."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, ValuesView
from typing import Any

import numpy as np

from ..graph.block import Block
from ..graph.model import Model
from ..graph.planner import Planner
from ..seam import Explained
from .realise import Realiser
from .resident import Resident

__all__ = ["Plans", "fixed_shapes"]

PLANS = 8
"""Plans of a model that are kept, one for each set of input shapes, and blocks that follow one block."""

Shapes = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
Report = Callable[[str, int, int], None]


class Plans:
    """Makes plans, has their first blocks realised, and keeps some.

    A mapping of (model, shapes) to the first block of a plan, the one that was used last at the end.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[int, object], Block] = OrderedDict()
        self._planners: dict[int, Planner] = {}
        self._explained: dict[int, tuple[Explained, ...]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[tuple[int, object]]:
        return iter(self._blocks)

    def values(self) -> ValuesView[Block]:
        """The first blocks."""
        return self._blocks.values()

    def add(self, model: int, planner: Planner) -> None:
        """A model by its number, and who plans it."""
        self._planners[model] = planner

    def model(self, number: int) -> Model | None:
        """A model that was added and is still there."""
        planner = self._planners.get(number)
        return None if planner is None else planner.model

    def explained(self, model: int) -> tuple[Explained, ...]:
        """Where each node of a model's newest plan runs. Thread-safe."""
        return self._explained.get(model, ())

    def start(
        self,
        model: int,
        feeds: Shapes,
        given: Mapping[str, Resident],
        realiser: Realiser,
        check: Callable[[], None],
        report: Report,
    ) -> Block:
        """The first block for given inputs, realised; what `check` raises is let through.

        Args:
            model: its number.
            feeds: dtype and shape of each input.
            given: those that lie on the device.
            realiser: makes the block's device objects.
            check: called in between.
            report: told phase, done, total.
        """
        lying = {name: resident.storage for name, resident in given.items()}
        shapes = tuple((name, dtype.str, shape) for name, (dtype, shape) in feeds.items())
        key = model, (shapes, tuple((name, s.nbytes, s.half) for name, s in lying.items()))
        block = self._blocks.get(key)
        if block is None:
            planner = self._planners[model]
            block = planner.start(feeds, check, lying)
            self._explained[model] = planner.explained
        realiser.given = {storage: given[name].buffer for name, storage in block.given.items()}
        realiser.realise(block, check, report)
        self._blocks[key] = block
        self._blocks.move_to_end(key)
        for old in [key for key in self._blocks if key[0] == model][:-PLANS]:
            realiser.forget(self._blocks.pop(old))
        return block

    def follow(
        self, model: int, block: Block, values: Sequence[Any], realiser: Realiser, check: Callable[[], None]
    ) -> Block:
        """The block that comes after one whose end is decided by values; not realised yet."""
        planner = self._planners[model]
        following = planner.resume(block, values, check)
        self._explained[model] = planner.explained
        known = block.home.following
        while len(known) > PLANS:
            realiser.forget(known.popitem(last=False)[1])
        return following

    def free(self, model: int, realiser: Realiser | None) -> None:
        """Forget a model; None: nothing of it was realised."""
        for key in [key for key in self._blocks if key[0] == model]:
            assert realiser is not None
            realiser.forget(self._blocks.pop(key))
        self._planners.pop(model, None)
        self._explained.pop(model, None)

    def close(self, realiser: Realiser | None) -> None:
        """Forget all of them but for what they explain."""
        for block in self._blocks.values():
            assert realiser is not None
            realiser.forget(block)
        self._blocks.clear()
        self._planners.clear()


def fixed_shapes(
    model: Model, given: Mapping[str, tuple[int, ...]] | None
) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]] | None:
    """Every input's dtype and shape, where the model or the caller fixes them all."""
    shapes: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
    for info in (*model.inputs, *model.overridable):
        default = model.defaults.get(info.name)
        shape: Sequence[Any] | None = (given or {}).get(info.name) or (
            default.shape if default is not None else info.shape
        )
        if info.dtype is None or shape is None or not all(isinstance(d, int) for d in shape):
            return None
        shapes[info.name] = (info.dtype, tuple(int(d) for d in shape))
    return {value.name: shapes[value.name] for value in model.graph.inputs}
