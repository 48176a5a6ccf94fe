"""Matrix products with weights known at load that stay packed in the device's memory: 8 or 4 bits each.

Both kinds add up chunks of k in f32: products of bytes are whole numbers, exact in f32 over 256
terms, and are then added to an i32; products of floats are multiplied by their block's scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .kernel import Binding, Kernel
from .matmul_registers import LANES, Tile, choose_tile, padded_rows, put, stores
from .registry import NoKernel
from .window import MOST_TURNS

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Array, Shape, Tensor

__all__ = ["EXACT", "Packed", "packed_product"]

EXACT = 256
"""Products of two numbers from -255 to 255 whose sum f32 holds exactly."""


@dataclass(frozen=True)
class Packed:
    """Weights [k, n] of a product, as they are packed.

    Attributes:
        owner: a known tensor that the packed buffers are kept with.
        key: names this use of the owner's contents.
        k: rows. n: columns.
        bits: of an element, 8 or 4.
        signed: elements are signed; 8 bits only.
        chunk: rows that have scales and zero points of their own, a multiple of 16.
        values: makes the elements, [k, n].
        zeros: makes what is subtracted from the elements, f32 [k / chunk rounded up or 1, n]; None = 0.
        scales: makes what the sums are multiplied with, f32 [k / chunk rounded up, n]; None: the
            product is of whole numbers, and is i32.
        shared: the zero points of all chunks are the same: `zeros` has one row.
    """

    owner: Tensor
    key: object
    k: int
    n: int
    bits: int
    signed: bool
    chunk: int
    values: Callable[[], Array]
    zeros: Callable[[], Array] | None = None
    scales: Callable[[], Array] | None = None
    shared: bool = False


def packed_product(plan: Lowering, a: Tensor, zero: Tensor | None, b: Packed, shape: Shape) -> Tensor:
    """Multiply a with packed weights; the result is pending.

    Args:
        plan: takes the kernel.
        a: [..., k]: f32 if b has scales, else i32 or u32 from -255 to 255.
        zero: one number of a's type that is subtracted from a's elements. None = 0.
        b: the weights.
        shape: of the result, [..., n].

    Raises:
        NoKernel: k is too long for one invocation.
    """
    m, k, n = a.size // b.k if b.k else 0, b.k, b.n
    dtype = np.dtype(np.float32 if b.scales else np.int32)
    if 0 in shape:
        return plan.new(dtype, shape)
    if k == 0:
        return plan.map("x", {"x": plan.constant(np.zeros((), dtype))}, shape=shape)
    k4, n4, chunks = -(-k // 4), -(-n // 4), -(-k // b.chunk)
    if plan.target.cpu and k4 + chunks > MOST_TURNS:
        raise NoKernel(f"{k} terms")
    tile = choose_tile(1, m, n, plan.target.subgroup)
    hardware = not plan.target.cpu
    variant = _Variant(tile, a.type or "", b.bits, b.signed, b.zeros is not None, b.scales is not None, n % 4 == 0)
    reads = [plan.storage(padded_rows(plan, plan.view(a, (m, k)), k) if not hardware else a)]
    reads.append(plan.weight(b.owner, ("packed", b.key), lambda _: _words(b)))
    if b.zeros is not None:
        reads.append(plan.weight(b.owner, ("packed zeros", b.key), lambda _: _rows(b.zeros)))
    if b.scales is not None:
        reads.append(plan.weight(b.owner, ("packed scales", b.key), lambda _: _rows(b.scales)))
    else:
        reads.append(plan.storage(plan.constant(np.zeros((), a.dtype)) if zero is None else zero))
    params: dict[str, int | float] = {"m": m, "n": n, "n4": n4, "k": k, "k4": k4}
    params |= {"chunk": b.chunk // 4, "chunks": chunks, "zero_step": 0 if b.shared else n4}
    flops = 2.0 * m * n * k
    if hardware and m <= 4:
        params |= {"column_tiles": -(-n4 // 8), "tiles": 0}
        return plan.pending(_thin_kernel(variant), reads, params, -(-n4 // 8) * m, dtype, shape, flops=flops)
    if hardware:
        rows = 8 if m <= 8 else 32
        params |= {"column_tiles": -(-n4 // 16), "tiles": 0}
        groups = -(-n4 // 16) * -(-m // rows)
        return plan.pending(_shared_kernel(variant, rows), reads, params, groups, dtype, shape, flops=flops)
    row_tiles, column_tiles = -(-m // tile.rows), -(-n4 // (tile.columns * tile.lanes))
    params |= {"column_tiles": column_tiles, "tiles": row_tiles * column_tiles}
    groups = -(-row_tiles * column_tiles // (LANES if tile.lanes == 1 else 1))
    return plan.pending(_register_kernel(variant), reads, params, groups, dtype, shape, flops=flops)


def _words(b: Packed) -> Array:
    """8 bits: [k][n / 4], a word holds four columns of a row. 4 bits: [k / 2][n / 4], of two rows.

    Rows are padded to fours; what is there times 0 is added: it is the last row's zero point.
    """
    values = b.values()
    spare = -b.k % 4
    below = np.zeros((spare, b.n), values.dtype)
    if spare and b.zeros is not None:
        below[:] = b.zeros()[-1]
    values = np.concatenate([values, below])
    values = np.pad(values, [(0, 0), (0, -b.n % 4)]).astype(np.uint8)
    if b.bits == 4:
        values = values[0::2] | values[1::2] << 4
    return np.ascontiguousarray(values).view("<u4").astype(np.uint32)


def _rows(make: Callable[[], Array] | None) -> Array:
    assert make is not None
    rows = make()
    return np.pad(rows, [(0, 0), (0, -rows.shape[1] % 4)]).astype(np.float32)


@dataclass(frozen=True)
class _Variant:
    tile: Tile
    kind: str
    bits: int
    signed: bool
    zeros: bool
    scaled: bool
    even_n: bool

    @property
    def name(self) -> str:
        return f"i{self.bits}" + ("_scaled" if self.scaled else "")

    @property
    def result(self) -> str:
        return "f32" if self.scaled else "i32"

    def word(self, u: str, q: str, column: str) -> str:
        """Where the word for row 4q + u lies."""
        if self.bits == 8:
            return f"b[({q} * 4u + {u}) * params.n4 + {column}]"
        return f"b[({q} * 2u + {u} / 2u) * params.n4 + {column}]"

    def unpacked(self, word: str, odd: str) -> str:
        """The four elements of a word as f32."""
        if self.bits == 8:
            signed = "I" if self.signed else "U"
            return f"vec4f(unpack4x{signed}8({word}))"
        return f"vec4f(unpack4xU8(({word} >> ({odd} * 4u)) & 0x0f0f0f0fu))"

    def reads(self, wide: bool) -> tuple[Binding, ...]:
        made = [Binding("a", f"vec4<{self.kind}>" if wide else self.kind), Binding("b", "u32")]
        made += [Binding("zeros", "vec4f")] if self.zeros else []
        made += [Binding("scales", "vec4f") if self.scaled else Binding("zero", self.kind)]
        return tuple(made)


_PARAMS = ("m", "n", "n4", "k", "k4", "chunk", "chunks", "zero_step", "column_tiles", "tiles")


@lru_cache
def _register_kernel(v: _Variant) -> Kernel:
    rows, columns, lanes = range(v.tile.rows), range(v.tile.columns), v.tile.lanes
    loads = range(v.tile.rows // lanes)
    shared = lanes > 1  # by the invocations of a subgroup, see Tile
    lines = ["let t = group;"] if shared else ["let t = group * 8u + lane;", "if (t < params.tiles) {"]
    lines += [
        f"let first = t % params.column_tiles * {v.tile.columns * lanes}u{' + lane' * shared};",
        f"let row = t / params.column_tiles * {v.tile.rows}u;",
        "let z = 0u;",
        "" if v.scaled else "let za = f32(zero[0]);",
    ]
    lines += [f"let r{i} = min(row + {i * lanes}u{' + lane' * shared}, params.m - 1u) * params.k4;" for i in loads]
    lines += [f"let n{j} = min(first + {j * lanes}u, params.n4 - 1u);" for j in columns]
    lines += [f"var c{i}_{j} = vec4<{v.result}>();" for i in rows for j in columns]
    lines += ["var q = 0u;", "for (var s = 0u; s < params.chunks; s++) {"]
    lines += [f"var p{i}_{j} = vec4f();" for i in rows for j in columns]
    if v.zeros:
        lines += [f"let zb{j} = zeros[s * params.zero_step + n{j}];" for j in columns]
    lines += ["for (let stop = min(q + params.chunk, params.k4); q < stop; q++) {"]
    lines += [f"let {'l' * shared or 'a'}{i} = vec4f(a[r{i} + q]){'' if v.scaled else ' - za'};" for i in loads]
    for u in range(4):
        for j in columns:
            if v.bits == 8 or u % 2 == 0:
                lines.append(f"let w{u}_{j} = {v.word(f'{u}u', 'q', f'n{j}')};")
            word = f"w{u}_{j}" if v.bits == 8 else f"w{u // 2 * 2}_{j}"
            lines.append(f"let b{u}_{j} = {v.unpacked(word, f'{u % 2}u')}{f' - zb{j}' if v.zeros else ''};")
    for i in rows:
        if shared:
            lines.append(f"let a{i} = subgroupBroadcast(l{i // lanes}, {i % lanes}u);")
        lines += [f"p{i}_{j} = fma(vec4f(a{i}[{u}]), b{u}_{j}, p{i}_{j});" for u in range(4) for j in columns]
    lines.append("}")
    for j in columns:
        if v.scaled:
            lines.append(f"let sb{j} = scales[s * params.n4 + n{j}];")
            lines += [f"c{i}_{j} = fma(p{i}_{j}, sb{j}, c{i}_{j});" for i in rows]
        else:
            lines += [f"c{i}_{j} += vec4<i32>(p{i}_{j});" for i in rows]
    lines += ["}", *stores(v.tile, v.even_n), "" if shared else "}"]
    return Kernel(
        f"matmul_{v.name}_{v.tile.rows}x{v.tile.columns * lanes * 4}",
        "\n".join(lines),
        reads=v.reads(True),
        params=tuple((name, "u32") for name in _PARAMS),
        result=v.result,
        width=4 if v.even_n else 1,
        lanes=lanes if shared else LANES,
        functions="" if v.even_n else put(f"vec4<{v.result}>"),
    )


@lru_cache
def _shared_kernel(v: _Variant, rows: int) -> Kernel:
    """Rows x 64 elements for each workgroup of 16 columns of four by 8 lanes, 16 of k at a time."""
    each = range(rows // 8)
    body = f"""let column = group % params.column_tiles * 16u;
let row = group / params.column_tiles * {rows}u;
let x = lane % 16u; let y = lane / 16u;
let n = min(column + x, params.n4 - 1u);
{"" if v.scaled else "let za = f32(zero[0]);"}
{"".join(f"var c{i} = vec4<{v.result}>();" for i in each)}
for (var s = 0u; s < params.chunks; s++) {{
    {"".join(f"var p{i} = vec4f();" for i in each)}
    {"let zb = zeros[s * params.zero_step + n];" if v.zeros else ""}
    let stop = min((s + 1u) * params.chunk, params.k4) * 4u;
    for (var k0 = s * params.chunk * 4u; k0 < stop; k0 += 16u) {{
        for (var i = 0u; i < {rows // 8}u; i++) {{
            let r = row + y + i * 8u; let at = k0 + x;
            var e = 0.0;
            if (r < params.m && at < params.k) {{ e = f32(a[r * params.k + at]){"" if v.scaled else " - za"}; }}
            tile_a[y + i * 8u][x] = e;
        }}
        for (var i = 0u; i < 2u; i++) {{
            let kb = y * 2u + i;
            var e = vec4f();
            if (k0 + kb < stop) {{
                let w = {v.word("kb % 4u", "((k0 + kb) / 4u)", "n")};
                e = {v.unpacked("w", "kb % 2u")}{" - zb" if v.zeros else ""};
            }}
            tile_b[kb][x] = e;
        }}
        workgroupBarrier();
        for (var u = 0u; u < 16u; u++) {{
            let e = tile_b[u][x];
            {"".join(f"p{i} = fma(vec4f(tile_a[y + {i * 8}u][u]), e, p{i});" for i in each)}
        }}
        workgroupBarrier();
    }}
    {"let sb = scales[s * params.n4 + n];" if v.scaled else ""}
    {"".join(f"c{i} = fma(p{i}, sb, c{i});" if v.scaled else f"c{i} += vec4<i32>(p{i});" for i in each)}
}}
for (var i = 0u; i < {rows // 8}u; i++) {{
    var v = c0;
    {"".join(f"v = select(v, c{i}, i == {i}u);" for i in each if i)}
    let r = row + y + i * 8u;
    if (r < params.m && column + x < params.n4) {{
        {"store4(r * params.n4 + n, v);" if v.even_n else "put(r * params.n, n * 4u, v);"}
    }}
}}"""
    functions = f"var<workgroup> tile_a: array<array<f32, 17>, {rows}>;\n"
    functions += "var<workgroup> tile_b: array<array<vec4f, 16>, 16>;\n"
    return Kernel(
        f"matmul_{v.name}_shared",
        body,
        reads=v.reads(False),
        params=tuple((name, "u32") for name in _PARAMS),
        result=v.result,
        width=4 if v.even_n else 1,
        lanes=128,
        functions=functions + ("" if v.even_n else put(f"vec4<{v.result}>")),
    )


@lru_cache
def _thin_kernel(v: _Variant) -> Kernel:
    """32 columns of one row for each workgroup, k shared out over sixteen lanes each, 16 of k at a time."""
    body = f"""let column = group % params.column_tiles * 8u;
let row = group / params.column_tiles;
let x = lane % 8u; let part = lane / 8u;
let n = min(column + x, params.n4 - 1u);
{"" if v.scaled else "let za = f32(zero[0]);"}
var c = vec4<{v.result}>();
for (var k0 = part * 16u; k0 < params.k; k0 += 256u) {{
    let s = k0 / (params.chunk * 4u);
    {"let zb = zeros[s * params.zero_step + n];" if v.zeros else ""}
    var p = vec4f();
    let stop = min(k0 + 16u, params.k);
    for (var at = k0; at < stop; at++) {{
        let w = {v.word("at % 4u", "(at / 4u)", "n")};
        let e = {v.unpacked("w", "at % 2u")}{" - zb" if v.zeros else ""};
        p = fma(vec4f(f32(a[row * params.k + at]){"" if v.scaled else " - za"}), e, p);
    }}
    c {"= fma(p, scales[s * params.n4 + n], c)" if v.scaled else "+= vec4<i32>(p)"};
}}
sums[part][x] = c;
for (var step = 8u; step > 0u; step /= 2u) {{
    workgroupBarrier();
    if (part < step) {{ sums[part][x] += sums[part + step][x]; }}
}}
if (part == 0u && column + x < params.n4) {{
    {"store4(row * params.n4 + n, sums[0][x]);" if v.even_n else "put(row * params.n, n * 4u, sums[0][x]);"}
}}"""
    functions = f"var<workgroup> sums: array<array<vec4<{v.result}>, 8>, 16>;\n"
    return Kernel(
        f"matmul_{v.name}_thin",
        body,
        reads=v.reads(False),
        params=tuple((name, "u32") for name in _PARAMS),
        result=v.result,
        width=4 if v.even_n else 1,
        lanes=128,
        functions=functions + ("" if v.even_n else put(f"vec4<{v.result}>")),
    )
