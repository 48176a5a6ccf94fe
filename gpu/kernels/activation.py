"""Activation functions: x: any shape, f32 -> y: same shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvalidModel
from .elementwise import Binary, Elementwise, operands
from .functions import ERF, IS_NAN, TANH, log1p
from .registry import NoKernel, Operator, op

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Tensor

__all__ = ["softplus"]


@op("Relu", since=6)
class Relu(Elementwise):
    """y = max(x, 0)."""

    wgsl = "select(x, 0.0, x < 0.0)"
    integer = "max(x, 0)"

    def pick(self, tensor: Tensor) -> str:
        """The expression for a tensor's dtype. Raises NoKernel."""
        if tensor.type == "u32":
            raise NoKernel("no kernel for uint32")
        return super().pick(tensor)


@op("LeakyRelu", since=6)
class LeakyRelu(Elementwise):
    """y = x if x >= 0 else alpha * x."""

    alpha: float = 0.01
    wgsl = "select(x, params.alpha * x, x < 0.0)"


@op("PRelu", since=7)
class PRelu(Binary):
    """z = x if x >= 0 else y * x; the slope y broadcasts to x."""

    wgsl = "select(x, y * x, x < 0.0)"

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor | tuple[Tensor | None, ...]:
        """Add the expression to the plan."""
        x, slope = operands(plan, inputs, 2)
        if plan.broadcast(x.shape, slope.shape) != x.shape:
            raise InvalidModel(
                f"node {plan.node!r} (PRelu): slope of shape {list(slope.shape)} does not broadcast to {list(x.shape)}"
            )
        return super().lower(plan, x, slope)


@op("ThresholdedRelu", since=10)
class ThresholdedRelu(Elementwise):
    """y = x if x > alpha else 0."""

    alpha: float = 1.0
    wgsl = "select(0.0, x, x > params.alpha)"


@op("Elu", since=6)
class Elu(Elementwise):
    """y = x if x >= 0 else alpha * (e ** x - 1)."""

    alpha: float = 1.0
    wgsl = "select(x, params.alpha * (exp(x) - 1.0), x < 0.0)"


@op("Celu", since=12)
class Celu(Elementwise):
    """y = max(0, x) + min(0, alpha * (e ** (x / alpha) - 1))."""

    alpha: float = 1.0
    wgsl = "max(x, 0.0) + min(0.0, params.alpha * (exp(min(x / params.alpha, 80.0)) - 1.0))"


@op("Selu", since=6)
class Selu(Elementwise):
    """y = gamma * (x if x > 0 else alpha * (e ** x - 1))."""

    alpha: float = 1.67326319217681884765625
    gamma: float = 1.05070102214813232421875
    wgsl = "params.gamma * select(x, params.alpha * (exp(x) - 1.0), x <= 0.0)"


@op("Sigmoid", since=6)
class Sigmoid(Elementwise):
    """y = 1 / (1 + e ** -x)."""

    wgsl = f"select(1.0 / (1.0 + exp(-x)), x, {IS_NAN})"


@op("HardSigmoid", since=6)
class HardSigmoid(Operator):
    """y = min(max(alpha * x + beta, 0), 1)."""

    alpha: float = 0.2
    beta: float = 0.5

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the expressions to the plan."""
        params = {"alpha": self.alpha, "beta": self.beta}
        y = plan.map("params.alpha * x + params.beta", {"x": _float(plan, inputs)}, params=params)
        return plan.map("select(select(y, 0.0, y < 0.0), 1.0, y > 1.0)", {"y": y})


@op("HardSwish", since=14)
class HardSwish(Elementwise):
    """y = x * min(max(x / 6 + 1 / 2, 0), 1)."""

    wgsl = "x * clamp(x * 0.16666667 + 0.5, 0.0, 1.0)"


@op("Swish", since=24)
class Swish(Elementwise):
    """y = x * sigmoid(alpha * x)."""

    alpha: float = 1.0
    wgsl = "x / (1.0 + exp(-params.alpha * x))"


@op("Softsign", since=6)
class Softsign(Elementwise):
    """y = x / (1 + |x|)."""

    wgsl = "x / (1.0 + abs(x))"


def softplus(plan: Lowering, x: Tensor) -> Tensor:
    """log(e ** x + 1)."""
    small = log1p(plan, plan.map("exp(-abs(x))", {"x": x}))
    return plan.map("max(x, 0.0) + y", {"x": x, "y": small})


@op("Softplus", since=6)
class Softplus(Operator):
    """y = log(e ** x + 1)."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the expressions to the plan."""
        return softplus(plan, _float(plan, inputs))


@op("Mish", since=18)
class Mish(Operator):
    """y = x * tanh(softplus(x))."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the expressions to the plan."""
        x = _float(plan, inputs)
        return plan.map(f"x * {TANH.format(x='y')}", {"x": x, "y": softplus(plan, x)})


@op("Gelu", since=20)
class Gelu(Operator):
    """y = x / 2 * (1 + erf(x / sqrt(2))), or with approximate="tanh" its tanh form."""

    approximate: str = "none"

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the expressions to the plan."""
        x = _float(plan, inputs)
        if self.approximate == "tanh":
            inner = plan.map("0.79788456 * (x + 0.044715 * x * x * x)", {"x": x})
            return plan.map(f"0.5 * x * (1.0 + {TANH.format(x='y')})", {"x": x, "y": inner})
        erf = plan.map(ERF, {"x": plan.map("x * 0.70710678", {"x": x})})
        return plan.map("0.5 * x * (1.0 + y)", {"x": x, "y": erf})


@op("Dropout", since=7)
class Dropout(Operator):
    """y = x, and a mask that is all true: inference. Training is left to the host."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        """Hand the input on."""
        x, _, training = (*inputs, None, None, None)[:3]
        operands(plan, inputs, 1)
        assert x is not None
        if training is not None and plan.value(training).any():
            raise NoKernel("training mode")
        mask = np.ones((), np.bool_ if plan.opset >= 10 else x.dtype)
        return x, plan.constant(np.broadcast_to(mask, x.shape))


def _float(plan: Lowering, inputs: tuple[Tensor | None, ...]) -> Tensor:
    (x,) = operands(plan, inputs, 1)
    if x.type != "f32":
        raise NoKernel(f"no kernel for {x.dtype.name}")
    return x
