"""What a run reads and where its outputs stay: `IOBinding`, with ONNX Runtime's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import trio

from ..gpu.errors import InvalidInput
from .feeds import check_names
from .tensor import DeviceTensor

if TYPE_CHECKING:
    from .session import Session

__all__ = ["IOBinding"]


class IOBinding:
    """Inputs and outputs of runs of one session. Made by `Session.io_binding`; may be used again and again.

    What is bound is checked when it is run with.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._inputs: dict[str, Any] = {}
        self._outputs: dict[str, str | DeviceTensor] = {}
        self._made: dict[str, Any] = {}

    def bind_cpu_input(self, name: str, arr_on_cpu: Any) -> None:
        """Feed an array, or numbers that become one, from the host."""
        self._inputs[name] = arr_on_cpu

    def bind_input(self, name: str, tensor: DeviceTensor) -> None:
        """Feed a tensor from where it lies.

        Raises:
            TypeError: it is none; arrays are bound with `bind_cpu_input`.
        """
        self._inputs[name] = _tensor(tensor)

    def bind_ortvalue_input(self, name: str, ortvalue: DeviceTensor) -> None:
        """The same as `bind_input`."""
        self.bind_input(name, ortvalue)

    def bind_output(self, name: str, device_type: str = "cpu") -> None:
        """Want an output.

        Args:
            name: of the output.
            device_type: "cpu": it comes as an array. "device", or the session's `backend` where that is not "cpu":
                it stays where it is computed, as a `DeviceTensor`.

        Raises:
            InvalidInput: the model has no such output, or it is no tensor and cannot stay.
            ValueError: another device.
        """
        check_names(self._session.get_outputs(), (name,))
        if device_type not in ("cpu", "device", self._session.backend):
            raise ValueError(f'device_type is "cpu", "device" or {self._session.backend!r}, not {device_type!r}')
        if device_type != "cpu":
            self._stays(name)
        self._outputs[name] = "cpu" if device_type == "cpu" else "device"

    def bind_ortvalue_output(self, name: str, ortvalue: DeviceTensor) -> None:
        """Have a tensor take over what the run makes, of the same dtype and whatever shape.

        It keeps what it has where the run does not get to its end.

        Raises:
            InvalidInput: the model has no such output, it has another dtype, or the tensor is bound to another output
                or is on another device.
            TypeError: it is no `DeviceTensor`.
        """
        check_names(self._session.get_outputs(), (name,))
        tensor = _tensor(ortvalue)
        dtype = self._stays(name)
        if tensor.dtype != dtype:
            raise InvalidInput(name, f"a tensor of {dtype}", str(tensor.dtype))
        self._session._check_near(name, tensor)
        for other, bound in self._outputs.items():
            if bound is tensor and other != name:
                raise InvalidInput(name, "a tensor of its own", f"the one that is bound to {other!r}")
        self._outputs[name] = tensor

    def get_outputs(self) -> list[Any]:
        """What the newest run has made, in the order of binding: `DeviceTensor`s, and arrays of those bound to "cpu".

        None for what a run that was terminated did not reach.
        """
        return list(self._made.values())

    async def copy_outputs_to_cpu(self) -> list[Any]:
        """`get_outputs` with every tensor copied to the host.

        Raises:
            Exception: as of `DeviceTensor.numpy`.

        **Cancellation:** felt at once.
        """
        await trio.lowlevel.checkpoint()
        return [await v.numpy() if isinstance(v, DeviceTensor) else v for v in tuple(self._made.values())]

    def clear_binding_inputs(self) -> None:
        """Forget the inputs."""
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        """Forget the outputs, and what was made."""
        self._outputs.clear()
        self._made = {}

    def _stays(self, name: str) -> np.dtype[Any]:
        info = next(info for info in self._session.get_outputs() if info.name == name)
        if info.dtype is None:
            raise InvalidInput(name, "an output that is a tensor, to stay on the device", info.type)
        return info.dtype


def _tensor(value: Any) -> DeviceTensor:
    if not isinstance(value, DeviceTensor):
        raise TypeError(f"a DeviceTensor is bound here, not {type(value).__name__}; arrays: bind_cpu_input")
    return value
