"""Conv's weights in panels: [group][panel][bias, then channel, taps][output channels of the panel]."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .kernel import Binding, Kernel

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Array, Storage, Tensor

__all__ = ["panels"]


@lru_cache
def _panel_kernel(bias: bool, lanes: int) -> Kernel:
    """The packing of `_pack` for weights that only the run knows."""
    first = "B[m]" if bias else "0.0"
    body = f"""let i = group * {lanes}u + lane;
if (i >= params.count) {{ return; }}
let t = i % params.tile;
let row = i / params.tile % (params.taps + 1u);
let panel = i / params.tile / (params.taps + 1u);
let inner = panel % params.panels * params.tile + t;
let m = panel / params.panels * params.outputs + inner;
var v = 0.0;
if (inner < params.outputs) {{
    if (row == 0u) {{ v = {first}; }} else {{ v = W[m * params.taps + row - 1u]; }}
}}
store(i, v);"""
    reads = (Binding("W"), Binding("B")) if bias else (Binding("W"),)
    names = ("count", "tile", "taps", "panels", "outputs")
    return Kernel("conv_panels", body, reads, params=tuple((name, "u32") for name in names), lanes=lanes)


def _pack(weights: Array, bias: Array | None, groups: int, tile: int) -> Array:
    outputs = weights.shape[0] // groups
    panels = -(-outputs // tile)
    rows = np.zeros((groups, panels * tile, weights[0].size + 1), np.float32)
    rows[:, :outputs, 1:] = weights.reshape(groups, outputs, -1)
    if bias is not None:
        rows[:, :outputs, 0] = bias.reshape(groups, outputs)
    return np.ascontiguousarray(rows.reshape(groups * panels, tile, -1).transpose(0, 2, 1))


def panels(plan: Lowering, weights: Tensor, bias: Tensor | None, groups: int, tile: int) -> Storage:
    """Weights [outputs, inputs / groups, taps...] and bias in panels of `tile` output channels.

    Known weights are packed on the CPU, once per session; others by a dispatch, in every run.
    """
    known = None if bias is None else plan.known_value(bias)
    if plan.known_value(weights) is not None and (bias is None or known is not None):
        return plan.weight(weights, ("panels", bias, groups, tile), lambda array: _pack(array, known, groups, tile))
    kernel = _panel_kernel(bias is not None, 64)
    outputs = weights.shape[0] // groups
    taps = weights.size // max(weights.shape[0], 1)
    count = groups * -(-outputs // tile) * tile * (taps + 1)
    reads = [plan.storage(t) for t in (weights, bias) if t is not None]
    params = {"count": count, "tile": tile, "taps": taps, "panels": -(-outputs // tile), "outputs": outputs}
    made = plan.pending(kernel, reads, params, -(-count // 64), np.float32, (count,))
    return plan.storage(made)
