"""The few frozen types that all floors share.

Standard library and NumPy only: this file knows no Trio, no wgpu, no ONNX. Everything here can
be sent to another thread, and (but for `Load.source` of some kinds) to another process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from .policy import TerminatePolicy

__all__ = [
    "Begin",
    "Begun",
    "BlockView",
    "Closed",
    "Counts",
    "Cursor",
    "Done",
    "Dropped",
    "Ended",
    "Explained",
    "Failed",
    "Fenced",
    "Finished",
    "Free",
    "Freed",
    "Load",
    "Loaded",
    "ModelMetadata",
    "NodeTime",
    "Outputs",
    "Progress",
    "Read",
    "Reply",
    "Segment",
    "StepKind",
    "StepView",
    "TensorInfo",
    "TensorRef",
]

StepKind = Literal["gpu", "host", "opaque"]


class Cursor(NamedTuple):
    """The program counter of a run: the next unit to submit. Ordered."""

    activation: int
    step: int = 0
    unit: int = 0


@dataclass(frozen=True, slots=True)
class StepView:
    """What the scheduler may know of a step.

    Attributes:
        kind: where it runs; a segment never mixes kinds. "opaque": a whole model in one call.
        units: into how many equal parts it may be cut; 1 = nowhere.
        cost_s: estimated seconds for all of its units.
        multiple: a part that is cut off should be a multiple of so many units.
    """

    kind: StepKind
    units: int = 1
    cost_s: float = 0.0
    multiple: int = 1


@dataclass(frozen=True, slots=True)
class Finished:
    """The run has no further block."""


@dataclass(frozen=True, slots=True)
class BlockView:
    """A straight line of steps whose shapes are known.

    Attributes:
        activation: number of this entry into a block, counted from 0 within a run.
        steps: at least one.
        then: what follows: another block, the end, or None = decided by values, which the
            `Fenced` of the block's last segment tells.
    """

    activation: int
    steps: tuple[StepView, ...]
    then: BlockView | Finished | None = field(default_factory=Finished)


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch [start, stop) of one block, submitted as one: the quantum of scheduling.

    `stop` may be Cursor(activation, len(steps)): the block's end. A segment that reaches it with
    `then` None asks the engine to decide.
    """

    run: int
    seq: int
    start: Cursor
    stop: Cursor


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, dtype and declared shape of a model's input or output.

    Attributes:
        name: as the model says.
        type: ONNX Runtime's spelling, such as ``"tensor(float)"``.
        shape: per dimension an int, the name of a symbolic dimension, or None; None = unknown rank.
        dtype: the NumPy dtype, None for what is no tensor.
    """

    name: str
    type: str
    shape: tuple[int | str | None, ...] | None
    dtype: np.dtype[Any] | None


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A handle on a value that stays in an engine; the bytes are the engine's.

    Attributes:
        actor: number of the actor whose engine has it. generation: which of the actor's engines.
        id: what the engine calls it; never used again for another.
    """

    actor: int
    generation: int
    id: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What a model says of itself."""

    producer_name: str = ""
    graph_name: str = ""
    domain: str = ""
    description: str = ""
    version: int = 0
    custom_metadata_map: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Explained:
    """Where one node of the model runs, and why.

    Attributes:
        node: the node's name. op: its operator.
        where: "gpu", "host", "folded" (computed once, ahead of runs), "view" (no work: another
            shape of the same bytes), "opaque", or "unplanned" (no shapes known yet).
        why: a few words: the kernel, what it fused into, or why there is no kernel for it.
    """

    node: str
    op: str
    where: str
    why: str


# --- requests -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """Make a session of a model, or add a model to it.

    Attributes:
        source: a path, bytes, or an onnx.ModelProto.
        input_shapes: make and compile a plan for these ahead of the first run.
        allow_host_steps: False: an operator on floats without a kernel is an error.
        cpu_threads: for engines that compute on the CPU; None = theirs to choose.
        memory_limit_bytes: of memory on the device, for the model that opens it; None = what there is.
        model: a number that no other model of this engine has or had; 0 for the first.
        actor, generation: what the engine's `TensorRef`s bear.
    """

    source: Any
    input_shapes: Mapping[str, tuple[int, ...]] | None = None
    allow_host_steps: bool = True
    cpu_threads: int | None = None
    model: int = 0
    memory_limit_bytes: int | None = None
    actor: int = field(default=0, compare=False)
    generation: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Begin:
    """Start a run: check the feeds, plan, compile, upload.

    Attributes:
        run: a number that no other run of this engine has or had.
        feeds: input name -> array, or a `TensorRef` of this engine. The engine reads them until `Ended`.
        wanted: names of the outputs, in order.
        policy: of the run; what of it the engine obeys itself is `max_in_flight`.
        profile: measure each node.
        model: which of the engine's models.
        keep: names of wanted outputs that stay in the engine: of these `Outputs` has `TensorRef`s.
    """

    run: int
    feeds: Mapping[str, Any]
    wanted: tuple[str, ...]
    policy: TerminatePolicy = field(default_factory=TerminatePolicy)
    profile: bool = False
    model: int = 0
    keep: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Read:
    """Bring outputs back as NumPy arrays: of a finished run, or those that a `Fenced` has called ready.

    Attributes:
        tensors: or of values that the engine has kept: then `run` is a number that no run has, for `stop`.
    """

    run: int
    names: tuple[str, ...] = ()
    tensors: tuple[TensorRef, ...] = ()


@dataclass(frozen=True, slots=True)
class Free:
    """Give back values that were kept, and models with all that they hold; those that are unknown are passed over."""

    tensors: tuple[TensorRef, ...] = ()
    models: tuple[int, ...] = ()


# --- replies --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a load is: phase "read", "optimise", "plan", "compile" or "upload"; total may be 0."""

    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """A session is there.

    Attributes:
        backend: the engine's name, "webgpu", "cpu" or "fake".
        adapter: what it computes on, for people to read.
        limits: fields of a `TerminatePolicy` that the engine cannot honour -> what it does instead.
        identity: tells adapters of one machine apart; sessions on one adapter take turns.
    """

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    overridable: tuple[TensorInfo, ...]
    metadata: ModelMetadata
    backend: str
    adapter: str
    providers: tuple[str, ...]
    limits: Mapping[str, str] = field(default_factory=dict)
    identity: str = ""


@dataclass(frozen=True, slots=True)
class Begun:
    """A run may stream its segments."""

    run: int
    block: BlockView | Finished


@dataclass(frozen=True, slots=True)
class Fenced:
    """A segment is finished.

    Attributes:
        gpu_s: seconds that it took on the device (of a step on the CPU: there), None where not known.
        next: for the last segment of a block whose `then` is None: what was decided.
        ready: names of outputs that are computed now and were not before.
    """

    run: int
    seq: int
    gpu_s: float | None = None
    next: BlockView | Finished | None = None
    ready: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Dropped:
    """A segment was not submitted: its run had been stopped."""

    run: int
    seq: int


@dataclass(frozen=True, slots=True)
class Outputs:
    """What `Read` asked for: `values` by the names of outputs, `tensors` in order. Arrays belong to the receiver."""

    run: int
    values: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Freed:
    """What `Free` named is gone, or goes with the end of the run that is under way."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of a run's segments.

    Attributes:
        submitted: given to the driver, or executed on the host. finished: of those, seen to finish.
        dropped: handed over, but not submitted, since the run had been stopped.
        most_in_flight: how many were with the driver at once, at most.
        on_gpu: of those submitted, how many went to the device.
        counted: how many the device itself has executed, by a counter of its own that each bumps;
            None where the engine was not asked to count.
    """

    submitted: int = 0
    finished: int = 0
    dropped: int = 0
    most_in_flight: int = 0
    on_gpu: int = 0
    counted: int | None = None


@dataclass(frozen=True, slots=True)
class NodeTime:
    """What a step of a run, or the part of it that one segment held, took.

    Attributes:
        node: the node's name. kernel: the shader, "copy", "upload", "fetch", or the operator of a step on the CPU.
        seconds: on the device, or on the CPU. Where the device cannot tell steps apart, their common time is
            divided as estimated.
        flops: operations on numbers, a multiply-add is two; as the operator's definition has them. 0 for steps on
            the CPU.
        nbytes: bytes that were read and written, each once, whatever a kernel reads again. Likewise.
    """

    node: str
    kernel: str
    where: StepKind
    seconds: float
    flops: float = 0.0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """A run is over: nothing of it is in flight, its buffers may be used again.

    Attributes:
        times: of each step that was executed, or part of one, in order, where the run was to be profiled.
    """

    run: int
    counts: Counts = field(default_factory=Counts)
    times: tuple[NodeTime, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """A request was not carried out.

    `error` is one of gpu/errors.py, `RunStopped` where the run (or the load) was stopped, or,
    where there is a bug in here, anything else.
    """

    error: BaseException


@dataclass(frozen=True, slots=True)
class Closed:
    """The engine is gone, with all it held."""


Reply = Loaded | Begun | Fenced | Dropped | Outputs | Ended | Freed | Failed | Closed
Done = Callable[[Reply], None]
