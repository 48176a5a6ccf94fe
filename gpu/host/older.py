"""What an operator of an older opset is in a newer one, where the reference evaluator knows only that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..graph.model import Node

__all__ = ["modern"]

_RESIZE, _ROI_ALIGN, _GRID_SAMPLE = 11, 16, 20


def modern(node: Node, inputs: Sequence[Any]) -> list[tuple[Node, list[Any]]]:
    """The nodes to compute instead, one after the other, each with its further inputs.

    1. Upsample, and Resize of opset 10, are a Resize without half pixels; nearest neighbours are
       rounded down where it grows and up where it shrinks: two of them where it does both.
    2. RoiAlign before opset 16 does not move by half a pixel.
    3. GridSample before opset 20 has other names for its modes.

    Args:
        node: the node.
        inputs: its inputs; the first is that of the first node.

    Returns:
        Nothing where the node may stay as it is.
    """
    if node.domain:
        return []
    if node.op == "Upsample" or (node.op == "Resize" and node.opset < _RESIZE):
        scales = node.attrs["scales"] if node.op == "Upsample" and node.opset < 9 else inputs[1]
        return _resizes(node, np.asarray(scales, np.float32))
    if node.op == "RoiAlign" and node.opset < _ROI_ALIGN:
        attrs = {**node.attrs, "coordinate_transformation_mode": "output_half_pixel"}
        return [(_like(node, "RoiAlign", _ROI_ALIGN, len(inputs), attrs), list(inputs[1:]))]
    if node.op == "GridSample" and node.opset < _GRID_SAMPLE:
        mode = {"bilinear": "linear", "bicubic": "cubic"}.get(node.attrs.get("mode", "bilinear"), "nearest")
        return [(_like(node, "GridSample", _GRID_SAMPLE, len(inputs), {**node.attrs, "mode": mode}), list(inputs[1:]))]
    return []


def _resizes(node: Node, scales: Any) -> list[tuple[Node, list[Any]]]:
    mode = node.attrs.get("mode", "nearest")
    if mode != "nearest":
        parts = [("floor", scales)]
    else:
        parts = [("floor", np.maximum(scales, 1)), ("ceil", np.minimum(scales, 1))]
        parts = [part for part in parts if (part[1] != 1).any()] or parts[:1]
    common = {"mode": mode, "coordinate_transformation_mode": "asymmetric"}
    return [
        (_like(node, "Resize", 13, 3, {**common, "nearest_mode": rounding}), [None, factors])
        for rounding, factors in parts
    ]


def _like(node: Node, op: str, opset: int, inputs: int, attrs: dict[str, Any]) -> Node:
    given = (*node.inputs, *([node.inputs[0]] * inputs))[:inputs]
    return Node(op, "", opset, node.name, given, node.outputs, attrs)
