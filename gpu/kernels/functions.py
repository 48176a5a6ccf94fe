"""Mathematical functions, element by element: x: any shape, f32 -> y: same shape.

Each expression holds f32's accuracy where the built-in function of some driver does not.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .elementwise import Elementwise, operands
from .registry import NoKernel, Operator, op

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Tensor

__all__ = ["ERF", "IS_NAN", "LOG", "TANH", "arcsine", "log1p", "sine"]

# By its bits: drivers may take it that floats are never NaN, and then x != x is false.
IS_NAN = "(bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u"
LOG = (
    "select(select(select(log({x}), -params.inf, {x} == 0.0), params.nan, {x} < 0.0), {x},"
    " ((bitcast<u32>({x}) & 0x7fffffffu) >= 0x7f800000u) & !({x} < 0.0))"
)
TANH = (
    "select(sign({x}) * (1.0 - 2.0 / (exp(2.0 * min(abs({x}), 15.0)) + 1.0)), fma({x} * ({x} * {x}), fma({x} * {x},"
    " fma({x} * {x}, fma({x} * {x}, fma({x} * {x}, -5.70498872745e-3, 2.06390887954e-2), -5.37397155531e-2),"
    " 1.33314422036e-1), -3.33332819422e-1), {x}), abs({x}) < 0.625)"
)
_ERF_BIG = (
    "sign(x) * (1.0 - exp(((((((-1.72853470e-5 * {t} + 3.83197126e-4) * {t} - 3.88396438e-3) * {t}"
    " + 2.42546219e-2) * {t} - 1.06777877e-1) * {t} - 6.34846687e-1) * {t} - 1.28717512e-1) * {t} - {t}))"
)
_ERF_SMALL = (
    "x + x * (((((-5.96761703e-4 * {s} + 4.99119423e-3) * {s} - 2.67681349e-2) * {s} + 1.12819925e-1) * {s}"
    " - 3.76125336e-1) * {s} + 1.28379166e-1)"
)
ERF = f"select({_ERF_SMALL.format(s='(x * x)')}, {_ERF_BIG.format(t='min(abs(x), 4.0)')}, abs(x) > 0.927734375)"

# An angle as a whole number of quarter turns and a rest of at most about pi / 4. Far from 0: the 64 bits of 1 / (2 pi)
# that matter times the angle's 24 digits; what is above 32 bits are whole turns, and the error is below 5e-9.
_ANGLE = """struct Turn { quarter: i32, rest: f32 }
fn far_turn(x: f32) -> Turn {
    let bits = bitcast<u32>(x);
    let s = ((bits >> 23u) & 0xffu) - 136u;
    let digits = u32(i32(bitcast<f32>((bits & 0x3ffffffu) + 0x4b000000u)));
    let a = select(vec4u(0xa2f9u, 0x836e4e44u, 0x1529fc27u, 0x57d1f534u),
        vec4u(0x1529fc27u, 0x57d1f534u, 0xddc0db62u, 0x95993c43u), (s & 64u) != 0u);
    let b = select(a.xyz, a.yzw, (s & 32u) != 0u);
    let c = select(b, vec3u((b.x << 16u) | (b.y >> 16u), (b.y << 16u) | (b.z >> 16u), b.z << 16u), (s & 16u) != 0u);
    let w = select(c.xy, vec2u((c.x << 8u) | (c.y >> 24u), (c.y << 8u) | (c.z >> 24u)), (s & 8u) != 0u);
    let high = digits >> 16u;
    let part = high * (w.y >> 16u) + (((digits & 0xffffu) * (w.y >> 16u)) >> 16u) + ((high * (w.y & 0xffffu)) >> 16u);
    let whole = digits * w.x + part;
    let turn = select(whole, 0u - whole, x < 0.0);
    let quarter = (turn + 0x20000000u) >> 30u;
    return Turn(i32(quarter), f32(i32(turn - (quarter << 30u))) * 1.46291807926715968e-9);
}
fn turn_of(x: f32) -> Turn {
    let k = round(x * 0.636619772);
    var made = Turn(i32(k), fma(k, -7.54978995489e-8, fma(k, -4.83751296997e-4, fma(k, -1.5703125, x))));
    if (abs(x) > 1e4) { made = far_turn(x); }
    return made;
}
fn sine_of(r: f32) -> f32 {
    return fma(r * (r * r), fma(r * r, fma(r * r, -1.9515295891e-4, 8.3321608736e-3), -1.6666654611e-1), r);
}
fn cosine_of(r: f32) -> f32 {
    return fma(r * r, fma(r * r, fma(r * r, fma(r * r, 2.443315711809948e-5, -1.388731625493765e-3),
        4.166664568298827e-2), -0.5), 1.0);
}
fn turned(turn: Turn, more: i32) -> f32 {
    let q = turn.quarter + more;
    let value = select(sine_of(turn.rest), cosine_of(turn.rest), (q & 1) == 1);
    return select(value, -value, (q & 2) == 2);
}
fn tangent(turn: Turn) -> f32 {
    let s = sine_of(turn.rest);
    let c = cosine_of(turn.rest);
    let odd = (turn.quarter & 1) == 1;
    return select(s, -c, odd) / select(c, s, odd);
}
"""


def log1p(plan: Lowering, x: Tensor) -> Tensor:
    """log(1 + x) for 0 <= x <= 1, accurate for small x too: 2 artanh(x / (2 + x)), a series."""
    s = plan.map("x / (2.0 + x)", {"x": x})
    terms = "0.066666667"
    for n in range(13, 1, -2):
        terms = f"fma(z, {terms}, {1 / n!r})"
    z = plan.map("s * s", {"s": s})
    return plan.map(f"2.0 * s * (1.0 + z * ({terms}))", {"s": s, "z": z})


def sine(plan: Lowering, x: Tensor, turns: int) -> Tensor:
    """sin(x + turns * pi / 2)."""
    return _of_angle(plan, x, f"turned(turn_of(x), {turns})")


def _of_angle(plan: Lowering, x: Tensor, wgsl: str) -> Tensor:
    wgsl = f"select({wgsl}, params.nan, (bitcast<u32>(x) & 0x7fffffffu) >= 0x7f800000u)"
    return plan.map(wgsl, {"x": x}, params={"nan": math.nan}, functions=_ANGLE, weight=8)


def arcsine(plan: Lowering, x: Tensor) -> Tensor:
    """arcsin(x)."""
    small = "abs(x) <= 0.5"
    z = plan.map(f"select(0.5 - 0.5 * abs(x), x * x, {small})", {"x": x})
    s = plan.map(f"select(sqrt(z), abs(x), {small})", {"x": x, "z": z})
    p = plan.map(
        "fma(s * z, fma(fma(fma(fma(4.2163199048e-2, z, 2.4181311049e-2), z, 4.5470025998e-2), z, 7.4953002686e-2),"
        " z, 1.6666752422e-1), s)",
        {"s": s, "z": z},
    )
    return plan.map(f"sign(x) * select(1.57079633 - 2.0 * p, p, {small})", {"p": p, "x": x})


class _Function(Operator):
    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the expressions to the plan."""
        (x,) = operands(plan, inputs, 1)
        if x.type != "f32":
            raise NoKernel(f"no kernel for {x.dtype.name}")
        return self.of_float(plan, x)

    def of_float(self, plan: Lowering, x: Tensor) -> Tensor:
        raise NotImplementedError


@op("Sqrt", since=6)
class Sqrt(Elementwise):
    """y = sqrt(x)."""

    wgsl = "sqrt(x)"


@op("Exp", since=6)
class Exp(Elementwise):
    """y = e ** x."""

    wgsl = f"select(exp(x), x, {IS_NAN})"


@op("Log", since=6)
class Log(Elementwise):
    """y = ln(x)."""

    wgsl = LOG.format(x="x")


@op("Sin", since=7)
class Sin(_Function):
    """y = sin(x)."""

    def of_float(self, plan: Lowering, x: Tensor) -> Tensor:
        """Add the expressions."""
        return sine(plan, x, 0)


@op("Cos", since=7)
class Cos(_Function):
    """y = cos(x)."""

    def of_float(self, plan: Lowering, x: Tensor) -> Tensor:
        """Add the expressions."""
        return sine(plan, x, 1)


@op("Tan", since=7)
class Tan(_Function):
    """y = tan(x)."""

    def of_float(self, plan: Lowering, x: Tensor) -> Tensor:
        """Add the expressions."""
        return _of_angle(plan, x, "tangent(turn_of(x))")


@op("Asin", since=7)
class Asin(_Function):
    """y = arcsin(x)."""

    def of_float(self, plan: Lowering, x: Tensor) -> Tensor:
        """Add the expressions."""
        return arcsine(plan, x)


@op("Acos", since=7)
class Acos(_Function):
    """y = arccos(x)."""

    def of_float(self, plan: Lowering, x: Tensor) -> Tensor:
        """Add the expressions: where |x| is large, twice the arcsine of half the chord."""
        s = plan.map("select(sqrt(0.5 - 0.5 * abs(x)), x, abs(x) <= 0.5)", {"x": x})
        return plan.map(
            "select(select(2.0 * a, 3.14159265 - 2.0 * a, x < 0.0), 1.57079633 - a, abs(x) <= 0.5)",
            {"a": arcsine(plan, s), "x": x},
        )


@op("Atan", since=7)
class Atan(_Function):
    """y = arctan(x)."""

    def of_float(self, plan: Lowering, x: Tensor) -> Tensor:
        """Add the expressions: x is brought below tan(pi / 8)."""
        a = plan.map("abs(x)", {"x": x})
        t = plan.map("select(select(a, (a - 1.0) / (a + 1.0), a > 0.41421356), -1.0 / a, a > 2.41421356)", {"a": a})
        start = plan.map("select(select(0.0, 0.785398163, a > 0.41421356), 1.57079633, a > 2.41421356)", {"a": a})
        z = plan.map("t * t", {"t": t})
        p = plan.map(
            "fma(t * z, fma(fma(fma(8.05374449538e-2, z, -1.38776856032e-1), z, 1.99777106478e-1), z,"
            " -3.33329491539e-1), t)",
            {"t": t, "z": z},
        )
        return plan.map("sign(x) * (s + p)", {"s": start, "p": p, "x": x})


@op("Sinh", since=9)
class Sinh(Elementwise):
    """y = sinh(x)."""

    wgsl = (
        "select(sinh(x), fma(x * (x * x), fma(x * x, fma(x * x, fma(x * x, 2.7557319e-6, 1.98412698e-4),"
        " 8.33333333e-3), 1.66666667e-1), x), abs(x) < 1.0)"
    )


@op("Cosh", since=9)
class Cosh(Elementwise):
    """y = cosh(x)."""

    wgsl = f"select(cosh(x), x, {IS_NAN})"


@op("Tanh", since=6)
class Tanh(Elementwise):
    """y = tanh(x)."""

    wgsl = f"select({TANH.format(x='x')}, x, {IS_NAN})"


@op("Asinh", since=9)
class Asinh(_Function):
    """y = arsinh(x)."""

    def of_float(self, plan: Lowering, x: Tensor) -> Tensor:
        """Add the expressions: ln(1 + t), t = |x| + x * x / (1 + sqrt(x * x + 1))."""
        t = plan.map("abs(x) + x * x / (1.0 + sqrt(x * x + 1.0))", {"x": x})
        return plan.map(
            "select(sign(x) * select(select(log(1.0 + t), log(abs(x)) + 0.69314718, abs(x) > 1e8), y, t < 0.5), x,"
            " (bitcast<u32>(x) & 0x7fffffffu) >= 0x7f800000u)",
            {"x": x, "t": t, "y": log1p(plan, plan.map("min(t, 1.0)", {"t": t}))},
        )


@op("Acosh", since=9)
class Acosh(Elementwise):
    """y = arcosh(x)."""

    wgsl = (
        "select(select(log(x + sqrt((x - 1.0) * (x + 1.0))), log(x) + 0.69314718, x > 1e8), params.nan,"
        f" (x < 1.0) | ({IS_NAN}))"
    )


@op("Atanh", since=9)
class Atanh(Elementwise):
    """y = artanh(x)."""

    wgsl = (
        "select(select(sign(x) * select(0.5 * log((1.0 + abs(x)) / (1.0 - abs(x))), params.inf, abs(x) == 1.0),"
        " x * fma(x * x, fma(x * x, fma(x * x, fma(x * x, fma(x * x, fma(x * x, fma(x * x, 6.66666667e-2,"
        " 7.69230769e-2), 9.09090909e-2), 1.11111111e-1), 1.42857143e-1), 0.2), 3.33333333e-1), 1.0),"
        f" abs(x) < 0.333), params.nan, (abs(x) > 1.0) | ({IS_NAN}))"
    )


@op("Erf", since=9)
class Erf(Elementwise):
    """y = erf(x)."""

    wgsl = ERF
