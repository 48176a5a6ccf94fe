"""How WGSL that is written for f32 becomes WGSL for buffers of f16."""

from __future__ import annotations

import pytest

from trionnx.gpu.kernels.half import admitted, halved, rewritten
from trionnx.gpu.kernels.kernel import Binding, Kernel, admits, link


@pytest.mark.parametrize(
    ("code", "kinds", "want"),
    [
        ("let v = x[i];", {"x": "f16"}, "let v = f32(x[i]);"),
        ("v = x[i].y + ax[i] + p.x[i] + x2[i];", {"x": "vec2u"}, "v = from_halves(x[i]).y + ax[i] + p.x[i] + x2[i];"),
        ("store(i, x[i + u32(w[j])]);", {"x": "f16", "w": "f16"}, "store(i, f32(x[i + u32(f32(w[j]))]));"),
        ("v = x[at(i)];", {"x": "u32"}, "v = from_half(x[u32(at(i)) / 2u], u32(at(i)));"),
        ("y[i] = max(x[i], 0.0);", {"x": "f16", "y": "f16"}, "y[i] = f16(max(f32(x[i]), 0.0));"),
        ("if (x[i] == y[i]) { y[x2[0]] = v; }", {"x": "f16", "y": "vec2u"},
         "if (f32(x[i]) == from_halves(y[i])) { y[x2[0]] = to_halves(v); }"),
        ("let x = 1;", {}, "let x = 1;"),
    ],
)  # fmt: skip
def test_loads_widen_and_stores_narrow(code, kinds, want):
    assert rewritten(code, kinds) == want


@pytest.mark.parametrize(
    ("code", "kind", "want"),
    [
        ("let v = x[i] + x [j];", "f32", True),
        ("let v = params.x;", "vec4f", True),
        ("let v = bitcast<f32>(x[i]);", "u32", False),
        ("let v = sum(&x, i);", "f32", False),
        ("let n = arrayLength(&x);", "f32", False),
        ("fn f(x: f32) -> f32 { return 2.0; }", "vec4<f32>", False),
    ],
)
def test_what_does_more_than_load_and_store_is_not_rewritten(code, kind, want):
    assert admitted(code, "x", kind) == want


def test_only_what_a_software_adapter_reads_is_words():
    assert [halved(kind, written, True) for kind in ("f32", "vec4f") for written in (False, True)] == [
        "u32", "f16", "vec2u", "vec2u",
    ]  # fmt: skip
    assert [halved("f32", written, False) for written in (False, True)] == ["f16", "f16"]


@pytest.mark.parametrize("cpu", [True, False])
def test_a_shader_without_f16_knows_nothing_of_it(cpu):
    kernel = Kernel("k", "store(group, x[lane]);", reads=(Binding("x"),))
    assert admits(kernel) == (("x", True), ("out", True))
    assert "f16" not in link(kernel, None, frozenset(), cpu).wgsl
    assert "out[i] = f16(v);" in link(kernel, None, frozenset({"out"}), cpu).wgsl
    assert "x[lane]" in link(kernel, None, frozenset({"out"}), cpu).wgsl
