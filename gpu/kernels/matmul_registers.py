"""Matrix products on software adapters: a tile of rows x 4-wide columns in the registers of each invocation.

There a load costs as much as dozens of multiplications, wherever its data lie.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .batch import Batch, batch_code, batch_names
from .kernel import Binding, Kernel
from .pad import pad

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Array, Shape, Tensor

__all__ = ["LANES", "NARROW", "Tile", "choose_tile", "lower_registers", "padded_rows", "put", "stores"]


class Tile(NamedTuple):
    """What one invocation computes: `rows` rows of `columns` groups of four columns.

    With `lanes` > 1, so many invocations, one subgroup, share their rows: each loads some of them
    and hands them to the others; their columns lie side by side. One turn of the loop takes
    `depth` terms, 4 or 2.
    """

    rows: int
    columns: int
    lanes: int = 1
    depth: int = 4


TILES = (Tile(16, 4), Tile(8, 4), Tile(4, 4), Tile(8, 1), Tile(4, 1), Tile(1, 4), Tile(1, 1))
LANES = 8
NARROW = 4
"""Invocations in a subgroup of an adapter whose compiler makes hundreds of bytes of each load: there a loop is slow
once it has outgrown the instruction cache, and compiling takes as long as the shader is large. So tiles are small."""


def choose_tile(batch: int, m: int, n: int, subgroup: int) -> Tile:
    """The tile that takes the fewest loads, on two cores and eight lanes.

    Args:
        batch: number of products.
        m: rows of each.
        n: columns of each.
        subgroup: invocations in a subgroup, 0 = unknown.
    """
    if subgroup == NARROW:
        if m == 1:
            return Tile(1, 1)
        return Tile(8 if m > 4 else 4, 2 if n > 16 else 1, NARROW, 2)
    if subgroup >= 8 and n >= 32:
        return Tile(32 if m > 16 else subgroup, 2, subgroup)

    def cost(tile: Tile) -> float:
        tiles = batch * -(-m // tile.rows) * -(-n // (4 * tile.columns))
        waves = -(-tiles // (2 * LANES))
        return waves * (tile.rows + 4 * tile.columns + 0.15 * tile.rows * tile.columns * 4)

    return min(TILES, key=cost)


def lower_registers(
    plan: Lowering, a: Tensor, b: Tensor, batch: Batch, m: int, k: int, n: int, transposed: bool, shape: Shape
) -> Tensor:
    """Emit a @ b; the result is pending. Operands are read four elements at a time, so rows are padded to that."""
    k4, n4 = -(-k // 4), -(-n // 4)
    tile = choose_tile(batch.size, m, n, plan.target.subgroup)
    if tile.lanes > 1:
        return _lower_subgroups(plan, a, b, batch, m, k, n, transposed, shape, tile)
    left = plan.storage(padded_rows(plan, a, k))
    if plan.known_value(b) is not None:
        right = plan.weight(b, ("matmul", transposed), lambda array: _packed(array, transposed))
    else:
        right = plan.storage(padded_rows(plan, b, n))
    row_tiles, column_tiles = -(-m // tile.rows), -(-n4 // tile.columns)
    tiles = batch.size * row_tiles * column_tiles
    params: dict[str, int | float] = {
        "tiles": tiles,
        "column_tiles": column_tiles,
        "row_tiles": row_tiles,
        "m": m,
        "n": n,
        "n4": n4,
        "k": k,
        "k4": k4,
    }
    params |= batch.params(m * k4, k * n4)
    kernel = _register_kernel(tile, a.type or "", n % 4 == 0, k % 4 == 0, len(batch.dims))
    return plan.pending(
        kernel, [left, right], params, -(-tiles // LANES), a.dtype, shape, flops=2.0 * batch.size * m * n * k
    )


def padded_rows(plan: Lowering, x: Tensor, size: int) -> Tensor:
    """A tensor whose rows of `size` elements are filled up with zeros to a multiple of four."""
    if size % 4 == 0:
        return x
    flat = plan.view(x, (x.size // size, size))
    return pad(plan, flat, [0, 0], [0, -size % 4], "constant", 0)


def _packed(array: Array, transposed: bool) -> Array:
    if transposed:
        array = array.T
    spare = [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % 4)]
    return np.ascontiguousarray(np.pad(array, spare) if spare[-1][1] else array)


@lru_cache
def _register_kernel(tile: Tile, kind: str, even_n: bool, even_k: bool, rank: int) -> Kernel:
    rows, columns = range(tile.rows), range(tile.columns)
    vector = f"vec4<{kind}>"
    lines = [
        "let t = group * 8u + lane;",
        "if (t < params.tiles) {",
        "let first = t % params.column_tiles * " + f"{tile.columns}u;",
        "let row = t / params.column_tiles % params.row_tiles * " + f"{tile.rows}u;",
        "let z = t / params.column_tiles / params.row_tiles;",
        batch_code(rank),
    ]
    lines += [f"let r{i} = left + min(row + {i}u, params.m - 1u) * params.k4;" for i in rows]
    lines += [f"let n{j} = right + min(first + {j}u, params.n4 - 1u);" for j in columns]
    lines += [f"var c{i}_{j} = {vector}();" for i in rows for j in columns]

    def step(count: int, index: str) -> list[str]:
        made = [f"let a{i} = a[r{i} + {index}];" for i in rows]
        for u in range(count):
            made += [f"let b{u}_{j} = b[n{j} + ({index} * 4u + {u}u) * params.n4];" for j in columns]
            for i in rows:
                for j in columns:
                    if kind == "f32":
                        made.append(f"c{i}_{j} = fma(vec4f(a{i}[{u}]), b{u}_{j}, c{i}_{j});")
                    else:
                        made.append(f"c{i}_{j} += a{i}[{u}] * b{u}_{j};")
        return made

    lines += ["for (var q = 0u; q < params.k / 4u; q++) {", *step(4, "q"), "}"]
    if not even_k:
        # The rows of b end at k: they have no padding of their own to multiply with.
        lines += ["let q = params.k / 4u;"]
        lines += [f"let a{i} = a[r{i} + q];" for i in rows]
        lines += ["for (var u = 0u; u < params.k % 4u; u++) {"]
        lines += [f"let b{j} = b[n{j} + (q * 4u + u) * params.n4];" for j in columns]
        for i in rows:
            for j in columns:
                made = f"fma(vec4f(a{i}[u]), b{j}, c{i}_{j})" if kind == "f32" else f"c{i}_{j} + a{i}[u] * b{j}"
                lines.append(f"c{i}_{j} = {made};")
        lines += ["}"]
    lines += [*stores(tile, even_n), "}"]
    names = ["tiles", "column_tiles", "row_tiles", "m", "n", "n4", "k", "k4", *batch_names(rank)]
    return Kernel(
        f"matmul_{tile.rows}x{tile.columns * 4}",
        "\n".join(lines),
        reads=(Binding("a", vector), Binding("b", vector)),
        params=tuple((name, "u32") for name in names),
        result=kind,
        width=4 if even_n else 1,
        lanes=LANES,
        functions="" if even_n else put(vector),
    )


def _lower_subgroups(
    plan: Lowering,
    a: Tensor,
    b: Tensor,
    batch: Batch,
    m: int,
    k: int,
    n: int,
    transposed: bool,
    shape: Shape,
    tile: Tile,
) -> Tensor:
    k4, n4, width = -(-k // 4), -(-n // 4), tile.columns * tile.lanes
    a_pitch = k4 * 4 // tile.depth
    left = plan.storage(padded_rows(plan, a, k))
    packed = plan.known_value(b) is not None and batch.size == 1
    if packed:
        right = plan.weight(b, ("matmul panels", width, transposed), lambda array: _panels(array, transposed, width))
        b_size, pitch = 0, width
    else:
        right, pitch = plan.storage(padded_rows(plan, b, n)), n4
        b_size = k * n4
    panels, row_tiles = -(-n4 // width), -(-m // tile.rows)
    params: dict[str, int | float] = {
        "panels": panels,
        "row_tiles": row_tiles,
        "m": m,
        "n": n,
        "n4": n4,
        "k": k,
        "a_pitch": a_pitch,
        "pitch": pitch,
    }
    params |= batch.params(m * a_pitch, b_size)
    kernel = _subgroup_kernel(tile, a.type or "", n % 4 == 0, packed, len(batch.dims))
    return plan.pending(
        kernel,
        [left, right],
        params,
        batch.size * row_tiles * panels,
        a.dtype,
        shape,
        flops=2.0 * batch.size * m * n * k,
    )


def _panels(array: Array, transposed: bool, width: int) -> Array:
    """[k, n] as [panel][k, padded to fours][width * 4 columns], zeros where there is nothing."""
    array = array.reshape(array.shape[-2:])
    array = array.T if transposed else array
    k, n = array.shape
    made = np.zeros((-(-k // 4) * 4, -(-n // (4 * width)) * 4 * width), array.dtype)
    made[:k, :n] = array
    return np.ascontiguousarray(made.reshape(made.shape[0], -1, 4 * width).transpose(1, 0, 2))


@lru_cache
def _subgroup_kernel(tile: Tile, kind: str, even_n: bool, packed: bool, rank: int) -> Kernel:
    lanes, depth, vector = tile.lanes, tile.depth, f"vec4<{kind}>"
    rows, columns, loads = range(tile.rows), range(tile.columns), range(tile.rows // lanes)
    width = lanes * tile.columns
    lines = [
        "let panel = group % params.panels;",
        f"let row = group / params.panels % params.row_tiles * {tile.rows}u;",
        "let z = group / params.panels / params.row_tiles;",
        batch_code(rank),
        f"let first = panel * {width}u + lane;",
    ]
    lines += [f"let r{i} = left + min(row + {i * lanes}u + lane, params.m - 1u) * params.a_pitch;" for i in loads]
    for j in columns:
        if packed:
            lines.append(f"var n{j} = panel * params.a_pitch * {depth * width}u + {j * lanes}u + lane;")
        else:
            lines.append(f"var n{j} = right + min(first + {j * lanes}u, params.n4 - 1u);")
    lines += [f"var c{i}_{j} = {vector}();" for i in rows for j in columns]

    def products(row: int, part: str, names: list[str]) -> list[str]:
        if kind == "f32":
            return [f"c{row}_{j} = fma(vec4f(s{row}{part}), {names[j]}, c{row}_{j});" for j in columns]
        return [f"c{row}_{j} += s{row}{part} * {names[j]};" for j in columns]

    loaded = [f"let l{i} = a[r{i} + q];" for i in loads]
    shared = [f"let s{i} = subgroupBroadcast(l{i // lanes}, {i % lanes}u);" for i in rows]
    lines += [f"for (var q = 0u; q < params.{'a_pitch' if packed else f'k / {depth}u'}; q++) {{", *loaded]
    for u in range(depth):
        lines += [f"let b{u}_{j} = b[n{j}]; n{j} += params.pitch;" for j in columns]
    for i in rows:
        lines.append(shared[i])
        for u in range(depth):
            lines += products(i, f"[{u}]", [f"b{u}_{j}" for j in columns])
    lines.append("}")
    if not packed:
        # The rows of b end at k: they have no padding of their own to multiply with.
        lines += [f"if (params.k % {depth}u != 0u) {{", f"let q = params.k / {depth}u;", *loaded, *shared]
        lines += [f"for (var u = 0u; u < params.k % {depth}u; u++) {{"]
        lines += [f"let b{j} = b[n{j}]; n{j} += params.pitch;" for j in columns]
        for i in rows:
            lines += products(i, "[u]", [f"b{j}" for j in columns])
        lines += ["}", "}"]
    lines += stores(tile, even_n)
    names = ["panels", "row_tiles", "m", "n", "n4", "k", "a_pitch", "pitch", *batch_names(rank)]
    return Kernel(
        f"matmul_{tile.rows}x{4 * width}",
        "\n".join(lines),
        reads=(Binding("a", f"vec{depth}<{kind}>"), Binding("b", vector)),
        params=tuple((name, "u32") for name in names),
        result=kind,
        width=4 if even_n else 1,
        lanes=lanes,
        functions="" if even_n else put(vector),
    )


def stores(tile: Tile, even_n: bool) -> list[str]:
    """Hand the tile to `store` row by row in a loop: written out, what is fused onto it would be compiled often."""
    columns = range(tile.columns)
    lines = [f"for (var i = 0u; i < {tile.rows}u; i++) {{"]
    for j in columns:
        lines.append(f"var v{j} = c0_{j};")
        lines += [f"v{j} = select(v{j}, c{i}_{j}, i == {i}u);" for i in range(1, tile.rows)]
    lines += ["let y = z * params.m + row + i;", "if (row + i < params.m) {"]
    for j in columns:
        at = f"first + {j * tile.lanes}u"
        if even_n:
            lines.append(f"if ({at} < params.n4) {{ store4(y * params.n4 + {at}, v{j}); }}")
        else:
            lines.append(f"put(y * params.n, ({at}) * 4u, v{j});")
    return [*lines, "}", "}"]


def put(vector: str) -> str:
    """WGSL of `put(y, x, v)`: up to four elements of a row that starts at y, where n is no multiple of four."""
    guarded = "".join(f"if (x + {u}u < params.n) {{ store(y + x + {u}u, v[{u}]); }}\n" for u in range(4))
    return f"fn put(y: u32, x: u32, v: {vector}) {{\n{guarded}}}\n"
