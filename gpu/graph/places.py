"""Where every tensor of a block in the making lies: on the device, in the run's frame, known, or nowhere yet.

Elementwise results and the results of kernels with `result` stay lazy until somebody needs their
bytes. How they are computed then: emission.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from ..kernels.registry import NoKernel, TooLarge
from .steps import Fetch, IndexCheck, Step, Upload
from .target import Target
from .tensor import F16, HELD, I64, Apply, Array, Shape, Storage, Tensor, as_halves, as_words, gpu_type

__all__ = ["Places", "Undecided", "padded"]


class Undecided(Exception):
    """A value is needed to go on planning and is only known at run time: the block ends here."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.tensor = tensor


class Places:
    """Where every tensor of a block in the making lies, and the steps that bring them there.

    Attributes:
        target: facts of the adapter. steps: made so far.
        node: name of the node being lowered. op: its operator. opset: its version.
        outputs: how many outputs the node lists.
        placed: where tensors lie on the device. hosted: keys of those in the run's frame.
        known: contents that a block's end has told.
        uses: how often a tensor is still going to be read: by nodes to come, and by lazy tensors.
        checks: what steps so far find out about values. flags: a word for each.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.node = ""
        self.op = ""
        self.opset = 0
        self.outputs = 1
        self.steps: list[Step] = []
        self.placed: dict[Tensor, Storage] = {}
        self.hosted: dict[Tensor, int] = {}
        self.known: dict[Tensor, Array] = {}
        self.uses: dict[Tensor, int] = {}
        self.checks: list[IndexCheck] = []
        self.flags = Storage(16, "flag")
        self._let_go: set[Tensor] = set()
        self._told: dict[Tensor, Tensor] = {}
        self.keys = 0

    def fork(self) -> Self:
        """A copy that goes on from here with an empty list of steps."""
        other = type(self)(self.target)
        other.placed, other.hosted, other.known = dict(self.placed), dict(self.hosted), dict(self.known)
        other.uses, other.keys, other._let_go = dict(self.uses), self.keys, set(self._let_go)
        other._told = dict(self._told)
        return other

    # --- values -------------------------------------------------------------------------------

    def known_value(self, tensor: Tensor) -> Array | None:
        """The contents of a tensor if they are known while planning."""
        return tensor.value if tensor.value is not None else self.known.get(tensor)

    def _fixed(self, tensor: Tensor) -> Tensor:
        """A known tensor to keep things with: another one for each contents that a block's end has told."""
        if tensor.value is not None or tensor not in self.known:
            return tensor
        if tensor not in self._told:
            self._told[tensor] = Tensor(tensor.dtype, tensor.shape, value=self.known[tensor])
        return self._told[tensor]

    def value(self, tensor: Tensor) -> Array:
        """The contents of a tensor, as planning needs them (a shape, axes, a condition).

        Raises:
            Undecided: only the run will know; the planner ends the block and comes back.
        """
        value = self.known_value(tensor)
        if value is None:
            raise Undecided(tensor)
        return value

    def ints(self, tensor: Tensor) -> list[int]:
        """`value` of a small integer tensor, flattened. Raises `Undecided`."""
        return [int(v) for v in self.value(tensor).reshape(-1)]

    def constant(self, array: Array) -> Tensor:
        """A tensor whose contents are known."""
        array = np.asarray(array)
        return Tensor(array.dtype, array.shape, value=array)

    # --- where things lie ---------------------------------------------------------------------

    def new(self, dtype: np.dtype[Any], shape: Shape, of: Sequence[Tensor] = ()) -> Tensor:
        """A tensor on the device for a kernel without `result` to write.

        Args:
            dtype: of the tensor.
            shape: of the tensor.
            of: all its elements are elements of these, so they are f16 if those are.
        """
        kind = gpu_type(np.dtype(dtype))
        if kind is None:
            raise NoKernel(f"no GPU type for {dtype}")
        tensor = self._fits(Tensor(np.dtype(dtype), tuple(shape)))
        tensor.half = bool(of) and all(self._is_half(t) for t in of)
        self.placed[tensor] = self._room(tensor)
        return tensor

    def storage(self, tensor: Tensor) -> Storage:
        """Where a tensor's bytes lie on the device, contiguous: computes, uploads or fuses as needed.

        Raises:
            NoKernel: the GPU has no type for its dtype.
        """
        placed = self.placed.get(tensor)
        if placed is not None:
            return placed
        if tensor.type is None:
            raise NoKernel(f"no GPU type for {tensor.dtype}")
        self._fits(tensor)
        value = self.known_value(tensor)
        if value is not None:
            return self.weight(tensor, "plain", lambda array: array)
        key = self.hosted.get(tensor)
        if key is not None:
            made = self._room(tensor)
            self.steps.append(Upload(key, made, tensor.dtype, tensor.size * made.each, self.node))
        elif (narrow := self._narrow(tensor)) is not None:
            made = self.storage(narrow)
        else:
            made = self._compute(tensor)
        self.placed[tensor] = made
        self.let_go(tensor)
        return made

    def let_go(self, tensor: Tensor) -> None:
        """A lazy tensor lies somewhere now, or nobody will read it: it needs its arguments no more."""
        if tensor.apply is None or tensor in self._let_go:
            return
        self._let_go.add(tensor)
        for arg in tensor.apply.args:
            self.uses[arg] -= 1
            if self.uses[arg] == 0 and arg not in self.placed:
                self.let_go(arg)

    def weight(self, tensor: Tensor, key: object, pack: Callable[[Array], Array]) -> Storage:
        """A known tensor's contents on the device, packed for a kernel; uploaded once per session.

        Args:
            tensor: `known_value` is not None.
            key: names the packing; with the tensor it identifies the buffer.
            pack: makes the array to upload (4-byte elements; bool becomes u32); called at most
                once, when the weight is uploaded, and may be slow.
        """
        tensor = self._fixed(tensor)
        made = tensor.weights.get(key)
        if made is None:
            value = self.known_value(tensor)
            assert value is not None
            first = [value if key == "plain" else pack(value)]
            halves = as_halves(first[0]) if self._lies_half(tensor) else None
            half = halves is not None
            if halves is not None:
                first = [halves]

            def fill() -> Array:
                return as_words(first.pop() if first else value if key == "plain" else pack(value), half)

            made = Storage(padded(first[0].size * (2 if half else 4)), "weight", fill, half)
            tensor.weights[key] = made
        return made

    def derive(self, tensor: Tensor, key: object, make: Callable[[Array], Array]) -> Tensor:
        """A known tensor made of another one's contents, once per session where the model fixes them.

        Args:
            tensor: `known_value` is not None.
            key: names what is made; with the tensor it identifies the result.
            make: makes the contents.
        """
        tensor = self._fixed(tensor)
        made = tensor.derived.get(key)
        if made is None:
            value = self.known_value(tensor)
            assert value is not None
            array = np.asarray(make(value))
            half = tensor.half or tensor.dtype == F16
            made = tensor.derived[key] = Tensor(array.dtype, array.shape, value=array, half=half)
        return made

    def host_key(self, tensor: Tensor) -> int | None:
        """The key of a tensor in the run's frame of host arrays, None where it is not there."""
        return self.hosted.get(tensor)

    def new_host(self, tensor: Tensor) -> int:
        """Give a tensor a place in the run's frame."""
        key = self.hosted[tensor] = self.keys
        self.keys += 1
        return key

    def fetch(self, tensor: Tensor) -> int:
        """Have a tensor's contents in the frame, read back from the device if need be."""
        key = self.hosted.get(tensor)
        if key is None:
            source = self.words(tensor)
            key = self.new_host(tensor)
            self.steps.append(Fetch(source, key, tensor.dtype, tensor.shape, self.node))
        return key

    # --- int64 that lies on the device as int32 -------------------------------------------------

    def widen(self, tensor: Tensor) -> Tensor:
        """An int32 result (indices) as int64. It stays where it is, and goes to the host once somebody asks there."""
        made = Tensor(I64, tensor.shape, apply=Apply("x", ("x",), (tensor,), label="int64"))
        self.uses[tensor] = self.uses.get(tensor, 0) + 1
        return made

    def narrowed(self, tensor: Tensor) -> Tensor | None:
        """The int32 tensor that `widen` was given, for one that it made and that is not on the host yet."""
        if tensor.dtype != I64 or tensor.apply is None or tensor in self.hosted or self.known_value(tensor) is not None:
            return None
        return tensor.apply.args[0]

    def words(self, tensor: Tensor) -> Storage:
        """`storage`, of int64 too where it lies on the device as int32."""
        return self.storage(self.narrowed(tensor) or tensor)

    def _fits(self, tensor: Tensor) -> Tensor:
        """Refuse, while there is a way round, what no dispatch could see in one piece. Raises TooLarge."""
        self._seen(padded(tensor.size * 4))
        return tensor

    def _seen(self, nbytes: int) -> None:
        limit = self.target.max_binding_bytes
        if nbytes > limit:
            raise TooLarge(f"{nbytes} bytes are over the adapter's limit of {limit} for one buffer that a shader sees")

    def _room(self, tensor: Tensor) -> Storage:
        """Memory for a tensor."""
        half = self._lies_half(tensor)
        return Storage(padded(tensor.size * (2 if half else 4)), half=half)

    def _lies_half(self, tensor: Tensor) -> bool:
        return self.target.f16 and (tensor.half or tensor.dtype == F16)

    def _is_half(self, tensor: Tensor) -> bool:
        """Whether a tensor lies as f16, or will once it is computed."""
        if tensor not in self.placed and self.known_value(tensor) is None:
            return self._lies_half(self._narrow(tensor) or tensor)
        return self.storage(tensor).half

    def _narrow(self, tensor: Tensor) -> Tensor | None:
        """The tensor of a narrow dtype that a lazy one shows as it is held, and nothing else."""
        apply = tensor.apply
        if apply is None or apply.wgsl != "x" or len(apply.args) != 1:
            return None
        (arg,) = apply.args
        return arg if arg.shape == tensor.shape and HELD.get(arg.dtype) == tensor.dtype else None

    def _compute(self, tensor: Tensor) -> Storage:
        """Emit a lazy tensor with all that fuses into it."""
        raise NotImplementedError


def padded(nbytes: int) -> int:
    """A size that buffers may have."""
    return max(16, (nbytes + 15) // 16 * 16)
