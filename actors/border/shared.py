"""Memory that two processes share: a file without a name, written by one side and read by the other.

Rules of this file:
1. On Linux a memfd, elsewhere a temporary file. It is handed to the child as it is started, so that nothing
   can be left behind: when both are gone, so is the memory.
2. The process of the sessions never maps what its worker may shrink: it reads and writes as one does
   with a file, so that a truncated one is an error and no fault of its own.
3. The control page cannot be shrunk, on Linux.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

from .parcel import Bytes, Malformed

__all__ = ["Arena", "Control", "SharedFile"]

_KEEP = 64 << 20
_BATCH = 1 << 20
_SMALL = 1 << 14
_ALIGN = 64
_PAGE = 4096
_CLOSING, _TAKEN, _STOPS, _RECALLS = 0, 1, 8, 260
_RUNS = 252
_LOW = (1 << 32) - 1
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT)


class SharedFile:
    """An open file that both processes have."""

    def __init__(self, fd: int, name: str) -> None:
        self.fd, self.name = fd, name
        self._lock = threading.Lock()

    @classmethod
    def create(cls) -> SharedFile:
        """A new, empty one."""
        if hasattr(os, "memfd_create"):
            try:
                return cls(os.memfd_create("trionnx", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "")
            except OSError:  # a sandbox that does not know it
                pass
        if sys.platform == "win32":
            with tempfile.NamedTemporaryFile(prefix="trionnx-") as file:  # gone once nobody has it open
                return cls(os.dup(file.fileno()), file.name)
        fd, path = tempfile.mkstemp(prefix="trionnx-")
        os.unlink(path)
        return cls(fd, "")

    @classmethod
    def adopt(cls, text: str) -> SharedFile:
        """The one that the parent handed over, by what `handle` gave there."""
        if sys.platform == "win32":
            return cls(os.open(text, os.O_RDWR | os.O_BINARY | os.O_TEMPORARY), text)
        fd = int(text)
        os.set_inheritable(fd, False)
        return cls(fd, "")

    @property
    def handle(self) -> str:
        """What the child finds it by."""
        return self.name or str(self.fd)

    def size(self) -> int:
        """Its size in bytes."""
        return os.fstat(self.fd).st_size

    def resize(self, size: int) -> None:
        """Grow or shrink it."""
        os.ftruncate(self.fd, size)

    def write(self, offset: int, data: memoryview) -> None:
        """Write at an offset.

        Raises:
            MemoryError: there is no room.
        """
        try:
            while len(data):
                if sys.platform == "win32":
                    with self._lock:
                        os.lseek(self.fd, offset, os.SEEK_SET)
                        count = os.write(self.fd, data[: 1 << 30])
                else:
                    count = os.pwrite(self.fd, data, offset)
                data, offset = data[count:], offset + count
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise MemoryError(f"no room in shared memory for {len(data)} bytes") from None
            raise

    def read(self, offset: int, size: int) -> Bytes:
        """Bytes, copied.

        Raises:
            Malformed: the file ends too early.
        """
        if offset + size > self.size():  # before room is made for them
            raise Malformed(f"shared memory of {self.size()} bytes, where {size} at {offset} were sent")
        data = np.empty(size, np.uint8)
        view = data.data
        while len(view):
            if sys.platform == "win32":
                with self._lock:
                    os.lseek(self.fd, offset, os.SEEK_SET)
                    some = os.read(self.fd, min(len(view), 1 << 24))
                    count = len(some)
                    view[:count] = some
            else:
                count = os.preadv(self.fd, [view], offset)
            if count == 0:
                raise Malformed(f"shared memory ends {len(view)} bytes too early")
            view, offset = view[count:], offset + count
        return data

    def close(self) -> None:
        """Close this side's."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Arena:
    """The bytes of messages that go one way. Room is given one piece behind the other, and anew once all is free.

    Args:
        file: where they are.
        mapped: what is taken is a view, not a copy; it may be read until its sender uses the room anew.
    """

    def __init__(self, file: SharedFile, *, mapped: bool = False) -> None:
        self._file = file
        self._mapped = mapped
        self._map: mmap.mmap | None = None
        self._end = 0

    def put(self, pieces: Iterable[memoryview]) -> tuple[int, int]:
        """See Storage."""
        offset = end = -(-self._end // _ALIGN) * _ALIGN
        batch = bytearray()
        for piece in pieces:
            if batch and len(batch) + len(piece) > _BATCH:
                self._file.write(end, memoryview(batch))
                end += len(batch)
                batch = bytearray()
            if len(piece) > _SMALL and not batch:
                self._file.write(end, piece)
                end += len(piece)
            else:
                batch += piece
        self._file.write(end, memoryview(batch))
        self._end = end + len(batch)
        return offset, self._end - offset

    def clear(self) -> None:
        """Everything that was put has been taken: begin anew, and give back what is much."""
        self._end = 0
        if self._file.size() > _KEEP:
            with contextlib.suppress(OSError):  # some systems do not shrink what is mapped
                self._file.resize(0)

    def take(self, offset: int, size: int) -> Bytes:
        """See Storage."""
        if not self._mapped:
            return self._file.read(offset, size)
        there = self._file.size()
        if offset + size > there:
            raise Malformed(f"shared memory of {there} bytes, where {size} at {offset} were sent")
        if self._map is None or len(self._map) < offset + size:
            self._map = mmap.mmap(self._file.fd, there, access=mmap.ACCESS_READ)
        return np.frombuffer(self._map, np.uint8, size, offset)


class Control:
    """A page of words that both processes see at once: which runs are stopped, and what has been taken.

    Each word has one writer.
    """

    def __init__(self, file: SharedFile, *, new: bool = False) -> None:
        if new:
            file.resize(_PAGE)
            _forbid_shrinking(file.fd)
        self._map: Any = mmap.mmap(file.fd, _PAGE)
        self._words = memoryview(self._map).cast("Q")

    def stop(self, run: int) -> None:
        """Stop a run, from any thread."""
        self._words[_STOPS + run % _RUNS] = run + 1

    def recall(self, run: int, seq: int) -> None:
        """Take the segments of a run below `seq` back."""
        self._words[_RECALLS + run % _RUNS] = (run + 1 & _LOW) << 32 | seq & _LOW

    def stop_all(self) -> None:
        """Stop every run."""
        self._words[_CLOSING] = 1

    def drops(self, run: int, seq: int) -> bool:
        """Whether a segment is not to be submitted any more."""
        words = self._words
        if words[_CLOSING] or words[_STOPS + run % _RUNS] == run + 1:
            return True
        recalled: int = words[_RECALLS + run % _RUNS]
        return recalled >> 32 == run + 1 & _LOW and seq < recalled & _LOW

    @property
    def taken(self) -> int:
        """How many messages with outputs the receiver has taken the bytes of."""
        return self._words[_TAKEN]

    @taken.setter
    def taken(self, count: int) -> None:
        self._words[_TAKEN] = count

    def close(self) -> None:
        """Unmap it."""
        self._words.release()
        self._map.close()


def _forbid_shrinking(fd: int) -> None:
    if sys.platform == "linux":
        import fcntl

        with contextlib.suppress(OSError, AttributeError):  # not a memfd
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
