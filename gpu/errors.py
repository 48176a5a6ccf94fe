"""What can go wrong, by whose fault it is: the model's, the caller's, or the machine's.

For lifetimes Trio's own errors are used: ``trio.ClosedResourceError`` when a session or a
scheduler was closed, ``trio.Cancelled`` when a cancel scope of the caller's was cancelled.
"""

from __future__ import annotations

import struct

__all__ = [
    "UNFORESEEN",
    "DeviceHung",
    "DeviceLost",
    "InvalidData",
    "InvalidInput",
    "InvalidModel",
    "NoAdapter",
    "OutOfDeviceMemory",
    "RunRefused",
    "RunStopped",
    "RunTerminated",
    "SessionInitTimeout",
    "UnsupportedOperator",
]

UNFORESEEN = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
    struct.error,
)
"""What code raises that has not been made for what a damaged or hostile file holds."""


class InvalidModel(ValueError):
    """The model's fault: the file cannot be read, or the graph in it breaks the rules of ONNX.

    Raised by ``load``, and by ``run`` where only the shapes of the inputs show it. The message
    names the file or the node. Not raised for operators that are valid but unknown here: that
    is `UnsupportedOperator`.
    """


class UnsupportedOperator(NotImplementedError):
    """The model holds an operator that this engine cannot run (or may not, on the host).

    Attributes:
        op: the operator's name, such as ``"NonMaxSuppression"``.
        domain: its domain, ``""`` for ONNX's own.
        opset: the version of that domain that the model imports.
        node: the name of the node.
        reason: why, in a few words.
    """

    def __init__(self, op: str, domain: str, opset: int, node: str, reason: str) -> None:
        super().__init__(op, domain, opset, node, reason)
        self.op, self.domain, self.opset, self.node, self.reason = op, domain, opset, node, reason

    def __str__(self) -> str:
        name = f"{self.domain}.{self.op}" if self.domain else self.op
        return f"operator {name} (opset {self.opset}) of node {self.node!r}: {self.reason}"


class InvalidInput(ValueError):
    """The caller's fault: an input or output name, dtype or shape that the model does not take.

    Raised before anything is submitted.

    Attributes:
        name: the input (or output) that it is about.
        expected: what the model takes, as text.
        got: what was given, as text.
    """

    def __init__(self, name: str, expected: str, got: str) -> None:
        super().__init__(name, expected, got)
        self.name, self.expected, self.got = name, expected, got

    def __str__(self) -> str:
        return f"{self.name!r}: expected {self.expected}, got {self.got}"


class InvalidData(ValueError):
    """The values of an input (or of something computed) break an operator's rule.

    Names and shapes did not show it: an index out of range, say. The message names the node.

    Attributes:
        node: the name of the node.
    """

    def __init__(self, node: str, message: str) -> None:
        super().__init__(node, message)
        self.node, self.message = node, message

    def __str__(self) -> str:
        return f"node {self.node!r}: {self.message}"


class NoAdapter(RuntimeError):
    """There is nothing to run on: no GPU driver was found, or none that was asked for.

    The message says what was looked for and how to get one.
    """


class DeviceLost(RuntimeError):
    """The GPU driver dropped the device; what was computed on it is gone."""


class DeviceHung(RuntimeError):
    """The GPU did not finish what was in flight within the bound; the session is unusable."""


class RunRefused(Exception):
    """A run cannot be over by its deadline, so it was not begun: see `open_scheduler(admission=True)`.

    Attributes:
        needed_s: seconds of device time that it takes, with what goes before it, as earlier runs took.
        left_s: seconds until the deadline of the caller's scopes.
    """

    def __init__(self, needed_s: float, left_s: float) -> None:
        super().__init__(needed_s, left_s)
        self.needed_s = needed_s
        self.left_s = left_s

    def __str__(self) -> str:
        needed = f"{self.needed_s} s with what goes before it"
        return f"the run takes about {needed}, and its deadline is in {self.left_s} s"


class SessionInitTimeout(TimeoutError):
    """A session could not be made in time. It is not tried again; what it was stuck in is abandoned.

    Attributes:
        phase: what was going on, such as "compile"; "start" before the engine has told anything.
        bound_s: how long was waited, in seconds.
    """

    def __init__(self, phase: str, bound_s: float) -> None:
        super().__init__(phase, bound_s)
        self.phase, self.bound_s = phase, bound_s

    def __str__(self) -> str:
        return f"the session was not there after {self.bound_s} s, in phase {self.phase!r}"


class OutOfDeviceMemory(MemoryError):
    """There is no room for the weights or for the values of a run: on the GPU, or, where it says the node, anywhere.

    Raised before anything is allocated where shapes tell: a file of 200 bytes can want a petabyte.
    """


class RunTerminated(Exception):
    """A run was stopped by ``RunOptions.terminate()``, not by a cancel scope.

    Attributes:
        segments_done: how many segments of the run had finished.
        segments_total: how many the run would have had, as far as was known.
        drained: whether everything in flight was seen to finish.
    """

    def __init__(self, segments_done: int, segments_total: int, drained: bool) -> None:
        super().__init__(segments_done, segments_total, drained)
        self.segments_done, self.segments_total, self.drained = segments_done, segments_total, drained

    def __str__(self) -> str:
        tail = "" if self.drained else "; the device did not finish what was in flight"
        return f"terminated after {self.segments_done} of {self.segments_total} segments{tail}"


class RunStopped(Exception):
    """Internal to the floors below the scheduler: a request was not carried out, its run was stopped.

    Never leaves ``Session.run``: the caller sees the reason for the stop instead.
    """
