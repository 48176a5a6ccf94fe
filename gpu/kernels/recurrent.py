"""RNN, GRU and LSTM: the inputs' products for all time steps at once, then one dispatch per time step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from .kernel import Binding, Kernel
from .recurrent_plain import GATES, Cell, activations, lower_plain
from .registry import NoKernel, Operator, op
from .window import bad

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Array, Storage, Tensor

__all__ = ["GRU", "LSTM", "RNN"]

_F32 = np.dtype(np.float32)
_ROWS = 8
_FUNCTIONS = """fn squash(x: vec4f) -> vec4f { return 1.0 / (1.0 + exp(-clamp(x, vec4f(-80.0), vec4f(80.0)))); }
fn curve(x: vec4f) -> vec4f { return tanh(clamp(x, vec4f(-15.0), vec4f(15.0))); }
"""


@lru_cache
def _input_kernel(lanes: int) -> Kernel:
    """P[row, :] = bias + X[row, :] W for 8 rows and four columns per lane; W: [bias, then input][columns]."""
    rows = range(_ROWS)
    start = "\n".join(f"let at{r} = min(row + {r}u, params.rows - 1u) * params.inputs;\nvar p{r} = bias;" for r in rows)
    steps = "\n".join(f"p{r} = fma(vec4f(X[at{r} + k]), w, p{r});" for r in rows)
    stores = "\n".join(
        f"if (row + {r}u < params.rows) {{ store4((row + {r}u) * params.columns + column, p{r}); }}" for r in rows
    )
    body = f"""let column = group % params.across * {lanes}u + lane;
let row = group / params.across * {_ROWS}u;
if (column >= params.columns) {{ return; }}
let bias = W[column];
{start}
for (var k = 0u; k < params.inputs; k++) {{
    let w = W[(k + 1u) * params.columns + column];
{steps}
}}
{stores}"""
    names = ("across", "columns", "rows", "inputs")
    return Kernel("recurrent_input", body, (Binding("X"), Binding("W", "vec4f")),
                  params=tuple((n, "u32") for n in names), width=4, lanes=lanes)


@lru_cache
def _step_kernel(cell: str, gates: int, rows: int, whole: bool, lanes: int) -> Kernel:
    """One time step of all directions: four units of `rows` sequences per lane.

    P: input products [time, sequence, direction, gate, unit]. R: [direction][bias, then unit][gate][unit].
    S: the state before, T: the state after, [h, c][direction, sequence, unit]. Y: [time, direction, sequence, hidden].
    """
    every = [(g, r) for r in range(rows) for g in range(gates)]
    lines = [f"""let unit = group % params.across * {lanes}u + lane;
let rest = group / params.across;
let first = rest % params.blocks * {rows}u;
let d = rest / params.blocks;
if (unit >= params.units) {{ return; }}
let time = select(params.time0, params.time1, d == 1u);
let span = params.units * {gates}u;
var at_r = d * (params.units * 4u + 1u) * span + unit;"""]
    for r in range(rows):
        lines.append(f"""let b{r} = min(first + {r}u, params.sequences - 1u);
let h{r} = (d * params.sequences + b{r}) * params.units;
let p{r} = ((time * params.sequences + b{r}) * params.directions + d) * span + unit;""")
    lines += [f"var a{g}_{r} = R[at_r + {g}u * params.units];" for g, r in every]
    lines.append("at_r += span;\nfor (var k = 0u; k < params.units; k++) {")
    lines += [f"let s{r} = S[h{r} + k];" for r in range(rows)]
    for i in range(4):
        lines += [f"let w{i}_{g} = R[at_r + {g}u * params.units];" for g in range(gates)]
        lines += [f"a{g}_{r} = fma(vec4f(s{r}[{i}]), w{i}_{g}, a{g}_{r});" for g, r in every]
        lines.append("at_r += span;")
    lines.append("}")
    for r in range(rows):
        lines.append(f"if (first + {r}u < params.sequences) {{")
        lines += [f"let x{g} = P[p{r} + {g}u * params.units];" for g in range(gates)]
        if cell == "lstm":
            lines.append(f"""let memory = params.directions * params.sequences * params.units + h{r} + unit;
let c = squash(x2 + a2_{r}) * S[memory] + squash(x0 + a0_{r}) * curve(x3 + a3_{r});
let h = squash(x1 + a1_{r}) * curve(c);
T[memory] = c;""")
        else:
            lines.append(f"""let z = squash(x0 + a0_{r});
let n = curve(x2 + squash(x1 + a1_{r}) * a2_{r});
let h = (1.0 - z) * n + z * S[h{r} + unit];""")
        lines.append(f"T[h{r} + unit] = h;\nlet y = (time * params.directions + d) * params.sequences + b{r};")
        if whole:
            lines.append("Y[y * params.units + unit] = h;")
        else:
            lines += [f"if (unit * 4u + {k}u < params.hidden) {{ Y[y * params.hidden + unit * 4u + {k}u] = h[{k}]; }}"
                      for k in range(4)]
        lines.append("}")
    names = ("across", "blocks", "units", "hidden", "sequences", "directions", "time0", "time1")
    return Kernel(
        f"{cell}_step", "\n".join(lines), tuple(Binding(n, "vec4f") for n in "PRS"),
        (Binding("T", "vec4f"), Binding("Y", "vec4f" if whole else "f32")), tuple((n, "u32") for n in names),
        result=None, lanes=lanes, functions=_FUNCTIONS,
    )


def _pack_input(weights: Array, bias: Array | None, gates: int, carried: Sequence[int], units: int) -> Array:
    """[direction, gate * hidden, input] to [bias, then input][direction, gate, unit]."""
    directions, rows, inputs = weights.shape
    hidden = rows // gates
    out = np.zeros((inputs + 1, directions, gates, units), np.float32)
    out[1:, :, :, :hidden] = weights.reshape(directions, gates, hidden, inputs).transpose(3, 0, 1, 2)
    if bias is not None:
        both = bias.reshape(directions, 2, gates, hidden)
        out[0, :, :, :hidden] = both[:, 0]
        for gate in carried:
            out[0, :, gate, :hidden] += both[:, 1, gate]
    return out


def _pack_recurrent(weights: Array, bias: Array | None, gates: int, carried: Sequence[int], units: int) -> Array:
    """[direction, gate * hidden, hidden] to [direction][bias, then unit][gate][unit]."""
    directions, _, hidden = weights.shape
    out = np.zeros((directions, units + 1, gates, units), np.float32)
    out[:, 1 : hidden + 1, :, :hidden] = weights.reshape(directions, gates, hidden, hidden).transpose(0, 3, 1, 2)
    if bias is not None:
        both = bias.reshape(directions, 2, gates, hidden)
        for gate in set(range(gates)) - set(carried):
            out[:, 0, gate, :hidden] = both[:, 1, gate]
    return out


class _Recurrent(Operator):
    """What the three share.

    `carried`: gates whose recurrent bias may be added to the input's. `default`: activation functions.
    """

    cell: ClassVar[str]
    states: ClassVar[int] = 1
    carried: ClassVar[tuple[int, ...]] = ()
    default: ClassVar[tuple[str, ...]]

    hidden_size: int
    direction: str
    layout: int
    clip: float | None
    activations: Sequence[str]
    activation_alpha: Sequence[float]
    activation_beta: Sequence[float]

    @property
    def gates(self) -> int:
        """Gates."""
        return GATES[self.cell]

    def _quick(self, plan: Lowering, weights: Sequence[Tensor | None]) -> bool:
        """Whether the quick kernels do: known weights, ONNX's own functions, nothing special."""
        names = tuple(name.lower() for name in self.activations)
        return (
            not self.layout
            and self.clip is None
            and (not names or names == self.default * (2 if self.direction == "bidirectional" else 1))
            and all(t is None or plan.known_value(t) is not None for t in weights)
        )

    def _lower(
        self, plan: Lowering, x: Tensor | None, w: Tensor | None, r: Tensor | None, b: Tensor | None,
        lengths: Tensor | None, initial: Sequence[Tensor | None], peepholes: Tensor | None = None, *,
        quick: bool = True, linear: bool = False, coupled: bool = False,
    ) -> tuple[Tensor, ...]:
        if x is None or w is None or r is None:
            raise bad(plan, "the inputs X, W and R", "fewer")
        directions = 2 if self.direction == "bidirectional" else 1
        if x.rank != 3 or w.rank != 3 or r.rank != 3:
            raise bad(plan, "X, W and R of 3 dimensions", [x.rank, w.rank, r.rank])
        time, batch, inputs = x.shape if not self.layout else (x.shape[1], x.shape[0], x.shape[2])
        hidden = r.shape[2]
        rows = self.gates * hidden
        start = (batch, directions, hidden) if self.layout else (directions, batch, hidden)
        for name, tensor, shape in (
            ("W", w, (directions, rows, inputs)),
            ("R", r, (directions, rows, hidden)),
            ("B", b, (directions, 2 * rows)),
            ("P", peepholes, (directions, 3 * hidden)),
            ("sequence_lens", lengths, (batch,)),
            *((f"initial state {n}", tensor, start) for n, tensor in enumerate(initial)),
        ):
            if tensor is not None and tensor.shape != shape:
                raise bad(plan, f"{name} of shape {list(shape)}", list(tensor.shape))
        if self.hidden_size and self.hidden_size != hidden:
            raise bad(plan, f"hidden_size {hidden} as in R", self.hidden_size)
        if self.direction not in ("forward", "reverse", "bidirectional"):
            raise bad(plan, "direction forward, reverse or bidirectional", self.direction)
        if x.dtype != np.float32:
            raise NoKernel(f"no kernel for {x.dtype}")
        known = None if lengths is None else plan.known_value(lengths)
        if known is not None and (known == time).all():
            lengths = None
        if not (quick and lengths is None and peepholes is None and not coupled and self._quick(plan, (w, r, b))):
            functions, params = activations(plan, self.activations, self.activation_alpha, self.activation_beta,
                                            self.default, directions)
            if self.clip is not None:
                params["clip"] = self.clip
            cell = Cell(self.cell, functions, self.clip is not None, lengths is not None, linear, peepholes is not None,
                        coupled)
            return lower_plain(plan, cell, params, x, w, r, b, lengths, initial, peepholes, layout=self.layout,
                               reverse=self.direction == "reverse")
        units = -(-hidden // 4) * 4
        bias = None if b is None else plan.known_value(b)
        key = (self.cell, b, units)
        packed_w = plan.weight(w, (*key, "w"), lambda a: _pack_input(a, bias, self.gates, self.carried, units))
        packed_r = plan.weight(r, (*key, "r"), lambda a: _pack_recurrent(a, bias, self.gates, self.carried, units))
        y = plan.new(_F32, (time, directions, batch, hidden))
        state = self._start(plan, initial, directions * batch, hidden, units)
        if batch and time:
            products = self._products(plan, x, packed_w, directions * self.gates * units)
            sizes = (time, batch, hidden, units, directions)
            state = self._steps(plan, products, packed_r, state, plan.storage(y), sizes)
        finals = []
        for n in range(self.states):
            final = plan.new(_F32, (directions, batch, hidden))
            lines = directions * batch
            _move(plan, state, n * lines * units, units, plan.storage(final), 0, hidden, lines, hidden)
            finals.append(final)
        return (y, *finals)

    def _start(self, plan: Lowering, initial: Sequence[Tensor | None], lines: int, hidden: int, units: int) -> Storage:
        zeros = plan.storage(plan.constant(np.zeros(max(self.states * lines * units, 1), np.float32)))
        if all(tensor is None for tensor in initial):
            return zeros
        state = plan.storage(plan.new(_F32, (self.states, lines, units)))
        if hidden < units or None in initial:
            plan.copy(zeros, 0, state, 0, self.states * lines * units)
        for n, tensor in enumerate(initial):
            if tensor is not None:
                _move(plan, plan.storage(tensor), 0, hidden, state, n * lines * units, units, lines, hidden)
        return state

    def _products(self, plan: Lowering, x: Tensor, packed: Storage, columns: int) -> Storage:
        rows, inputs = x.shape[0] * x.shape[1], x.shape[2]
        kernel = _input_kernel(8 if plan.target.cpu else 64)
        across = -(-columns // (4 * kernel.lanes))
        params = {"across": across, "columns": columns // 4, "rows": rows, "inputs": inputs}
        made = plan.pending(kernel, [plan.storage(x), packed], params, across * -(-rows // _ROWS), x.dtype,
                            (rows, columns), flops=2.0 * rows * columns * inputs)
        return plan.storage(made)

    def _steps(
        self, plan: Lowering, products: Storage, packed: Storage, state: Storage, y: Storage,
        sizes: tuple[int, int, int, int, int],
    ) -> Storage:
        time, batch, hidden, units, directions = sizes
        rows = 4 if batch > 2 else 1
        kernel = _step_kernel(self.cell, self.gates, rows, hidden == units, 8 if plan.target.cpu else 32)
        across = -(-units // (4 * kernel.lanes))
        blocks = -(-batch // rows)
        flops = 2.0 * directions * batch * self.gates * units * units
        # Of products and y, which hold all times, only this one's; units of padding count.
        touches = packed.nbytes // 4 + directions * batch * units * (self.gates + 2 * self.states + 1)
        spare = [plan.storage(plan.new(_F32, (self.states, directions, batch, units))) for _ in range(2)]
        for n in range(time):
            back = time - 1 - n
            params: dict[str, int | float] = {
                "across": across, "blocks": blocks, "units": units // 4, "hidden": hidden, "sequences": batch,
                "directions": directions, "time0": back if self.direction == "reverse" else n, "time1": back,
            }
            after = spare[n % 2]
            groups = across * blocks * directions
            plan.dispatch(kernel, [products, packed, state], [after, y], params, groups, flops=flops, touches=touches)
            state = after
        return state


def _move(
    plan: Lowering, source: Storage, start: int, stride: int, target: Storage, target_start: int, target_stride: int,
    lines: int, count: int,
) -> None:
    """Copy lines of `count` elements, in one piece where there are no gaps."""
    if stride == target_stride == count:
        lines, count = 1, lines * count
    for line in range(lines):
        plan.copy(source, start + line * stride, target, target_start + line * target_stride, count)


@op("LSTM", since=7)
class LSTM(_Recurrent):
    """i, o, f, c' = X W + h R + B;  c = sigm(f) c + sigm(i) tanh(c');  h = sigm(o) tanh(c).

    X: [T, B, I] f32, W: [D, 4H, I], R: [D, 4H, H], B: [D, 8H], initial_h, initial_c: [D, B, H]
    -> Y: [T, D, B, H], Y_h, Y_c: [D, B, H].
    """

    cell = "lstm"
    states = 2
    carried = (0, 1, 2, 3)
    default = ("sigmoid", "tanh", "tanh")

    hidden_size: int = 0
    direction: str = "forward"
    layout: int = 0
    clip: float | None = None
    activations: Sequence[str] = ()
    activation_alpha: Sequence[float] = ()
    activation_beta: Sequence[float] = ()
    input_forget: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Add the product and one dispatch per time step."""
        x, w, r, b, lengths, h, c, peepholes = (*inputs, *(None,) * 8)[:8]
        return self._lower(plan, x, w, r, b, lengths, (h, c), peepholes, coupled=bool(self.input_forget))


@op("GRU", since=7)
class GRU(_Recurrent):
    """z, r = sigm(X W + h R + B);  n = tanh(X W + r (h R + Rb) + Wb);  h = (1 - z) n + z h.

    X: [T, B, I] f32, W: [D, 3H, I], R: [D, 3H, H], B: [D, 6H], initial_h: [D, B, H] -> Y: [T, D, B, H], Y_h: [D, B, H].
    Without linear_before_reset, n = tanh(X W + (r h) R + Wb + Rb).
    """

    cell = "gru"
    carried = (0, 1)
    default = ("sigmoid", "tanh")

    hidden_size: int = 0
    direction: str = "forward"
    layout: int = 0
    clip: float | None = None
    activations: Sequence[str] = ()
    activation_alpha: Sequence[float] = ()
    activation_beta: Sequence[float] = ()
    linear_before_reset: int = 0

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Add the product and one or two dispatches per time step."""
        x, w, r, b, lengths, h = (*inputs, *(None,) * 6)[:6]
        linear = bool(self.linear_before_reset)
        return self._lower(plan, x, w, r, b, lengths, (h,), quick=linear, linear=linear)


@op("RNN", since=7)
class RNN(_Recurrent):
    """h = tanh(X W + h R + B).

    X: [T, B, I] f32, W: [D, H, I], R: [D, H, H], B: [D, 2H], initial_h: [D, B, H] -> Y: [T, D, B, H], Y_h: [D, B, H].
    """

    cell = "rnn"
    default = ("tanh",)

    hidden_size: int = 0
    direction: str = "forward"
    layout: int = 0
    clip: float | None = None
    activations: Sequence[str] = ()
    activation_alpha: Sequence[float] = ()
    activation_beta: Sequence[float] = ()

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Add the product and one dispatch per time step."""
        x, w, r, b, lengths, h = (*inputs, *(None,) * 6)[:6]
        return self._lower(plan, x, w, r, b, lengths, (h,), quick=False)
