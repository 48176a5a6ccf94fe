"""Elementwise expressions: what of a lazy tensor fuses, and the WGSL that computes it.

This file knows no steps and decides nothing about when something is computed (lowering.py does).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from ..kernels.kernel import Binding, Epilogue, Kernel
from .target import Target
from .tensor import Array, Shape, Storage, Tensor, contiguous_strides, gpu_type

__all__ = ["QUADS_PER_GROUP", "Tree", "epilogue", "map_kernel"]

QUADS_PER_GROUP = 256
"""Groups of four elements that one workgroup of the plain elementwise kernel computes."""

_IDENTIFIER = re.compile(r"(?<![\w.])(params\.)?([A-Za-z_]\w*)")


class Tree:
    """The expression of a lazy tensor as it stands now: a DAG down to what lies somewhere.

    Attributes:
        lazies: what would be computed on the way, innermost first, the tensor itself last.
        applies: those of them that are elementwise. roots: those that are kernels not emitted yet.
        leaves: what is read, in order of first use. scalars: one-element tensors known now.
    """

    def __init__(self, top: Tensor, placed: Mapping[Tensor, Storage], known: Callable[[Tensor], Array | None]) -> None:
        self.top = top
        self.lazies: list[Tensor] = []
        self.leaves: list[Tensor] = []
        self.scalars: dict[Tensor, float | int] = {}
        self._below: dict[Tensor, frozenset[Tensor]] = {}
        self._walk(top, placed, known)
        self.applies = [t for t in self.lazies if t.apply is not None]
        self.roots = [t for t in self.lazies if t.pending is not None]

    @property
    def root(self) -> Tensor | None:
        """The kernel that the expression would be fused onto."""
        return self.roots[0] if self.roots else None

    def holds_root(self, tensor: Tensor) -> bool:
        """Whether a kernel not emitted yet is among what a lazy tensor is computed from."""
        return any(t.pending is not None for t in self._below[tensor])

    def weight(self, tensor: Tensor) -> int:
        """How many elementwise operators a lazy tensor takes."""
        return sum(t.apply.weight for t in self._below[tensor] if t.apply is not None)

    def _walk(self, top: Tensor, placed: Mapping[Tensor, Storage], known: Callable[[Tensor], Array | None]) -> None:
        stack: list[tuple[Tensor, bool]] = [(top, False)]
        seen_leaves: set[Tensor] = set()
        while stack:
            tensor, ready = stack.pop()
            if ready:
                assert tensor.apply is not None
                below = {tensor}
                for arg in tensor.apply.args:
                    below |= self._below.get(arg, frozenset())
                self._below[tensor] = frozenset(below)
                self.lazies.append(tensor)
                continue
            if tensor in self._below or tensor in seen_leaves or tensor in self.scalars:
                continue
            value = known(tensor) if tensor not in placed else None
            if value is not None and value.size == 1:
                self.scalars[tensor] = value.reshape(-1)[0].item()
            elif tensor in placed or value is not None:
                seen_leaves.add(tensor)
                self.leaves.append(tensor)
            elif tensor.pending is not None:
                self._below[tensor] = frozenset({tensor})
                self.lazies.append(tensor)
            elif tensor.apply is not None:
                stack.append((tensor, True))
                stack.extend((arg, False) for arg in reversed(tensor.apply.args) if arg not in self._below)
            else:
                seen_leaves.add(tensor)
                self.leaves.append(tensor)
        # An argument may have been pushed twice before it was done: keep the first.
        self.lazies = list(dict.fromkeys(self.lazies))


def broadcast_strides(shape: Shape, out: Shape) -> list[int]:
    """Strides, in elements, with which a tensor is read under the index of `out`; 0 where repeated."""
    padded = (1,) * (len(out) - len(shape)) + tuple(shape)
    return [0 if size == 1 else stride for size, stride in zip(padded, contiguous_strides(padded), strict=True)]


def collapse(out: Shape, strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Merge neighbouring dimensions that every tensor walks alike, and drop those of size 1.

    Returns:
        The sizes, and for each tensor its strides over them; at least one dimension.
    """
    dims: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for axis, size in enumerate(out):
        if size == 1:
            continue
        if dims and all(m[-1] == s[axis] * size for m, s in zip(merged, strides, strict=True)):
            dims[-1] *= size
            for m, s in zip(merged, strides, strict=True):
                m[-1] = s[axis]
        else:
            dims.append(size)
            for m, s in zip(merged, strides, strict=True):
                m.append(s[axis])
    if not dims:
        return [1], [[0] for _ in strides]
    return dims, merged


def map_kernel(target: Target) -> Kernel:
    """The kernel of a fused expression that has no other kernel to be fused onto."""
    return _map_kernel(target.cpu)


@lru_cache
def _map_kernel(cpu: bool) -> Kernel:
    index = "(group * 64u + lane) * 4u + k" if cpu else "group * 256u + k * 64u + lane"
    body = f"""for (var k = 0u; k < 4u; k++) {{
    let i = {index};
    if (i < params.quads) {{ store4(i, vec4f()); }}
}}"""
    return Kernel("map", body, params=(("quads", "u32"),), width=4)


def epilogue(tree: Tree, out: Tensor, width: int) -> tuple[Epilogue, dict[str, int | float]]:
    """The `store` of an expression: WGSL, the buffers it reads (those of `tree.leaves`), its parameters.

    Args:
        tree: with at most one root, whose value `store` is given.
        out: the tensor that is stored.
        width: 1 or 4, as the kernel stores.
    """
    return _Writer(tree, out, width).write()


class _Writer:
    def __init__(self, tree: Tree, out: Tensor, width: int) -> None:
        self.tree, self.out, self.width = tree, out, width
        self.params: dict[str, int | float] = {}
        self.kinds: list[tuple[str, str]] = []
        self.general = [t for t in tree.leaves if t.size not in (1, out.size)]
        self.dims, strides = collapse(out.shape, [broadcast_strides(t.shape, out.shape) for t in self.general])
        self.strides = dict(zip(self.general, strides, strict=True))
        self.rows = width == 4 and self.dims[-1] % 4 == 0
        """Four neighbours of the result lie in one row of every broadcast leaf."""

    def _wide(self, leaf: Tensor) -> bool:
        """Whether a leaf is read four elements at a time."""
        if self.width != 4 or leaf.size == 1:
            return False
        if leaf not in self.strides:
            return leaf.size == self.out.size
        *outer, last = self.strides[leaf]
        return self.rows and last == 1 and all(stride % 4 == 0 for stride in outer)

    def write(self) -> tuple[Epilogue, dict[str, int | float]]:
        tree, width = self.tree, self.width
        fused = self._fused()
        code = [*dict.fromkeys(t.apply.functions for t in tree.applies if t.apply is not None), fused]
        if self.general:
            code.append(self._offsets())
        reads = []
        for number, leaf in enumerate(tree.leaves):
            stored = _stored(leaf)
            reads.append(Binding(f"leaf{number}", f"vec4<{stored}>" if self._wide(leaf) else stored))
        code.append(self._store4() if width == 4 else self._store1())
        stored = _stored(self.out)
        label = "+".join(dict.fromkeys(t.apply.label for t in tree.applies if t.apply is not None))
        made = Epilogue(
            "".join(code),
            tuple(reads),
            tuple(self.kinds),  # type: ignore[arg-type]
            f"vec4<{stored}>" if width == 4 else stored,
            label,
        )
        return made, self.params

    def _param(self, name: str, kind: str, value: int | float) -> str:
        name = f"e_{name}"  # the kernel that is fused onto has parameters of its own
        if name not in self.params:
            self.params[name] = value
            self.kinds.append((name, kind))
        return f"params.{name}"

    def _fused(self) -> str:
        """`fused(v, a0, a1, ...)`: the expression over scalars."""
        tree = self.tree
        code: dict[Tensor, str] = {leaf: f"a{n}" for n, leaf in enumerate(tree.leaves)}
        for n, (tensor, value) in enumerate(tree.scalars.items()):
            kind = tensor.type
            assert kind is not None
            name = self._param(f"k{n}", "u32" if kind == "bool" else kind, value)
            code[tensor] = f"({name} != 0u)" if kind == "bool" else name
        lines = []
        count = len(tree.scalars)
        for n, tensor in enumerate(tree.lazies):
            if tensor.pending is not None:
                code[tensor] = "v"
                continue
            apply = tensor.apply
            assert apply is not None
            names = {}
            for name, value in apply.params:
                names[name] = self._param(f"k{count}", "f32", value)
                count += 1
            args = {name: code[arg] for name, arg in zip(apply.names, apply.args, strict=True)}
            lines.append(f"let t{n}: {gpu_type(tensor.dtype)} = {_substitute(apply.wgsl, args, names)};\n")
            code[tensor] = f"t{n}"
        given = []
        if tree.root is not None:
            given.append(f"v: {tree.root.type}")
        given += [f"a{n}: {leaf.type}" for n, leaf in enumerate(tree.leaves)]
        return (
            f"fn fused({', '.join(given)}) -> {self.out.type} {{\n{''.join(lines)}return {code[self.tree.top]};\n}}\n"
        )

    def _offsets(self) -> str:
        """`offsets(i)`: where each broadcast leaf lies under the flat index i."""
        rank = len(self.dims)
        members = ", ".join(f"o{g}: u32" for g in range(len(self.general)))
        lines = [f"struct Offsets {{ {members} }}\nfn offsets(i: u32) -> Offsets {{\nvar o: Offsets;\nvar n = i;\n"]
        for axis in range(rank - 1, -1, -1):
            if axis:
                dim = self._param(f"d{axis}", "u32", self.dims[axis])
                lines.append(f"let q{axis} = n / {dim}; let c{axis} = n - q{axis} * {dim}; n = q{axis};\n")
            else:
                lines.append("let c0 = n;\n")
            for g, leaf in enumerate(self.general):
                stride = self.strides[leaf][axis]
                if stride == 1:
                    lines.append(f"o.o{g} += c{axis};\n")
                elif stride:
                    lines.append(f"o.o{g} += c{axis} * {self._param(f's{g}_{axis}', 'u32', stride)};\n")
        lines.append("return o;\n}\n")
        return "".join(lines)

    def _call(self, args: Sequence[str], component: str) -> str:
        inner = [f"v{component}"] if self.tree.root is not None else []
        inner += [arg + component for arg in args]
        call = f"fused({', '.join(inner)})"
        return f"u32({call})" if self.out.type == "bool" else call

    def _store1(self) -> str:
        lines = [f"fn store(i: u32, v: {self._value_type()}) {{\n"]
        if self.general:
            lines.append("let o = offsets(i);\n")
        args = []
        for n, leaf in enumerate(self.tree.leaves):
            if leaf in self.strides:
                index = f"o.o{self.general.index(leaf)}"
            else:
                index = "i" if leaf.size == self.out.size else "0u"
            lines.append(f"let e{n} = leaf{n}[{index}]{_test(leaf)};\n")
            args.append(f"e{n}")
        lines.append(f"out[i] = {self._call(args, '')};\n}}\n")
        return "".join(lines)

    def _store4(self) -> str:
        lines = [f"fn store4(i: u32, v: vec4<{self._value_type()}>) {{\n"]
        args = []
        for n, leaf in enumerate(self.tree.leaves):
            args.append(f"e{n}")
            if leaf in self.strides:
                continue
            if self._wide(leaf):
                lines.append(f"let e{n} = leaf{n}[i]{_test4(leaf)};\n")
            else:
                lines.append(f"let e{n} = vec4<{leaf.type}>(leaf{n}[0]{_test(leaf)});\n")
        if self.general:
            lines += self._in_rows() if self.rows else self._places()
        values = ", ".join(self._call(args, f".{c}") for c in "xyzw")
        lines.append(f"out[i] = vec4<{_stored(self.out)}>({values});\n}}\n")
        return "".join(lines)

    def _in_rows(self) -> list[str]:
        """Statements that read the broadcast leaves at four elements of one row."""
        last = len(self.dims) - 1
        lines = ["let o = offsets(i * 4u);\n"]
        for g, leaf in enumerate(self.general):
            n, item = self.tree.leaves.index(leaf), f"vec4<{leaf.type}>"
            if self._wide(leaf):
                lines.append(f"let e{n} = leaf{n}[o.o{g} / 4u]{_test4(leaf)};\n")
            elif self.strides[leaf][last]:
                step = self._param(f"s{g}_{last}", "u32", self.strides[leaf][last])
                loads = ", ".join(f"leaf{n}[o.o{g} + {k}u * {step}]{_test(leaf)}" for k in range(4))
                lines.append(f"let e{n} = {item}({loads});\n")
            else:
                lines.append(f"let e{n} = {item}(leaf{n}[o.o{g}]{_test(leaf)});\n")
        return lines

    def _places(self) -> list[str]:
        """Statements that read the broadcast leaves at four elements, which may lie in several rows."""
        last = len(self.dims) - 1
        before, inside, after = [], [], []
        for g, leaf in enumerate(self.general):
            n, item = self.tree.leaves.index(leaf), f"vec4<{leaf.type}>"
            if self.strides[leaf][last]:
                step = self._param(f"s{g}_{last}", "u32", self.strides[leaf][last])
                before.append(f"var p{g} = vec4u();\n")
                inside.append(f"p{g} = select(p{g}, o.o{g} + ahead * {step}, ahead < vec4u(4u));\n")
                loads = ", ".join(f"leaf{n}[p{g}.{c}]{_test(leaf)}" for c in "xyzw")
                after.append(f"let e{n} = {item}({loads});\n")
            else:
                before.append(f"var e{n} = {item}();\n")
                inside.append(f"e{n} = select(e{n}, {item}(leaf{n}[o.o{g}]{_test(leaf)}), ahead < vec4u(4u));\n")
        return [
            *before,
            "var turn = 0u;\nloop {\nlet o = offsets(i * 4u + turn);\nlet ahead = vec4u(0u, 1u, 2u, 3u) - turn;\n",
            *inside,
            "turn++;\nif (turn >= 4u) { break; }\n}\n",
            *after,
        ]

    def _value_type(self) -> str:
        root = self.tree.root
        if root is None:
            return "f32"
        assert root.pending is not None
        assert root.pending.kernel.result is not None
        return root.pending.kernel.result


def _stored(tensor: Tensor) -> str:
    kind = tensor.type
    assert kind is not None
    return "u32" if kind == "bool" else kind


def _test4(tensor: Tensor) -> str:
    return " != vec4<u32>()" if tensor.type == "bool" else ""


def _test(tensor: Tensor) -> str:
    return " != 0u" if tensor.type == "bool" else ""


def _substitute(wgsl: str, args: Mapping[str, str], params: Mapping[str, str]) -> str:
    """Put operands in for the names of an expression."""

    def replace(match: re.Match[str]) -> str:
        prefix, name = match.groups()
        if prefix:
            return params[name]
        return args.get(name, name)

    return _IDENTIFIER.sub(replace, wgsl)
