"""What a plan says of the work in each dispatch: operations on numbers, and bytes. All by hand."""

from __future__ import annotations

import numpy as np
import pytest

from trionnx.gpu.graph.planner import Planner
from trionnx.gpu.graph.read import read_model
from trionnx.gpu.graph.steps import Dispatch
from trionnx.gpu.graph.target import CPU_LIKE

F = np.dtype(np.float32)


def dispatches(model, **shapes) -> list[Dispatch]:
    planner = Planner(read_model(model), CPU_LIKE)
    inputs = {i.name: (i.dtype or F, shapes[i.name]) for i in planner.model.inputs}
    return [step for step in planner.start(inputs, lambda: None).steps if isinstance(step, Dispatch)]


def work(model, **shapes) -> list[tuple[float, int]]:
    return [(step.flops, step.nbytes) for step in dispatches(model, **shapes)]


def test_a_product(parse):
    model = parse("g (float[32,48] x, float[48,64] w) => (float[32,64] y) { y = MatMul(x, w) }")
    assert work(model, x=(32, 48), w=(48, 64)) == [(2 * 32 * 48 * 64, 4 * (32 * 48 + 48 * 64 + 32 * 64))]


def test_a_convolution_and_what_is_fused_onto_it(parse):
    model = parse(
        "g (float[1,16,12,12] x, float[32,16,1,1] w) => (float[1,32,12,12] y)"
        "{ a = Conv(x, w) b = Relu(a) y = Mul(b, b) }"
    )
    [packing, step] = dispatches(model, x=(1, 16, 12, 12), w=(32, 16, 1, 1))
    assert packing.flops == 0
    outputs = 32 * 12 * 12
    assert step.flops == 2 * 16 * outputs + 2 * outputs
    # Weights lie in panels with a row for the bias.
    assert step.nbytes == 4 * (16 * 12 * 12 + 32 * (16 + 1) + outputs)


def test_three_by_three_with_padding(parse):
    model = parse(
        "g (float[1,16,12,12] x, float[32,16,3,3] w) => (float[1,32,12,12] y) { y = Conv<pads=[1,1,1,1]>(x, w) }"
    )
    counted = work(model, x=(1, 16, 12, 12), w=(32, 16, 3, 3))
    assert sum(flops for flops, _ in counted) == 2 * 32 * 16 * 3 * 3 * 12 * 12


@pytest.mark.parametrize("row", [64, 1])
def test_elementwise_operators_are_one_operation_for_each_element(parse, row):
    model = parse("g (float[64,64] x, float[n] r) => (float[64,64] y) { a = Add(x, r) y = Relu(a) }")
    padded = max(row, 4)
    assert work(model, x=(64, 64), r=(row,)) == [(2 * 64 * 64, 4 * (2 * 64 * 64 + padded))]


def test_a_pool(parse):
    model = parse("g (float[1,4,8,8] x) => (float[1,4,4,4] y) { y = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x) }")
    assert work(model, x=(1, 4, 8, 8)) == [(4 * 4 * 4 * 4, 4 * (4 * 8 * 8 + 4 * 4 * 4))]


def test_what_reads_a_part_of_a_buffer_counts_the_part(parse):
    taken = parse("g (float[1000,16] x, int32[5] i) => (float[5,16] y) { y = Gather(x, i) }")
    gather = dispatches(taken, x=(1000, 16), i=(5,))[-1]
    assert (gather.flops, gather.nbytes) == (0, 4 * (2 * 5 * 16 + 5))
    cut = parse(
        "g (float[64,64] x) => (float[64,8] y) <int64[1] a = {0}, int64[1] b = {8}, int64[1] c = {1}>"
        "{ y = Slice(x, a, b, c) }"
    )
    assert work(cut, x=(64, 64)) == [(0, 4 * 2 * 64 * 8)]
