from __future__ import annotations

import numpy as np
import pytest

from trionnx.gpu.device.adapters import choose_adapter
from trionnx.gpu.device.device import Device
from trionnx.gpu.device.shader import BOUNDS, NO_CHECKS, checks_for
from trionnx.gpu.kernels.kernel import Program

PAST_THE_END = """@group(0) @binding(0) var<storage, read> x: array<vec4f>;
@group(0) @binding(1) var<storage, read_write> y: array<vec4f>;
@compute @workgroup_size(8)
fn main(@builtin(local_invocation_id) local: vec3u) {
    y[local.x] = x[local.x * 100000000u];
    y[local.x * 100000000u + 64u] = vec4f(7.0);
}
"""


def test_only_vulkan_keeps_accesses_inside_by_itself():
    assert [checks_for(backend) for backend in ("Vulkan", "Metal", "D3D12")] == [NO_CHECKS, BOUNDS, BOUNDS]


def test_what_lies_past_the_end_is_neither_read_nor_written():
    device = Device(choose_adapter())
    try:
        pipeline = device.compile(Program("past_the_end", PAST_THE_END, 1, 1, (), 1))
        buffers = [device.buffer(256) for _ in range(3)]
        for buffer in buffers:
            device.write(buffer, 0, np.full(64, 3.0, np.float32), lambda: None)
        group = device.bind(pipeline, None, 0, [(buffer, 0, 256) for buffer in buffers[:2]])
        encoder = device.native.create_command_encoder()
        writer = encoder.begin_compute_pass()
        writer.set_pipeline(pipeline.native)
        writer.set_bind_group(0, group)
        writer.dispatch_workgroups(1)
        writer.end()
        device.native.queue.submit([encoder.finish()])
        read, written, other = (np.frombuffer(device.read(b, 0, 256, lambda: None), np.float32) for b in buffers)
        assert (read == 3.0).all()
        assert (other == 3.0).all()
        assert (written[:4] == 3.0).all()
        assert set(written.tolist()) <= {0.0, 3.0, 7.0}
    finally:
        device.close()


def test_a_wrong_shader_is_told_of():
    device = Device(choose_adapter())
    try:
        with pytest.raises(Exception, match="nonsense"):
            device.compile(Program("wrong", "nonsense", 0, 1, (), 1))
    finally:
        device.close()
