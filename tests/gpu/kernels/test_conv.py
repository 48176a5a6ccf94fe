from __future__ import annotations

import itertools

import numpy as np
import pytest

from trionnx.gpu.errors import InvalidModel
from trionnx.gpu.kernels.conv_depthwise import Block, choose_block
from trionnx.gpu.kernels.conv_space import flatten
from trionnx.gpu.kernels.conv_tile import Tile, choose_tile
from trionnx.gpu.kernels.window import Axis

GEOMETRIES = {
    "1x1": ((1, 3, 8, 8), (5, 3, 1, 1), {}),
    "1x1 of an odd size": ((2, 3, 7, 9), (20, 3, 1, 1), {}),
    "1x1 of one pixel": ((3, 8, 1, 1), (20, 8, 1, 1), {}),
    "1x1 with strides": ((1, 8, 19, 18), (20, 8, 1, 1), {"strides": [2, 2]}),
    "3x3": ((2, 8, 13, 13), (16, 8, 3, 3), {"pads": [1, 1, 1, 1]}),
    "3x3 of whole rows": ((1, 5, 9, 20), (33, 5, 3, 3), {"pads": [1, 1, 1, 1]}),
    "3x3 with strides": ((1, 3, 17, 19), (20, 3, 3, 3), {"pads": [1, 1, 1, 1], "strides": [2, 2]}),
    "7x7 with strides": ((1, 3, 40, 44), (18, 3, 7, 7), {"pads": [3, 3, 3, 3], "strides": [2, 2]}),
    "uneven pads": ((1, 3, 12, 11), (6, 3, 3, 2), {"pads": [0, 2, 1, 0], "strides": [1, 3]}),
    "columns without pads": ((1, 4, 30, 32), (17, 4, 3, 1), {}),
    "columns of odd rows": ((1, 4, 30, 5), (6, 4, 3, 1), {}),
    "one column": ((1, 16, 32, 1), (24, 16, 5, 1), {}),
    "rows": ((1, 4, 9, 32), (17, 4, 1, 3), {"pads": [0, 1, 0, 1]}),
    "dilations": ((1, 3, 20, 21), (4, 3, 3, 3), {"pads": [4, 4, 4, 4], "dilations": [4, 4]}),
    "dilations and strides": ((2, 5, 64), (7, 5, 5), {"strides": [3], "dilations": [2]}),
    "kernel of the input's size": ((1, 8, 5, 5), (20, 8, 5, 5), {}),
    "groups": ((1, 6, 14, 15), (9, 2, 3, 3), {"group": 3, "pads": [1, 0, 2, 1], "strides": [2, 1]}),
    "long kernel": ((1, 2, 60), (4, 2, 31), {"pads": [15, 15]}),
    "long kernel with strides": ((1, 1, 640), (20, 1, 256), {"strides": [128]}),
    "one dimension": ((2, 5, 33), (7, 5, 3), {"pads": [1, 1]}),
    "three dimensions": ((1, 3, 6, 7, 8), (5, 3, 2, 3, 3), {"strides": [2, 1, 2], "pads": [1, 1, 0, 0, 1, 2]}),
    "three dimensions, dilated": ((1, 3, 6, 7, 8), (5, 3, 2, 2, 2), {"dilations": [2, 3, 1]}),
    "same upper": ((1, 3, 17, 18), (5, 3, 3, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "same lower": ((1, 3, 17, 18), (5, 3, 2, 2), {"auto_pad": "SAME_LOWER"}),
    "valid": ((1, 3, 17, 18), (5, 3, 3, 2), {"auto_pad": "VALID", "strides": [2, 3]}),
    "no image": ((0, 3, 5, 5), (4, 3, 3, 3), {}),
}
DEPTHWISE = {
    "3x3": ((1, 12, 15, 15), (12, 1, 3, 3), {"group": 12, "pads": [1, 1, 1, 1]}),
    "3x3 of whole rows": ((2, 5, 10, 36), (5, 1, 3, 3), {"group": 5, "pads": [1, 1, 1, 1]}),
    "5x5 with strides": ((1, 4, 15, 30), (4, 1, 5, 5), {"group": 4, "pads": [2, 2, 2, 2], "strides": [2, 1]}),
    "3x3 with strides": ((1, 4, 14, 31), (4, 1, 3, 3), {"group": 4, "pads": [1, 1, 1, 1], "strides": [1, 2]}),
    "two maps per channel": ((1, 4, 5, 7), (8, 1, 3, 3), {"group": 4, "dilations": [2, 2], "pads": [2, 2, 2, 2]}),
    "one dimension": ((1, 6, 50), (6, 1, 9), {"group": 6, "pads": [4, 4]}),
    "three dimensions": ((1, 3, 4, 5, 6), (3, 1, 3, 3, 3), {"group": 3, "pads": [1] * 6}),
    "a window too large to unroll": ((1, 3, 21, 30), (3, 1, 21, 20), {"group": 3}),
}


def convolve(x, w, b, strides=(), dilations=(), pads=(), auto_pad="NOTSET", group=1):
    """Conv in float64, tap by tap."""
    rank = x.ndim - 2
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    pads = list(pads or [0] * 2 * rank)
    span = [(k - 1) * d + 1 for k, d in zip(w.shape[2:], dilations, strict=True)]
    if auto_pad.startswith("SAME"):
        for a, size in enumerate(x.shape[2:]):
            total = max((-(-size // strides[a]) - 1) * strides[a] + span[a] - size, 0)
            small = total // 2
            pads[a], pads[a + rank] = (small, total - small) if auto_pad == "SAME_UPPER" else (total - small, small)
    x = np.pad(x.astype(np.float64), [(0, 0), (0, 0), *((pads[a], pads[a + rank]) for a in range(rank))])
    out = [(x.shape[a + 2] - span[a]) // strides[a] + 1 for a in range(rank)]
    y = np.zeros((x.shape[0], w.shape[0], *out))
    maps, inner = w.shape[0] // group, w.shape[1]
    for g, tap in itertools.product(range(group), np.ndindex(*w.shape[2:])):
        window = tuple(
            slice(t * d, t * d + s * (n - 1) + 1, s) for t, d, s, n in zip(tap, dilations, strides, out, strict=True)
        )
        taken = x[(slice(None), slice(g * inner, (g + 1) * inner), *window)]
        weights = w[(slice(g * maps, (g + 1) * maps), slice(None), *tap)].astype(np.float64)
        y[:, g * maps : (g + 1) * maps] += np.einsum("nc...,mc->nm...", taken, weights)
    return y if b is None else y + b.reshape(-1, *[1] * rank)


def add_conv(cases, rng, geometry, *, bias=True, known=(1, 2)):
    shape, kernel, attrs = geometry
    x, w = (rng.standard_normal(s, np.float32) for s in (shape, kernel))
    b = rng.standard_normal(kernel[0], np.float32) if bias else None
    cases.add("Conv", x, w, *([b] if bias else []), known=known, want=convolve(x, w, b, **attrs), **attrs)


def test_every_geometry(cases, product_variant, rng):
    for geometry in (*GEOMETRIES.values(), *DEPTHWISE.values()):
        add_conv(cases, rng, geometry)
    cases.check()


def test_without_bias(cases, variant, rng):
    for name in ("1x1", "3x3", "groups", "one dimension"):
        add_conv(cases, rng, GEOMETRIES[name], bias=False, known=(1,))
        add_conv(cases, rng, DEPTHWISE.get(name, DEPTHWISE["3x3"]), bias=False, known=(1,))
    cases.check()


def test_weights_or_bias_that_only_the_run_knows(cases, variant, rng):
    for name in ("1x1", "3x3", "groups"):
        for known in ((), (1,), (2,)):
            add_conv(cases, rng, GEOMETRIES[name], known=known)
        add_conv(cases, rng, GEOMETRIES[name], bias=False, known=())
    add_conv(cases, rng, DEPTHWISE["3x3"], known=())
    cases.check()


def test_what_is_fused_onto_a_convolution_sees_every_element_once(open_model, parse, rng, variant):
    w, b = rng.standard_normal((20, 3, 3, 3), np.float32), rng.standard_normal(20, np.float32)
    for width in (9, 12):
        model = parse(
            f"agraph (float[1, 3, 6, {width}] x, float[20, 3, 3, 3] w, float[20] b, float[1, 20, 1, 1] s,"
            f" float[1, 20, 6, {width}] r) => (float[1, 20, 6, {width}] y) {{"
            " c = Conv <pads = [1, 1, 1, 1]> (x, w, b) m = Mul (c, s) a = Add (m, r) y = Relu (a) }"
        )
        x, r = rng.standard_normal((1, 3, 6, width), np.float32), rng.standard_normal((1, 20, 6, width), np.float32)
        s = rng.standard_normal((1, 20, 1, 1), np.float32)
        (y,) = open_model(model).run({"x": x, "w": w, "b": b, "s": s, "r": r})
        want = np.maximum(convolve(x, w, b, pads=[1, 1, 1, 1]) * s + r, 0)
        np.testing.assert_allclose(y, want, atol=1e-5 * np.abs(want).max())


def test_cut_between_any_two_workgroups_it_gives_the_same_bits(open_model, parse, rng, variant):
    model = parse(
        "agraph (float[2, 8, 19, 21] x, float[40, 8, 3, 3] w) => (float[2, 40, 10, 11] y) {"
        " y = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, w) }"
    )
    driver = open_model(model)
    feeds = {"x": rng.standard_normal((2, 8, 19, 21), np.float32), "w": rng.standard_normal((40, 8, 3, 3), np.float32)}
    whole = driver.run(feeds)[0]
    assert driver.run(feeds, units=1)[0].tobytes() == whole.tobytes()


def test_infinity_stays_in_its_window(cases, variant, rng):
    x = rng.standard_normal((1, 3, 9, 11), np.float32)
    x[0, 1, 4, 5] = np.inf
    w = np.abs(rng.standard_normal((5, 3, 3, 3), np.float32))
    cases.add("Conv", x, w, known=(1,), pads=[1, 1, 1, 1])
    cases.check()


@pytest.mark.parametrize(
    ("attrs", "kernel", "words"),
    [
        ("", "2, 4, 3, 3", "channels"),
        ("<group = 2>", "2, 3, 3, 3", "channels"),
        ("<kernel_shape = [5, 5]>", "2, 3, 3, 3", "kernel_shape"),
        ("<strides = [1]>", "2, 3, 3, 3", "strides"),
        ("<pads = [0, -1, 0, 0]>", "2, 3, 3, 3", "pads"),
        ("", "2, 3, 9, 9", "window"),
    ],
)
def test_a_wrong_node_is_refused_by_name(open_model, parse, attrs, kernel, words):
    graph = f"agraph (float[1, 3, 8, 8] x, float[{kernel}] w) => (float[a, b, c, d] y)"
    model = parse(f"{graph} {{ [stem] y = Conv {attrs} (x, w) }}")
    shape = [int(v) for v in kernel.split(",")]
    with pytest.raises(InvalidModel, match=f"'stem'.*Conv.*{words}"):
        open_model(model).run({"x": np.zeros((1, 3, 8, 8), np.float32), "w": np.zeros(shape, np.float32)})


def test_inputs_are_copied_only_where_they_must_be():
    def copied(*axes: Axis) -> bool:
        return flatten(axes).copied

    assert not copied(Axis(28, 28), Axis(28, 28))
    assert not copied(Axis(7, 7), Axis(4, 4))
    assert not copied(Axis(512, 508, 5), Axis(1, 1))
    assert not copied(Axis(30, 28, 3), Axis(32, 32))
    assert copied(Axis(7, 7), Axis(7, 7))
    assert copied(Axis(30, 28, 3), Axis(30, 30))
    assert copied(Axis(28, 14, 1, 2), Axis(28, 14, 1, 2))
    assert copied(Axis(28, 28, 3, 1, 1, 1, 1), Axis(28, 28, 3, 1, 1, 1, 1))


def test_tiles_fit_their_outputs():
    def tile(outputs: int, pixels: int, subgroup: int = 0) -> Tile:
        return choose_tile(outputs, flatten([Axis(1, 1), Axis(pixels, pixels)]), subgroup)

    assert tile(64, 3136) == Tile(16, 16)
    assert tile(4, 3136) == Tile(4, 16)
    assert tile(64, 49) == Tile(16, 8)
    assert tile(64, 1) == Tile(16, 4)
    assert tile(64, 3136, 8) == Tile(32, 8)
    assert tile(48, 3136, 8) == Tile(16, 8)
    assert tile(64, 1, 8) == Tile(32, 4)
    assert tile(64, 3136, 4) == Tile(8, 8, 4)
    assert tile(4, 3136, 4) == Tile(4, 8, 4)
    assert tile(64, 1, 4) == Tile(8, 4, 4)
    taps = flatten([Axis(56, 56, 3, begin=1, end=1)] * 2)
    assert choose_tile(64, taps, 4) == Tile(4, 8, 4)
    column = flatten([Axis(56, 56, 3, begin=1, end=1), Axis(56, 56)])
    assert choose_tile(64, column, 4) == Tile(4, 8, 4)
    square = flatten([Axis(28, 28, 3, 1, 1, 1, 1)] * 2)
    assert choose_block(square, True) == Block(4, 16)
    assert choose_block(square, True, 4) == Block(4, 4)
    assert choose_block(square, False) == Block(1, 4)
    assert choose_block(flatten([Axis(64, 34, 31)] * 2), True) is None


def test_widths_share_their_pipelines(open_model, parse, rng):
    model = parse(
        "agraph (float[1, 3, 32, width] x, float[24, 3, 3, 3] w) => (float[1, 24, 16, out] y) {"
        " y = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, w) }"
    )
    driver = open_model(model)
    w = rng.standard_normal((24, 3, 3, 3), np.float32)
    made = []
    for width in (200, 202, 208, 222, 360, 361):
        x = rng.standard_normal((1, 3, 32, width), np.float32)
        (y,) = driver.run({"x": x, "w": w})
        np.testing.assert_allclose(y, convolve(x, w, None, strides=[2, 2], pads=[1] * 4), atol=5e-5)
        made.append(driver.engine.device.pipelines)
    assert made[1:] == [made[1]] * 5


def test_loops_may_turn_more_often_than_a_software_adapter_allows(cases, variant, rng):
    x, w = rng.standard_normal((1, 700, 420), np.float32), rng.standard_normal((3, 700, 410), np.float32)
    cases.add("Conv", x, w, known=(1,), want=convolve(x, w, None), tol=1e-5)
    cases.check()
