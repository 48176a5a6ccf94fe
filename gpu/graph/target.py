"""What a kernel's choices may depend on: facts of an adapter, without the adapter."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CPU_LIKE", "Target"]


@dataclass(frozen=True, slots=True)
class Target:
    """Facts of the adapter that a plan is made for.

    Attributes:
        cpu: a software adapter: loads are dear, workgroup memory never pays.
        flops_per_s, bytes_per_s, overhead_s: for the first estimate of a step's time.
        max_storage_buffers: storage buffers that one dispatch may bind.
        max_binding_bytes: the largest stretch of a buffer that one dispatch may see.
        max_workgroups: workgroups of one dispatch.
        width: workgroups that run side by side; a step is cut into multiples of it.
        f16: float16 lies in buffers as f16; else as f32.
        subgroup: invocations in a subgroup where shaders may use subgroup operations and it is known, else 0.
    """

    cpu: bool = True
    flops_per_s: float = 8e9
    bytes_per_s: float = 1.5e9
    overhead_s: float = 30e-6
    max_storage_buffers: int = 8
    max_binding_bytes: int = 128 << 20
    max_workgroups: int = 65535
    width: int = 2
    f16: bool = False
    subgroup: int = 0


CPU_LIKE = Target()
