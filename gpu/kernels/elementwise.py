"""What an elementwise operator is, and arithmetic.

An operator here is one WGSL expression; chains of them fuse by themselves, also onto the end of
other kernels. This file does not know how (graph/fuse.py does).
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ..errors import InvalidModel
from .registry import NoKernel, Operator, op

if TYPE_CHECKING:
    from ..graph.lowering import Lowering
    from ..graph.tensor import Tensor

__all__ = ["Binary", "Elementwise", "Variadic", "one_dtype", "operands"]

# By its bits: drivers may take it that floats are never NaN, and then x != x is false.
ANY_NAN = "max(bitcast<u32>(x) & 0x7fffffffu, bitcast<u32>(y) & 0x7fffffffu) > 0x7f800000u"

_PARAM = re.compile(r"params\.(\w+)")
_SPECIAL = {"inf": math.inf, "nan": math.nan}


def operands(plan: Lowering, inputs: tuple[Tensor | None, ...], count: int) -> list[Tensor]:
    """The first `count` inputs of a node, none of them left out. Raises InvalidModel."""
    given = [t for t in inputs[:count] if t is not None]
    if len(given) < count:
        raise InvalidModel(f"node {plan.node!r} ({plan.op}): expected {count} inputs, got {len(given)}")
    return given


def one_dtype(plan: Lowering, tensors: list[Tensor]) -> None:
    """Raises InvalidModel unless all have the same dtype."""
    if len({t.dtype for t in tensors}) > 1:
        names = ", ".join(t.dtype.name for t in tensors)
        raise InvalidModel(f"node {plan.node!r} ({plan.op}): expected operands of one dtype, got {names}")


class Elementwise(Operator):
    """y = wgsl(x): x: any shape -> y: same shape.

    Attributes:
        wgsl: an expression over x (then y, z). `params.NAME` is the field NAME of the operator;
            `params.inf` and `params.nan` are what they say (WGSL has no literals for them).
        types: WGSL types that it is right for, separated by blanks.
        integer: the expression for i32 and u32, where it is another.
        arity: number of operands; all have one dtype.
        result: dtype of the result, None = that of x.
    """

    wgsl: ClassVar[str]
    types: ClassVar[str] = "f32"
    integer: ClassVar[str] = ""
    arity: ClassVar[int] = 1
    result: ClassVar[type[np.generic] | None] = None

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor | tuple[Tensor | None, ...]:
        """Add the expression to the plan."""
        tensors = operands(plan, inputs, self.arity)
        one_dtype(plan, tensors)
        return self.expression(plan, tensors)

    def expression(self, plan: Lowering, tensors: list[Tensor]) -> Tensor:
        """The expression over tensors of one dtype, named x, y, z."""
        wgsl = self.pick(tensors[0])
        fields = {f.name for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        params = {n: float(getattr(self, n) if n in fields else _SPECIAL[n]) for n in _PARAM.findall(wgsl)}
        return plan.map(wgsl, dict(zip("xyz", tensors, strict=False)), dtype=self.result, params=params)

    def pick(self, tensor: Tensor) -> str:
        """The expression for a tensor's dtype. Raises NoKernel."""
        if tensor.type in ("i32", "u32") and self.integer:
            return self.integer
        if tensor.type not in self.types.split():
            raise NoKernel(f"no kernel for {tensor.dtype.name}")
        return self.wgsl


class Binary(Elementwise):
    """z = wgsl(x, y): x, y: any shapes that broadcast -> z: the broadcast shape."""

    arity = 2


class Variadic(Elementwise):
    """y = wgsl(...wgsl(x0, x1)..., xn): one or more, of any shapes that broadcast -> y: the broadcast shape."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor | tuple[Tensor | None, ...]:
        """Add the expressions to the plan."""
        tensors = operands(plan, inputs, max(1, len(inputs)))
        one_dtype(plan, tensors)
        self.pick(tensors[0])
        plan.broadcast(*(t.shape for t in tensors))
        made = tensors[0]
        for tensor in tensors[1:]:
            made = self.expression(plan, [made, tensor])
        return self.finish(plan, made, len(tensors))

    def finish(self, plan: Lowering, made: Tensor, count: int) -> Tensor:
        """What is done with the last result."""
        return made


@op("Add", since=7)
class Add(Binary):
    """z = x + y; integers wrap."""

    wgsl = "x + y"
    types = "f32 i32 u32"


@op("Sub", since=7)
class Sub(Binary):
    """z = x - y; integers wrap."""

    wgsl = "x - y"
    types = "f32 i32 u32"


@op("Mul", since=7)
class Mul(Binary):
    """z = x * y; integers wrap."""

    wgsl = "x * y"
    types = "f32 i32 u32"


@op("Div", since=7)
class Div(Binary):
    """z = x / y; integers truncate."""

    wgsl = "x / y"
    types = "f32 i32 u32"


@op("Mod", since=10)
class Mod(Binary):
    """z = x mod y: the sign of y, or with fmod the sign of x (floats: always)."""

    fmod: int = 0
    wgsl = "x % y"
    types = "f32 u32"

    def pick(self, tensor: Tensor) -> str:
        """The expression for a tensor's dtype. Raises NoKernel."""
        if tensor.type == "i32":
            return "x % y" if self.fmod else "select(x % y, x % y + y, x % y != 0 && (x % y < 0) != (y < 0))"
        if tensor.type == "f32" and not self.fmod:
            raise NoKernel("floats need fmod")
        return super().pick(tensor)


@op("Max", since=6)
class Max(Variadic):
    """y = max(x0, ...); NaN if any is."""

    wgsl = "select(max(x, y), x + y, " + ANY_NAN + ")"
    integer = "max(x, y)"


@op("Min", since=6)
class Min(Variadic):
    """y = min(x0, ...); NaN if any is."""

    wgsl = "select(min(x, y), x + y, " + ANY_NAN + ")"
    integer = "min(x, y)"


@op("Sum", since=6)
class Sum(Variadic):
    """y = x0 + x1 + ..."""

    wgsl = "x + y"


@op("Mean", since=6)
class Mean(Variadic):
    """y = (x0 + x1 + ...) / n."""

    wgsl = "x + y"

    def finish(self, plan: Lowering, made: Tensor, count: int) -> Tensor:
        """Divide the sum."""
        return plan.map("x / params.count", {"x": made}, params={"count": count})


@op("Pow", since=7)
class Pow(Operator):
    """z = x ** y: x: f32 | i32, y: any number type, shapes that broadcast -> z: dtype of x."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the expression to the plan; a known exponent that is a small number becomes multiplications."""
        x, y = operands(plan, inputs, 2)
        value = plan.known_value(y)
        if value is not None and value.size == 1:
            short = _SHORT_POWERS.get(float(value.reshape(-1)[0]))
            if short is not None and (x.type == "f32" or (x.type == "i32" and short.startswith(("x", "(x")))):
                return plan.map(short, {"x": x}, shape=plan.broadcast(x.shape, y.shape))
        if x.type != "f32":
            raise NoKernel(f"no kernel for powers of {x.dtype.name}")
        if value is not None and y.dtype != np.float32:
            if y.dtype.kind not in "iuf" or not np.array_equal(value.astype(np.float32), value):
                raise NoKernel(f"exponents of {y.dtype.name}")
            y = plan.constant(value.astype(np.float32))
        if y.type in ("i32", "u32"):
            y = plan.map("f32(x)", {"x": y}, dtype=np.float32)
        if y.type != "f32":
            raise NoKernel(f"exponents of {y.dtype.name}")
        power = plan.map(
            # The squares and cubes are exact, pow() is not.
            # Not && and ||: where many of them come together, SwiftShader takes minutes to compile them.
            "select(select(select(pow(abs(x), y), select(abs(x * x * x), x * x, y == 2.0), (y == 2.0) | (y == 3.0)), "
            "select(0.0, params.inf, y < 0.0), x == 0.0), 1.0, (y == 0.0) | (abs(x) == 1.0))",
            {"x": x, "y": y},
            params={"inf": math.inf},
        )
        return plan.map(
            "select(select(select(p, -p, (abs(y) % 2.0 == 1.0) & (bitcast<i32>(x) < 0)), params.nan,"
            " (x < 0.0) & (x >= -3.4028234e38) & (y != trunc(y))), params.nan,"
            f" ({ANY_NAN}) & ((bitcast<u32>(y) << 1u) != 0u) & (bitcast<u32>(x) != 0x3f800000u))",
            {"p": power, "x": x, "y": y},
            params={"nan": math.nan},
        )


_SHORT_POWERS = {
    0.5: "sqrt(x)",
    -0.5: "1.0 / sqrt(x)",
    -1.0: "1.0 / x",
    -2.0: "1.0 / (x * x)",
    1.0: "x",
    2.0: "x * x",
    3.0: "x * x * x",
    4.0: "(x * x) * (x * x)",
}


@op("Clip", since=6)
class ClipByAttributes(Operator):
    """y = min(max(x, min), max): x: any shape, f32 -> y: same shape."""

    min: float = -3.4028234663852886e38
    max: float = 3.4028234663852886e38

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the expression to the plan."""
        (x,) = operands(plan, inputs, 1)
        if x.type != "f32":
            raise NoKernel(f"no kernel for {x.dtype.name}")
        bounds = [plan.constant(np.array(bound, np.float32)) for bound in (self.min, self.max)]
        return clip(plan, x, *bounds)


@op("Clip", since=11)
class Clip(Operator):
    """y = min(max(x, min), max): x: any shape, f32 | i32 | u32; min, max: scalars or left out -> y: same shape."""

    def lower(self, plan: Lowering, *inputs: Tensor | None) -> Tensor:
        """Add the expression to the plan."""
        x, low, high = (*inputs, None, None, None)[:3]
        operands(plan, inputs, 1)
        assert x is not None
        one_dtype(plan, [t for t in (x, low, high) if t is not None])
        if x.type not in ("f32", "i32", "u32"):
            raise NoKernel(f"no kernel for {x.dtype.name}")
        for bound in (low, high):
            if bound is not None and bound.size != 1:
                shape = list(bound.shape)
                raise InvalidModel(f"node {plan.node!r} (Clip): expected scalar bounds, got shape {shape}")
        return clip(plan, x, low, high)


def clip(plan: Lowering, x: Tensor, low: Tensor | None, high: Tensor | None) -> Tensor:
    """A tensor between two scalars, either of which may be missing; NaN stays NaN."""
    wgsl, args = "x", {"x": x}
    if low is not None:
        wgsl, args["low"] = "select(x, low, x < low)", low
    if high is not None:
        wgsl, args["high"] = (
            (f"select({wgsl}, high, x > high)" if low is None else f"select({wgsl}, high, x > high || low > high)"),
            high,
        )
    return plan.map(wgsl, args, shape=x.shape)


@op("Neg", since=6)
class Neg(Elementwise):
    """y = -x."""

    wgsl = "-x"
    types = "f32 i32"


@op("Abs", since=6)
class Abs(Elementwise):
    """y = |x|."""

    wgsl = "abs(x)"
    types = "f32 i32 u32"


@op("Sign", since=9)
class Sign(Elementwise):
    """y = -1, 0 or 1."""

    wgsl = "select(select(select(x, 0.0, x == 0.0), 1.0, x > 0.0), -1.0, x < 0.0)"

    def pick(self, tensor: Tensor) -> str:
        """The expression for a tensor's dtype. Raises NoKernel."""
        integers = {"i32": "sign(x)", "u32": "min(x, 1u)"}
        return integers.get(tensor.type or "") or super().pick(tensor)


@op("Reciprocal", since=6)
class Reciprocal(Elementwise):
    """y = 1 / x."""

    wgsl = "1.0 / x"


@op("Floor", since=6)
class Floor(Elementwise):
    """y = the largest integer <= x."""

    wgsl = "floor(x)"


@op("Ceil", since=6)
class Ceil(Elementwise):
    """y = the smallest integer >= x."""

    wgsl = "ceil(x)"


@op("Round", since=11)
class Round(Elementwise):
    """y = the nearest integer, halves to even."""

    wgsl = "round(x)"
