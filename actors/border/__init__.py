"""What crosses the border of a process, and how: a closed list of messages, and shared memory. Knows no Trio."""

from __future__ import annotations
