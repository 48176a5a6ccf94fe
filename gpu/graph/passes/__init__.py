"""What is done to a model once, when it is loaded: one pass, one file."""

from __future__ import annotations

from collections.abc import Callable

from ..model import Model
from .affine import fold_affine
from .fold import fold_constants
from .identity import drop_identities
from .repeated import merge_repeated
from .unused import drop_unused

__all__ = ["drop_identities", "drop_unused", "fold_affine", "fold_constants", "merge_repeated", "optimise"]


def optimise(
    model: Model,
    *,
    check: Callable[[], None] = lambda: None,
    progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> None:
    """Run every pass on a model, in place.

    Args:
        model: names, dtypes and order of its inputs and outputs stay as they are. An output may
            become a constant, or share its Value with another output or an input.
        check: called between nodes; what it raises leaves, and the model is then unusable.
        progress: called with "optimise", how much is done, and of how much.
    """
    graph = model.graph
    drop_unused(graph, check)
    drop_identities(graph, check)
    fold_constants(graph, check, lambda done, total: progress("optimise", done, total))
    merge_repeated(graph, check)
    fold_affine(graph, check)
    drop_unused(graph, check)
    progress("optimise", 1, 1)
