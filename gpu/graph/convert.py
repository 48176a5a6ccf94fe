"""Graph protobufs become Graph, Node and Value. Knows no files and no devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, NodeProto, SparseTensorProto

from ..errors import InvalidModel
from ..host.room import check_room
from .model import Graph, Node, Value
from .tensors import TensorFiles, element_type, misshapen

__all__ = ["Convert"]

Array = np.ndarray[Any, Any]
_T = AttributeProto
_NESTED = (_T.GRAPH, _T.GRAPHS)


class Convert:
    """Converts the graphs of one model.

    Args:
        label: what to call the model in messages.
        opsets: domain -> version, "" for ai.onnx.
        files: where tensors come from.
        check: called every few nodes.
        progress: called with (phase, done, total).
    """

    def __init__(
        self,
        label: str,
        opsets: Mapping[str, int],
        files: TensorFiles,
        check: Callable[[], None],
        progress: Callable[[str, int, int], None],
    ) -> None:
        self.label, self.opsets, self.files, self.check, self.progress = label, opsets, files, check, progress
        self.names: set[str] = set()
        self.scopes: list[dict[str, Value]] = []
        self.done = self.total = self.made = 0

    def main(self, proto: GraphProto, overridable: bool) -> tuple[Graph, dict[str, Array]]:
        """The main graph, and the defaults of its overridable inputs.

        Args:
            proto: the graph.
            overridable: whether initialisers that are listed as inputs may be fed.

        Raises:
            InvalidModel: a name is produced twice or by nothing, or there is a cycle.
        """
        self.total = len(proto.node) + len(proto.initializer)
        return self._graph(proto, overridable)

    def _graph(self, proto: GraphProto, overridable: bool, nested: bool = False) -> tuple[Graph, dict[str, Array]]:
        scope: dict[str, Value] = {}
        dtypes = {i.name: _dtype(i.type) for infos in (proto.value_info, proto.output) for i in infos}
        constants = dict(self._constants(proto))
        inputs, later, defaults = list[Value](), list[Value](), dict[str, Array]()
        for info in proto.input:
            if info.name in scope:
                raise self.wrong(f"there are two inputs called {info.name!r}")
            array = constants.get(info.name)
            if array is not None and not overridable and not nested:
                continue
            scope[info.name] = value = Value(self._unshadowed(info.name), _dtype(info.type))
            if array is None or nested:
                inputs.append(value)
            else:
                defaults[info.name] = array
                later.append(value)
            constants.pop(info.name, None)
        for name, array in constants.items():
            scope[name] = Value(self._unshadowed(name), array.dtype, array)
        self.scopes.append(scope)
        ordered = self._ordered(proto)
        nodes: list[Node] = []
        for node in ordered:
            made = self._node(node, scope, dtypes)
            if made is not None:
                nodes.append(made)
            self._tick()
        outputs = []
        for info in proto.output:
            out = self._find(info.name)
            if out is None:
                where = f"graph {proto.name!r}" if nested else "the model"
                raise self.wrong(f"the output {info.name!r} of {where} is produced by nothing")
            outputs.append(out)
        self.scopes.pop()
        return Graph(proto.name, inputs + later, outputs, nodes), defaults

    def _constants(self, proto: GraphProto) -> Iterator[tuple[str, Array]]:
        seen: set[str] = set()
        for tensor in proto.initializer:
            if tensor.name in seen:
                raise self.wrong(f"there are two initialisers called {tensor.name!r}")
            seen.add(tensor.name)
            yield tensor.name, self.files.array(tensor)
            self._tick()
        for sparse in proto.sparse_initializer:
            yield sparse.values.name, self._dense(sparse)

    def _dense(self, sparse: SparseTensorProto) -> Array:
        values, indices = self.files.array(sparse.values), self.files.array(sparse.indices)
        shape = tuple(sparse.dims)
        why = misshapen(shape, values.dtype)
        if why:
            raise self.wrong(f"sparse tensor {sparse.values.name!r}: {why}")
        check_room(f"{self.label}: sparse tensor {sparse.values.name!r}", values.dtype, shape)
        out = np.zeros(shape, values.dtype)
        try:
            if indices.ndim == 1:
                out.reshape(-1)[indices] = values
            else:
                out[tuple(indices.T)] = values
        except (IndexError, ValueError):
            raise self.wrong(f"sparse tensor {sparse.values.name!r}: its indices do not fit its shape") from None
        return out

    def _node(self, proto: NodeProto, scope: dict[str, Value], dtypes: Mapping[str, Any]) -> Node | None:
        op = proto.op_type
        domain = "" if proto.domain == "ai.onnx" else proto.domain
        if op == "Constant" and not domain and len(proto.attribute) == 1:
            array = self._constant(proto.attribute[0])
            if array is not None and len(proto.output) == 1:
                scope[proto.output[0]] = Value(proto.output[0], array.dtype, array)
                return None
        inputs = [self._find(name) if name else None for name in proto.input]
        while inputs and inputs[-1] is None:
            inputs.pop()
        outputs: list[Value | None] = []
        for name in proto.output:
            outputs.append(Value(self._unshadowed(name, 1), dtypes.get(name)) if name else None)
        attrs = {a.name: self._attribute(a, proto) for a in proto.attribute}
        scope.update((n, v) for n, v in zip(proto.output, outputs, strict=True) if v is not None)
        return Node(op, domain, self.opsets.get(domain, 0), self._name(proto), tuple(inputs), tuple(outputs), attrs)

    def _constant(self, a: AttributeProto) -> Array | None:
        match a.name:
            case "value":
                return self.files.array(a.t)
            case "sparse_value":
                return self._dense(a.sparse_tensor)
            case "value_float":
                return np.array(a.f, np.float32)
            case "value_floats":
                return np.array(a.floats, np.float32)
            case "value_int":
                return np.array(a.i, np.int64)
            case "value_ints":
                return np.array(a.ints, np.int64)
            case "value_string":
                return np.array(a.s.decode("utf-8", "replace"), object)
            case "value_strings":
                out = np.empty(len(a.strings), object)
                out[:] = [s.decode("utf-8", "replace") for s in a.strings]
                return out
        return None

    def _attribute(self, a: AttributeProto, node: NodeProto) -> Any:
        kind = a.type or _guess(a)
        match kind:
            case _T.INT:
                return a.i
            case _T.FLOAT:
                return a.f
            case _T.STRING:
                return _text(a.s)
            case _T.INTS:
                return list(a.ints)
            case _T.FLOATS:
                return list(a.floats)
            case _T.STRINGS:
                return [_text(s) for s in a.strings]
            case _T.TENSOR:
                return self.files.array(a.t)
            case _T.TENSORS:
                return [self.files.array(t) for t in a.tensors]
            case _T.GRAPH:
                return self._graph(a.g, False, True)[0]
            case _T.GRAPHS:
                return [self._graph(g, False, True)[0] for g in a.graphs]
            case _T.SPARSE_TENSOR:
                return a.sparse_tensor
            case _T.SPARSE_TENSORS:
                return list(a.sparse_tensors)
            case _T.TYPE_PROTO:
                return a.tp
            case _T.TYPE_PROTOS:
                return list(a.type_protos)
        raise self.wrong(f"node {_label(node)}: attribute {a.name!r} is of no known type")

    def _name(self, proto: NodeProto) -> str:
        name = proto.name
        while not name or name in self.names:
            name = f"{proto.name or proto.op_type}_{self.made}"
            self.made += 1
        self.names.add(name)
        return name

    def _unshadowed(self, name: str, own: int = 0) -> str:
        """A name for a value that no value of the graphs around its graph has."""
        around = self.scopes[: len(self.scopes) - own]
        taken = {v.name for scope in around if (v := scope.get(name)) is not None}
        while name in taken or (name.endswith("'") and any(name in scope for scope in around)):
            name += "'"
        return name

    def _find(self, name: str) -> Value | None:
        for scope in reversed(self.scopes):
            value = scope.get(name)
            if value is not None:
                return value
        return None

    def _ordered(self, proto: GraphProto) -> Sequence[NodeProto]:
        """The nodes in an order in which they can be computed; checks that each name is produced once."""
        given = self.scopes[-1]
        producers: dict[str, int] = {}
        needs: list[set[str]] = []
        in_order = True
        for i, node in enumerate(proto.node):
            if not i & 63:
                self.check()
            wanted = set(node.input)
            for a in node.attribute:
                if a.type in _NESTED:
                    for graph in (a.g, *a.graphs):
                        wanted |= self._free(graph)
            wanted.discard("")
            needs.append(wanted)
            in_order = in_order and all(n in producers or self._known(n) for n in wanted)
            for name in node.output:
                if name in producers or name in given:
                    raise self.wrong(f"node {_label(node)}: its output {name!r} is produced twice")
                if name:
                    producers[name] = i
        if in_order:
            return list(proto.node)
        sorter: TopologicalSorter[int] = TopologicalSorter()
        for i, wanted in enumerate(needs):
            sorter.add(i)
            for name in wanted:
                if name in producers:
                    sorter.add(i, producers[name])
                elif not self._known(name):
                    raise self.wrong(f"node {_label(proto.node[i])}: its input {name!r} is produced by nothing")
        try:
            return [proto.node[i] for i in sorter.static_order()]
        except CycleError as error:
            raise self.wrong(f"node {_label(proto.node[error.args[1][0]])} depends on its own output") from None

    def _known(self, name: str) -> bool:
        return any(name in scope for scope in self.scopes)

    def _free(self, graph: GraphProto) -> set[str]:
        """The names that a nested graph takes from the graphs around it."""
        own = {v.name for v in graph.input} | {t.name for t in graph.initializer}
        own |= {s.values.name for s in graph.sparse_initializer}
        wanted: set[str] = {v.name for v in graph.output}
        for node in graph.node:
            own.update(node.output)
            wanted.update(node.input)
            for a in node.attribute:
                if a.type in _NESTED:
                    for inner in (a.g, *a.graphs):
                        wanted |= self._free(inner)
        return wanted - own - {""}

    def _tick(self) -> None:
        self.done += 1
        if not self.done & 15:
            self.check()
            self.progress("read", min(self.done, self.total), self.total)

    def wrong(self, why: str) -> InvalidModel:
        """An error that names the model."""
        return InvalidModel(f"{self.label}: {why}")


def _label(node: NodeProto) -> str:
    return f"{node.name!r} ({node.op_type})" if node.name else f"({node.op_type}, without a name)"


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _dtype(proto: onnx.TypeProto) -> np.dtype[Any] | None:
    return element_type(proto.tensor_type.elem_type) if proto.HasField("tensor_type") else None


def _guess(a: AttributeProto) -> int:
    """The type of an attribute that does not say it, as files of IR version 1 do not."""
    for name, kind in (("i", _T.INT), ("f", _T.FLOAT), ("s", _T.STRING), ("t", _T.TENSOR), ("g", _T.GRAPH)):
        if a.HasField(name):
            return kind
    for name, kind in (("ints", _T.INTS), ("floats", _T.FLOATS), ("strings", _T.STRINGS), ("tensors", _T.TENSORS)):
        if len(getattr(a, name)):
            return kind
    return _T.UNDEFINED
