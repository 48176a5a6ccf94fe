"""Device memory for slots, shared by the plans of a session: only one run uses it at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..graph.memory import Slot
from .device import Device

__all__ = ["Pool"]


class Pool:
    """Buffers that stand behind slots; slots of different paths may share one.

    A buffer lives as long as a slot of some plan uses it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._users: dict[Any, int] = {}
        self._behind: dict[Slot, Any] = {}

    def behind(self, slot: Slot) -> Any:
        """The buffer of a slot that has one."""
        return self._behind[slot]

    def provide(self, path: Iterable[Slot]) -> list[Slot]:
        """Give each slot of a path a buffer of its own; return those that had none before."""
        path = list(path)
        taken = {id(self._behind[s]) for s in path if s in self._behind}
        fresh = [s for s in path if s not in self._behind]
        for slot in sorted(fresh, key=lambda s: -s.nbytes):
            free = [b for b in self._users if id(b) not in taken and slot.nbytes <= b.size <= 2 * slot.nbytes + 4096]
            buffer = min(free, key=lambda b: b.size) if free else self._device.buffer(slot.nbytes)
            self._users[buffer] = self._users.get(buffer, 0) + 1
            self._behind[slot] = buffer
            taken.add(id(buffer))
        return fresh

    def forget(self, slots: Iterable[Slot]) -> None:
        """Slots are gone; so is a buffer that nobody else uses."""
        for slot in slots:
            buffer = self._behind.pop(slot)
            self._users[buffer] -= 1
            if not self._users[buffer]:
                del self._users[buffer]
                self._device.release(buffer)
