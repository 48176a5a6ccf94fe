"""ONNX's standard back end interface: ``prepare``, ``run_model``, ``run_node``, ``supports_device``.

Plain functions that wait, for programs without Trio and for those with it: the one scheduler
behind them lives in a Trio loop of its own, on a daemon thread, from the first call to the
program's end. Inside a Trio app use `trionnx.open_scheduler` instead, which does not block.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
import onnx
import trio
from onnx.backend.base import Backend, BackendRep

from .gpu.errors import InvalidInput, NoAdapter
from .scheduler import Scheduler, Session, open_scheduler
from .scheduler.backends import known_adapters

__all__ = ["TrionnxBackend", "TrionnxBackendRep", "prepare", "run_model", "run_node", "supports_device"]

_T = TypeVar("_T")

_CLOSE_BOUND_S = 10.0
_NEWEST_IR = 10
_OF_THE_SUITE = frozenset(("rtol", "atol", "opset_version"))
"""Keyword arguments that onnx hands to every function of a back end."""


class TrionnxBackendRep(BackendRep):  # type: ignore[misc, unused-ignore]
    """A model that is ready to run. Made by `TrionnxBackend.prepare`; closes itself when it is garbage.

    Attributes:
        backend: the engine that it is on, such as "webgpu".
        adapter: what that computes on.
    """

    def __init__(self, loop: _Loop, session: Session) -> None:
        self._loop, self._session = loop, session
        self.backend, self.adapter = session.backend, session.adapter
        self._names = [info.name for info in (*session.get_inputs(), *session.get_overridable_initializers())]
        self._finalizer = weakref.finalize(self, _close_soon, loop, session)
        self._finalizer.atexit = False  # the loop closes what is left then

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Compute the outputs; waits for them. From any thread.

        Args:
            inputs: the inputs in the model's order (None: left out), or by name; a single array for one.
            kwargs: none is known but those that onnx's tests hand on.

        Returns:
            The outputs in the model's order.

        Raises:
            InvalidInput: an input of a wrong dtype or shape, too many, or too few.
            trio.ClosedResourceError: it is closed.
            TypeError: an unknown keyword argument.
            InvalidModel, InvalidData, UnsupportedOperator, OutOfDeviceMemory, DeviceLost: see there.
        """
        _refuse(kwargs)
        feeds = self._feeds(inputs)
        return tuple(self._loop.call(lambda _: self._session.run(None, feeds)))

    def close(self) -> None:
        """Give the device's memory back now. No effect on one that is closed."""
        self._finalizer()

    def _feeds(self, inputs: Any) -> dict[str, Any]:
        if isinstance(inputs, Mapping):
            return dict(inputs)
        if isinstance(inputs, np.ndarray):
            inputs = [inputs]
        if len(inputs) > len(self._names):
            raise InvalidInput("inputs", f"at most {len(self._names)}", str(len(inputs)))
        return {name: x for name, x in zip(self._names, inputs, strict=False) if x is not None}


class TrionnxBackend(Backend):  # type: ignore[misc, unused-ignore]
    """ONNX's standard back end interface, on the webgpu engine unless told otherwise.

    ``device`` is "CPU", which says nothing here (the interface's default), or "CUDA" or "CUDA:1",
    an NVIDIA GPU by its number among those. What it really runs on say the keyword arguments that
    `prepare` takes; `run_model` and `run_node` hand them on.
    """

    @classmethod
    def prepare(
        cls,
        model: Any,
        device: str = "CPU",
        *,
        backend: str = "webgpu",
        adapter: str | int | None = None,
        allow_host_steps: bool = True,
        input_shapes: Mapping[str, Sequence[int]] | None = None,
        **kwargs: Any,
    ) -> TrionnxBackendRep:
        """Load a model; waits for it. From any thread.

        Args:
            model: an onnx.ModelProto, a path or bytes.
            device: see the class.
            backend: "webgpu", "auto", "cpu" or a registered name.
            adapter: index or part of the name of an adapter; None: what ``TRIONNX_ADAPTER`` says, else the best.
            allow_host_steps: False: an operator on floats that has no kernel is an error.
            input_shapes: input name -> shape: prepare for these ahead of the first run.
            kwargs: none is known but those that onnx's tests hand on.

        Raises:
            InvalidModel: the model cannot be read, or breaks ONNX's rules.
            UnsupportedOperator: an operator cannot run here.
            NoAdapter: there is nothing to run on, or not what was asked for.
            OutOfDeviceMemory: the device has no room for the weights.
            ValueError: an unknown device or name of a back end.
            TypeError: an unknown keyword argument.
        """
        _refuse(kwargs)
        if adapter is None:
            adapter = _adapter_of(device)
        loop = _loop()

        async def load(scheduler: Scheduler) -> Session:
            return await scheduler.load(
                model, backend=backend, adapter=adapter, allow_host_steps=allow_host_steps, input_shapes=input_shapes
            )

        session = loop.call(load)
        if backend not in ("auto", session.backend):
            _close_soon(loop, session)
            raise NoAdapter(f"asked for the back end {backend!r}, got {session.backend!r}")
        return TrionnxBackendRep(loop, session)

    @classmethod
    def run_model(cls, model: Any, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        """Load a model, run it once, forget it: `prepare`, then `TrionnxBackendRep.run`; see both."""
        rep = cls.prepare(model, device, **kwargs)
        try:
            return rep.run(inputs)
        finally:
            rep.close()

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[Any, tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Compute a single node, in the newest opset, or in that of ``opset_version=``.

        Args:
            node: the node. What its nested graphs take from around them is not to be had.
            inputs: one per input of the node that has a name, in order; or by name.
            device: see the class.
            outputs_info: not needed, and not looked at.
            kwargs: as for `prepare`.

        Raises:
            InvalidInput: there are too many or too few inputs.
            InvalidModel, InvalidData, UnsupportedOperator, NoAdapter: see there.
        """
        names = list(dict.fromkeys(name for name in node.input if name))
        given = dict(inputs) if isinstance(inputs, Mapping) else {}
        if not given:
            given = dict(zip(names, [inputs] if isinstance(inputs, np.ndarray) else inputs, strict=False))
        if missing := [name for name in names if name not in given]:
            raise InvalidInput(missing[0], "an array", "nothing")
        arrays = {name: np.asarray(given[name]) for name in names}
        return cls.run_model(_model_of(node, arrays, kwargs.get("opset_version")), arrays, device, **kwargs)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether there is such a device. Looks for adapters for "CUDA"; opens no driver for "CPU"."""
        try:
            _adapter_of(device)
        except (NoAdapter, ValueError):
            return False
        return True


prepare = TrionnxBackend.prepare
run_model = TrionnxBackend.run_model
run_node = TrionnxBackend.run_node
supports_device = TrionnxBackend.supports_device


def _refuse(kwargs: Mapping[str, Any]) -> None:
    if unknown := sorted(set(kwargs) - _OF_THE_SUITE):
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}")


def _model_of(node: onnx.NodeProto, arrays: Mapping[str, Any], opset: int | None) -> onnx.ModelProto:
    model = onnx.ModelProto(ir_version=_NEWEST_IR)
    model.graph.name = node.name or node.op_type
    model.graph.node.append(node)
    for name, array in arrays.items():
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, array.shape))
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output if name)
    main = onnx.defs.onnx_opset_version()
    own = main if node.domain in ("", "ai.onnx") else _newest(node.domain)
    model.opset_import.add(domain=node.domain, version=opset or own)
    if node.domain not in ("", "ai.onnx"):
        model.opset_import.add(domain="", version=main)
    return model


def _newest(domain: str) -> int:
    return max((s.since_version for s in onnx.defs.get_all_schemas() if s.domain == domain), default=1)


def _adapter_of(device: str) -> int | None:
    """The adapter that a device's name asks for; None: it does not ask."""
    kind, _, number = device.partition(":")
    if kind == "CPU":
        return None
    if kind != "CUDA" or not (number.isdecimal() or not number):
        raise ValueError(f'device {device!r} is not known; known are "CPU", "CUDA" and "CUDA:1"')
    found, place = _nvidia(), int(number or 0)
    if place >= len(found):
        raise NoAdapter(f"device {device!r}: there are {len(found)} NVIDIA GPUs")
    return found[place]


@cache
def _nvidia() -> tuple[int, ...]:
    """The indices of NVIDIA's adapters. They stay the same while the program runs."""
    there = _loop().call(lambda scheduler: known_adapters())
    return tuple(a.index for a in there if a.kind == "hardware" and "nvidia" in f"{a.name} {a.driver}".lower())


class _Loop:
    """A Trio loop with a scheduler in it, on a daemon thread of its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._live,), name="trionnx-backend", daemon=True)
        self._thread.start()
        self._ready.wait()
        atexit.register(self.close)

    async def _live(self) -> None:
        self._stop = trio.Event()
        async with open_scheduler(backend="webgpu") as scheduler, trio.open_nursery() as nursery:
            self._scheduler, self._nursery = scheduler, nursery
            self._token = trio.lowlevel.current_trio_token()
            self._ready.set()
            await self._stop.wait()
            nursery.cancel_scope.cancel()

    def call(self, request: Callable[[Scheduler], Awaitable[_T]]) -> _T:
        """Have a request carried out there; wait for its answer, and raise its error."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("this waits for the very thread that it was called on")
        scope, answered = trio.CancelScope(), threading.Event()
        values: list[_T] = []
        errors: list[Exception] = []

        async def serve() -> None:
            try:
                with scope:
                    values.append(await request(self._scheduler))
            except Exception as error:
                errors.append(error)
            finally:
                answered.set()

        self.post(lambda: self._nursery.start_soon(serve))
        try:
            answered.wait()
        except BaseException:  # KeyboardInterrupt
            self.post(scope.cancel)
            raise
        if errors:
            raise errors.pop()
        if not values:
            raise trio.ClosedResourceError("the program is ending")
        return values.pop()

    def post(self, call: Callable[[], object]) -> None:
        """Have something called there, soon."""
        self._token.run_sync_soon(call)

    def close(self) -> None:
        """Close every session; for the end of the program."""
        if os.getpid() != self.pid:
            return
        try:
            self.post(self._stop.set)
        except trio.RunFinishedError:
            return
        self._thread.join(_CLOSE_BOUND_S)


_lock = threading.Lock()
_loops: list[_Loop] = []


def _loop() -> _Loop:
    """This process's loop."""
    with _lock:
        if not _loops or _loops[-1].pid != os.getpid():  # a forked child has no threads
            _loops[:] = [_Loop()]
        return _loops[-1]


def _close_soon(loop: _Loop, session: Session) -> None:
    if os.getpid() == loop.pid:
        try:
            loop.post(session.close)
        except trio.RunFinishedError:
            return
