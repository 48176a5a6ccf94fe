from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from trionnx.gpu.errors import InvalidModel
from trionnx.gpu.graph.lowering import Lowering
from trionnx.gpu.graph.target import CPU_LIKE
from trionnx.gpu.graph.tensor import Tensor
from trionnx.gpu.kernels.quantise import spread

F, U8, I8 = np.float32, np.uint8, np.int8
LIMITS = {U8: (0, 256), I8: (-128, 128), np.uint16: (0, 65536), np.int16: (-32768, 32768)}


def some(rng, dtype, *shape):
    return rng.integers(*LIMITS[dtype], shape).astype(dtype)


def rounded(x, scale, zero, dtype):
    low, high = LIMITS[dtype]
    return np.clip(np.rint(x / scale).astype(np.int64) + zero, low, high - 1).astype(dtype)


@pytest.mark.parametrize("dtype", LIMITS)
def test_quantize_and_dequantize_per_tensor_axis_and_block(cases, rng, dtype):
    x = (50 * rng.standard_normal((2, 5, 6))).astype(F)
    x[0, 0, :4] = 0.25, 0.75, 1e30, -1e30  # ties, saturation
    zero = dtype(3)
    cases.add("QuantizeLinear", x, F(0.5), zero, want=rounded(x.clip(-1e9, 1e9), F(0.5), 3, dtype))
    for axis, size in ((0, 2), (1, 5), (-1, 6)):
        scale, zeros = 0.1 + rng.random(size, F), some(rng, dtype, size)
        along = [-1 if k == axis % 3 else 1 for k in range(3)]
        wide, wanted = scale.reshape(along), zeros.astype(np.int64).reshape(along)
        cases.add("QuantizeLinear", x, scale, zeros, want=rounded(x.clip(-1e9, 1e9), wide, wanted, dtype), axis=axis)
        q = some(rng, dtype, 2, 5, 6)
        cases.add("DequantizeLinear", q, scale, zeros, want=(q - wanted) * wide, axis=axis)
        cases.add("DequantizeLinear", q, scale, known=(1,), want=q * wide, axis=axis)
    for axis, block in ((1, 2), (2, 3)):
        shape = tuple(-(-n // block) if k == axis else n for k, n in enumerate(x.shape))
        scale, zeros = 0.1 + rng.random(shape, F), some(rng, dtype, *shape)
        wide, wanted = (
            np.repeat(t, block, axis)[tuple(slice(0, n) for n in x.shape)] for t in (scale, zeros.astype(np.int64))
        )
        cases.add("DequantizeLinear", q, scale, zeros, want=(q - wanted) * wide, axis=axis, block_size=block)
        cases.add(
            "QuantizeLinear",
            x,
            scale,
            zeros,
            want=rounded(x.clip(-1e9, 1e9), wide, wanted, dtype),
            axis=axis,
            block_size=block,
        )
    cases.check(opset=21)


def test_quantize_without_zero_point_gives_uint8(cases, rng):
    x = (9 * rng.standard_normal((3, 7))).astype(F)
    cases.add("QuantizeLinear", x, F(0.25), want=rounded(x, F(0.25), 0, U8))
    cases.add("QuantizeLinear", x, F(0.25), want=rounded(x, F(0.25), 0, I8), output_dtype=3)
    cases.add("DequantizeLinear", np.array([[-5, 70000]], np.int32), F(0.5), want=np.array([[-2.5, 35000]], F))
    cases.check(opset=21)


@pytest.mark.parametrize("rows", [3, 3000], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [I8, np.int32, ml_dtypes.int4, ml_dtypes.float8_e4m3fn])
def test_known_weights_are_dequantised_once(cases, rng, rows, dtype):
    x = (7 * rng.standard_normal((rows, 30))).clip(-8, 7).astype(dtype)
    scale = rng.random((rows, 1), F) + F(0.1)
    want = x.astype(F) * scale
    cases.add("DequantizeLinear", x, scale[:, 0].copy(), known=(0, 1), want=want, axis=0)
    blocks = np.repeat(scale, 3, 1) * np.array([1, 2, 3], F)
    wide = x.astype(F) * np.repeat(blocks, 10, 1)
    if dtype != np.int32:
        cases.add("DequantizeLinear", x, blocks, known=(0, 1), want=wide, axis=1, block_size=10)
    cases.check(opset=21)


def test_quantised_weights_of_older_opsets(cases, rng):
    q, zeros = some(rng, I8, 4, 30), some(rng, I8, 4)
    scale = rng.random(4, F)
    want = (q.astype(F) - zeros[:, None].astype(F)) * scale[:, None]
    cases.add("DequantizeLinear", q, scale, zeros, known=(0, 1, 2), want=want, axis=0)
    x = (9 * rng.standard_normal((4, 30))).astype(F)
    cases.add("QuantizeLinear", x, F(0.5), I8(3), known=(0, 1, 2), want=rounded(x, F(0.5), 3, I8))
    cases.check(opset=13)


def test_dynamic_quantize_linear_covers_the_range_and_zero(cases, rng):
    for x in (
        rng.standard_normal((3, 50), F),
        2 + rng.random((1, 7), F),
        -2 - rng.random((33, 41), F),
        rng.standard_normal((130, 129), F),
        np.zeros((2, 2), F),
    ):
        low, high = min(F(0), x.min()), max(F(0), x.max())
        scale = (high - low if high > low else F(1)) / F(255)
        zero = U8(np.rint(np.clip(0 - low / scale, 0, 255)))
        cases.add("DynamicQuantizeLinear", x, outputs=3, want=[rounded(x, scale, int(zero), U8), scale, zero])
    cases.check(opset=13)


@pytest.mark.parametrize("known", [(), (1, 3)], ids=["fed", "known"])
def test_integer_products_never_saturate(cases, rng, product_variant, known):
    for a_type, b_type in ((U8, I8), (U8, U8), (I8, I8), (I8, U8)):
        for m, k, n in ((1, 3, 4), (3, 600, 5), (40, 33, 36), (20, 257, 70)):
            a, b = some(rng, a_type, m, k), some(rng, b_type, k, n)
            a_zero, b_zero, zeros = some(rng, a_type), some(rng, b_type), some(rng, b_type, n)
            wide, right = a.astype(np.int64), b.astype(np.int64)
            cases.add("MatMulInteger", a, b, known=known, want=(wide @ right).astype(np.int32))
            for zero in (b_zero, zeros):
                want = (wide - a_zero) @ (right - zero.astype(np.int64))
                cases.add("MatMulInteger", a, b, a_zero, zero, known=known, want=want.astype(np.int32))
    most = np.full((2, 70000), 255, U8), np.full((70000, 4), 127, I8)
    cases.add("MatMulInteger", *most, known=known, want=np.full((2, 4), 70000 * 255 * 127, np.int64).astype(np.int32))
    cases.check(opset=13)


def test_integer_products_of_other_ranks_and_of_zero_points_per_row(cases, rng):
    a, b, row = some(rng, U8, 2, 3, 5), some(rng, I8, 5, 4), some(rng, U8, 3)
    wide, right = a.astype(np.int32), b.astype(np.int32)
    cases.add("MatMulInteger", a, b, known=(1,), want=wide @ right)
    cases.add("MatMulInteger", a[0], b, row, known=(1,), want=(wide[0] - row[:, None].astype(np.int32)) @ right)
    cases.add("MatMulInteger", a[0, 0], b, want=wide[0, 0] @ right)
    cases.add("MatMulInteger", a, np.stack([b, b + I8(0)]), want=wide @ right)
    cases.add("MatMulInteger", a, b[:, 0], known=(1,), want=wide @ right[:, 0])
    cases.add("MatMulInteger", a[:, :0], b, known=(1,), want=wide[:, :0] @ right)
    cases.add("MatMulInteger", a[..., :0], b[:0], known=(1,), want=np.zeros((2, 3, 4), np.int32))
    cases.check(opset=13)


def test_qlinear_matmul(cases, rng):
    for dtype in (U8, I8):
        a, b = some(rng, dtype, 6, 40), some(rng, dtype, 40, 9)
        for scale in (F(0.02), 0.01 + 0.02 * rng.random(9, F)):
            zeros = some(rng, dtype, 9) if scale.size > 1 else some(rng, dtype)
            for known in ((), (3, 4, 5)):
                inputs = (a, F(0.01), dtype(7), b, scale, zeros, F(0.3), dtype(11))
                made = (a.astype(np.int64) - 7) @ (b.astype(np.int64) - zeros.astype(np.int64))
                want = rounded(made.astype(F) * (F(0.01) * scale / F(0.3)), 1, 11, dtype)
                cases.add("QLinearMatMul", *inputs, known=known, want=want)
    cases.check(opset=13)


def convolved(x, w, strides, pad, group):
    """[n, c, h, w] with [m, c / group, kh, kw], int64."""
    n, c, _, _ = x.shape
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], (2, 3))[:, :, ::strides, ::strides]
    windows = windows.reshape(n, group, c // group, *windows.shape[2:])
    made = np.einsum("ngchwij,gmcij->ngmhw", windows, w.reshape(group, -1, *w.shape[1:]))
    return made.reshape(n, w.shape[0], *made.shape[3:])


@pytest.mark.parametrize("known", [(), (1, 3)], ids=["fed", "known"])
def test_integer_convolutions_are_exact(cases, rng, known):
    for a_type, b_type in ((U8, I8), (U8, U8), (I8, I8)):
        for shape, filters, strides, pad, group in (
            ((1, 3, 9, 8), (4, 3, 3, 3), 1, 1, 1),
            ((2, 70, 6, 7), (5, 70, 3, 3), 2, 1, 1),
            ((1, 600, 3, 4), (8, 600, 1, 1), 1, 0, 1),
            ((1, 8, 9, 9), (8, 1, 3, 3), 1, 1, 8),
            ((1, 140, 4, 4), (4, 70, 3, 3), 1, 1, 2),
        ):
            x, w = some(rng, a_type, *shape), some(rng, b_type, *filters)
            x_zero, w_zero = some(rng, a_type), some(rng, b_type)
            wide, right = x.astype(np.int64) - x_zero, w.astype(np.int64)
            attrs = {"strides": [strides] * 2, "pads": [pad] * 4, "group": group}
            want = convolved(wide, right - w_zero, strides, pad, group).astype(np.int32)
            cases.add("ConvInteger", x, w, x_zero, w_zero, known=known, want=want, **attrs)
            want = convolved(x.astype(np.int64), right, strides, pad, group).astype(np.int32)
            cases.add("ConvInteger", x, w, known=known, want=want, **attrs)
    cases.check(opset=13)


def test_qlinear_conv(cases, rng):
    x, w, bias = some(rng, U8, 1, 6, 7, 8), some(rng, I8, 4, 6, 3, 3), rng.integers(-9999, 9999, 4).astype(np.int32)
    for scale in (F(0.02), 0.01 + 0.02 * rng.random(4, F)):
        for known in ((), (3, 4, 5)):
            inputs = (x, F(0.01), U8(7), w, scale, np.zeros(scale.shape, I8), F(0.9), U8(111), bias)
            made = convolved(x.astype(np.int64) - 7, w.astype(np.int64), 1, 1, 1) + bias.reshape(4, 1, 1)
            factor = F(0.01) * scale.reshape(-1, 1, 1) / F(0.9)
            cases.add(
                "QLinearConv",
                *inputs,
                known=known,
                want=rounded(made.astype(F) * factor, 1, 111, U8),
                pads=[1, 1, 1, 1],
            )
    cases.check(opset=13)


@pytest.mark.parametrize(
    ("shape", "block"), [((3,), 0), ((2, 5), 0), ((1, 2), 2), ((2, 2), 2)], ids=["size", "rank", "rows", "blocks"]
)
def test_scales_that_do_not_fit_are_refused(shape, block):
    plan = Lowering(CPU_LIKE)
    plan.node, plan.op = "q", "QuantizeLinear"
    scale = Tensor(np.dtype(F), shape, value=np.ones(shape, F))
    with pytest.raises(InvalidModel, match=r"node 'q' \(QuantizeLinear\): expected .*scales or zero points"):
        spread(plan, scale, (2, 5), 1, block)
