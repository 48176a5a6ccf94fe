from __future__ import annotations

from typing import Any

import numpy as np
import pytest

F, U8, I8 = np.float32, np.uint8, np.int8
MS = "com.microsoft"


def normal(rng, *shape):
    return rng.standard_normal(shape, F)


def some(rng, dtype, *shape):
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return np.asarray(rng.integers(low, high + 1, shape)).astype(dtype)


def scalar(value: float, dtype: Any = F) -> Any:
    return np.array(value, dtype)


def test_fused_matmul(cases, rng, variant):
    cases.add("FusedMatMul", normal(rng, 3, 4, 5), normal(rng, 3, 5, 6), domain=MS, alpha=0.5)
    cases.add("FusedMatMul", normal(rng, 3, 5, 4), normal(rng, 3, 6, 5), domain=MS, transA=1, transB=1)
    for known in ((), (1,)):
        cases.add("FusedMatMul", normal(rng, 3, 4, 5), normal(rng, 6, 5), known=known, domain=MS, transB=1)
    cases.check()


def test_gelus(cases, rng):
    x = 4 * normal(rng, 2, 5, 32)
    for op in ("FastGelu", "BiasGelu"):
        cases.add(op, x, normal(rng, 32), domain=MS)
    for op in ("FastGelu", "Gelu", "QuickGelu"):
        cases.add(op, x, domain=MS)
    cases.check()


def test_fused_conv(cases, rng):
    x, w, b = normal(rng, 1, 3, 8, 8), normal(rng, 4, 3, 3, 3), normal(rng, 4)
    cases.add("FusedConv", x, w, b, domain=MS, activation="Relu", pads=[1, 1, 1, 1])
    cases.add("FusedConv", x, w, b, normal(rng, 1, 4, 8, 8), domain=MS, activation="Relu", pads=[1, 1, 1, 1])
    for activation, params in (("LeakyRelu", [0.2]), ("HardSigmoid", [0.2, 0.5]), ("Clip", [-1.0, 1.0])):
        cases.add("FusedConv", x, w, b, domain=MS, activation=activation, activation_params=params)
    for activation in ("Sigmoid", "Tanh"):
        cases.add("FusedConv", x, w, b, domain=MS, activation=activation)
    cases.check()


def test_normalisations_with_a_skip(cases, rng, variant):
    x, skip = normal(rng, 2, 5, 130), normal(rng, 2, 5, 130)
    gamma, beta, bias = normal(rng, 3, 130)
    cases.add("SkipLayerNormalization", x, skip, gamma, beta, bias, domain=MS)
    cases.add("SkipLayerNormalization", x, skip, gamma, beta, domain=MS, epsilon=1e-3)
    cases.add("SkipLayerNormalization", x, skip[0], gamma, domain=MS)
    cases.add("SkipSimplifiedLayerNormalization", x, skip, gamma, domain=MS)
    cases.add("SkipSimplifiedLayerNormalization", x, skip, gamma, bias, domain=MS)
    cases.check()


def test_the_sum_with_the_skip_is_an_output(cases, rng):
    x, skip, gamma, beta, bias = normal(rng, 5, 1, 3, 16)
    total = (x + skip + bias[0, 0]).astype(np.float64)
    mean, inverse = total.mean(-1, keepdims=True), 1 / np.sqrt(total.var(-1, keepdims=True) + 1e-12)
    want = [(total - mean) * inverse * gamma[0, 0] + beta[0, 0], mean, inverse, total]
    inputs = x, skip, gamma[0, 0], beta[0, 0], bias[0, 0]
    cases.add("SkipLayerNormalization", *inputs, domain=MS, outputs=4, want=want)
    cases.check()


def test_normalisations_before_onnx_had_them(cases, rng):
    x, gamma, beta = normal(rng, 2, 5, 32), normal(rng, 32), normal(rng, 32)
    cases.add("SimplifiedLayerNormalization", x, gamma)
    cases.add("LayerNormalization", x, gamma, beta)
    cases.check(opset=13)


def test_embeddings_with_a_normalisation(cases, rng):
    ids, kinds = rng.integers(0, 9, (2, 5)).astype(np.int32), rng.integers(0, 2, (2, 5)).astype(np.int32)
    words, places, segments = normal(rng, 9, 32), normal(rng, 12, 32), normal(rng, 2, 32)
    gamma, beta = normal(rng, 2, 32)
    mask = (rng.random((2, 5)) > 0.4).astype(np.int32)
    cases.add("EmbedLayerNormalization", ids, kinds, words, places, segments, gamma, beta, mask, domain=MS, outputs=2)
    where = rng.integers(0, 12, (2, 5)).astype(np.int32)
    rest = words, places, None, gamma, beta, None, where
    cases.add("EmbedLayerNormalization", ids, None, *rest, domain=MS, outputs=3)
    cases.check()


@pytest.mark.parametrize("bits", [4, 8])
def test_products_with_weights_of_few_bits(cases, rng, product_variant, bits):
    for rows, k, n, block in ((1, 64, 8, 32), (6, 100, 17, 16), (40, 256, 36, 128)):
        blocks = -(-k // block)
        weights, scales = some(rng, U8, n, blocks, block * bits // 8), rng.random(n * blocks, F)
        zeros, bias = some(rng, U8, n * -(-blocks * bits // 8)), normal(rng, n)
        attrs = {"domain": MS, "K": k, "N": n, "bits": bits, "block_size": block, "tol": 5e-6}
        a = normal(rng, 2, rows, k)
        cases.add("MatMulNBits", a, weights, scales, known=(1, 2), **attrs)
        cases.add("MatMulNBits", a, weights, scales, zeros, None, bias, known=(1, 2, 3), **attrs)
    cases.check()


def test_weights_of_few_bits_that_only_the_run_knows(cases, rng):
    weights, scales = some(rng, U8, 8, 2, 16), rng.random(16, F)
    attrs = {"K": 64, "N": 8, "bits": 4, "block_size": 32}
    cases.add("MatMulNBits", normal(rng, 3, 64), weights, scales, domain=MS, **attrs)
    cases.check(host=["MatMulNBits"])


def test_quantised_products_of_microsoft(cases, rng):
    a, b, scales, bias = some(rng, U8, 3, 20), some(rng, I8, 20, 7), rng.random(7, F), normal(rng, 7)
    zeros = np.zeros(7, I8)
    inputs = a, b, scalar(0.1), scales, scalar(9, U8), zeros, bias
    cases.add("MatMulIntegerToFloat", *inputs, known=(1, 5), domain=MS)
    x = normal(rng, 3, 20)
    cases.add("DynamicQuantizeMatMul", x, b, scalar(0.1), scalar(3, I8), bias, known=(1, 3), domain=MS)
    cases.add("DynamicQuantizeMatMul", x, some(rng, U8, 20, 7), scalar(0.1), known=(1,), domain=MS)
    c = rng.integers(-999, 999, 7).astype(np.int32)
    gemm = a, scalar(0.1), scalar(9, U8), b, scalar(0.1), scalar(0, I8), c
    cases.add("QGemm", *gemm, scalar(9.0), scalar(77, U8), known=(3, 5), domain=MS)
    cases.add("QGemm", *gemm, known=(3, 5), domain=MS)
    cases.check()


def test_quantised_elementwise_operators(cases, rng):
    u, s = some(rng, U8, 3, 4), some(rng, I8, 3, 4)
    cases.add(
        "QLinearAdd",
        u,
        scalar(0.1),
        scalar(3, U8),
        u.T.copy().T,
        scalar(0.2),
        scalar(99, U8),
        scalar(0.3),
        scalar(7, U8),
        domain=MS,
    )
    cases.add(
        "QLinearMul",
        s,
        scalar(0.1),
        scalar(3, I8),
        s[0],
        scalar(0.2),
        scalar(-9, I8),
        scalar(1.0),
        scalar(7, I8),
        domain=MS,
    )
    table = {"known": (1, 2, 3, 4), "domain": MS}
    cases.add("QLinearSigmoid", u, scalar(0.1), scalar(99, U8), scalar(1 / 256), scalar(0, U8), **table)
    cases.add("QLinearLeakyRelu", s, scalar(0.1), scalar(9, I8), scalar(0.1), scalar(-9, I8), alpha=0.2, **table)
    image = some(rng, U8, 2, 3, 7, 5)
    cases.add("QLinearGlobalAveragePool", image, scalar(0.1), scalar(99, U8), scalar(0.05), scalar(9, U8), domain=MS)
    parts = u, scalar(0.1), scalar(99, U8), some(rng, U8, 3, 2), scalar(0.2), scalar(9, U8)
    cases.add("QLinearConcat", scalar(0.15), scalar(77, U8), *parts, domain=MS, axis=1)
    x = normal(rng, 3, 4)
    cases.add("QuantizeLinear", x, scalar(0.1), scalar(99, U8), domain=MS)
    cases.add("DequantizeLinear", u, scalar(0.1), scalar(99, U8), domain=MS)
    cases.add("DequantizeLinear", u, scalar(0.1), scalar(99, U8), domain=MS, known=(0, 1, 2))
    cases.check()


def test_fused_gemm(cases, rng):
    a, b, c = normal(rng, 3, 20), normal(rng, 20, 7), normal(rng, 7)
    cases.add("FusedGemm", a, b, c, domain=MS, activation="Relu", alpha=0.5)
    slope = {"activation": "LeakyRelu", "activation_alpha": 0.2}
    cases.add("FusedGemm", a, b.T.copy(), known=(1,), domain=MS, transB=1, **slope)
    cases.check()


def test_attention_with_quantised_projections(cases, rng):
    x, weights, bias = some(rng, U8, 2, 5, 32), some(rng, I8, 32, 96), normal(rng, 96)
    scales = scalar(0.02), scalar(0.01)
    for mask in (None, np.array([5, 2], np.int32)):
        inputs = x, weights, bias, *scales, mask, scalar(130, U8), scalar(0, I8)
        cases.add("QAttention", *inputs, known=(1, 2, 4, 7), domain=MS, num_heads=4, tol=5e-6)
    cases.check()


def test_recurrent_products_that_are_quantised_in_the_run(cases, rng):
    for direction, d in (("forward", 1), ("bidirectional", 2)):
        x, w, r = normal(rng, 5, 2, 6), some(rng, I8, d, 6, 16), some(rng, I8, d, 4, 16)
        scales, zeros = 0.005 + 0.005 * rng.random((d,), F), np.zeros((d,), I8)
        bias, start = normal(rng, d, 32), normal(rng, 2, d, 2, 4)
        inputs = x, w, r, bias, None, *start, None, scales, zeros, scales, zeros
        attrs = {"hidden_size": 4, "direction": direction, "domain": MS, "outputs": 3, "tol": 1e-5}
        cases.add("DynamicQuantizeLSTM", *inputs, known=(1, 2, 8, 9, 10, 11), **attrs)
    cases.check(host=["DynamicQuantizeLSTM"])


def test_rows_of_a_quantised_table(cases, rng):
    table, scales, zeros = some(rng, U8, 9, 16), rng.random((9, 2), F), some(rng, U8, 9, 1)
    indices = rng.integers(0, 9, (2, 3))
    attrs = {"domain": MS, "block_size": 16, "bits": 4, "quantize_axis": 1}
    cases.add("GatherBlockQuantized", table, indices, scales, fed=(1,), **attrs)
    cases.add("GatherBlockQuantized", table, indices, scales, zeros, fed=(1,), **attrs)
    cases.check(host=["GatherBlockQuantized"])


def test_half_floats_stay_half_floats(cases, rng):
    x, skip, gamma = (normal(rng, 2, 5, 32).astype(np.float16) for _ in range(3))
    weights, scales = some(rng, U8, 8, 2, 8), rng.random(16, F).astype(np.float16)

    def outputs(dtype):
        a, b, c, d = (t.astype(dtype) for t in (x, skip, gamma, scales))
        cases.cases.clear()
        cases.add("SkipSimplifiedLayerNormalization", a, b, c[0, 0], domain=MS)
        cases.add("FastGelu", a, c[0, 0], domain=MS)
        cases.add("MultiHeadAttention", a, b, c, num_heads=4, domain=MS)
        cases.add("FusedMatMul", a, b, transB=1, domain=MS)
        cases.add("MatMulNBits", a, weights, d, known=(1, 2), K=32, N=8, bits=4, block_size=16, domain=MS)
        numbered = list(enumerate(cases.cases))
        feeds = {
            f"i{number}_{k}": t
            for number, case in numbered
            for k, t in enumerate(case.inputs)
            if t is not None and k not in case.known
        }
        return cases.open_model(cases.model(numbered, 18)).run(feeds)

    for half, single in zip(outputs(np.float16), outputs(F), strict=True):
        assert half.dtype == np.float16
        np.testing.assert_allclose(half, single, rtol=1e-3, atol=1e-3)
