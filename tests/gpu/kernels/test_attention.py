from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from trionnx.gpu.errors import InvalidModel

F = np.float32
MS = "com.microsoft"
INFINITE = F(-np.inf)


def referenced(op: str, inputs: Any, outputs: int, opset: int, **attrs: Any) -> list[Any]:
    """What onnx.reference makes of one node."""
    names = ["" if x is None else f"i{k}" for k, x in enumerate(inputs)]
    made = [f"o{k}" for k in range(outputs)]
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in zip(names, inputs, strict=True)
        if x is not None
    ]
    node = helper.make_node(op, names, made, **attrs)
    graph = helper.make_graph([node], "one", infos, [onnx.ValueInfoProto(name=name) for name in made])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    feeds = {name: x for name, x in zip(names, inputs, strict=True) if x is not None}
    with np.errstate(all="ignore"):
        evaluated: Any = ReferenceEvaluator(model).run(None, feeds)
    return list(evaluated)


def add(cases, op, *inputs, outputs=1, opset=24, fed=(), tol=2e-6, **attrs):
    want = referenced(op, inputs, outputs, opset, **attrs)
    cases.add(op, *inputs, outputs=outputs, want=want, fed=fed, tol=tol, **attrs)


def normal(rng, *shape):
    return rng.standard_normal(shape, F)


def test_attention_with_heads_of_every_layout(cases, rng, variant):
    q, k, v = normal(rng, 2, 4, 5, 8), normal(rng, 2, 4, 7, 8), normal(rng, 2, 4, 7, 6)
    add(cases, "Attention", q, k, v)
    add(cases, "Attention", q, k, v, scale=0.25, softcap=2.0)
    add(cases, "Attention", q, k[:, :2], v[:, :2])
    add(cases, "Attention", q, k[:, :1], v[:, :1])
    q, k, v = normal(rng, 2, 5, 24), normal(rng, 2, 7, 12), normal(rng, 2, 7, 6)
    add(cases, "Attention", q, k, v, q_num_heads=4, kv_num_heads=2)
    add(cases, "Attention", q[:, :1], k, v, q_num_heads=4, kv_num_heads=2, is_causal=1)
    cases.check(opset=24)


def test_attention_masks(cases, rng, variant):
    q, k, v = normal(rng, 2, 3, 5, 8), normal(rng, 2, 3, 7, 8), normal(rng, 2, 3, 7, 8)
    for shape in ((5, 7), (1, 3, 5, 7), (2, 1, 1, 7), (5, 6)):
        seen = rng.random(shape) > 0.4
        for mask in (seen, np.where(seen, normal(rng, *shape), INFINITE)):
            for causal in (0, 1):
                # The reference takes the number of queries from the mask.
                whole = np.broadcast_to(mask, (*shape[:-2], 5, shape[-1]))
                want = referenced("Attention", (q, k, v, whole), 1, 24, is_causal=causal)
                cases.add("Attention", q, k, v, mask, want=want, is_causal=causal)
    cases.check(opset=24)


def test_a_query_that_sees_nothing_gets_zero(cases, rng, variant):
    for keys in (7, 8, 6000):
        q, k, v = normal(rng, 1, 2, 3, 4), normal(rng, 1, 2, keys, 4), normal(rng, 1, 2, keys, 4)
        seen = np.ones((3, keys), bool)
        seen[1] = False
        add(cases, "Attention", q, k, v, seen, None, None, outputs=4, tol=1e-5, qk_matmul_output_mode=3)
        add(cases, "Attention", q, k, v, np.where(seen, F(0), INFINITE), tol=1e-5)
    cases.check(opset=24)


def test_attention_over_a_cache(cases, rng):
    q, k, v = normal(rng, 2, 4, 3, 8), normal(rng, 2, 2, 3, 8), normal(rng, 2, 2, 3, 6)
    past = normal(rng, 2, 2, 5, 8), normal(rng, 2, 2, 5, 6)
    for causal in (0, 1):
        add(cases, "Attention", q, k, v, None, *past, outputs=3, is_causal=causal)
    lengths = np.array([3, 2], np.int64)
    for fed in ((), (6,)):
        add(cases, "Attention", q, k, v, None, None, None, lengths, fed=fed)
        add(cases, "Attention", q, k, v, None, None, None, lengths, fed=fed, is_causal=1)
    cases.check(opset=24)


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_attention_shows_its_scores(cases, rng, mode):
    q, k, v = normal(rng, 1, 2, 4, 8), normal(rng, 1, 2, 4, 8), normal(rng, 1, 2, 4, 8)
    mask = normal(rng, 4, 4)
    add(cases, "Attention", q, k, v, mask, outputs=4, is_causal=1, qk_matmul_output_mode=mode)
    if mode:
        add(cases, "Attention", q, k, v, mask, outputs=4, qk_matmul_output_mode=mode, softcap=3.0)
    cases.check(opset=24)


def test_attention_over_a_window(cases, rng):
    q, k, v = normal(rng, 1, 2, 6, 8), normal(rng, 1, 2, 6, 8), normal(rng, 1, 2, 6, 8)
    for causal, left, right in ((1, 2, -1), (0, 1, 1), (0, -1, 0), (0, 0, -1)):
        windows = {"left_window_size": left, "right_window_size": right}
        add(cases, "Attention", q, k, v, opset=25, is_causal=causal, **windows)
    cases.check(opset=25)


def test_rotary_embedding(cases, rng):
    angles = normal(rng, 11, 4)
    cos, sin = np.cos(angles), np.sin(angles)
    places = rng.integers(0, 11, (2, 5))
    for interleaved in (0, 1):
        for x, attrs in ((normal(rng, 2, 3, 5, 8), {}), (normal(rng, 2, 5, 24), {"num_heads": 3})):
            attrs = {"interleaved": interleaved, **attrs}
            add(cases, "RotaryEmbedding", x, cos, sin, places, **attrs)
            add(cases, "RotaryEmbedding", x, cos, sin, places, fed=(3,), **attrs)
            add(cases, "RotaryEmbedding", x, cos[places], sin[places], **attrs)
            part = cos[:, :2], sin[:, :2]
            add(cases, "RotaryEmbedding", x, *part, places, rotary_embedding_dim=4, **attrs)
    cases.check(opset=24)


def test_multi_head_attention(cases, rng, variant):
    q, k, v = normal(rng, 3, 2, 5, 32)
    seen = (rng.random((2, 5)) > 0.3).astype(np.int32)
    cases.add("MultiHeadAttention", q, k, v, domain=MS, num_heads=4)
    cases.add("MultiHeadAttention", q, k, v, normal(rng, 96), domain=MS, num_heads=4, unidirectional=1)
    cases.add("MultiHeadAttention", q, k, v, None, seen, normal(rng, 1, 4, 5, 5), domain=MS, num_heads=4, scale=0.5)
    longer = normal(rng, 2, 2, 7, 32)
    cases.add("MultiHeadAttention", q, *longer, None, np.array([7, 3], np.int32), domain=MS, num_heads=4)
    cases.add("MultiHeadAttention", q, *normal(rng, 2, 2, 4, 7, 8), domain=MS, num_heads=4)
    past = normal(rng, 2, 2, 4, 3, 8)
    cases.add("MultiHeadAttention", q, k, v, None, None, None, *past, outputs=3, domain=MS, num_heads=4)
    cases.check()


def test_packed_multi_head_attention_is_as_unpacked(cases, rng):
    q, k, v = (normal(rng, 2, 5, 4, 8) for _ in range(3))
    heads = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    want = referenced("Attention", heads, 1, 24)[0].transpose(0, 2, 1, 3).reshape(2, 5, 32)
    cases.add("MultiHeadAttention", np.stack([q, k, v], 3), domain=MS, num_heads=4, want=want)
    packed = q.reshape(2, 5, 32), np.stack([k, v], 3)
    cases.add("MultiHeadAttention", *packed, domain=MS, num_heads=4, want=want)
    cases.check()


def test_attention_with_its_projections(cases, rng):
    x, weights, bias = normal(rng, 2, 5, 32), normal(rng, 32, 96) * F(0.2), normal(rng, 96)
    seen = (rng.random((2, 5)) > 0.3).astype(np.int32)
    seen[:, 0] = 1
    cases.add("Attention", x, weights, bias, known=(1, 2), domain=MS, num_heads=4)
    cases.add("Attention", x, weights, bias, seen, domain=MS, num_heads=4, unidirectional=1)
    cases.add("Attention", x, weights, bias, np.array([5, 2], np.int32), domain=MS, num_heads=4)
    past = normal(rng, 2, 2, 4, 3, 8)
    cases.add("Attention", x, weights, bias, None, past, outputs=2, domain=MS, num_heads=4, unidirectional=1)
    cases.check()


def group_query(rng, b, s, past):
    shapes = [(b, s, 64), (b, s, 32), (b, s, 32), (b, 2, past, 16), (b, 2, past, 16)]
    return [normal(rng, *shape) for shape in shapes]


def ends(b, total):
    return np.full(b, total - 1, np.int32), np.array(total, np.int32)


def test_group_query_attention(cases, rng):
    angles = normal(rng, 32, 8)
    turns = np.cos(angles), np.sin(angles)
    attrs = {"num_heads": 4, "kv_num_heads": 2, "domain": MS, "outputs": 3}
    for rotary in (0, 1):
        prompt, step = group_query(rng, 2, 5, 0), group_query(rng, 1, 1, 6)
        cases.add("GroupQueryAttention", *prompt, *ends(2, 5), *turns, do_rotary=rotary, **attrs)
        cases.add("GroupQueryAttention", *step, *ends(1, 7), *turns, known=(5, 6), do_rotary=rotary, **attrs)
    packed = normal(rng, 2, 9, 128)
    more = {"do_rotary": 1, "rotary_interleaved": 1, "softcap": 5.0}
    cases.add("GroupQueryAttention", packed, None, None, None, None, *ends(2, 9), *turns, **more, **attrs)
    plain = group_query(rng, 2, 9, 0)[:3]
    cases.add("GroupQueryAttention", *plain, None, None, *ends(2, 9), local_window_size=3, **attrs)
    cases.check()


def test_group_query_attention_of_sequences_of_different_lengths(cases, rng):
    q, k, v, *past = group_query(rng, 2, 1, 6)
    lengths = np.array([6, 3], np.int32), np.array(7, np.int32)
    rows = []
    for b in range(2):
        news = [x[b].reshape(1, 1, 2, 16).transpose(0, 2, 1, 3) for x in (k, v)]
        caches = [x[b : b + 1, :, : lengths[0][b]] for x in past]
        one = referenced("Attention", (q[b].reshape(1, 1, 4, 16).transpose(0, 2, 1, 3), *news, None, *caches), 1, 24)
        rows.append(one[0].reshape(1, 64))
    want = np.stack(rows)
    cases.add("GroupQueryAttention", q, k, v, *past, *lengths, num_heads=4, kv_num_heads=2, domain=MS, want=want)
    cases.check(host=["GroupQueryAttention"])


def test_rotary_embedding_of_microsoft(cases, rng):
    angles = normal(rng, 16, 4)
    turns = np.cos(angles), np.sin(angles)
    places = rng.integers(0, 16, (2, 5))
    for interleaved in (0, 1):
        cases.add("RotaryEmbedding", normal(rng, 2, 5, 24), places, *turns, domain=MS, interleaved=interleaved)
        x, first = normal(rng, 2, 3, 5, 8), np.array([3], np.int64)
        cases.add("RotaryEmbedding", x, first, *turns, domain=MS, interleaved=interleaved)
    cases.check()


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        ("Attention<q_num_heads = 3, kv_num_heads = 3>(x, x, x)", "float[2,4,8] x"),
        ("Attention(x, y, y)", "float[2,4,5,8] x, float[2,3,5,8] y"),
        ("Attention(x, y, y)", "float[2,4,5,8] x, float[2,4,5,6] y"),
        ("RotaryEmbedding<num_heads = 3>(x, y, y)", "float[2,4,8] x, float[4,4] y"),
        ("RotaryEmbedding(x, y, y)", "float[2,3,4,8] x, float[2,4,3] y"),
    ],
)
def test_wrong_graphs_are_refused_with_the_node_named(open_model, parse, op, inputs):
    model = parse(f"g ({inputs}) => (float[A] z) {{ z = {op} }}", 24)
    feeds = {i.name: np.zeros([d.dim_value for d in i.type.tensor_type.shape.dim], F) for i in model.graph.input}
    with pytest.raises(InvalidModel, match=r"node .* \((Attention|RotaryEmbedding)\): expected "):
        open_model(model).run(feeds)
