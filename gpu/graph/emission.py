"""The steps of a block in the making, and where every tensor lies.

Elementwise results and the results of kernels with `result` stay lazy until somebody needs their
bytes; by then what could be fused has been. Where things lie is in places.py. This file does not
know operators (lowering.py) and does not walk the graph (planner.py); it does not know wgpu.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import InvalidModel
from ..kernels.kernel import Epilogue, Kernel, admits, link, pack_params
from ..kernels.place import place_kernel
from ..kernels.registry import NoKernel
from . import fuse
from .places import Places, padded
from .steps import Copy, Dispatch, IndexCheck
from .tensor import Apply, Pending, Shape, Storage, Tensor, gpu_type

__all__ = ["Emission"]

INLINE_LIMIT = 24
"""Elementwise operators in one fused expression, at most."""


class Emission(Places):
    """Emits steps: dispatches, copies, and what fuses into them."""

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
        effort: float = 1.0,
        touches: int | None = None,
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
            flops: as of `dispatch`.
            effort: as of `dispatch`.
            touches: as of `dispatch`.
            of: all its elements are elements of this, so they are f16 if those are.
        """
        assert kernel.result is not None
        assert len(reads) == len(kernel.reads)
        waiting = Pending(kernel, tuple(reads), dict(params), groups, flops, self.node, effort, touches)
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
        effort: float = 1.0,
        touches: int | None = None,
        epilogue: Epilogue | None = None,
        check: IndexCheck | None = None,
    ) -> None:
        """Emit a kernel now. Nothing is emitted where there are no workgroups.

        Args:
            kernel: its text, without what is fused.
            reads: its buffers, then those of what is fused.
            writes: what it makes.
            params: values of its parameters.
            groups: workgroups for the whole step.
            flops: operations on numbers, a multiply-add is two: for profiles, and the first estimate of its time.
            effort: how many times as long as these take it takes, by that estimate.
            touches: elements of the kernel's own buffers that it reads and writes, where that is not all of them.
            epilogue: what is fused onto its end.
            check: its flag is word `len(checks)` of `flags`, the last of `writes`.
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
            self.flags.nbytes = padded(4 * len(self.checks))
        for storage in (*reads, *writes):
            self._seen(storage.nbytes)
        nbytes = sum(s.nbytes for s in (*reads, *writes))
        if touches is not None:
            nbytes = touches * (*reads, *writes)[0].each + sum(s.nbytes for s in reads[len(kernel.reads) :])
        target = self.target
        cost = target.overhead_s + max(effort * flops / target.flops_per_s, nbytes / target.bytes_per_s)
        packed = pack_params(program.params, params)
        self.steps.append(
            Dispatch(program, tuple(reads), tuple(writes), packed, groups, cost, self.node, flops, nbytes, check)
        )

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
        self.dispatch(kernel, [source], [target], params, -(-params["count"] // 256), touches=2 * count)

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
            return self._emit_pending(tensor.pending, self._room(tensor), None, (), {}, 0.0)
        assert tensor.apply is not None, f"{tensor!r} lies nowhere"
        tree = self._settle(tensor)
        made = self._room(tensor)
        if tensor.size == 0:
            return made
        root = tree.root
        leaf_storages = [self.storage(leaf) for leaf in tree.leaves]
        flops = float(tensor.size * tree.weight(tensor))
        if root is not None:
            assert root.pending is not None
            kernel = root.pending.kernel
            epilogue, params = fuse.epilogue(tree, tensor, kernel.width)
            return self._emit_pending(root.pending, made, epilogue, leaf_storages, params, flops)
        kernel = fuse.map_kernel(self.target)
        epilogue, params = fuse.epilogue(tree, tensor, kernel.width)
        quads = -(-tensor.size // 4)
        params["quads"] = quads
        groups = -(-quads // fuse.QUADS_PER_GROUP)
        self.dispatch(kernel, leaf_storages, [made], params, groups, flops=flops, epilogue=epilogue)
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
        flops: float,
    ) -> Storage:
        node, self.node = self.node, pending.node
        self.dispatch(
            pending.kernel,
            (*pending.reads, *reads),
            [out],
            {**pending.params, **params},
            pending.groups,
            flops=pending.flops + flops,
            effort=pending.effort,
            touches=pending.touches,
            epilogue=epilogue,
        )
        self.node = node
        return out
