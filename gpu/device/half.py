"""Whether f16 in buffers is right, found by trying: drivers may flush small values to zero, or lose NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..graph.tensor import Array
from ..kernels.kernel import Binding, Kernel, link

if TYPE_CHECKING:
    from .device import Device

__all__ = ["BITS", "judge_half", "measure_half"]

BITS = np.arange(1 << 16, dtype=np.uint16)
"""Every float16 there is."""
_KERNEL = Kernel(
    "measure_half",
    f"""let four = group * 64u + lane;
for (var i = four * 4u; i < four * 4u + 4u; i++) {{
    widened[i] = bitcast<u32>(ones[i]);
    by_ones[i] = exact[i];
    widened[{BITS.size}u + i] = bitcast<u32>(fours[four][i % 4u]);
}}
let i = four * 4u;
by_fours[four] = vec4f(exact[i], exact[i + 1u], exact[i + 2u], exact[i + 3u]);""",
    reads=(Binding("ones"), Binding("fours", "vec4f"), Binding("exact")),
    writes=(Binding("widened", "u32"), Binding("by_ones"), Binding("by_fours", "vec4f")),
    result=None,
)


def measure_half(device: Device) -> bool:
    """Whether every float16 comes as f32 out of a buffer, and goes back into one, as what it is.

    False also where a shader may not see a buffer that is large enough to try them all.
    """
    if device.target.max_binding_bytes < 8 * BITS.size:
        return False
    named = frozenset(("ones", "fours", "by_ones", "by_fours"))
    pipeline = device.compile(link(_KERNEL, None, named, device.target.cpu))
    wide = BITS.view(np.float16).astype(np.float32)
    buffers = [device.buffer(n * BITS.size) for n in (2, 4, 8, 2, 2)]
    halves, exact, *made = buffers
    try:
        device.write(halves, 0, BITS, lambda: None)
        device.write(exact, 0, wide, lambda: None)
        encoder = device.native.create_command_encoder()
        writer = encoder.begin_compute_pass()
        writer.set_pipeline(pipeline.native)
        writer.set_immediates(0, bytes(4), 0, 4)
        bound = [(b, 0, b.size) for b in (halves, halves, exact, *made)]
        writer.set_bind_group(0, device.bind(pipeline, None, 0, bound))
        writer.dispatch_workgroups(BITS.size // 256)
        writer.end()
        device.native.queue.submit([encoder.finish()])
        answers = [np.frombuffer(device.read(b, 0, b.size, lambda: None), np.uint16) for b in made]
    finally:
        for buffer in buffers:
            device.release(buffer)
    return judge_half(answers[0].view(np.float32).reshape(2, -1), np.stack(answers[1:]))


def judge_half(widened: Array, narrowed: Array) -> bool:
    """Whether all is right, NaN whatever its bits.

    Args:
        widened: f32 [n, 65536]: each float16 as it came out of a buffer.
        narrowed: u16 [n, 65536]: each float16 as it went back into one.
    """
    halves = BITS.view(np.float16)
    wide, nan = halves.astype(np.float32), np.isnan(halves)
    return (
        bool((widened.view(np.uint32) == wide.view(np.uint32))[:, ~nan].all() and (narrowed == BITS)[:, ~nan].all())
        and bool(np.isnan(widened[:, nan]).all())
        and bool(np.isnan(narrowed.view(np.float16)[:, nan]).all())
    )
