"""The steps of a block in the making, and where every tensor lies.

Elementwise results and the results of kernels with `result` stay lazy until somebody needs their
bytes; by then what could be fused has been. This file does not know operators (lowering.py) and
does not walk the graph (planner.py); it does not know wgpu.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from ..errors import InvalidModel
from ..kernels.kernel import Epilogue, Kernel, admits, link, pack_params
from ..kernels.place import place_kernel
from ..kernels.registry import NoKernel, TooLarge
from . import fuse
from .steps import Copy, Dispatch, Fetch, IndexCheck, Step, Upload
from .target import Target
from .tensor import F16, HELD, I64, Apply, Array, Pending, Shape, Storage, Tensor, as_halves, as_words, gpu_type

__all__ = ["Emission", "Undecided"]

INLINE_LIMIT = 24
"""Elementwise operators in one fused expression, at most."""


class Undecided(Exception):
    """A value is needed to go on planning and is only known at run time: the block ends here."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.tensor = tensor


class Emission:
    """The steps of a block in the making, and where every tensor lies.

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

            made = Storage(_padded(first[0].size * (2 if half else 4)), "weight", fill, half)
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

    # --- emitting -----------------------------------------------------------------------------

    def view(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """The same bytes under another shape of as many elements: no work."""
        shape = tuple(int(s) for s in shape)
        if self.known_value(tensor) is not None:
            return self.derive(tensor, ("view", shape), lambda array: array.reshape(shape))
        if tensor.shape == shape:
            return tensor
        narrow = self.narrowed(tensor)
        if narrow is not None:
            return self.widen(self.view(narrow, shape))
        made = Tensor(tensor.dtype, shape, half=tensor.half)
        self.placed[made] = self.storage(tensor)
        return made

    def map(
        self,
        wgsl: str,
        args: Mapping[str, Tensor],
        *,
        dtype: Any = None,
        shape: Shape | None = None,
        params: Mapping[str, float] | None = None,
        label: str = "",
        functions: str = "",
        weight: int = 1,
    ) -> Tensor:
        """An elementwise result: `wgsl` is an expression over scalars named as in `args`.

        Args:
            wgsl: for instance "select(params.alpha * x, x, x >= 0.0)". Names of `args` have
                their WGSL scalar type (f32, i32, u32, bool), `params.NAME` is f32.
            args: tensors that broadcast against each other.
            dtype: of the result, default: that of the first argument.
            shape: of the result, default: as NumPy broadcasts.
            params: f32 scalars; they travel outside of the shader.
            label: for explain().
            functions: WGSL at module scope that the expression calls, under names that are its own.
            weight: how many operators the expression is worth, where that is not one.

        Raises:
            InvalidModel: the shapes do not broadcast.
            NoKernel: a dtype has no GPU type.
        """
        tensors = tuple(args.values())
        dtype = np.dtype(dtype) if dtype is not None else tensors[0].dtype
        for kind in (dtype, *(t.dtype for t in tensors)):
            if gpu_type(kind) is None:
                raise NoKernel(f"no GPU type for {kind}")
        shape = self.broadcast(*(t.shape for t in tensors)) if shape is None else tuple(shape)
        listed = tuple((params or {}).items())
        apply = Apply(wgsl, tuple(args), tensors, listed, label or self.op, functions, weight)
        made = Tensor(dtype, shape, apply=apply)
        for tensor in (made, *tensors):
            self._fits(tensor)
        for arg in tensors:
            self.uses[arg] = self.uses.get(arg, 0) + 1
        self._limit(made)
        return made

    def pending(
        self,
        kernel: Kernel,
        reads: Sequence[Storage],
        params: Mapping[str, int | float],
        groups: int,
        dtype: Any,
        shape: Shape,
        *,
        flops: float = 0.0,
        of: Tensor | None = None,
    ) -> Tensor:
        """The result of a kernel with `result`: emitted later, with what can be fused onto its end.

        Args:
            kernel: with `result`.
            reads: in the order of `kernel.reads`.
            params: a value for each of `kernel.params`.
            groups: workgroups for the whole step.
            dtype: of the result.
            shape: of the result; its elements in row-major order are what `store` counts.
            flops: floating point operations, for the first estimate of its time.
            of: all its elements are elements of this, so they are f16 if those are.
        """
        assert kernel.result is not None
        assert len(reads) == len(kernel.reads)
        waiting = Pending(kernel, tuple(reads), dict(params), groups, flops, self.node)
        half = of is not None and self._is_half(of)
        return self._fits(Tensor(np.dtype(dtype), tuple(shape), pending=waiting, half=half))

    def dispatch(
        self,
        kernel: Kernel,
        reads: Sequence[Storage],
        writes: Sequence[Storage],
        params: Mapping[str, int | float],
        groups: int,
        *,
        flops: float = 0.0,
        epilogue: Epilogue | None = None,
        check: IndexCheck | None = None,
    ) -> None:
        """Emit a kernel now. Nothing is emitted where there are no workgroups.

        With `check`, its flag is word `len(checks)` of `flags`, the last of `writes`.
        """
        if groups <= 0:
            return
        may = admits(kernel, epilogue)
        reads = [self._wide(s) if s.half and not able else s for s, (_, able) in zip(reads, may, strict=False)]
        halves = frozenset(name for s, (name, _) in zip((*reads, *writes), may, strict=True) if s.half)
        program = link(kernel, epilogue, halves, not halves or self.target.cpu)
        assert (len(reads), len(writes)) == (program.reads, program.writes), kernel.name
        if check is not None:
            self.checks.append(check)
            self.flags.nbytes = _padded(4 * len(self.checks))
        for storage in (*reads, *writes):
            self._seen(storage.nbytes)
        nbytes = sum(s.nbytes for s in (*reads, *writes))
        target = self.target
        cost = target.overhead_s + max(flops / target.flops_per_s, nbytes / target.bytes_per_s)
        packed = pack_params(program.params, params)
        self.steps.append(Dispatch(program, tuple(reads), tuple(writes), packed, groups, cost, self.node, check))

    def copy(self, source: Storage, source_offset: int, target: Storage, target_offset: int, count: int) -> None:
        """Emit a copy of `count` elements; offsets in elements."""
        if count <= 0:
            return
        each = target.each
        begin, end, nbytes = source_offset * each, target_offset * each, count * each
        if source.half != target.half or begin % 4 or end % 4 or nbytes % 4:
            self._moved(source, source_offset, target, target_offset, count, count, count)
            return
        cost = self.target.overhead_s + nbytes * 2 / (4 * self.target.bytes_per_s)
        self.steps.append(Copy(source, begin, target, end, nbytes, cost, self.node))

    def place(self, source: Storage, target: Storage, offset: int, rows: int, run: int, pitch: int) -> None:
        """Emit copies of `rows` runs of a storage to where they begin at offset, offset + pitch, ... of another."""
        if rows > 4:
            self._moved(source, 0, target, offset, rows * run, run, pitch)
            return
        for row in range(rows):
            self.copy(source, row * run, target, offset + row * pitch, run)

    def _moved(
        self, source: Storage, first: int, target: Storage, offset: int, count: int, run: int, pitch: int
    ) -> None:
        params = {"count": count, "run": run, "pitch": pitch, "offset": offset, "first": first}
        wide = not any(n % 4 for n in params.values())
        if wide:
            params = {name: n // 4 for name, n in params.items()}
        kind = "f32" if source.half or target.half else "u32"
        kernel = place_kernel(kind, wide, self.target.cpu)
        self.dispatch(kernel, [source], [target], params, -(-params["count"] // 256))

    def _wide(self, storage: Storage) -> Storage:
        """What a storage of f16 holds, as f32."""
        made = Storage(storage.nbytes * 2)
        self._moved(storage, 0, made, 0, *[storage.nbytes // 2] * 3)
        return made

    # --- fusion -------------------------------------------------------------------------------

    def broadcast(self, *shapes: Shape) -> Shape:
        """The shape that NumPy would broadcast to. Raises InvalidModel naming the node."""
        try:
            return tuple(np.broadcast_shapes(*shapes))
        except ValueError:
            listed = " and ".join(str(list(s)) for s in shapes)
            raise InvalidModel(f"node {self.node!r} ({self.op}): shapes {listed} do not broadcast") from None

    def is_lazy(self, tensor: Tensor) -> bool:
        """Whether a tensor is still to be computed."""
        return (tensor.apply is not None or tensor.pending is not None) and tensor not in self.placed

    def _limit(self, tensor: Tensor) -> None:
        """Compute arguments now where one fused expression would grow too large."""
        assert tensor.apply is not None
        tree = fuse.Tree(tensor, self.placed, self.known_value)
        room = self.target.max_storage_buffers - 5
        if len(tree.applies) <= INLINE_LIMIT and len(tree.leaves) <= room:
            return
        for arg in sorted((a for a in tensor.apply.args if self.is_lazy(a)), key=lambda a: -a.size):
            self.storage(arg)
            tree = fuse.Tree(tensor, self.placed, self.known_value)
            if len(tree.applies) <= INLINE_LIMIT and len(tree.leaves) <= room:
                return

    def _compute(self, tensor: Tensor) -> Storage:
        """Emit a lazy tensor with all that fuses into it."""
        if tensor.pending is not None:
            return self._emit_pending(tensor.pending, self._room(tensor), None, (), {})
        assert tensor.apply is not None, f"{tensor!r} lies nowhere"
        tree = self._settle(tensor)
        made = self._room(tensor)
        if tensor.size == 0:
            return made
        root = tree.root
        leaf_storages = [self.storage(leaf) for leaf in tree.leaves]
        if root is not None:
            assert root.pending is not None
            kernel = root.pending.kernel
            epilogue, params = fuse.epilogue(tree, tensor, kernel.width)
            return self._emit_pending(root.pending, made, epilogue, leaf_storages, params)
        kernel = fuse.map_kernel(self.target)
        epilogue, params = fuse.epilogue(tree, tensor, kernel.width)
        quads = -(-tensor.size // 4)
        params["quads"] = quads
        groups = -(-quads // fuse.QUADS_PER_GROUP)
        self.dispatch(
            kernel,
            leaf_storages,
            [made],
            params,
            groups,
            flops=float(tensor.size * len(tree.applies)),
            epilogue=epilogue,
        )
        return made

    def _settle(self, tensor: Tensor) -> fuse.Tree:
        """Decide what of a lazy tensor's expression is fused, and compute the rest first.

        1. At most one unemitted kernel is the root, and only if its shape is the result's.
        2. What others will need later is computed by itself first if it holds a kernel, or is large.
        3. An expression over fewer elements than the result is computed by itself if that saves work.
        """
        while True:
            tree = fuse.Tree(tensor, self.placed, self.known_value)
            room = self.target.max_storage_buffers - 1
            first = None
            inside = Counter(arg for lazy in tree.applies if lazy.apply is not None for arg in lazy.apply.args)
            for node in tree.lazies:  # innermost first
                if node is tensor:
                    continue
                holds_root = node.pending is not None or tree.holds_root(node)
                wanted_later = self.uses.get(node, 0) > inside[node]
                small = node.size * 4 <= tensor.size and node.size > 1
                if holds_root and (wanted_later or node.shape != tensor.shape):
                    first = node
                    break
                if not holds_root and ((wanted_later and tree.weight(node) > 3) or (small and tree.weight(node) > 1)):
                    first = node
                    break
            if first is None and len(tree.roots) > 1:
                first = tree.roots[0]
            if first is None and tree.root is not None:
                assert tree.root.pending is not None
                if len(tree.leaves) + len(tree.root.pending.reads) > room:
                    first = tree.root
            if first is None:
                return tree
            self.storage(first)

    def _emit_pending(
        self,
        pending: Pending,
        out: Storage,
        epilogue: Epilogue | None,
        reads: Sequence[Storage],
        params: Mapping[str, int | float],
    ) -> Storage:
        node, self.node = self.node, pending.node
        self.dispatch(
            pending.kernel,
            (*pending.reads, *reads),
            [out],
            {**pending.params, **params},
            pending.groups,
            flops=pending.flops,
            epilogue=epilogue,
        )
        self.node = node
        return out

    def _fits(self, tensor: Tensor) -> Tensor:
        """Refuse, while there is a way round, what no dispatch could see in one piece. Raises TooLarge."""
        self._seen(_padded(tensor.size * 4))
        return tensor

    def _seen(self, nbytes: int) -> None:
        limit = self.target.max_binding_bytes
        if nbytes > limit:
            raise TooLarge(f"{nbytes} bytes are over the adapter's limit of {limit} for one buffer that a shader sees")

    def _room(self, tensor: Tensor) -> Storage:
        """Memory for a tensor."""
        half = self._lies_half(tensor)
        return Storage(_padded(tensor.size * (2 if half else 4)), half=half)

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


def _padded(nbytes: int) -> int:
    return max(16, (nbytes + 15) // 16 * 16)
