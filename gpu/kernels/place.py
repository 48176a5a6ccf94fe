"""Copies in a row: what no copy between buffers can do, since it takes steps, or widens or narrows."""

from __future__ import annotations

from functools import lru_cache

from .kernel import Binding, Kernel

__all__ = ["place_kernel"]


@lru_cache
def place_kernel(kind: str, wide: bool, cpu: bool) -> Kernel:
    """Rows of `run` elements, one after the other from `first` on, to where each `pitch` from `offset` on begins.

    Args:
        kind: of elements; "u32" moves any bits, "f32" also to and from f16.
        wide: four at a time; the parameters count fours.
        cpu: for a software adapter.
    """
    index = "(group * 64u + lane) * 4u + k" if cpu else "group * 256u + k * 64u + lane"
    body = f"""for (var k = 0u; k < 4u; k++) {{
    let i = {index};
    if (i < params.count) {{
        let row = i / params.run;
        y[params.offset + row * params.pitch + (i - row * params.run)] = x[params.first + i];
    }}
}}"""
    stored = f"vec4<{kind}>" if wide else kind
    names = ("count", "run", "pitch", "offset", "first")
    return Kernel(
        f"place{'x4' if wide else ''}",
        body,
        reads=(Binding("x", stored),),
        writes=(Binding("y", stored),),
        params=tuple((name, "u32") for name in names),
        result=None,
    )
