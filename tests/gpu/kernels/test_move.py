from __future__ import annotations

import itertools

import numpy as np
import pytest

from trionnx.gpu.errors import InvalidModel


def ints(*values):
    return np.array(values, np.int64)


def test_transposes_of_every_order(cases, rng, variant):
    x = rng.standard_normal((3, 4, 1, 8), np.float32)
    for perm in itertools.permutations(range(4)):
        cases.add("Transpose", x, perm=list(perm))
    cases.add("Transpose", rng.standard_normal((5, 7), np.float32))
    cases.add("Transpose", rng.standard_normal(7, np.float32))
    cases.add("Transpose", rng.standard_normal((4, 0, 3), np.float32), perm=[2, 0, 1])
    cases.add("Transpose", rng.random((4, 6)) < 0.5)
    cases.add("Transpose", rng.random((2, 4, 8)) < 0.5, perm=[1, 0, 2])
    cases.add("Transpose", rng.integers(0, 9, (3, 5), np.int32))
    cases.add("Transpose", rng.standard_normal((2, 3, 2, 3, 2, 3, 2), np.float32), perm=[6, 0, 5, 1, 4, 2, 3])
    cases.check(opset=13)


def test_slices_are_numpys(cases, rng, variant):
    x = rng.standard_normal((6, 9, 8), np.float32)
    for _ in range(60):
        axes = rng.permutation(3)[: rng.integers(1, 4)]
        starts, ends = rng.integers(-12, 13, (2, len(axes)))
        steps = rng.choice([-3, -2, -1, 1, 1, 1, 2, 5], len(axes))
        index = [slice(None)] * 3
        for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
            index[axis] = slice(start, end, step)
        signed = np.where(rng.random(len(axes)) < 0.5, axes, axes - 3)
        cases.add("Slice", x, starts, ends, signed, steps, want=x[tuple(index)])
    cases.add("Slice", x, ints(1, 2), ints(2**62, -(2**62)), want=x[1:, 2:0])
    cases.add("Slice", x, ints(-1), ints(-(2**62)), ints(1), ints(-1), want=x[:, ::-1])
    cases.add("Slice", x, np.array([2], np.int32), np.array([5], np.int32), known=(1, 2), want=x[2:5])
    cases.add("Slice", rng.random((4, 6)) < 0.5, ints(1), ints(4), ints(1))
    cases.check(opset=13)


def test_slice_by_attributes(cases, rng):
    x = rng.standard_normal((6, 9), np.float32)
    cases.add("Slice", x, starts=[2], ends=[100], axes=[1])
    cases.add("Slice", x, starts=[-3, 1], ends=[-1, 4])
    cases.check(opset=9)


def test_concat(cases, rng, variant):
    for axis, shape in itertools.product((0, 1, 2, -1), ((6, 4, 2), (6, 3, 5))):
        parts = []
        for size in (4, 0, 3, 8):
            part = list(shape)
            part[axis] = size
            parts.append(rng.standard_normal(part, np.float32))
        cases.add("Concat", *parts, axis=axis)
    x = rng.standard_normal((2, 3), np.float32)
    cases.add("Concat", x, x, axis=1, want=np.concatenate([x, x], 1))
    cases.add("Concat", x, axis=0)
    cases.add("Concat", rng.random((9, 4)) < 0.5, rng.random((9, 3)) < 0.5, axis=1)
    cases.check(opset=13)


@pytest.mark.parametrize("opset", [11, 13, 18])
def test_split(cases, rng, opset):
    x = rng.standard_normal((8, 6), np.float32)
    if opset < 13:
        cases.add("Split", x, outputs=2, axis=1, split=[2, 4])
    else:
        cases.add("Split", x, ints(2, 4), outputs=2, axis=1)
        cases.add("Split", x, ints(3, 0, 5), outputs=3, axis=-2)
    if opset < 18:
        cases.add("Split", x, outputs=4)
    else:
        cases.add("Split", x, outputs=3, num_outputs=3)
    cases.check(opset)


def test_tile_and_blocks(cases, rng):
    cases.add("Tile", rng.standard_normal((3, 4), np.float32), ints(2, 3))
    cases.add("Tile", rng.standard_normal((2, 1, 4), np.float32), ints(1, 5, 1))
    cases.add("Tile", rng.standard_normal((2, 3, 4, 5), np.float32), ints(2, 1, 3, 2))
    cases.add("Tile", rng.standard_normal((2, 3), np.float32), ints(0, 3))
    for mode in ("DCR", "CRD"):
        cases.add("DepthToSpace", rng.standard_normal((2, 18, 3, 4), np.float32), blocksize=3, mode=mode)
    cases.add("SpaceToDepth", rng.standard_normal((2, 3, 4, 6), np.float32), blocksize=2)
    cases.check(opset=13)


def test_pads(cases, rng, variant):
    x = rng.standard_normal((4, 5, 6), np.float32)
    for mode in ("constant", "reflect", "edge"):
        for pads in ((1, 0, 2, 3, 0, 1), (0, 0, 2, 0, 0, 1), (-1, 0, 2, 2, 0, -1), (0, 0, -2, 0, 0, -1), (0,) * 6):
            cases.add("Pad", x, ints(*pads), mode=mode)
    cases.add("Pad", x, ints(1, 0, 2, 3, 0, 1), np.float32(2.5), known=(2,))
    cases.add("Pad", rng.integers(0, 9, (2, 3), np.int32), ints(1, 1, 1, 1), np.int32(-7), known=(2,))
    cases.add("Pad", rng.standard_normal((0, 3), np.float32), ints(1, 0, 1, 0))
    cases.check(opset=13)


def test_pads_of_other_versions(open_model, cases, rng, parse):
    x = rng.standard_normal((4, 5), np.float32)
    cases.add(
        "Pad", x, ints(3, 1), np.float32(7), ints(-1), known=(2,), want=np.pad(x, ((0, 0), (3, 1)), constant_values=7)
    )
    cases.add("Pad", x, ints(7, 0, 0, 12), mode="wrap", want=np.pad(x, ((7, 0), (0, 12)), mode="wrap"))
    cases.check(opset=19)
    driver = open_model(
        parse("g (float[4,5] x) => (float[5,7] y) { y = Pad<pads = [1, 0, 0, 2], value = 2.5>(x) }", 10)
    )
    np.testing.assert_array_equal(driver.run({"x": x})[0], np.pad(x, ((1, 0), (0, 2)), constant_values=2.5))


def test_shapes_cost_no_step(open_model, parse, rng):
    driver = open_model(
        parse(
            "g (float[2,3,1,4] x) => (float[6,4] y, float[2,3,4] z, float[2,12] f, float[1,2,3,1,4,1] u)"
            "<int64[2] s = {-1, 4}, int64[1] a = {-2}, int64[2] b = {0, -1}>"
            "{ y = Reshape(x, s) z = Squeeze(x, a) f = Flatten(x) u = Unsqueeze(x, b) }"
        )
    )
    x = rng.standard_normal((2, 3, 1, 4), np.float32)
    for made in driver.run({"x": x}):
        np.testing.assert_array_equal(made.reshape(-1), x.reshape(-1))
    plan = next(reversed(driver.engine._plans.values()))
    assert [type(step).__name__ for step in plan.steps] == ["Upload"]


def test_shapes(cases, rng):
    x = rng.standard_normal((2, 3, 4), np.float32)
    cases.add("Reshape", x, ints(0, -1))
    cases.add("Reshape", x, ints(4, 0, 2))
    cases.add("Reshape", x, ints(-1))
    cases.add("Reshape", rng.standard_normal((0, 3), np.float32), ints(3, 0), allowzero=1)
    cases.add("Reshape", rng.standard_normal((1,), np.float32), np.zeros(0, np.int64))
    for axis in (-3, -1, 0, 1, 3):
        cases.add("Flatten", x, axis=axis)
    cases.add("Squeeze", rng.standard_normal((1, 3, 1), np.float32))
    cases.add("Squeeze", rng.standard_normal((1, 3, 1), np.float32), ints(0))
    cases.add("Unsqueeze", x, ints(0, -1))
    cases.add("ConstantOfShape", ints(2, 3))
    cases.add("ConstantOfShape", ints(0))
    cases.check(opset=14)


def test_shapes_by_attributes(cases, rng):
    cases.add("Squeeze", rng.standard_normal((1, 3, 1), np.float32), axes=[0, 2])
    cases.add("Squeeze", rng.standard_normal((1, 3, 1), np.float32))
    cases.add("Unsqueeze", rng.standard_normal((3, 4), np.float32), axes=[0, 3])
    cases.check(opset=11)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("y = Reshape(x, s)", r"cannot reshape \[2, 3\] to \[4, -1\]"),
        ("y = Transpose<perm = [0, 0]>(x)", "perm"),
        ("y = Transpose<perm = [0, 1, 2]>(x)", "perm"),
        ("y = Concat<axis = 0>(x, z)", "differ outside of axis 0"),
        ("y = Concat<axis = 2>(x, x)", "axis 2 is out of range"),
        ("y = Slice(x, o, o, o, o)", "steps other than 0"),
        ("y = Squeeze(x, o)", "expected size 1"),
        ("y = Unsqueeze(x, o2)", "repeat"),
        ("y = Flatten<axis = 3>(x)", "axis 3 is out of range"),
        ("y, w = Split(x, s)", "do not make up"),
        ("y = Tile(x, o)", "repeats"),
        ("y = Pad(x, s)", "expected 4 pads"),
        ("y = SpaceToDepth<blocksize = 2>(x)", "expected 4 dimensions"),
    ],
)
def test_wrong_graphs_are_refused_with_the_node_named(open_model, parse, body, message):
    given = "<int64[2] s = {4, -1}, int64[1] o = {0}, int64[2] o2 = {0, 0}>"
    model = parse(f"g (float[2,3] x, float[2,4] z) => (float[N,M] y) {given} {{ {body} }}")
    with pytest.raises(InvalidModel, match=message):
        open_model(model).run({"x": np.zeros((2, 3), np.float32), "z": np.zeros((2, 4), np.float32)})


def test_space_to_depth_with_columns_first(cases, rng):
    x = rng.standard_normal((2, 3, 4, 6), np.float32)
    want = x.reshape(2, 3, 2, 2, 3, 2).transpose(0, 1, 3, 5, 2, 4).reshape(2, 12, 2, 3)
    cases.add("SpaceToDepth", x, blocksize=2, mode="CRD", want=want)
    cases.check(opset=28)
