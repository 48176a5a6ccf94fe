"""The families of operators: modules whose import fills the registry."""

from __future__ import annotations

from importlib import import_module

for _name in (
    "gather",
    "normalise",
    "matmul",
    "softmax",
    "reduce",
    "pad",
    "move",
    "shape",
    "logic",
    "activation",
    "functions",
    "elementwise",
    "conv",
    "conv_transpose",
    "pool",
    "recurrent",
    "resize",
    "quantise",
    "attention",
    "contrib",
    "attention_contrib",
    "quantise_contrib",
    "scatter",
    "deform",
    "det",
    "spectral",
    "einsum",
    "norms",
    "sample",
    "order",
    "scan",
):
    import_module(f".{_name}", __package__)
