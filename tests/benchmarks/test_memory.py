from __future__ import annotations

from memory import least
from trionnx.gpu.graph.block import Block, Result
from trionnx.gpu.graph.memory import Slots
from trionnx.gpu.graph.steps import Copy
from trionnx.gpu.graph.tensor import Storage


def test_the_least_is_what_lives_at_once_over_all_blocks_and_the_weights():
    weight, first, second, third = Storage(1024, "weight"), Storage(64), Storage(256), Storage(128)
    before = Block([_copy(weight, first), _copy(first, second)], Slots())
    after = Block([_copy(second, third), _copy(weight, first)], Slots())
    # first (64) lives from one block into the other, beside second (256) and third (128).
    assert least([before, after]) == (1024, 1024 + 64 + 256 + 128)


def test_an_output_lives_to_the_end():
    out, first, second = Storage(512), Storage(64), Storage(64)
    block = Block([_copy(first, out), _copy(first, second)], Slots())
    assert least([block]) == (0, 512 + 64)
    block.results["y"] = 1, Result(None, (128,), storage=out)  # type: ignore[arg-type]
    assert least([block]) == (0, 512 + 64 + 64)


def _copy(source: Storage, target: Storage) -> Copy:
    return Copy(source, 0, target, 0, 4, 0.0, "")
