"""Matrix products.

On a software adapter an invocation computes a tile of rows x 4-wide columns in registers, because
there a load costs as much as dozens of multiplications wherever its data lie; a real GPU shares tiles through
workgroup memory. Either way each element is summed in one fixed order.
"""

from __future__ import annotations

import math

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import InvalidModel
from ..graph.fuse import broadcast_strides, collapse
from .elementwise import one_dtype, operands
from .kernel import Binding, Kernel
from .move import strided
from .pad import pad
from .registry import NoKernel, Operator, op

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Array, Shape, Storage, Tensor

__all__ = ["Tile", "choose_tile", "product"]


class Tile(NamedTuple):
    """What an invocation computes: `rows` rows of `columns` groups of four columns."""

    rows: int
    columns: int


TILES = (Tile(16, 4), Tile(8, 4), Tile(4, 4), Tile(8, 1), Tile(4, 1), Tile(1, 4), Tile(1, 1))
LANES = 8


def choose_tile(batch: int, m: int, n: int) -> Tile:
    """The tile of the software kernel that takes the fewest loads, on two cores and eight lanes."""

    def cost(tile: Tile) -> float:
        tiles = batch * -(-m // tile.rows) * -(--(-n // 4) // tile.columns)
        waves = -(--(-tiles // LANES) // 2)
        return waves * (tile.rows + 4 * tile.columns + 0.15 * tile.rows * tile.columns * 4)

    return min(TILES, key=cost)


@dataclass(frozen=True, slots=True)
class Batch:
    """Leading dimensions: sizes, and how far each steps in a and in b, in matrices."""

    dims: tuple[int, ...]
    a: tuple[int, ...]
    b: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of products."""
        return math.prod(self.dims)


def product(plan: Lowering, a: Tensor, b: Tensor, shape: Shape, *, b_transposed: bool = False) -> Tensor:
    """a @ b, broadcast over leading dimensions, as `shape`.

    Args:
        a: [..., m, k]. b: [..., k, n], or with b_transposed [n, k].
        shape: of the result; its elements are those of [..., m, n].
    """
    if a.type not in ("f32", "i32", "u32"):
        raise NoKernel(f"no kernel for {a.dtype.name}")
    m, k = a.shape[-2:]
    n = b.shape[-2] if b_transposed else b.shape[-1]
    leading = plan.broadcast(a.shape[:-2], b.shape[:-2])
    if math.prod(b.shape[:-2]) == 1:
        m, leading = m * math.prod(leading), ()
        dims, steps = [1], [[0], [0]]
    else:
        dims, steps = collapse(leading, [broadcast_strides(t.shape[:-2], leading) for t in (a, b)])
    batch = Batch(tuple(dims), tuple(steps[0]), tuple(steps[1]))
    if 0 in shape:
        return plan.new(a.dtype, shape)
    if k == 0:
        return plan.map("x", {"x": plan.constant(np.zeros((), a.dtype))}, shape=shape)
    if b_transposed and plan.known_value(b) is None:
        b = strided(plan, b, (k, n), (k, n), (1, k), 0)
        b_transposed = False
    if not plan.target.cpu:
        return _shared(plan, a, b, batch, m, k, n, b_transposed, shape)
    return _registers(plan, a, b, batch, m, k, n, b_transposed, shape)


def _registers(
    plan: Lowering, a: Tensor, b: Tensor, batch: Batch, m: int, k: int, n: int, transposed: bool, shape: Shape
) -> Tensor:
    """The software kernel: both operands read four elements at a time, so rows are padded to multiples of four."""
    k4, n4 = -(-k // 4), -(-n // 4)
    left = plan.storage(_padded_rows(plan, a, k))
    if plan.known_value(b) is not None:
        right = plan.weight(b, ("matmul", transposed), lambda array: _packed(array, transposed))
    else:
        right = plan.storage(_padded_rows(plan, b, n))
    tile = choose_tile(batch.size, m, n)
    row_tiles, column_tiles = -(-m // tile.rows), -(-n4 // tile.columns)
    tiles = batch.size * row_tiles * column_tiles
    params: dict[str, int | float] = {
        "tiles": tiles, "column_tiles": column_tiles, "row_tiles": row_tiles, "m": m, "n": n, "n4": n4, "k": k, "k4": k4
    }
    params |= _batch_params(batch, m * k4, k * n4)
    kernel = _register_kernel(tile, a.type or "", n % 4 == 0, k % 4 == 0, len(batch.dims))
    return plan.pending(
        kernel, [left, right], params, -(-tiles // LANES), a.dtype, shape, flops=2.0 * batch.size * m * n * k
    )


def _padded_rows(plan: Lowering, x: Tensor, size: int) -> Tensor:
    if size % 4 == 0:
        return x
    flat = plan.view(x, (x.size // size, size))
    return pad(plan, flat, [0, 0], [0, -size % 4], "constant", 0)


def _packed(array: Array, transposed: bool) -> Array:
    if transposed:
        array = array.T
    spare = [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % 4)]
    return np.ascontiguousarray(np.pad(array, spare) if spare[-1][1] else array)


def _batch_params(batch: Batch, a_size: int, b_size: int) -> dict[str, int | float]:
    params: dict[str, int | float] = {}
    for axis, (size, a, b) in enumerate(zip(batch.dims, batch.a, batch.b, strict=True)):
        params |= {f"d{axis}": size, f"a{axis}": a * a_size, f"b{axis}": b * b_size}
    return params


def _batch_code(rank: int) -> str:
    """Statements that find where the matrices of product `z` begin."""
    lines = ["var left = 0u; var right = 0u; var rest = z;"]
    for axis in range(rank - 1, -1, -1):
        lines.append(f"{{ let c = rest % params.d{axis}; rest /= params.d{axis};")
        lines.append(f"left += c * params.a{axis}; right += c * params.b{axis}; }}")
    return "\n".join(lines)


def _batch_names(rank: int) -> list[str]:
    return [f"{letter}{axis}" for axis in range(rank) for letter in "dab"]


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
        _batch_code(rank),
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
    for i in rows:
        lines.append(f"if (row + {i}u < params.m) {{ let y = z * params.m + row + {i}u;")
        for j in columns:
            if even_n:
                lines.append(f"if (first + {j}u < params.n4) {{ store4(y * params.n4 + first + {j}u, c{i}_{j}); }}")
            else:
                lines.append(f"put(y * params.n, (first + {j}u) * 4u, c{i}_{j});")
        lines.append("}")
    lines.append("}")
    put = "" if even_n else (
        f"fn put(y: u32, x: u32, v: {vector}) {{\n"
        + "".join(f"if (x + {u}u < params.n) {{ store(y + x + {u}u, v[{u}]); }}\n" for u in range(4)) + "}\n"
    )
    names = ["tiles", "column_tiles", "row_tiles", "m", "n", "n4", "k", "k4", *_batch_names(rank)]
    return Kernel(
        f"matmul_{tile.rows}x{tile.columns * 4}", "\n".join(lines), reads=(Binding("a", vector), Binding("b", vector)),
        params=tuple((name, "u32") for name in names), result=kind, width=4 if even_n else 1, lanes=LANES,
        functions=put,
    )


def _shared(
    plan: Lowering, a: Tensor, b: Tensor, batch: Batch, m: int, k: int, n: int, transposed: bool, shape: Shape
) -> Tensor:
    """The kernel for real GPUs."""
    if transposed:
        right: Storage = plan.weight(b, "transposed", lambda array: np.ascontiguousarray(array.T))
    else:
        right = plan.storage(b)
    thin = m <= 4
    rows, columns = (1, 32) if thin else (64, 64)
    column_tiles, row_tiles = -(-n // columns), -(-m // rows)
    params: dict[str, int | float] = {"m": m, "n": n, "k": k, "column_tiles": column_tiles, "row_tiles": row_tiles}
    params |= _batch_params(batch, m * k, k * n)
    kernel = _thin_kernel(a.type or "", len(batch.dims)) if thin else _shared_kernel(a.type or "", len(batch.dims))
    groups = batch.size * row_tiles * column_tiles
    return plan.pending(
        kernel, [plan.storage(a), right], params, groups, a.dtype, shape, flops=2.0 * batch.size * m * n * k
    )


_GROUP = """let column = group % params.column_tiles * {columns}u;
let row = group / params.column_tiles % params.row_tiles * {rows}u;
let z = group / params.column_tiles / params.row_tiles;
"""


@lru_cache
def _shared_kernel(kind: str, rank: int) -> Kernel:
    """64 x 64 elements for each workgroup of 16 x 16 lanes, 16 of k at a time."""
    sums = "\n".join(f"c{i} += tile_a[u][y * 4u + {i}u] * bs;" for i in range(4))
    stores = "\n".join(
        f"if (row + y * 4u + {i}u < params.m && column + x * 4u + {j}u < params.n) {{"
        f" store((z * params.m + row + y * 4u + {i}u) * params.n + column + x * 4u + {j}u, c{i}[{j}]); }}"
        for i in range(4) for j in range(4)
    )
    body = _GROUP.format(columns=64, rows=64) + _batch_code(rank) + f"""
let x = lane % 16u; let y = lane / 16u;
{"".join(f"var c{i} = vec4<{kind}>();" for i in range(4))}
for (var k0 = 0u; k0 < params.k; k0 += 16u) {{
    for (var s = 0u; s < 4u; s++) {{
        let ka = k0 + x; let ra = row + y + s * 16u;
        var va = {kind}(0);
        if (ka < params.k && ra < params.m) {{ va = a[left + ra * params.k + ka]; }}
        tile_a[x][y + s * 16u] = va;
        let kb = k0 + lane / 64u + s * 4u; let cb = column + lane % 64u;
        var vb = {kind}(0);
        if (kb < params.k && cb < params.n) {{ vb = b[right + kb * params.n + cb]; }}
        tile_b[lane / 64u + s * 4u][lane % 64u / 4u][lane % 4u] = vb;
    }}
    workgroupBarrier();
    for (var u = 0u; u < 16u; u++) {{
        let bs = tile_b[u][x];
        {sums}
    }}
    workgroupBarrier();
}}
{stores}"""
    functions = f"""var<workgroup> tile_a: array<array<{kind}, 65>, 16>;
var<workgroup> tile_b: array<array<vec4<{kind}>, 16>, 16>;
"""
    return _gpu_kernel("matmul_shared", body, kind, rank, functions)


@lru_cache
def _thin_kernel(kind: str, rank: int) -> Kernel:
    """32 columns of one row for each workgroup, k shared out over eight lanes each."""
    body = _GROUP.format(columns=32, rows=1) + _batch_code(rank) + f"""
let x = lane % 32u; let part = lane / 32u; let at = column + x;
var sum = {kind}(0);
if (at < params.n) {{
    for (var i = part; i < params.k; i += 8u) {{
        sum += a[left + row * params.k + i] * b[right + i * params.n + at];
    }}
}}
sums[part][x] = sum;
workgroupBarrier();
if (part == 0u && at < params.n) {{
    store((z * params.m + row) * params.n + at, ((sums[0][x] + sums[1][x]) + (sums[2][x] + sums[3][x]))
        + ((sums[4][x] + sums[5][x]) + (sums[6][x] + sums[7][x])));
}}"""
    return _gpu_kernel("matmul_thin", body, kind, rank, f"var<workgroup> sums: array<array<{kind}, 32>, 8>;\n")


def _gpu_kernel(name: str, body: str, kind: str, rank: int, functions: str) -> Kernel:
    names = ["m", "n", "k", "column_tiles", "row_tiles", *_batch_names(rank)]
    return Kernel(
        name, body, reads=(Binding("a", kind), Binding("b", kind)), params=tuple((n, "u32") for n in names),
        result=kind, lanes=256, functions=functions,
    )


@op("MatMul", since=1)
class MatMul(Operator):
    """y = a @ b as NumPy does it: a: [..., m, k] or [k], b: [..., k, n] or [k], f32 | i32 | u32."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernel; it may be fused onto."""
        a, b = operands(plan, inputs, 2)
        one_dtype(plan, [a, b])
        if not a.rank or not b.rank or a.shape[-1] != b.shape[-2 if b.rank > 1 else 0]:
            raise InvalidModel(
                f"node {plan.node!r} (MatMul): shapes {list(a.shape)} and {list(b.shape)} do not multiply"
            )
        leading = plan.broadcast(a.shape[:-2], b.shape[:-2])
        shape = (*leading, *a.shape[-2:-1], *(b.shape[-1:] if b.rank > 1 else ()))
        left = a if a.rank > 1 else plan.view(a, (1, a.size))
        return product(plan, left, b if b.rank > 1 else plan.view(b, (b.size, 1)), shape)


@op("Gemm", since=7)
class Gemm(Operator):
    """y = alpha * a' @ b' + beta * c: a': [m, k], b': [k, n], transposed if asked for; c broadcasts to [m, n]."""

    alpha: float = 1.0
    beta: float = 1.0
    transA: int = 0
    transB: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the kernel; it may be fused onto."""
        a, b = operands(plan, inputs, 2)
        c = inputs[2] if len(inputs) > 2 else None
        one_dtype(plan, [t for t in (a, b, c) if t is not None])
        self._check(plan, a, b)
        if a.type != "f32" and (self.alpha != 1.0 or self.beta != 1.0):
            raise NoKernel(f"alpha and beta for {a.dtype.name}")
        if self.transA:
            k, m = a.shape
            a = strided(plan, a, (m, k), (m, k), (1, m), 0)
        shape = (a.shape[0], b.shape[0 if self.transB else 1])
        if c is not None and plan.broadcast(c.shape, shape) != shape:
            raise InvalidModel(
                f"node {plan.node!r} (Gemm): c of shape {list(c.shape)} does not broadcast to {list(shape)}"
            )
        made = product(plan, a, b, shape, b_transposed=bool(self.transB))
        factors = {"alpha": self.alpha, "beta": self.beta}
        terms = ["params.alpha * y" if self.alpha != 1.0 else "y"]
        if c is not None and self.beta != 0.0:
            terms.append("params.beta * c" if self.beta != 1.0 else "c")
        if terms == ["y"]:
            return made
        used = {name: factors[name] for name in factors if any(name in term for term in terms)}
        args = {"y": made, "c": c} if len(terms) > 1 and c is not None else {"y": made}
        return plan.map(" + ".join(terms), args, params=used, shape=shape)

    def _check(self, plan: Lowering, a: Tensor, b: Tensor) -> None:
        if a.rank == b.rank == 2 and a.shape[0 if self.transA else 1] == b.shape[1 if self.transB else 0]:
            return
        shapes = f"{list(a.shape)}{' transposed' * bool(self.transA)} and {list(b.shape)}{' transposed' * bool(self.transB)}"
        raise InvalidModel(f"node {plan.node!r} (Gemm): shapes {shapes} do not multiply")


