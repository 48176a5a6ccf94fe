"""Whether shapes that a caller names ahead of the first run are shapes of the model's inputs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .errors import InvalidInput
from .seam import TensorInfo

__all__ = ["check_shapes"]


def check_shapes(inputs: Iterable[TensorInfo], shapes: Mapping[str, Sequence[int]] | None) -> None:
    """Refuse a shape that no array for the input could have.

    Args:
        inputs: what may be fed.
        shapes: input name -> sizes; of some inputs, or of all. None: nothing to check.

    Raises:
        InvalidInput: a name that is not known, a wrong rank, or another size than the model fixes.
    """
    infos = {info.name: info for info in inputs}
    for name, shape in (shapes or {}).items():
        if name not in infos:
            known = ", ".join(map(repr, infos)) or "(it has none)"
            raise InvalidInput(name, f"an input of the model: {known}", "a name that it does not have")
        declared = infos[name].shape
        if declared is None:
            continue
        if len(declared) != len(shape) or any(
            isinstance(want, int) and 0 <= want != size for want, size in zip(declared, shape, strict=True)
        ):
            raise InvalidInput(name, f"shape ({_sizes(declared)})", f"({_sizes(shape)})")


def _sizes(shape: Iterable[object]) -> str:
    return ", ".join("?" if size is None else str(size) for size in shape)
