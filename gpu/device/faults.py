"""wgpu's errors as ours."""

from __future__ import annotations

from ..errors import DeviceLost, OutOfDeviceMemory

__all__ = ["translate"]


def translate(error: BaseException) -> BaseException:
    """What the caller should see for an error that wgpu raised; anything else stays as it is."""
    name, text = type(error).__name__, str(error)
    if isinstance(error, MemoryError) and not isinstance(error, OutOfDeviceMemory):
        return OutOfDeviceMemory(text)
    if name == "GPUOutOfMemoryError" or "not enough memory" in text.lower():
        return OutOfDeviceMemory(text.splitlines()[0])
    if name.startswith("GPU") and "lost" in text.lower():
        return DeviceLost(text.splitlines()[0])
    return error
