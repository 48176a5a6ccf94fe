"""Shader modules, with no more checks at run time than the backend lacks.

A kernel never indexes its own arrays out of their bounds and its loops end; what it reads past the end of a
buffer it does not use. wgpu would add a clamp to every access and a counter to every loop all the same, and
software adapters pay for that. Vulkan's robust buffer access, which wgpu always asks for, keeps an access past
the end inside of what is bound; Direct3D and Metal get wgpu's clamps.
"""

from __future__ import annotations

from typing import Any

__all__ = ["checks_for", "make_module"]

NO_CHECKS, BOUNDS = 0, 1


def checks_for(backend: str) -> int:
    """The checks that shaders get on a backend, as bits of WGPUShaderRuntimeChecks."""
    return NO_CHECKS if backend == "Vulkan" else BOUNDS


def make_module(device: Any, label: str, code: str, checks: int) -> Any:
    """A shader module on one of wgpu's devices. Raises wgpu's errors for what is wrong in the code."""
    from wgpu.backends.wgpu_native import _api, ffi, lib

    texts = [ffi.new("char[]", text.encode()) for text in (code, label)]
    source = ffi.new("WGPUShaderSourceWGSL *")
    source.chain.sType = lib.WGPUSType_ShaderSourceWGSL
    source.code.data, source.code.length = texts[0], len(texts[0]) - 1
    descriptor = ffi.new("WGPUShaderModuleDescriptor *")
    descriptor.nextInChain = ffi.cast("WGPUChainedStruct *", source)
    descriptor.label.data, descriptor.label.length = texts[1], len(texts[1]) - 1
    made = _api.libf.wgpuDeviceCreateShaderModuleTrusted(device._internal, descriptor, checks)
    return _api.GPUShaderModule(label, made, device)
