"""Frames on a pipe, and the bytes that go with them: small ones in the frame, large ones in shared memory.

A frame is a head, a text (JSON) and a short tail of bytes. What does not fit in the tail is put into
the sender's `Arena` and told by its offset there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

__all__ = ["Bytes", "Frames", "Malformed", "Packing", "Storage", "Unpacking", "frame"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_HEAD = struct.Struct("<IIIQ")
_MAGIC = 0x58_4E_52_54
_MOST_TEXT = 1 << 28
_MOST_TAIL = 1 << 17
_INLINE = 1 << 12
_ALIGN = 64
IN_FRAME, IN_ARENA = 0, 1


class Malformed(ValueError):
    """What came over the border is no message of this program's, or not whole."""


class Storage(Protocol):
    """Where large bytes are put by one side and taken by the other."""

    def put(self, pieces: Iterable[memoryview]) -> tuple[int, int]:
        """Write pieces one behind the other; the offset and the size of all."""
        raise NotImplementedError

    def take(self, offset: int, size: int) -> Bytes:
        """The bytes at an offset. Raises Malformed where they are not all there."""
        raise NotImplementedError


class Packing:
    """Collects the bytes of one message.

    Args:
        arena: for large ones; None: there is none (any more).
    """

    def __init__(self, arena: Storage | None) -> None:
        self._arena = arena
        self.tail = bytearray()

    def add(self, data: memoryview) -> list[int]:
        """Take bytes; gives where they are: the place and the offset."""
        size = data.nbytes
        if size > _INLINE or len(self.tail) + size > _MOST_TAIL - _ALIGN:
            return self.add_pieces([data])[:2]
        self.tail += bytes(-len(self.tail) % 8)
        offset = len(self.tail)
        self.tail += data
        return [IN_FRAME, offset]

    def add_pieces(self, pieces: Iterable[memoryview]) -> list[int]:
        """Take bytes in pieces, into the arena: the place, the offset and the size of all."""
        if self._arena is None:
            raise BrokenPipeError("there is no shared memory (any more)")
        return [IN_ARENA, *self._arena.put(pieces)]


class Unpacking:
    """Gives the bytes that came with a message.

    Args:
        tail: the tail of its frame.
        arena: of its sender.
    """

    def __init__(self, tail: bytes | bytearray, arena: Storage) -> None:
        self._tail, self._arena = tail, arena

    def take(self, place: object, offset: object, size: int) -> Bytes:
        """The bytes at a place.

        Raises:
            Malformed: there is no such place, or it ends too early.
        """
        if type(offset) is not int or offset < 0 or size < 0:
            raise Malformed(f"an offset of {offset!r}")
        if size == 0:
            return np.empty(0, np.uint8)
        if place == IN_ARENA:
            return self._arena.take(offset, size)
        if place != IN_FRAME or offset + size > len(self._tail):
            raise Malformed(f"{size} bytes at {offset} of {len(self._tail)}, place {place!r}")
        return np.frombuffer(self._tail, np.uint8, size, offset).copy()


def frame(text: bytes, tail: bytes | bytearray, number: int) -> bytes:
    """A frame, whole; `number` tells which request it is, or answers."""
    if len(text) > _MOST_TEXT:
        raise Malformed(f"a message of {len(text)} bytes")
    return b"".join((_HEAD.pack(_MAGIC, len(text), len(tail), number), text, tail))


class Frames:
    """Makes frames of the bytes that a pipe gives."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Take what has come."""
        self._buffer += data

    def next(self) -> tuple[int, bytes, bytes] | None:
        """The next frame's number, text and tail; None: it is not whole yet.

        Raises:
            Malformed: what comes next is no frame.
        """
        buffer = self._buffer
        if len(buffer) < _HEAD.size:
            return None
        magic, text, tail, number = _HEAD.unpack_from(buffer)
        if magic != _MAGIC or text > _MOST_TEXT or tail > _MOST_TAIL:
            raise Malformed("bytes that are no message")
        middle = _HEAD.size + text
        end = middle + tail
        if len(buffer) < end:
            return None
        view = memoryview(buffer)
        found = number, bytes(view[_HEAD.size : middle]), bytes(view[middle:end])
        view.release()
        del buffer[:end]
        return found
