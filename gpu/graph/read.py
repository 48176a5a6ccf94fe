"""An ONNX model, from wherever it comes, becomes a Model.

Rules of this file:
1. Large data are mapped or sliced, never parsed or copied whole, so that no call holds the
   interpreter for long.
2. What is wrong with a file is one `InvalidModel` of one line, which names the file.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx.inliner import inline_local_functions

from ..errors import UNFORESEEN, InvalidModel, OutOfDeviceMemory
from ..seam import ModelMetadata, TensorInfo
from .check import check_nodes
from .convert import Convert
from .functions import MOST_BYTES, MOST_NODES, expanded
from .model import Model
from .tensors import TensorFiles, element_type, map_file
from .upgrade import UPGRADED, upgrade
from .wire import BLOB_KEY, RAW_DATA, Blob, Skeleton, skeleton

__all__ = ["OLDEST_OPSET", "newest_opset", "read_model"]

OLDEST_OPSET = 1
_PIECE = 4 << 20
_LFS = b"version https://git-lfs.github.com/spec/"
_NEWEST_OTHER = 1 << 20


def newest_opset() -> int:
    """The newest ai.onnx opset that the installed onnx package knows."""
    return int(onnx.defs.onnx_opset_version())


def read_model(
    source: Any,
    *,
    check: Callable[[], None] = lambda: None,
    progress: Callable[[str, int, int], None] | None = None,
    optimise: bool = True,
) -> Model:
    """Read a model and optimise it.

    Args:
        source: a path, bytes or another buffer, an open binary file, or an ``onnx.ModelProto``.
            A path is mapped, and stays mapped while arrays of the model live; bytes are
            not copied, buffers that can be written to are, and so are the tensors of a
            ModelProto, one at a time.
        check: called every few milliseconds; what it raises leaves.
        progress: called with the phase ("read", "optimise"), how much is done, and of how much.
        optimise: False: the graph as the file has it.

    Raises:
        InvalidModel: what is read is no model, or a wrong one; one line that names file and fault.
        UnsupportedOperator: it is of an old opset, with an operator that is another one now.
        OutOfDeviceMemory: there is no room for what it wants.
        OSError: the file cannot be opened (FileNotFoundError, PermissionError).
        TypeError: `source` is nothing that a model can be read from.
    """
    progress = progress or (lambda phase, done, total: None)
    progress("read", 0, 0)
    label, folders, parts = _open(source, check)
    try:
        with np.errstate(all="ignore"):
            return _read(label, folders, parts, check, progress, optimise)
    except (InvalidModel, OutOfDeviceMemory):
        raise
    except MemoryError as error:
        raise OutOfDeviceMemory(f"{label}: {_line(error)}") from None
    except UNFORESEEN as error:
        raise InvalidModel(f"{label}: damaged or no valid ONNX model: {_line(error)}") from error


def _read(
    label: str,
    folders: list[Path],
    parts: Skeleton,
    check: Callable[[], None],
    progress: Callable[[str, int, int], None],
    optimise: bool,
) -> Model:
    proto = onnx.ModelProto()
    for chunk in parts.chunks:
        check()
        try:
            proto.MergeFromString(chunk)
        except (DecodeError, ValueError):
            raise InvalidModel(f"{label}: damaged or no ONNX model: its protobuf cannot be decoded") from None
    check()
    if not proto.HasField("graph"):
        raise InvalidModel(f"{label}: no ONNX model: it holds no graph")
    opsets = _opsets(proto, label)
    if proto.functions:
        proto = _inlined(proto, label)
        opsets = _opsets(proto, label)
    convert = Convert(label, opsets, TensorFiles(label, parts.blobs, folders, check), check, progress)
    overridable = proto.ir_version >= 4
    graph, defaults = convert.main(proto.graph, overridable)
    if opsets.get("", UPGRADED) < UPGRADED:
        upgrade(graph, check)
        opsets[""] = UPGRADED
    else:
        check_nodes(graph, check)
    fixed = {t.name for t in proto.graph.initializer} | {s.values.name for s in proto.graph.sparse_initializer}
    infos = [_info(i) for i in proto.graph.input]
    model = Model(
        graph=graph,
        opsets=opsets,
        inputs=tuple(i for i in infos if i.name not in fixed),
        outputs=tuple(_info(i) for i in proto.graph.output),
        overridable=tuple(i for i in infos if i.name in defaults),
        metadata=ModelMetadata(
            producer_name=proto.producer_name,
            graph_name=proto.graph.name,
            domain=proto.domain,
            description=proto.doc_string,
            version=proto.model_version,
            custom_metadata_map={p.key: p.value for p in proto.metadata_props},
        ),
        defaults=defaults,
        ir_version=proto.ir_version,
    )
    if optimise:
        from .passes import optimise as run_passes

        run_passes(model, check=check, progress=progress)
    return model


def _open(source: Any, check: Callable[[], None]) -> tuple[str, list[Path], Skeleton]:
    if isinstance(source, onnx.ModelProto):
        return "the ModelProto", [], _skeleton_of(source, check)
    if isinstance(source, str | os.PathLike):
        path = Path(os.fspath(source))
        if path.is_dir():
            raise InvalidModel(f"{path}: a folder, not an ONNX file")
        return _scan(map_file(path), str(path), _folders(path), check)
    if isinstance(source, bytes | bytearray | memoryview):
        view = memoryview(source)
        if not view.readonly or not view.c_contiguous:
            view = _copied(view, check)
        return _scan(view.cast("B"), "the bytes of the model", [], check)
    read = getattr(source, "read", None)
    if not callable(read):
        raise TypeError(f"a model is a path, bytes, a binary file or an onnx.ModelProto, not {type(source).__name__}")
    name = getattr(source, "name", None)
    origin = Path(name) if isinstance(name, str) and os.path.isfile(name) else None
    pieces: list[bytes] = []
    while piece := read(_PIECE):
        check()
        if not isinstance(piece, bytes | bytearray | memoryview):
            raise TypeError("the file that a model is read from must be opened in binary mode")
        pieces.append(bytes(piece))
    view = _joined(pieces, check)
    return _scan(view, str(origin or "the model file"), _folders(origin) if origin else [], check)


def _folders(path: Path) -> list[Path]:
    """Where external data may lie: beside the path, or beside the file that it is a link to."""
    return [path.parent, Path(os.path.realpath(path)).parent]


def _scan(
    view: memoryview, label: str, folders: list[Path], check: Callable[[], None]
) -> tuple[str, list[Path], Skeleton]:
    if not len(view):
        raise InvalidModel(f"{label}: empty, no ONNX model")
    head = bytes(view[:512])
    if head.startswith(_LFS):
        raise InvalidModel(f"{label}: a Git LFS pointer, not the model itself; fetch it with `git lfs pull`")
    if _is_text(head):
        raise InvalidModel(f"{label}: a text file, no ONNX model")
    return label, folders, skeleton(view, label, check=check)


def _is_text(head: bytes) -> bool:
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3 or not error.start:
            return False
        text = head[: error.start].decode("utf-8")
    return all(c.isprintable() or c in "\t\n\r\f" for c in text)


def _copied(view: memoryview, check: Callable[[], None]) -> memoryview:
    if not view.c_contiguous:
        return memoryview(view.tobytes())
    view = view.cast("B")
    if not len(view):
        return view
    out = mmap.mmap(-1, len(view))
    for start in range(0, len(view), _PIECE):
        check()
        out[start : start + _PIECE] = view[start : start + _PIECE]
    return memoryview(out).toreadonly()


def _joined(pieces: list[bytes], check: Callable[[], None]) -> memoryview:
    total = sum(map(len, pieces))
    if len(pieces) < 2:
        return memoryview(pieces[0] if pieces else b"")
    out, start = mmap.mmap(-1, total), 0
    pieces.reverse()
    while pieces:
        check()
        piece = pieces.pop()
        out[start : start + len(piece)] = piece
        start += len(piece)
    return memoryview(out).toreadonly()


def _skeleton_of(proto: onnx.ModelProto, check: Callable[[], None]) -> Skeleton:
    """The skeleton of a ModelProto, serialised a node and a tensor at a time."""
    label, out = "the ModelProto", Skeleton()

    def add(piece: onnx.ModelProto) -> None:
        check()
        data = memoryview(piece.SerializeToString())
        part = skeleton(data, label, check=check, first_blob=len(out.blobs))
        out.chunks += part.chunks
        out.blobs += part.blobs

    def refer(tensor: onnx.TensorProto, blob: int) -> None:
        tensor.external_data.add(key=BLOB_KEY, value=str(blob))
        tensor.data_location = onnx.TensorProto.EXTERNAL

    def flush(piece: onnx.ModelProto, force: bool = False) -> onnx.ModelProto:
        if not force and piece.graph.ByteSize() < _PIECE // 4:
            return piece
        add(piece)
        return onnx.ModelProto()

    shell = onnx.ModelProto()
    for descriptor, value in proto.ListFields():
        if descriptor.name in ("graph", "training_info"):
            continue
        if descriptor.name in ("opset_import", "metadata_props", "functions", "configuration"):
            getattr(shell, descriptor.name).extend(value)
        else:
            setattr(shell, descriptor.name, value)
    if proto.HasField("graph"):
        shell.graph.SetInParent()
    add(shell)
    piece, count = onnx.ModelProto(), 0
    for descriptor, value in proto.graph.ListFields():
        if descriptor.name in ("name", "doc_string"):
            setattr(piece.graph, descriptor.name, value)
            continue
        for item in value:
            count += 1
            large = descriptor.name == "initializer" and prod(item.dims) >= 1024
            if large and item.HasField("raw_data"):
                check()
                slim = piece.graph.initializer.add(name=item.name, data_type=item.data_type, dims=item.dims)
                refer(slim, len(out.blobs))
                out.blobs.append(Blob(RAW_DATA, (memoryview(item.raw_data),)))
                continue
            getattr(piece.graph, descriptor.name).add().CopyFrom(item)
            large = large or (descriptor.name == "node" and item.ByteSize() >= _PIECE // 64)
            if large or not count & 63:
                piece = flush(piece, large)
    add(piece)
    return out


def _opsets(proto: onnx.ModelProto, label: str) -> dict[str, int]:
    opsets: dict[str, int] = {}
    for entry in proto.opset_import:
        domain = "" if entry.domain == "ai.onnx" else entry.domain
        if entry.version > _NEWEST_OTHER:
            raise InvalidModel(f"{label}: opset {entry.version} of {entry.domain!r} is no version")
        opsets[domain] = max(entry.version, opsets.get(domain, 0))
    main = opsets.get("")
    newest = newest_opset()
    if main is None:
        for node in proto.graph.node:
            if node.domain in ("", "ai.onnx"):
                raise InvalidModel(
                    f"{label}: node {node.name!r} ({node.op_type}) is of ai.onnx, but the model imports no opset of it"
                )
    elif not OLDEST_OPSET <= main <= newest:
        raise InvalidModel(f"{label}: opset {main} of ai.onnx; opsets {OLDEST_OPSET} to {newest} are supported")
    return opsets


def _inlined(proto: onnx.ModelProto, label: str) -> onnx.ModelProto:
    try:
        nodes, nbytes = expanded(proto)
        if nodes > MOST_NODES or nbytes > MOST_BYTES:
            raise ValueError(f"they stand for {nodes:,} nodes in {nbytes:,} bytes")
        inlined: onnx.ModelProto = inline_local_functions(proto, True)
        return inlined
    except Exception as error:
        raise InvalidModel(f"{label}: its local functions cannot be inlined: {_line(error)}") from None


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _info(info: onnx.ValueInfoProto) -> TensorInfo:
    proto = info.type
    shape: tuple[int | str | None, ...] | None = None
    dtype = None
    if proto.HasField("tensor_type"):
        dtype = element_type(proto.tensor_type.elem_type)
        if proto.tensor_type.HasField("shape"):
            shape = tuple(_dim(d) for d in proto.tensor_type.shape.dim)
    return TensorInfo(info.name, _spelling(proto), shape, dtype)


def _dim(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    if dim.HasField("dim_value"):
        return dim.dim_value if dim.dim_value >= 0 else None
    name = dim.dim_param
    return name if name and name not in ("-1", "?") else None


def _spelling(proto: onnx.TypeProto) -> str:
    """A type as ONNX Runtime writes it."""
    match proto.WhichOneof("value"):
        case "tensor_type":
            return f"tensor({_element(proto.tensor_type.elem_type)})"
        case "sparse_tensor_type":
            return f"sparse_tensor({_element(proto.sparse_tensor_type.elem_type)})"
        case "sequence_type":
            return f"seq({_spelling(proto.sequence_type.elem_type)})"
        case "optional_type":
            return f"optional({_spelling(proto.optional_type.elem_type)})"
        case "map_type":
            return f"map({_element(proto.map_type.key_type)},{_spelling(proto.map_type.value_type)})"
    return "unknown"


def _element(data_type: int) -> str:
    try:
        return str(onnx.TensorProto.DataType.Name(data_type)).lower()
    except ValueError:
        return "undefined"
