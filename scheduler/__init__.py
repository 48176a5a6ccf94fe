"""The second floor: cuts segments, decides who goes next, asks cancel scopes; the public API."""

from __future__ import annotations

from .backends import register_engine
from .options import RunOptions
from .scheduler import Scheduler, open_scheduler
from .session import Session
from .statistics import Statistics
from .stream import Stream

__all__ = ["RunOptions", "Scheduler", "Session", "Statistics", "Stream", "open_scheduler", "register_engine"]
