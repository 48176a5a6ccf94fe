"""A value that stays on the device: `DeviceTensor`."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
import trio

from ..gpu.seam import TensorRef

if TYPE_CHECKING:
    from .session import Session

__all__ = ["DeviceTensor", "current"]


class DeviceTensor:
    """An output that has stayed on the device of its session. Made by a run with an `IOBinding`.

    It can be fed to runs of its session, and of those loaded beside it, without passing through the
    host. Its memory is given back by `close`, at the end of a ``with``, when nobody refers to it any more, and when
    its session is closed. Bound as an output, it takes over what the run makes.

    Attributes:
        name: the output that it was.
    """

    def __init__(self, session: Session, name: str, ref: TensorRef) -> None:
        self.name = name
        self._session = session
        self._ref = ref
        self._writer: object = None
        self._finalizer = self._finalize()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<trionnx.DeviceTensor {self.name!r}: {self.dtype}{list(self.shape)} on {self.adapter}{state}>"

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype that the array would have."""
        return self._ref.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the array would have."""
        return self._ref.shape

    @property
    def nbytes(self) -> int:
        """The bytes that the array would have."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def backend(self) -> str:
        """The engine that holds it."""
        return self._session.backend

    @property
    def adapter(self) -> str:
        """What it lies on."""
        return self._session.adapter

    @property
    def closed(self) -> bool:
        """Whether its memory was given back."""
        return not self._finalizer.alive or self._session._closed

    async def numpy(self) -> np.ndarray[Any, Any]:
        """Copy it to the host, once the queue is free.

        Returns:
            An array of its own, of `dtype` and `shape`.

        Raises:
            trio.ClosedResourceError: it, its session or the scheduler is closed.
            DeviceLost: the driver dropped the device.
            DeviceHung: the device did not finish in time.
            RuntimeError: called from another Trio run, another thread or a forked process.

        **Cancellation:** felt at once; the tensor stays as it is.
        """
        self._session._home.check("a tensor")
        self._current("")
        return await self._session._bring(lambda: self._current(""))

    def close(self) -> None:
        """Give the memory back; a run that reads it goes on. No effect on a closed tensor.

        Raises:
            RuntimeError: called from another Trio run, another thread or a forked process.
        """
        self._session._home.check("a tensor")
        self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __dlpack__(self, **_: Any) -> NoReturn:
        raise BufferError(
            "DLPack knows no buffers of WebGPU, and a copy to the host has to be awaited: "
            "hand over `await tensor.numpy()`, which offers DLPack"
        )

    def __dlpack_device__(self) -> NoReturn:
        self.__dlpack__()

    # --- for sessions ---------------------------------------------------------------------------

    def _current(self, name: str) -> TensorRef:
        """What it owns now. Raises where that is gone."""
        if not self._finalizer.alive:
            fed = f" that is fed to {name!r}" if name else ""
            raise trio.ClosedResourceError(f"the tensor{fed} is closed")
        self._session._check()
        return self._ref

    def _begin_write(self, run: object, name: str) -> None:
        """A run is going to take it as an output."""
        self._current(name)
        if self._writer is not None:
            raise trio.BusyResourceError(f"the tensor for {name!r} is an output of another run that is not over")
        self._writer = run

    def _end_write(self, run: object) -> None:
        if self._writer is run:
            self._writer = None

    def _take(self, session: Session, ref: TensorRef) -> None:
        """Own what a run of a session has made, and give the value before back. One that is closed stays closed."""
        if not self._finalizer.alive:
            session._free(ref)
            return
        self._let_go()
        self._session, self._ref = session, ref
        self._finalizer = self._finalize()

    def _let_go(self) -> None:
        if self._finalizer.detach() is not None:
            self._session._free(self._ref)

    def _finalize(self) -> weakref.finalize[[trio.lowlevel.TrioToken, Callable[[TensorRef], None], TensorRef], Self]:
        finalizer = weakref.finalize(self, _free_soon, self._session._home.token, self._session._free, self._ref)
        finalizer.atexit = False
        return finalizer


def _free_soon(token: trio.lowlevel.TrioToken, free: Callable[[TensorRef], None], ref: TensorRef) -> None:
    """Runs in whatever thread collects garbage."""
    with contextlib.suppress(trio.RunFinishedError):
        token.run_sync_soon(free, ref)


def current(feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Feeds with what each tensor owns now in its place. Raises where that is gone."""
    return {n: feed._current(n) if isinstance(feed, DeviceTensor) else feed for n, feed in feeds.items()}
