"""Whether f16 in buffers is right, found by trying: drivers may flush small values to zero, or lose NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..graph.tensor import Array
from ..kernels.kernel import Program

if TYPE_CHECKING:
    from .device import Device

__all__ = ["BITS", "judge_half", "measure_half"]

BITS = np.arange(1 << 16, dtype=np.uint16)
"""Every float16 there is."""
_WGSL = f"""enable f16;
@group(0) @binding(0) var<storage, read> ones: array<f16>;
@group(0) @binding(1) var<storage, read> fours: array<vec4<f16>>;
@group(0) @binding(2) var<storage, read> exact: array<f32>;
@group(0) @binding(3) var<storage, read_write> widened: array<u32>;
@group(0) @binding(4) var<storage, read_write> by_ones: array<f16>;
@group(0) @binding(5) var<storage, read_write> by_fours: array<vec4<f16>>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) place: vec3u) {{
    let i = place.x * 4u;
    for (var k = i; k < i + 4u; k++) {{
        widened[k] = bitcast<u32>(f32(ones[k]));
        by_ones[k] = f16(exact[k]);
    }}
    let four = vec4f(fours[place.x]);
    for (var k = 0u; k < 4u; k++) {{ widened[{BITS.size}u + i + k] = bitcast<u32>(four[k]); }}
    by_fours[place.x] = vec4<f16>(vec4f(exact[i], exact[i + 1u], exact[i + 2u], exact[i + 3u]));
}}
"""


def measure_half(device: Device) -> bool:
    """Whether every float16 comes as f32 out of a buffer, and goes back into one, as what it is."""
    pipeline = device.compile(Program("measure_half", _WGSL, 3, 3, (), 1))
    wide = BITS.view(np.float16).astype(np.float32)
    buffers = [device.buffer(n * BITS.size) for n in (2, 4, 8, 2, 2)]
    halves, exact, *made = buffers
    try:
        device.write(halves, 0, BITS, lambda: None)
        device.write(exact, 0, wide, lambda: None)
        encoder = device.native.create_command_encoder()
        writer = encoder.begin_compute_pass()
        writer.set_pipeline(pipeline.native)
        bound = [(b, b.size) for b in (halves, halves, exact, *made)]
        writer.set_bind_group(0, device.bind(pipeline, None, 0, bound))
        writer.dispatch_workgroups(BITS.size // 256)
        writer.end()
        device.native.queue.submit([encoder.finish()])
        answers = [np.frombuffer(device.read(b, b.size, lambda: None), np.uint16) for b in made]
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
