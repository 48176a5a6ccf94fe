"""Matrix products on real GPUs: tiles shared through workgroup memory."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .batch import Batch, batch_code, batch_names
from .kernel import Binding, Kernel

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Shape, Storage, Tensor

__all__ = ["lower_shared"]


def lower_shared(
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
    params |= batch.params(m * k, k * n)
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
        for i in range(4)
        for j in range(4)
    )
    body = (
        _GROUP.format(columns=64, rows=64)
        + batch_code(rank)
        + f"""
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
    )
    functions = f"""var<workgroup> tile_a: array<array<{kind}, 65>, 16>;
var<workgroup> tile_b: array<array<vec4<{kind}>, 16>, 16>;
"""
    return _gpu_kernel("matmul_shared", body, kind, rank, functions)


@lru_cache
def _thin_kernel(kind: str, rank: int) -> Kernel:
    """32 columns of one row for each workgroup, k shared out over eight lanes each."""
    body = (
        _GROUP.format(columns=32, rows=1)
        + batch_code(rank)
        + f"""
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
    )
    return _gpu_kernel("matmul_thin", body, kind, rank, f"var<workgroup> sums: array<array<{kind}, 32>, 8>;\n")


def _gpu_kernel(name: str, body: str, kind: str, rank: int, functions: str) -> Kernel:
    names = ["m", "n", "k", "column_tiles", "row_tiles", *batch_names(rank)]
    return Kernel(
        name,
        body,
        reads=(Binding("a", kind), Binding("b", kind)),
        params=tuple((n, "u32") for n in names),
        result=kind,
        lanes=256,
        functions=functions,
    )
