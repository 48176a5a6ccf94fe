"""RNN, GRU and LSTM, a time step at a time; the reference evaluator knows no sequence lengths and few activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..graph.model import Node
from .table import Array, Inputs, op

__all__: list[str] = []

_Step = Callable[[Array, list[Array]], list[Array]]
"""One time step: the input's row for each sequence, and the state before -> the state after, the output first."""

_ACTIVATIONS: dict[str, Callable[[Array, float, float], Any]] = {
    "relu": lambda x, a, b: np.maximum(x, 0),
    "tanh": lambda x, a, b: np.tanh(x),
    "sigmoid": lambda x, a, b: 0.5 * (1 + np.tanh(0.5 * x)),
    "affine": lambda x, a, b: a * x + b,
    "leakyrelu": lambda x, a, b: np.where(x < 0, a * x, x),
    "thresholdedrelu": lambda x, a, b: np.where(x >= a, x, 0),
    "scaledtanh": lambda x, a, b: a * np.tanh(b * x),
    "hardsigmoid": lambda x, a, b: np.clip(a * x + b, 0, 1),
    "elu": lambda x, a, b: np.where(x < 0, a * np.expm1(x), x),
    "softsign": lambda x, a, b: x / (1 + np.abs(x)),
    "softplus": lambda x, a, b: np.logaddexp(x, 0),
}
_DEFAULTS = {
    "affine": (1.0, 0.0),
    "leakyrelu": (0.01, 0.0),
    "thresholdedrelu": (1.0, 0.0),
    "scaledtanh": (1.0, 1.0),
    "hardsigmoid": (0.2, 0.5),
    "elu": (1.0, 0.0),
}
_TAKES = {"affine": 2, "scaledtanh": 2, "hardsigmoid": 2, "leakyrelu": 1, "thresholdedrelu": 1, "elu": 1}
_GATES = {"RNN": (1, ["Tanh"]), "GRU": (3, ["Sigmoid", "Tanh"]), "LSTM": (4, ["Sigmoid", "Tanh", "Tanh"])}


def _functions(node: Node, directions: int) -> list[list[Callable[[Array], Array]]]:
    """The activation functions of each direction, their numbers taken from the attributes in order."""
    own = _GATES[node.op][1]
    names = node.attrs.get("activations") or own * directions
    if len(names) != len(own) * directions:
        raise ValueError(f"{len(names)} activations for {len(own) * directions}")
    alphas, betas = list(node.attrs.get("activation_alpha") or ()), list(node.attrs.get("activation_beta") or ())
    limit = node.attrs.get("clip")
    made = []
    for place, name in enumerate(str(n).lower() for n in names):
        if name not in _ACTIVATIONS:
            raise ValueError(f"activation {name!r} is not known")
        a, b = _DEFAULTS.get(name, (0.0, 0.0))
        if _TAKES.get(name, 0) > 0 and alphas:
            a = alphas.pop(0)
        if _TAKES.get(name, 0) > 1 and betas:
            b = betas.pop(0)
        # An LSTM's memory is an activation's input as well, but ONNX Runtime does not clip it.
        made.append(_bound(_ACTIVATIONS[name], a, b, limit if place % len(own) < 2 else None))
    return [made[i * len(own) : (i + 1) * len(own)] for i in range(directions)]


def _bound(
    function: Callable[[Array, float, float], Any], a: float, b: float, limit: float | None
) -> Callable[[Array], Array]:
    if limit is None:
        return lambda x: np.asarray(function(x, a, b))
    return lambda x: np.asarray(function(np.clip(x, -limit, limit), a, b))


@op("RNN", "GRU", "LSTM")
def _recurrent(node: Node, inputs: Inputs) -> list[Array]:
    """X [time, batch, size] (with layout 1 [batch, time, size]) -> Y, Y_h and, of an LSTM, Y_c; in float32 or wider."""
    x, w, r = inputs[:3]
    bias, lengths, h0, c0, peepholes = (*inputs[3:], *([None] * 5))[:5]
    attrs, dtype = node.attrs, inputs[0].dtype
    wide = np.promote_types(dtype, np.float32) if dtype.kind == "f" else np.dtype(np.float32)
    batched = bool(attrs.get("layout", 0))
    x = x.astype(wide)
    if batched:
        x = x.swapaxes(0, 1)
    count, size = len(w), r.shape[-1]
    times, batch = x.shape[:2]
    direction = attrs.get("direction", "forward")
    if direction not in ("forward", "reverse", "bidirectional") or count != 1 + (direction == "bidirectional"):
        raise ValueError(f"weights for {count} directions, of {direction}")
    if x.shape[2] != w.shape[2] or w.shape[1] != _GATES[node.op][0] * size:
        raise ValueError(f"weights {list(w.shape)} and {list(r.shape)} do not fit an input of {list(x.shape)}")
    steps = np.full(batch, times) if lengths is None else lengths.astype(np.int64)
    if batch and (steps.min() < 0 or steps.max() > times):
        raise ValueError(f"sequence lengths {steps.min()} to {steps.max()} in {times} time steps")
    outputs = np.zeros((times, count, batch, size), wide)
    last: list[list[Array]] = []
    for d, functions in enumerate(_functions(node, count)):
        start = [_initial(s, d, batch, size, wide, batched) for s in (h0, c0)]
        b = np.zeros(2 * w.shape[1], wide) if bias is None else bias[d].astype(wide)
        p = None if peepholes is None else peepholes[d].astype(wide)
        step = _STEPS[node.op](node, w[d].astype(wide), r[d].astype(wide), b, p, functions)
        backwards = direction == "reverse" or d == 1
        last.append(_walk(x, steps, start if node.op == "LSTM" else start[:1], step, backwards, outputs[:, d]))
    made = [outputs.transpose(2, 0, 1, 3) if batched else outputs]
    for states in zip(*last, strict=True):
        whole = np.stack(states)
        made.append(whole.swapaxes(0, 1) if batched else whole)
    return [m.astype(dtype) for m in made[: len(node.outputs)]]


def _initial(state: Array | None, d: int, batch: int, size: int, dtype: Any, batched: bool) -> Array:
    if state is None:
        return np.zeros((batch, size), dtype)
    return np.asarray(state[:, d] if batched else state[d]).astype(dtype)


def _walk(x: Array, steps: Array, state: list[Array], step: _Step, backwards: bool, out: Array) -> list[Array]:
    """Walk the sequences; one that has ended keeps its state. Backwards each begins at its own end."""
    longest = int(steps.max()) if len(steps) else 0
    rows = np.arange(len(steps))
    for t in range(longest):
        going = t < steps
        at = np.where(going, steps - 1 - t, 0) if backwards else np.full(len(steps), t)
        made = step(x[at, rows], state)
        state = [np.where(going[:, None], new, old) for new, old in zip(made, state, strict=True)]
        out[at[going], rows[going]] = made[0][going]
    return state


def _rnn(node: Node, w: Array, r: Array, b: Array, p: Array | None, functions: Sequence[Any]) -> _Step:
    (f,) = functions
    size = len(w)

    def step(x: Array, state: list[Array]) -> list[Array]:
        return [f(x @ w.T + state[0] @ r.T + b[:size] + b[size:])]

    return step


def _gru(node: Node, w: Array, r: Array, b: Array, p: Array | None, functions: Sequence[Any]) -> _Step:
    f, g = functions
    size = r.shape[-1]
    first, second = b[: 3 * size], b[3 * size :]
    late = bool(node.attrs.get("linear_before_reset", 0))

    def step(x: Array, state: list[Array]) -> list[Array]:
        (h,) = state
        given = x @ w.T + first
        kept = h @ r[: 2 * size].T + second[: 2 * size]
        update = f(given[:, :size] + kept[:, :size])
        reset = f(given[:, size : 2 * size] + kept[:, size:])
        if late:
            hidden = g(given[:, 2 * size :] + reset * (h @ r[2 * size :].T + second[2 * size :]))
        else:
            hidden = g(given[:, 2 * size :] + (reset * h) @ r[2 * size :].T + second[2 * size :])
        return [(1 - update) * hidden + update * h]

    return step


def _lstm(node: Node, w: Array, r: Array, b: Array, p: Array | None, functions: Sequence[Any]) -> _Step:
    f, g, h_of = functions
    size = r.shape[-1]
    pi, po, pf = np.zeros((3, size), w.dtype) if p is None else p.reshape(3, size)
    coupled = bool(node.attrs.get("input_forget", 0))

    def step(x: Array, state: list[Array]) -> list[Array]:
        h, c = state
        gates = x @ w.T + h @ r.T + b[: 4 * size] + b[4 * size :]
        i, o, forget, cell = (gates[:, n * size : (n + 1) * size] for n in range(4))
        i = f(i + pi * c)
        forget = 1 - i if coupled else f(forget + pf * c)
        c = forget * c + i * g(cell)
        return [f(o + po * c) * h_of(c), c]

    return step


_STEPS: dict[str, Callable[..., _Step]] = {"RNN": _rnn, "GRU": _gru, "LSTM": _lstm}
