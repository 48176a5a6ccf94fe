"""ONNX models on any GPU, inside Trio apps, that really stop when they are cancelled.

Importing this opens no driver and imports no engine; the first `load` does.
"""

from __future__ import annotations

from . import _interrupt as _interrupt

# isort: split
import sys as _sys

if "trionnx._worker" not in _sys.orig_argv:
    # Its initialisation holds the GIL for most of a second; onnx needs it, and by the first load it
    # would stop the event loop for as long. A worker has none.
    import ml_dtypes as _ml_dtypes  # noqa: F401

from .gpu.errors import (
    DeviceHung,
    DeviceLost,
    InvalidData,
    InvalidInput,
    InvalidModel,
    NoAdapter,
    OutOfDeviceMemory,
    RunRefused,
    RunTerminated,
    SessionInitTimeout,
    UnsupportedOperator,
)
from .gpu.policy import TerminatePolicy
from .gpu.seam import NodeTime
from .scheduler import (
    DeviceTensor,
    IOBinding,
    RunOptions,
    Scheduler,
    Session,
    Statistics,
    Stream,
    open_scheduler,
    register_engine,
)

__all__ = [
    "DeviceHung",
    "DeviceLost",
    "DeviceTensor",
    "IOBinding",
    "InvalidData",
    "InvalidInput",
    "InvalidModel",
    "NoAdapter",
    "NodeTime",
    "OutOfDeviceMemory",
    "RunOptions",
    "RunRefused",
    "RunTerminated",
    "Scheduler",
    "Session",
    "SessionInitTimeout",
    "Statistics",
    "Stream",
    "TerminatePolicy",
    "UnsupportedOperator",
    "open_scheduler",
    "register_engine",
]
