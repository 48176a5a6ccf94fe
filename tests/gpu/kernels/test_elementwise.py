from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from trionnx.gpu.errors import InvalidModel

erf = np.vectorize(math.erf)
expm1, log1p, tanh = np.expm1, np.log1p, np.tanh
UNARY: dict[str, Any] = {
    "Neg": np.negative,
    "Abs": np.abs,
    "Sign": np.sign,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Round": np.rint,
    "Exp": np.exp,
    "Sin": np.sin,
    "Cos": np.cos,
    "Atan": np.arctan,
    "Sinh": np.sinh,
    "Cosh": np.cosh,
    "Tanh": tanh,
    "Asinh": np.arcsinh,
    "Erf": erf,
    "Relu": lambda x: np.maximum(x, 0),
    "LeakyRelu": lambda x: np.where(x < 0, 0.01 * x, x),
    "ThresholdedRelu": lambda x: np.where(x > 1, x, 0),
    "Elu": lambda x: np.where(x < 0, expm1(x), x),
    "Celu": lambda x: np.where(x < 0, expm1(x), x),
    "Selu": lambda x: 1.0507010221481323 * np.where(x > 0, x, 1.6732631921768188 * expm1(x)),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "HardSigmoid": lambda x: np.clip(0.2 * x + 0.5, 0, 1),
    "HardSwish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "Softsign": lambda x: x / (1 + np.abs(x)),
    "Softplus": lambda x: log1p(np.exp(x)),
    "Mish": lambda x: x * tanh(log1p(np.exp(x))),
}
SPECIAL = {
    "Sqrt": (np.sqrt, np.geomspace(1e-20, 1e20, 401)),
    "Log": (np.log, np.geomspace(1e-20, 1e20, 401)),
    "Reciprocal": (np.reciprocal, np.linspace(0.5, 90, 401)),
    "Asin": (np.arcsin, np.linspace(-1, 1, 401)),
    "Acos": (np.arccos, np.linspace(-1, 1, 401)),
    "Atanh": (np.arctanh, np.linspace(-0.99, 0.99, 401)),
    "Acosh": (np.arccosh, np.geomspace(1, 1e20, 401)),
    "Asinh": (np.arcsinh, np.geomspace(1e-3, 1e20, 401)),
    "Tan": (np.tan, np.linspace(-1.4, 1.4, 401)),
    "Sin": (np.sin, np.linspace(-2e4, 2e4, 401)),
    "Cos": (np.cos, np.linspace(-2e4, 2e4, 401)),
    "Exp": (np.exp, np.linspace(-20, 60, 401)),
    "Tanh": (np.tanh, np.array([-1e30, -90, -15, 15, 90, 1e30])),
}


def test_functions_of_one_operand_hold_f32_accuracy(cases, variant):
    x = np.concatenate([np.linspace(-8, 8, 1605), np.linspace(-0.1, 0.1, 98)]).astype(np.float32)
    for op, function in UNARY.items():
        cases.add(op, x, want=function(x.astype(np.float64)), tol=1e-6)
    for op, (function, points) in SPECIAL.items():
        x = points.astype(np.float32)
        cases.add(op, x, want=function(x.astype(np.float64)), tol=4e-6)
    cases.check(opset=18)


def test_gelu_and_swish(cases):
    x = np.linspace(-8, 8, 801).astype(np.float32)
    wide = x.astype(np.float64)
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    cases.add("Gelu", x, want=wide / 2 * (1 + erf(wide / math.sqrt(2))))
    cases.add("Gelu", x, want=wide / 2 * (1 + np.tanh(inner)), approximate="tanh")
    cases.add("Swish", x, want=wide / (1 + np.exp(-0.7 * wide)), alpha=0.7)
    cases.check(opset=24)


def test_attributes(cases):
    x = np.linspace(-4, 4, 101).astype(np.float32)
    cases.add("LeakyRelu", x, alpha=0.3)
    cases.add("Elu", x, alpha=0.7)
    cases.add("Celu", x, alpha=0.7)
    cases.add("Selu", x, alpha=0.7, gamma=1.3)
    cases.add("HardSigmoid", x, alpha=0.4, beta=0.1)
    cases.add("ThresholdedRelu", x, alpha=0.5)
    cases.add("IsInf", np.array([np.inf, -np.inf, np.nan, 1], np.float32), detect_negative=0)
    cases.add("IsInf", np.array([np.inf, -np.inf, np.nan, 1], np.float32), detect_positive=0)
    cases.check(opset=17)


def test_nan_and_infinity_go_through(cases, variant):
    x = np.array([np.nan, -1, 1, np.inf, -np.inf], np.float32)
    for op in (
        "Relu",
        "LeakyRelu",
        "Sigmoid",
        "Tanh",
        "Abs",
        "Sign",
        "Floor",
        "Exp",
        "Erf",
        "Softplus",
        "IsNaN",
        "IsInf",
    ):
        cases.add(op, x)
    y = np.array([0, np.nan, 0, 0, np.nan], np.float32)
    cases.add("Max", x, y, want=np.maximum(x, y))
    cases.add("Min", x, y, want=np.minimum(x, y))
    cases.add("Clip", x, np.float32(0), np.float32(0.5), want=np.clip(x, 0, 0.5))
    cases.add("HardSigmoid", x, want=np.clip(np.float32(0.2) * x + np.float32(0.5), 0, 1))
    cases.check(opset=18)


def test_operators_of_two_operands_broadcast(cases, rng):
    for op in ("Add", "Sub", "Mul", "Div"):
        for a, b in (
            ((3, 1, 5), (4, 1)),
            ((2, 3), (2, 3)),
            ((), (3,)),
            ((5,), ()),
            ((2, 1, 1), (1, 3, 4)),
            ((0, 3), (3,)),
        ):
            cases.add(op, rng.standard_normal(a, np.float32), rng.standard_normal(b, np.float32))
    for op in ("Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual"):
        cases.add(op, np.round(rng.standard_normal((7, 5), np.float32)), np.round(rng.standard_normal(5, np.float32)))
        cases.add(op, rng.integers(-2, 3, (7, 5), np.int32), rng.integers(-2, 3, (7, 1), np.int32))
    x, y = rng.random((2, 4, 5)) < 0.5
    for op in ("And", "Or", "Xor", "Equal"):
        cases.add(op, x, y[0])
    cases.add("Not", x)
    cases.add("Where", x, rng.standard_normal((4, 5), np.float32), rng.standard_normal(1, np.float32))
    cases.add("Where", x, rng.integers(0, 9, (4, 5), np.int32), rng.integers(0, 9, 5, np.int32))
    cases.add("PRelu", rng.standard_normal((2, 3, 4), np.float32), rng.standard_normal((3, 1), np.float32))
    cases.check(opset=16)


def test_variadic_operators(cases, rng):
    for op in ("Max", "Min", "Sum", "Mean"):
        a, b, c = (rng.standard_normal(shape, np.float32) for shape in ((3, 1, 5), (4, 1), (1,)))
        cases.add(op, a, b, c)
        cases.add(op, a)
    cases.add("Max", rng.integers(-9, 9, 7, np.int32), rng.integers(-9, 9, 7, np.int32))
    cases.check(opset=13)


def test_integers(cases, rng):
    x, y = rng.integers(-9, 10, 300, np.int32), rng.choice(np.array([-7, -3, 2, 5], np.int32), 300)
    cases.add("Div", x, y)
    for fmod in (0, 1):
        cases.add("Mod", x, y, fmod=fmod)
    cases.add(
        "Mul", np.array([2**30, -(2**31)], np.int32), np.array([4, 3], np.int32), want=np.array([0, -(2**31)], np.int32)
    )
    cases.add("Neg", x)
    cases.add("Abs", x)
    cases.add("Sign", x)
    u, v = rng.integers(0, 2**32, (2, 50), np.uint32)
    cases.add("BitwiseAnd", u, v)
    cases.add("BitwiseOr", u, v)
    cases.add("BitwiseXor", x[:50], y[:50])
    cases.add("BitwiseNot", x)
    shifts = np.array([0, 1, 31, 32, 40], np.uint32)
    i, by = np.array([-8, -1, 7, -8, 7], np.int32), np.array([1, 31, 1, 32, -1], np.int32)
    cases.add("BitShift", i, by, direction="RIGHT", want=np.array([-4, -1, 3, -1, 0]))
    cases.add("BitShift", i, by, direction="LEFT", want=np.array([-16, -(2**31), 14, 0, 0]))
    cases.add("BitShift", u[:5], shifts, direction="LEFT", want=np.where(shifts < 32, u[:5] << (shifts % 32), 0))
    cases.add("BitShift", u[:5], shifts, direction="RIGHT", want=np.where(shifts < 32, u[:5] >> (shifts % 32), 0))
    cases.check(opset=18)


def test_powers(cases, rng):
    x = np.repeat(np.array([-3, -2, -1, -0.5, 0, 0.5, 1, 2, 3], np.float32), 7)
    y = np.tile(np.array([-3, -2, -0.5, 0, 1, 2.5, 4], np.float32), 9)
    with np.errstate(all="ignore"):
        cases.add("Pow", x, y, want=np.power(x, y))
    positive = np.abs(x) + np.float32(0.1)
    for exponent in (2, 0.5, 3, -1, 1.7, 0, -0.5, 4, -2):
        cases.add(
            "Pow", positive, np.float32(exponent), known=(1,), want=np.power(positive.astype(np.float64), exponent)
        )
    cases.add("Pow", x, np.array([2], np.int64), want=x * x)
    cases.add("Pow", x, np.array(3, np.int32), want=x**3)
    cases.add("Pow", rng.integers(-9, 9, (3, 5), np.int32), np.array(3, np.int64))
    cases.check(opset=15)


def test_casts_follow_numpy(cases, rng):
    sources = (
        rng.standard_normal((7, 5), np.float32) * 5,
        rng.random((4, 5)) < 0.5,
        rng.integers(-9, 9, (3, 5), np.int32),
        rng.integers(0, 9, (3, 5), np.uint32),
    )
    for to, dtype in ((1, np.float32), (6, np.int32), (9, np.bool_), (12, np.uint32)):
        for x in sources:
            cases.add("Cast", x, to=to, want=x.astype(dtype))
            cases.add("CastLike", x, np.zeros(1, dtype), want=x.astype(dtype))
    far = np.array([1e30, -1e30, np.nan, 2147483520, -2147483648, np.inf, -0.9], np.float32)
    least = -(2**31)
    cases.add("Cast", far, to=6, want=np.array([least, least, least, 2147483520, least, least, 0], np.int32))
    cases.check(opset=15)


@pytest.mark.parametrize("opset", [7, 10, 11, 13])
def test_clip_by_attributes_and_by_inputs(cases, rng, opset):
    x = rng.standard_normal(30, np.float32)
    if opset < 11:
        cases.add("Clip", x, min=-0.5, max=0.3)
        cases.add("Clip", x, max=0.3)
        cases.add("Clip", x)
    else:
        low, high = np.float32(-0.5), np.float32(0.3)
        cases.add("Clip", x, low, high, known=(1, 2))
        cases.add("Clip", x, low, high)
        cases.add("Clip", x, None, high)
        cases.add("Clip", x, low)
        cases.add("Clip", x, high, low, want=np.full(30, low))
    cases.check(opset)


@pytest.mark.parametrize("opset", [7, 10, 12, 22])
def test_dropout_hands_its_input_on(cases, rng, opset):
    x = rng.standard_normal((3, 4), np.float32)
    cases.add("Dropout", x, want=x, **({"ratio": 0.3} if opset < 12 else {}))
    cases.add("Dropout", x, outputs=2, want=[x, np.ones((3, 4), np.float32 if opset < 10 else np.bool_)])
    if opset >= 12:
        cases.add("Dropout", x, np.float32(0.3), np.array(False), known=(1, 2), want=x)
    cases.check(opset)


def test_expand(cases, rng):
    for shape, wanted in (((3, 1), [2, 1, 6]), ((1,), [0]), ((), [4]), ((3, 4), [1, 1]), ((2, 1, 4), [3, 1])):
        cases.add("Expand", rng.standard_normal(shape, np.float32), np.array(wanted, np.int64))
    cases.add("Expand", rng.random((3, 1)) < 0.5, np.array([3, 4], np.int64))
    cases.check(opset=13)


def test_a_chain_with_its_own_let_bindings_fuses(open_model, parse):
    driver = open_model(parse("g (float[1000] x) => (float[1000] y) { a = Softplus(x) b = Erf(a) y = Mul(b, x) }"))
    x = np.linspace(-9, 9, 1000).astype(np.float32)
    (y,) = driver.run({"x": x})
    want = erf(np.log1p(np.exp(x.astype(np.float64)))) * x
    np.testing.assert_allclose(y, want, atol=1e-6 * 9)
    plan = next(reversed(driver.engine._plans.values()))
    assert sum(hasattr(step, "program") for step in plan.steps) == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("y = Add(a3, a4)", r"\(Add\): shapes \[3\] and \[4\]"),
        ("y = Mul(a3, i3)", "one dtype"),
        ("y = Where(a3, a3, a3)", "bool condition"),
        ("y = Clip(a3, a4)", "scalar bounds"),
        ("y = PRelu(a3, a23)", "does not broadcast"),
        ("y = Add(a3)", "input 'B' is missing"),
        ("y = Max(a3, i3)", "one dtype"),
    ],
)
def test_wrong_graphs_are_refused_with_the_node_named(open_model, parse, body, message):
    shapes = {"a3": (3,), "a4": (4,), "a23": (2, 3)}
    feeds: dict[str, Any] = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    feeds["i3"] = np.zeros(3, np.int32)
    model = parse(f"g (float[3] a3, float[4] a4, float[2,3] a23, int32[3] i3) => (float[N] y) {{ {body} }}")
    with pytest.raises(InvalidModel, match=message):
        open_model(model).run(feeds)


def test_bits_as_another_dtype(cases, rng):
    x = np.array([1.5, -0.0, np.inf, -3e-40], np.float32)
    for to, dtype in ((6, np.int32), (12, np.uint32), (1, np.float32)):
        cases.add("BitCast", x, to=to, want=x.view(dtype))
    cases.add("BitCast", x.view(np.int32), to=1, want=x)
    cases.check(opset=26)


def test_functions_of_nan_and_infinity(cases):
    x = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 0.0, 2.0, -2.0], np.float32)
    with np.errstate(all="ignore"):
        for name in ("Exp", "Log", "Cosh", "Sinh", "Tanh", "Sqrt"):
            cases.add(name, x, want=getattr(np, name.lower())(x).astype(np.float32), tol=1e-5)
        for name in ("Asinh", "Acosh", "Atanh", "Atan"):
            cases.add(name, x, want=getattr(np, f"arc{name.lower()[1:]}")(x).astype(np.float32), tol=1e-5)
        e = np.array([0, 1, 2, 3, 0.5, -1, -0.5, 2.5, np.inf, -np.inf, np.nan], np.float32)
        base = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 2.0, -2.0], np.float32)[:, None]
        want = np.power(base.astype(np.float64), e.astype(np.float64)).astype(np.float32)
        cases.add("Pow", base, e, want=want, tol=1e-5)
    cases.check()


def test_angles_of_any_size(cases, rng):
    """Over the whole range of f32, where an angle is near or far, and where sine and cosine cross 0."""
    far = rng.integers(0x461C4000, 0x7F800000, 20000, dtype=np.uint32).view(np.float32)
    edge = np.array([1e4, 10000.001, 2**24, 1e22, 3.4028235e38, 0, -0.0, 1e-30], np.float32)
    zeros = (np.arange(1, 20000, 7) * (math.pi / 2)).astype(np.float32)
    x = np.concatenate([far, -far[:5000], rng.uniform(-2e5, 2e5, 20000).astype(np.float32), edge, -edge, zeros])
    unreal = np.array([np.inf, -np.inf, np.nan], np.float32)
    for name in ("Sin", "Cos", "Tan"):
        function = np.vectorize(getattr(math, name.lower()))
        want = function(x.astype(np.float64))
        kept = np.abs(want) < 10  # the slope of a tangent is no more than 100 there
        cases.add(name, x[kept], want=want[kept], tol=3e-7 if name != "Tan" else 2e-6)
        cases.add(name, unreal, want=unreal * np.nan)
    cases.check()


def test_an_angle_that_is_computed_and_read_on(open_model, parse):
    model = parse("""g (float[N] x, float[N] z) => (float[N] y, float[N] t) {
        k = Constant<value = float {1e6}>() a = Mul(x, k) s = Sin(a) c = Cos(a) p = Mul(s, s) q = Mul(c, c)
        r = Add(p, q) y = Mul(r, z) u = Tan(a) v = Mul(u, c) t = Sub(v, s)
    }""")
    x, z = np.linspace(-9, 9, 501).astype(np.float32), np.linspace(1, 2, 501).astype(np.float32)
    y, t = open_model(model).run({"x": x, "z": z})
    np.testing.assert_allclose(y, z, atol=1e-6)
    np.testing.assert_allclose(t, 0, atol=1e-6)


def test_small_arguments_keep_their_digits(cases):
    x = np.logspace(-6, 0, 200).astype(np.float32)
    for name, function in (("Sinh", np.sinh), ("Asinh", np.arcsinh), ("Atanh", np.arctanh)):
        for part in (x[:100], x[100:180]):
            cases.add(name, part, want=function(part.astype(np.float64)), tol=1e-6)
            cases.add(name, part[:1], want=function(part[:1].astype(np.float64)), tol=1e-6)
    cases.check()
