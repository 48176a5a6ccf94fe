"""The skeleton of a serialised model: the same protobuf without the bytes of its large tensors.

Rules of this file:
1. It knows protobuf's wire format and the field numbers of ONNX messages, not what they mean.
2. It descends only where a large tensor can be: whatever is smaller than the threshold is copied
   as it stands.
3. No single call here, nor the parsing of one chunk that it returns, is long: the largest chunk
   is about a mebibyte, unless one node alone is larger.
4. The large data are not copied: they are slices of the buffer that was given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import InvalidModel

__all__ = ["BLOB_KEY", "RAW_DATA", "THRESHOLD", "Blob", "Skeleton", "skeleton"]

THRESHOLD = 4096
"""Tensor data of so many bytes and more are left out of the skeleton."""

BLOB_KEY = "trionnx.blob"
"""The key of the external_data entry that holds the index of a tensor's blob, as decimal text."""

RAW_DATA = 9
"""The number of TensorProto's field raw_data."""

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Blob:
    """The data of one large tensor.

    Attributes:
        field: the number of TensorProto's field that it was in (9 raw_data, 4 float_data, ...).
        parts: slices of the file, in order; one, unless a packed field was written in pieces.
    """

    field: int
    parts: tuple[memoryview, ...]


@dataclass(slots=True)
class Skeleton:
    """Chunks of a small ModelProto, to be merged in order, and the data that were left out."""

    chunks: list[bytes] = field(default_factory=list)
    blobs: list[Blob] = field(default_factory=list)


_MODEL, _GRAPH, _NODE, _ATTRIBUTE, _TENSOR, _SPARSE, _FUNCTION = range(7)
_NAMES = ("model", "graph", "node", "attribute", "tensor", "sparse tensor", "function")
_CHILDREN: tuple[dict[int, int], ...] = (
    {7: _GRAPH, 25: _FUNCTION},
    {1: _NODE, 5: _TENSOR, 15: _SPARSE},
    {5: _ATTRIBUTE},
    {5: _TENSOR, 6: _GRAPH, 10: _TENSOR, 11: _GRAPH, 22: _SPARSE, 23: _SPARSE},
    {},
    {1: _TENSOR, 2: _TENSOR},
    {7: _NODE, 11: _ATTRIBUTE},
)
_TRAINING = 20
_NUMBERS = frozenset((4, 5, 7, 10, 11))
_MAX_DEPTH = 100


def skeleton(
    view: memoryview,
    label: str,
    *,
    threshold: int = THRESHOLD,
    check: Callable[[], None] = lambda: None,
    first_blob: int = 0,
) -> Skeleton:
    """Take the large tensors out of a serialised ModelProto.

    Args:
        view: the bytes of the model, of format "B"; the blobs are slices of it.
        label: what to call the model in messages.
        threshold: tensor data of so many bytes and more are taken out.
        check: called every few milliseconds; what it raises leaves.
        first_blob: the index of the first blob, where a model has several buffers.

    Returns:
        Chunks that merge (``ModelProto.MergeFromString``) into the model without the large data,
        each tensor of which has an ``external_data`` entry `BLOB_KEY` instead. Training
        information is left out too.

    Raises:
        InvalidModel: the bytes are no protobuf or end too early; says at which byte.
    """
    return _Scan(view, label, max(threshold, 16), check, first_blob).run()


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _delimited(number: int, body: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(body)) + body


class _Scan:
    def __init__(
        self, view: memoryview, label: str, threshold: int, check: Callable[[], None], first_blob: int
    ) -> None:
        self.view, self.label, self.threshold, self.check = view, label, threshold, check
        self.first_blob = first_blob
        self.out = Skeleton()
        self.ticks = 0

    def run(self) -> Skeleton:
        view, parts, size, run = self.view, [], 0, 0
        pos, end = 0, len(view)
        while pos < end:
            start, number, wire, body, pos = self.field(pos, end, _MODEL)
            child = _CHILDREN[_MODEL].get(number) if wire == 2 else None
            if number != _TRAINING and (child is None or pos - body < self.threshold):
                size += pos - start
                continue
            parts.append(bytes(view[run:start]))
            run = pos
            if number == _TRAINING:
                continue
            self.flush(parts)
            if child == _GRAPH:
                self.graph(body, pos)
            else:
                changed = self.message(body, pos, _FUNCTION, 1)
                self.out.chunks.append(bytes(view[start:pos]) if changed is None else _delimited(number, changed))
        parts.append(bytes(view[run:end]))
        self.flush(parts)
        return self.out

    def flush(self, parts: list[bytes], number: int | None = None) -> None:
        body = b"".join(parts)
        parts.clear()
        if body:
            self.out.chunks.append(body if number is None else _delimited(number, body))

    def graph(self, pos: int, end: int) -> None:
        """The main graph, in several chunks."""
        view, parts, size, run = self.view, list[bytes](), 0, pos
        while pos < end:
            start, number, wire, body, pos = self.field(pos, end, _GRAPH)
            size += pos - start
            child = _CHILDREN[_GRAPH].get(number) if wire == 2 else None
            changed = None if child is None or pos - body < self.threshold else self.message(body, pos, child, 1)
            if changed is not None:
                parts += bytes(view[run:start]), _delimited(number, changed)
                size += len(changed) - (pos - start)
                run = pos
            if size >= _CHUNK:
                parts.append(bytes(view[run:pos]))
                self.flush(parts, 7)
                size, run = 0, pos
                self.check()
        parts.append(bytes(view[run:end]))
        self.flush(parts, 7)

    def message(self, pos: int, end: int, kind: int, depth: int) -> bytes | None:
        """The body of a message without its large data; None if there were none."""
        if depth > _MAX_DEPTH:
            raise InvalidModel(f"{self.label}: damaged or no ONNX model: messages nested too deeply at byte {pos}")
        if kind == _TENSOR:
            return self.tensor(pos, end)
        view, parts, run, children = self.view, list[bytes](), pos, _CHILDREN[kind]
        while pos < end:
            start, number, wire, body, pos = self.field(pos, end, kind)
            if wire != 2 or pos - body < self.threshold:
                continue
            child = children.get(number)
            changed = None if child is None else self.message(body, pos, child, depth + 1)
            if changed is not None:
                parts += bytes(view[run:start]), _delimited(number, changed)
                run = pos
        if not parts:
            return None
        parts.append(bytes(view[run:end]))
        return b"".join(parts)

    def tensor(self, pos: int, end: int) -> bytes | None:
        view, parts, run = self.view, list[bytes](), pos
        first, large, unpacked = pos, 0, set[int]()
        while pos < end:
            _, number, wire, body, pos = self.field(pos, end, _TENSOR)
            if number in _NUMBERS and wire != 2:
                unpacked.add(number)
            elif (number == RAW_DATA or number in _NUMBERS) and pos - body >= self.threshold:
                large = number
        if not large or large in unpacked:
            return None
        pos, pieces = first, list[memoryview]()
        while pos < end:
            start, number, _, body, pos = self.field(pos, end, _TENSOR)
            if number == large:
                if large == RAW_DATA:
                    pieces.clear()
                pieces.append(view[body:pos])
                parts.append(bytes(view[run:start]))
                run = pos
        parts.append(bytes(view[run:end]))
        entry = _delimited(1, BLOB_KEY.encode()) + _delimited(2, b"%d" % (self.first_blob + len(self.out.blobs)))
        parts += _delimited(13, entry), b"\x70\x01"
        self.out.blobs.append(Blob(large, tuple(pieces)))
        return b"".join(parts)

    def field(self, pos: int, end: int, kind: int) -> tuple[int, int, int, int, int]:
        """Read one field at pos: its start, number, wire type, start of its body, end."""
        self.ticks += 1
        if not self.ticks & 4095:
            self.check()
        view, start = self.view, pos
        tag = view[pos]
        pos += 1
        if tag > 0x7F:
            tag, pos = self.number(start, end, kind)
        wire, number = tag & 7, tag >> 3
        if not 0 < number < 1 << 29:
            raise self.damaged(start, kind)
        if wire == 2:
            if pos >= end:
                raise self.short(start, kind, "ends within a length")
            length = view[pos]
            if length > 0x7F:
                length, pos = self.number(pos, end, kind)
            else:
                pos += 1
            stop = pos + length
            if stop > end:
                raise self.short(start, kind, f"field {number} should have {length} bytes, {end - pos} are left")
            return start, number, wire, pos, stop
        if wire == 0:
            body = pos
            _, pos = self.number(pos, end, kind)
            return start, number, wire, body, pos
        if wire not in (1, 5):
            raise self.damaged(start, kind)
        stop = pos + (8 if wire == 1 else 4)
        if stop > end:
            raise self.short(start, kind, f"ends within field {number}")
        return start, number, wire, pos, stop

    def number(self, pos: int, end: int, kind: int) -> tuple[int, int]:
        view, value, shift, start = self.view, 0, 0, pos
        while True:
            if pos >= end:
                raise self.short(start, kind, "ends within a number")
            byte = view[pos]
            pos += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, pos
            shift += 7
            if shift > 63:
                raise self.damaged(start, kind)

    def short(self, pos: int, kind: int, why: str) -> InvalidModel:
        what = "the file" if kind == _MODEL else f"a {_NAMES[kind]}"
        return InvalidModel(f"{self.label}: truncated or damaged at byte {pos}: {what} {_ends(why)}")

    def damaged(self, pos: int, kind: int) -> InvalidModel:
        return InvalidModel(f"{self.label}: damaged or no ONNX model: no valid field of a {_NAMES[kind]} at byte {pos}")


def _ends(why: str) -> str:
    return why if why.startswith("ends") else f"is cut short: {why}"
