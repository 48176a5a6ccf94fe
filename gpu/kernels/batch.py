"""Leading dimensions of matrix products, which broadcast."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Batch", "batch_code", "batch_names"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Sizes, and how far each steps in a and in b, in matrices."""

    dims: tuple[int, ...]
    a: tuple[int, ...]
    b: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of products."""
        return math.prod(self.dims)

    def params(self, a_size: int, b_size: int) -> dict[str, int | float]:
        """Parameters for `batch_code`, the sizes of one matrix of a and of b given."""
        params: dict[str, int | float] = {}
        for axis, (size, a, b) in enumerate(zip(self.dims, self.a, self.b, strict=True)):
            params |= {f"d{axis}": size, f"a{axis}": a * a_size, f"b{axis}": b * b_size}
        return params


def batch_code(rank: int) -> str:
    """Statements that find where the matrices of product `z` begin."""
    lines = ["var left = 0u; var right = 0u; var rest = z;"]
    for axis in range(rank - 1, -1, -1):
        lines.append(f"{{ let c = rest % params.d{axis}; rest /= params.d{axis};")
        lines.append(f"left += c * params.a{axis}; right += c * params.b{axis}; }}")
    return "\n".join(lines)


def batch_names(rank: int) -> list[str]:
    """Names of the parameters that `batch_code` reads."""
    return [f"{letter}{axis}" for axis in range(rank) for letter in "dab"]
