"""The second floor: cuts segments, decides who goes next, asks cancel scopes; the public API."""

from __future__ import annotations

from .backends import register_engine
from .binding import IOBinding
from .options import RunOptions
from .scheduler import Scheduler, open_scheduler
from .session import Session
from .statistics import Statistics
from .stream import Stream
from .tensor import DeviceTensor

__all__ = [
    "DeviceTensor",
    "IOBinding",
    "RunOptions",
    "Scheduler",
    "Session",
    "Statistics",
    "Stream",
    "open_scheduler",
    "register_engine",
]
