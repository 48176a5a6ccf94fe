"""RNN, GRU and LSTM with all that ONNX lets one ask for, from weights in ONNX's layout.

recurrent.py has the quick way for what models mostly hold. The inputs' products for all time
steps come first here too; a time step is one dispatch (two for a GRU that resets before its
product), one lane for each unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ..graph.tensor import contiguous_strides
from .kernel import Binding, Kernel
from .matmul import product
from .move import strided
from .window import bad

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Storage, Tensor

__all__ = ["GATES", "Cell", "activations", "lower_plain"]

GATES = {"rnn": 1, "gru": 3, "lstm": 4}
_F32 = np.dtype(np.float32)

# WGSL over x, A (alpha) and B (beta), and their defaults.
_FUNCTIONS: dict[str, tuple[str, float | None, float | None]] = {
    "sigmoid": ("1.0 / (1.0 + exp(-clamp(x, -80.0, 80.0)))", None, None),
    "tanh": ("tanh(clamp(x, -15.0, 15.0))", None, None),
    "relu": ("max(x, 0.0)", None, None),
    "affine": ("A * x + B", 1.0, 0.0),
    "leakyrelu": ("select(A * x, x, x >= 0.0)", 0.01, None),
    "thresholdedrelu": ("select(0.0, x, x >= A)", 1.0, None),
    "scaledtanh": ("A * tanh(clamp(B * x, -15.0, 15.0))", 1.0, 1.0),
    "hardsigmoid": ("clamp(A * x + B, 0.0, 1.0)", 0.2, 0.5),
    "elu": ("select(A * (exp(min(x, 0.0)) - 1.0), x, x >= 0.0)", 1.0, None),
    "softsign": ("x / (1.0 + abs(x))", None, None),
    "softplus": ("max(x, 0.0) + log(1.0 + exp(-abs(x)))", None, None),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """What a cell's kernels depend on.

    Attributes:
        kind: "rnn", "gru" or "lstm".
        functions: names of the activation functions of each direction, in ONNX's order.
        clipped: the inputs of the activations are clipped. lengths: sequences have their own lengths.
        linear: GRU: the product comes before the reset. peepholes, coupled: LSTM.
    """

    kind: str
    functions: tuple[tuple[str, ...], ...]
    clipped: bool = False
    lengths: bool = False
    linear: bool = False
    peepholes: bool = False
    coupled: bool = False

    @property
    def gates(self) -> int:
        """Gates."""
        return GATES[self.kind]

    @property
    def states(self) -> int:
        """States: h, and c of an LSTM."""
        return 2 if self.kind == "lstm" else 1


def activations(
    plan: Lowering, names: Sequence[str], alphas: Sequence[float], betas: Sequence[float], default: Sequence[str],
    directions: int,
) -> tuple[tuple[tuple[str, ...], ...], dict[str, float]]:
    """The functions of each direction, and their alphas and betas as parameters. Raises InvalidModel."""
    lowered = [name.lower() for name in names] or [*default] * directions
    if len(lowered) != len(default) * directions or any(name not in _FUNCTIONS for name in lowered):
        raise bad(plan, f"{len(default) * directions} activation functions that ONNX has", list(names))
    params = {}
    given_a, given_b = list(alphas), list(betas)
    for n, name in enumerate(lowered):
        d, place = divmod(n, len(default))
        _, alpha, beta = _FUNCTIONS[name]
        if alpha is not None:
            params[f"alpha{place}_{d}"] = given_a.pop(0) if given_a else alpha
        if beta is not None:
            params[f"beta{place}_{d}"] = given_b.pop(0) if given_b else beta
    each = len(default)
    return tuple(tuple(lowered[d * each : (d + 1) * each]) for d in range(directions)), params


def _function_code(cell: Cell) -> tuple[str, list[str]]:
    """WGSL functions act0, act1, ... of a value and the direction, and the parameters that they read."""
    lines, names = [], []
    for place in range(len(cell.functions[0])):
        cases = []
        for d, functions in enumerate(cell.functions):
            text, alpha, beta = _FUNCTIONS[functions[place]]
            for letter, name, default in (("A", "alpha", alpha), ("B", "beta", beta)):
                if default is not None:
                    names.append(f"{name}{place}_{d}")
                    text = text.replace(letter, f"params.{name}{place}_{d}")
            cases.append(f"({text})")
        value = cases[0] if len(set(cases)) == 1 else f"select({cases[1]}, {cases[0]}, d == 0u)"
        # The cell's memory is an activation's input as well, but ONNX Runtime does not clip it.
        limit = "clamp(v, -params.clip, params.clip)" if cell.clipped and place < 2 else "v"
        lines.append(f"fn act{place}(v: f32, d: u32) -> f32 {{ let x = {limit}; return {value}; }}\n")
    return "".join(lines), names


_WHERE = """let t = group * 32u + lane;
if (t >= params.total) { return; }
let u = t % params.hidden;
let b = t / params.hidden % params.sequences;
let d = t / params.hidden / params.sequences;
let backwards = (params.reverse == 1u) | (d == 1u);
let own = t - u;
"""


@lru_cache
def _step_kernel(cell: Cell, stage: str) -> Kernel:
    """One time step of all directions, a lane for each unit.

    P: input products [row, direction, gate, unit]. R: [direction][unit before][gate][unit]. B: biases as
    ONNX has them. S: the state before, T: after, [h, c][direction, sequence, unit]. Y: as the strides say.
    Q: [z, r * h] of a GRU that resets before its product; stage "gates" makes it, "hidden" reads it.
    """
    gates = range(cell.gates)
    work = [0, 1] if stage == "gates" else [2] if stage == "hidden" else list(gates)
    source = "Q[params.total + own + k]" if stage == "hidden" else "S[own + k]"
    own_bias = cell.kind == "gru" and cell.linear
    lines = [_WHERE]
    lines.append(f"let span = min({'u32(max(L[b], 0))' if cell.lengths else 'params.time'}, params.time);")
    lines.append("""let live = params.step < span;
let when = select(params.step, span - 1u - params.step, live & backwards);
let width = params.hidden * GATESu;
let p = ((when * params.xt + b * params.xb) * params.directions + d) * width + u;
let bias = d * 2u * width + u;
var at = d * params.hidden * width + u;""".replace("GATES", str(cell.gates)))
    for g in work:
        place = f"{g}u * params.hidden"
        first = f"B[bias + {place}]"
        second = f"B[bias + width + {place}]"
        if own_bias and g == 2:
            lines.append(f"let x2 = P[p + {place}] + {first};\nvar a2 = {second};")
        else:
            lines.append(f"var a{g} = P[p + {place}] + ({first} + {second});")
    lines.append(f"for (var k = 0u; k < params.hidden; k++) {{\nlet s = {source};")
    lines += [f"a{g} = fma(s, R[at + {g}u * params.hidden], a{g});" for g in work]
    lines.append("at += width;\n}\nlet before = S[t];")
    if stage == "gates":
        lines.append("Q[t] = act0(a0, d);\nQ[params.total + t] = act0(a1, d) * before;")
    else:
        lines.append(_cell_code(cell, stage))
        if cell.kind == "lstm":
            lines.append("T[params.total + t] = select(memory, c, live);")
        lines.append("T[t] = select(before, h, live);")
        lines.append("Y[when * params.yt + d * params.yd + b * params.yb + u] = select(0.0, h, live);")
    code, names = _function_code(cell)
    reads = [Binding(n) for n in "PRBS"]
    reads += [Binding("L", "i32")] if cell.lengths else []
    reads += [Binding("H")] if cell.peepholes else []
    reads += [Binding("Q")] if stage == "hidden" else []
    ints = ("total", "hidden", "sequences", "directions", "reverse", "time", "step", "xt", "xb", "yt", "yd", "yb")
    return Kernel(
        f"{cell.kind}_{stage or 'step'}", "\n".join(lines), tuple(reads),
        (Binding("Q"),) if stage == "gates" else (Binding("T"), Binding("Y")),
        (*((n, "u32") for n in ints), *((n, "f32") for n in ("clip", *dict.fromkeys(names)))),
        result=None, lanes=32, functions=code,
    )


def _cell_code(cell: Cell, stage: str) -> str:
    if cell.kind == "rnn":
        return "let h = act0(a0, d);"
    if cell.kind == "gru":
        if stage == "hidden":
            return "let z = Q[t];\nlet h = (1.0 - z) * act1(a2, d) + z * before;"
        return """let z = act0(a0, d);
let h = (1.0 - z) * act1(x2 + act0(a1, d) * a2, d) + z * before;"""
    i, o, f = (f" + H[d * 3u * params.hidden + {n}u * params.hidden + u] * {what}" if cell.peepholes else ""
               for n, what in enumerate(("memory", "c", "memory")))
    forget = "(1.0 - i)" if cell.coupled else f"act0(a2{f}, d)"
    return f"""let memory = S[params.total + t];
let i = act0(a0{i}, d);
let c = {forget} * memory + i * act1(a3, d);
let h = act0(a1{o}, d) * act2(c, d);"""


def lower_plain(
    plan: Lowering, cell: Cell, params: dict[str, float], x: Tensor, w: Tensor, r: Tensor, b: Tensor | None,
    lengths: Tensor | None, initial: Sequence[Tensor | None], peepholes: Tensor | None, *, layout: int, reverse: bool,
) -> tuple[Tensor, ...]:
    """Add the products and the time steps.

    Args:
        plan: takes the kernels.
        cell: what kind of a cell it is.
        params: alphas and betas, and "clip".
        x: [time, batch, inputs], or [batch, time, inputs] with layout 1.
        w: [directions, gates * hidden, inputs].
        r: [directions, gates * hidden, hidden].
        b: [directions, 2 * gates * hidden].
        lengths: int32 [batch].
        initial: h (and c): [directions, batch, hidden], or [batch, directions, hidden] with layout 1.
        peepholes: [directions, 3 * hidden].
        layout: ONNX's.
        reverse: the only direction is backwards.

    Returns:
        Y, Y_h (and Y_c).
    """
    directions, hidden = r.shape[0], r.shape[2]
    batch, time = x.shape[:2] if layout else (x.shape[1], x.shape[0])
    width = cell.gates * hidden
    total = directions * batch * hidden
    zeros = plan.storage(plan.constant(np.zeros(max(cell.states * total, directions * 2 * width, 1), np.float32)))
    y_shape = (batch, time, directions, hidden) if layout else (time, directions, batch, hidden)
    y = plan.new(_F32, y_shape)
    state = plan.storage(plan.new(_F32, (cell.states, total)))
    for n, tensor in enumerate(initial):
        if tensor is None:
            plan.copy(zeros, 0, state, n * total, total)
        else:
            moved = _turned(plan, tensor) if layout else tensor
            plan.copy(plan.storage(moved), 0, state, n * total, total)
    if total and time:
        rows = time * batch
        flat = product(plan, plan.view(x, (rows, x.shape[2])), plan.view(w, (directions * width, w.shape[2])),
                       (rows, directions * width), b_transposed=True)
        dims = (directions, hidden, width)
        columns = strided(plan, r, dims, dims, (width * hidden, 1, hidden), 0)
        reads = [plan.storage(flat), plan.storage(columns), zeros if b is None else plan.storage(b)]
        more = [plan.storage(t) for t in (lengths, peepholes) if t is not None]
        steps = contiguous_strides(y_shape)
        yb, yt, yd = (steps[0], steps[1], steps[2]) if layout else (steps[2], steps[0], steps[1])
        sizes = {
            "total": total, "hidden": hidden, "sequences": batch, "directions": directions, "reverse": int(reverse),
            "time": time, "xt": 1 if layout else batch, "xb": time if layout else 1, "yt": yt, "yd": yd, "yb": yb,
            "clip": math.inf,
        }
        state = _steps(plan, cell, {**sizes, **params}, reads, more, state, plan.storage(y))
    finals = []
    for n in range(cell.states):
        final = plan.new(_F32, (directions, batch, hidden))
        plan.copy(state, n * total, plan.storage(final), 0, total)
        finals.append(_turned(plan, final) if layout else final)
    return (y, *finals)


def _steps(
    plan: Lowering, cell: Cell, sizes: dict[str, int | float], reads: list[Storage], more: list[Storage],
    state: Storage, y: Storage,
) -> Storage:
    total, hidden = int(sizes["total"]), int(sizes["hidden"])
    groups, flops = -(-total // 32), 2.0 * total * hidden * cell.gates
    spare = [plan.storage(plan.new(_F32, (cell.states, total))) for _ in range(2)]
    two = cell.kind == "gru" and not cell.linear
    gates = plan.storage(plan.new(_F32, (2, total))) if two else None
    # Of products and y, which hold all times, only this one's.
    touches = sum(s.nbytes for s in reads[1:]) // 4 + total * (cell.gates + 2 * cell.states + 1)
    for n in range(int(sizes["time"])):
        params = {**sizes, "step": n}
        after = spare[n % 2]
        given = [*reads, state, *more]
        if gates is not None:
            plan.dispatch(_step_kernel(cell, "gates"), given, [gates], params, groups, flops=flops * 2 / 3,
                          touches=touches)
            plan.dispatch(_step_kernel(cell, "hidden"), [*given, gates], [after, y], params, groups, flops=flops / 3,
                          touches=touches)
        else:
            plan.dispatch(_step_kernel(cell, ""), given, [after, y], params, groups, flops=flops, touches=touches)
        state = after
    return state


def _turned(plan: Lowering, x: Tensor) -> Tensor:
    """[a, b, c] as [b, a, c]."""
    a, b, c = x.shape
    return strided(plan, x, (b, a, c), (b, a, c), (c, b * c, 1), 0)
