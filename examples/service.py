"""A small HTTP service: a client that hangs up stops its run on the GPU.

    python examples/service.py MODEL.onnx [--bind 127.0.0.1:8000]

POST /run takes an .npz file with an array for each input, and answers with one of the outputs; GET /statistics says
what is going on. Starlette on Hypercorn's Trio worker; needs the extra `trionnx[examples]`.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import trio
from hypercorn.config import Config
from hypercorn.trio import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import trionnx
from trionnx.cli.console import quiet_drivers

__all__ = ["application", "packed", "unpacked"]

MOST_BYTES = 64 << 20


def packed(arrays: dict[str, Any]) -> bytes:
    """Arrays by name as an .npz file."""
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def unpacked(content: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of an .npz file.

    Raises:
        Exception: it is none.
    """
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return dict(arrays)


def application(scheduler: trionnx.Scheduler, session: trionnx.Session) -> Starlette:
    """The service of one session."""
    names = [info.name for info in session.get_outputs()]

    async def run(request: Request) -> Response:
        content = bytearray()
        async for part in request.stream():
            content += part
            if len(content) > MOST_BYTES:
                return PlainTextResponse("too large\n", 413)
        try:
            feeds = unpacked(bytes(content))
        except Exception as error:
            return PlainTextResponse(f"no .npz file: {error}\n", 400)
        made: list[list[Any]] = []
        async with trio.open_nursery(strict_exception_groups=True) as nursery:
            nursery.start_soon(_hang_up, request.receive, nursery.cancel_scope.cancel)
            try:
                made.append(await session.run(None, feeds))
            except (trionnx.InvalidInput, trionnx.InvalidData) as error:
                return PlainTextResponse(f"{error}\n", 422)
            finally:
                nursery.cancel_scope.cancel()
        if not made:  # nobody is there to read it
            return PlainTextResponse("the client hung up\n", 499)
        return Response(packed(dict(zip(names, made[0], strict=True))), media_type="application/octet-stream")

    async def statistics(_: Request) -> Response:
        return JSONResponse(asdict(scheduler.statistics()))

    return Starlette(routes=[Route("/run", run, methods=["POST"]), Route("/statistics", statistics)])


async def _hang_up(receive: Callable[[], Awaitable[MutableMapping[str, Any]]], stop: Callable[[], None]) -> None:
    """Stop when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    stop()


@asynccontextmanager
async def service(app: Starlette, bind: str) -> AsyncIterator[str]:
    """Serve during the block; yields the address."""
    config = Config()
    config.bind, config.graceful_timeout, config.errorlog = [bind], 1.0, None
    ended = trio.Event()
    async with trio.open_nursery() as nursery:
        start = partial(serve, app, config, shutdown_trigger=ended.wait)  # type: ignore[arg-type]
        (address, *_) = await nursery.start(start)
        try:
            yield address
        finally:
            ended.set()


async def main(model: str, bind: str) -> None:
    """Load the model and serve until Ctrl-C."""
    async with trionnx.open_scheduler() as scheduler:
        session = await scheduler.load(model)
        async with service(application(scheduler, session), bind) as address:
            print(f"{session.backend}: {session.adapter}, at {address}", flush=True)
            await trio.sleep_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve a model over HTTP.")
    parser.add_argument("model")
    parser.add_argument("--bind", default="127.0.0.1:8000")
    arguments = parser.parse_args()
    quiet_drivers()
    try:
        trio.run(main, arguments.model, arguments.bind)
    except KeyboardInterrupt:
        sys.exit(130)
