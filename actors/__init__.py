"""The first floor: one task per queue. Lifetimes, mailboxes, supervision; knows no policy."""

from __future__ import annotations

from .actor import CLOSE_BOUND_S, Actor, run_actor

__all__ = ["CLOSE_BOUND_S", "Actor", "run_actor"]
