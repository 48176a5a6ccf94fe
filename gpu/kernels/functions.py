"""Mathematical functions, element by element: x: any shape, f32 -> y: same shape.

Each expression holds f32's accuracy where the built-in function of some driver does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .elementwise import Elementwise
from .registry import op

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Tensor

__all__ = ["ERF", "TANH", "log1p"]

TANH = "tanh(clamp({x}, -15.0, 15.0))"
_ERF_BIG = (
    "sign(x) * (1.0 - exp(((((((-1.72853470e-5 * {t} + 3.83197126e-4) * {t} - 3.88396438e-3) * {t}"
    " + 2.42546219e-2) * {t} - 1.06777877e-1) * {t} - 6.34846687e-1) * {t} - 1.28717512e-1) * {t} - {t}))"
)
_ERF_SMALL = (
    "x + x * (((((-5.96761703e-4 * {s} + 4.99119423e-3) * {s} - 2.67681349e-2) * {s} + 1.12819925e-1) * {s}"
    " - 3.76125336e-1) * {s} + 1.28379166e-1)"
)
ERF = f"select({_ERF_SMALL.format(s='(x * x)')}, {_ERF_BIG.format(t='min(abs(x), 4.0)')}, abs(x) > 0.927734375)"


def log1p(plan: Lowering, x: Tensor) -> Tensor:
    """log(1 + x), accurate for small x."""
    one = plan.map("1.0 + x", {"x": x})
    return plan.map("select(log(u) * (x / (u - 1.0)), x, u == 1.0)", {"x": x, "u": one})


@op("Sqrt", since=6)
class Sqrt(Elementwise):
    """y = sqrt(x)."""

    wgsl = "sqrt(x)"


@op("Exp", since=6)
class Exp(Elementwise):
    """y = e ** x."""

    wgsl = "exp(x)"


@op("Log", since=6)
class Log(Elementwise):
    """y = ln(x)."""

    wgsl = "log(x)"


@op("Sin", since=7)
class Sin(Elementwise):
    """y = sin(x)."""

    wgsl = "sin(x)"


@op("Cos", since=7)
class Cos(Elementwise):
    """y = cos(x)."""

    wgsl = "cos(x)"


@op("Tan", since=7)
class Tan(Elementwise):
    """y = tan(x)."""

    wgsl = "sin(x) / cos(x)"


@op("Asin", since=7)
class Asin(Elementwise):
    """y = arcsin(x)."""

    wgsl = "asin(x)"


@op("Acos", since=7)
class Acos(Elementwise):
    """y = arccos(x)."""

    wgsl = "acos(x)"


@op("Atan", since=7)
class Atan(Elementwise):
    """y = arctan(x)."""

    wgsl = "atan(x)"


@op("Sinh", since=9)
class Sinh(Elementwise):
    """y = sinh(x)."""

    wgsl = "sinh(x)"


@op("Cosh", since=9)
class Cosh(Elementwise):
    """y = cosh(x)."""

    wgsl = "cosh(x)"


@op("Tanh", since=6)
class Tanh(Elementwise):
    """y = tanh(x)."""

    wgsl = TANH.format(x="x")


@op("Asinh", since=9)
class Asinh(Elementwise):
    """y = arsinh(x)."""

    wgsl = "asinh(x)"


@op("Acosh", since=9)
class Acosh(Elementwise):
    """y = arcosh(x)."""

    wgsl = "acosh(x)"


@op("Atanh", since=9)
class Atanh(Elementwise):
    """y = artanh(x)."""

    wgsl = "atanh(x)"


@op("Erf", since=9)
class Erf(Elementwise):
    """y = erf(x)."""

    wgsl = ERF
