"""Outputs as they come: a run in a task of its own, and what its caller goes over."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio

from .run import Deliver

__all__ = ["Stream", "streaming"]


class Stream:
    """Goes over (name, value), in the order in which a run computes its outputs. Made by `Session.stream`."""

    def __init__(self, items: trio.MemoryReceiveChannel[tuple[str, Any]]) -> None:
        self._items = items
        self._error: Exception | None = None

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> tuple[str, Any]:
        try:
            return await self._items.receive()
        except trio.EndOfChannel:
            pass
        error, self._error = self._error, None
        raise StopAsyncIteration if error is None else error


@asynccontextmanager
async def streaming(perform: Callable[[Deliver | None], Awaitable[Any]]) -> AsyncIterator[Stream]:
    """Perform a run beside the block of an ``async with``.

    Args:
        perform: the run; it is given what to call with each output.

    Yields:
        The outputs to come.

    **Cancellation:** the run is stopped and drained, as it is when the block is left early.
    """
    send, receive = trio.open_memory_channel[tuple[str, Any]](float("inf"))
    stream = Stream(receive)

    async def work() -> None:
        with send:
            try:
                await perform(lambda name, value: send.send_nowait((name, value)))
            except Exception as error:
                stream._error = error

    error: BaseException
    try:
        async with trio.open_nursery(strict_exception_groups=True) as nursery:
            nursery.start_soon(work)
            try:
                yield stream
            finally:
                nursery.cancel_scope.cancel()
        return
    except BaseExceptionGroup as group:
        others = [one for one in group.exceptions if not isinstance(one, trio.Cancelled)]
        if len(others) > 1:
            raise
        error = (others or group.exceptions)[0]
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context
        del error, context
