"""What came first, whichever thread said it: `Latch`."""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["Latch"]

T = TypeVar("T")


class Latch(Generic[T]):
    """Takes one value, the first; from any thread."""

    __slots__ = ("_first",)

    def __init__(self) -> None:
        self._first: dict[None, T] = {}  # setdefault is atomic

    def __bool__(self) -> bool:
        return None in self._first

    @property
    def value(self) -> T | None:
        """What came first; None before."""
        return self._first.get(None)

    def settle(self, value: T) -> bool:
        """Whether this is what comes first."""
        return None not in self._first and self._first.setdefault(None, value) is value
