"""The families of operators: modules whose import fills the registry."""

from __future__ import annotations

from importlib import import_module

FAMILIES = tuple(
    import_module(f".{name}", __package__)
    for name in (
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
    )
)
"""The modules whose import fills the registry."""
