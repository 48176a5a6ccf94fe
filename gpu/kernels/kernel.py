"""What a compute kernel is: WGSL that declares what its pipeline depends on.

Every dispatch here is one-dimensional, and a kernel never reads `workgroup_id` itself: it is
given `group`, the number of the workgroup counted over the whole step. So any step can be cut
into several dispatches between two workgroups, with the same result bit for bit.

This file knows no wgpu: it makes text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np

from .half import admitted, conversions, halved, rewritten

__all__ = ["Binding", "Epilogue", "Kernel", "Program", "admits", "link", "pack_params"]

Scalar = Literal["f32", "i32", "u32"]


@dataclass(frozen=True, slots=True)
class Binding:
    """One storage buffer: `var<storage, ...> name: array<type>`."""

    name: str
    type: str = "f32"


@dataclass(frozen=True)
class Kernel:
    """A compute shader, but for what is fused onto its end.

    The whole of it is the key under which its pipeline is cached, so nothing may be baked in
    that changes with the sizes of tensors: sizes travel in `params`.

    Attributes:
        name: for people: explain(), profiles, labels.
        body: statements of `main`. In scope: `group` (u32, the workgroup's number in the step),
            `lane` (u32, 0 <= lane < lanes), `params.NAME`, the bindings by name, `functions`.
            A kernel with `result` hands each value of its output to `store(i, v)` (width 1:
            i = flat element index) or `store4(i, v)` (width 4: i = index of four contiguous
            elements, v = vec4) exactly once; anything fused onto it happens in there. A kernel
            without `result` writes its `writes` itself.
        reads: buffers read. writes: buffers written, only where `result` is None.
        params: names and types of 4-byte scalars, in order.
        result: WGSL scalar type that is handed to store, "f32", "i32", "u32" or "bool"; None = stores by itself.
        width: 1 or 4, see `body`. Buffers are padded to 16 bytes: the last vec4 may hang over.
        lanes: workgroup size.
        functions: WGSL at module scope (functions, `var<workgroup>`, constants).
        multiple: a part that is cut off should be a multiple of so many workgroups.
    """

    name: str
    body: str
    reads: tuple[Binding, ...] = ()
    writes: tuple[Binding, ...] = ()
    params: tuple[tuple[str, Scalar], ...] = ()
    result: str | None = "f32"
    width: int = 1
    lanes: int = 64
    functions: str = ""
    multiple: int = 1


@dataclass(frozen=True)
class Epilogue:
    """What `store` does: an expression over the kernel's value and further buffers (fuse.py makes it)."""

    code: str
    reads: tuple[Binding, ...] = ()
    params: tuple[tuple[str, Scalar], ...] = ()
    out: str = "f32"
    label: str = ""


@dataclass(frozen=True)
class Program:
    """A whole shader. Bindings: 0 = params (uniform, where there are any), then reads, then writes.

    `base` in immediates is the number of the first workgroup of a dispatch.
    """

    name: str
    wgsl: str = field(repr=False)
    reads: int
    writes: int
    params: tuple[tuple[str, Scalar], ...]
    multiple: int


def plain_epilogue(kernel: Kernel) -> Epilogue:
    """Store the value as it is."""
    assert kernel.result is not None
    stored = "u32" if kernel.result == "bool" else kernel.result
    if kernel.width == 4:
        value = "vec4u(v)" if kernel.result == "bool" else "v"
        return Epilogue(f"fn store4(i: u32, v: vec4<{kernel.result}>) {{ out[i] = {value}; }}\n", out=f"vec4<{stored}>")
    value = "u32(v)" if kernel.result == "bool" else "v"
    return Epilogue(f"fn store(i: u32, v: {kernel.result}) {{ out[i] = {value}; }}\n", out=stored)


@lru_cache(maxsize=4096)
def admits(kernel: Kernel, epilogue: Epilogue | None = None) -> tuple[tuple[str, bool], ...]:
    """The buffers of a shader, reads before writes: their names, and whether they may hold f16 instead of f32."""
    end = _end(kernel, epilogue)
    code = f"{kernel.functions}\n{kernel.body}"
    reads, writes = _buffers(kernel, end)
    own = {*kernel.reads, *kernel.writes}
    return tuple((b.name, admitted(code if b in own else end.code, b.name, b.type)) for b in (*reads, *writes))


@lru_cache(maxsize=4096)
def link(
    kernel: Kernel, epilogue: Epilogue | None = None, halves: frozenset[str] = frozenset(), cpu: bool = True
) -> Program:
    """Make the whole shader of a kernel and what is fused onto its end.

    Args:
        kernel: its text.
        epilogue: what is fused, None = nothing.
        halves: buffers that hold f16 instead of f32, of those that `admits` says may.
        cpu: for a software adapter; it matters for halves only.
    """
    end = _end(kernel, epilogue)
    reads, writes = _buffers(kernel, end)
    params = kernel.params + end.params
    lines = ["enable f16;", conversions(cpu)] if halves else []
    lines.append("var<immediate> base: u32;")
    kinds: dict[str, str] = {}
    number = 0
    if params:
        members = ", ".join(f"{name}: {kind}" for name, kind in params)
        lines += [f"struct Params {{ {members} }}", "@group(0) @binding(0) var<uniform> params: Params;"]
        number = 1
    for access, bindings in (("read", reads), ("read_write", writes)):
        for binding in bindings:
            kind = binding.type
            if binding.name in halves:
                kind = kinds[binding.name] = halved(kind, access != "read", cpu)
            lines.append(f"@group(0) @binding({number}) var<storage, {access}> {binding.name}: array<{kind}>;")
            number += 1
    own = {b.name: kinds.pop(b.name) for b in (*kernel.reads, *kernel.writes) if b.name in kinds}
    lines += [
        rewritten(end.code, kinds),
        rewritten(kernel.functions, own),
        f"@compute @workgroup_size({kernel.lanes})",
        "fn main(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_id) local: vec3u) {",
        "let group = base + workgroup.x;",
        "let lane = local.x;",
        rewritten(kernel.body, own),
        "}",
    ]
    name = kernel.name + (f"+{end.label}" if end.label else "")
    return Program(name, "\n".join(lines), len(reads), len(writes), params, kernel.multiple)


def _end(kernel: Kernel, epilogue: Epilogue | None) -> Epilogue:
    if epilogue is None:
        return plain_epilogue(kernel) if kernel.result is not None else Epilogue("")
    return epilogue


def _buffers(kernel: Kernel, end: Epilogue) -> tuple[tuple[Binding, ...], tuple[Binding, ...]]:
    return kernel.reads + end.reads, (Binding("out", end.out),) if kernel.result is not None else kernel.writes


def pack_params(declared: Sequence[tuple[str, Scalar]], values: Mapping[str, int | float]) -> bytes:
    """Lay parameters out as the uniform struct wants them: 4 bytes each, in order.

    Raises:
        KeyError: a declared parameter has no value.
        OverflowError: a value does not fit its 32 bits.
    """
    out = np.empty(len(declared), np.uint32)
    for index, (name, kind) in enumerate(declared):
        value = values[name]
        if kind == "f32":
            out[index] = np.float32(value).view(np.uint32)
        elif kind == "u32":
            out[index] = np.uint32(value)
        else:
            out[index] = np.array(value, np.int32).view(np.uint32)
    return out.tobytes()
