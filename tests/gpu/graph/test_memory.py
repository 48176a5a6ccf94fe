from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trionnx.gpu.graph.memory import Slot, Slots
from trionnx.gpu.graph.steps import Copy, Step
from trionnx.gpu.graph.tensor import Storage


def copy(source: Storage, target: Storage) -> Copy:
    return Copy(source, 0, target, 0, 4, 0.0, "")


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Step], list[Storage]]:
    """Steps that each read something written before and write something new."""
    storages = [Storage(16)]
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, 25))):
        source = storages[draw(st.integers(0, len(storages) - 1))]
        storages.append(Storage(16 * draw(st.integers(1, 8))))
        steps.append(copy(source, storages[-1]))
    return steps, storages


@given(programs(), st.randoms(use_true_random=False))
def test_no_value_is_overwritten_while_it_is_still_read(program, random):
    steps, storages = program
    kept = set(random.sample(storages, k=min(3, len(storages))))
    slots = Slots()
    slots.assign(steps, kept)
    holds: dict[Slot, Storage] = {}
    for step in steps:
        for storage in (step.source, step.target):
            assert slots.where[storage].nbytes >= storage.nbytes
        if step.source in holds.values():
            assert holds[slots.where[step.source]] is step.source
        holds[slots.where[step.source]] = step.source
        holds[slots.where[step.target]] = step.target
    for storage in kept:
        if storage in slots.where:
            assert holds[slots.where[storage]] is storage


def test_a_chain_takes_two_slots():
    chain = [Storage(64) for _ in range(20)]
    slots = Slots()
    slots.assign([copy(a, b) for a, b in pairwise(chain)], set())
    assert len(slots.all) == 2


def test_a_freed_slot_of_this_block_grows_rather_than_a_new_one_being_made():
    first, second, third = Storage(16), Storage(16), Storage(1024)
    slots = Slots()
    slots.assign([copy(first, second), copy(second, third)], set())
    assert sorted(s.nbytes for s in slots.all) == [16, 1024]


def test_what_lives_on_keeps_its_slot_in_every_block_that_may_follow():
    before, kept, after = Storage(64), Storage(64), Storage(64)
    slots = Slots()
    slots.assign([copy(before, kept)], {kept})
    for _ in range(2):
        fork = slots.fork()
        fork.assign([copy(kept, after)], {after})
        assert fork.where[kept] is slots.where[kept]
        assert fork.where[after] is not slots.where[kept]


def test_a_slot_of_an_earlier_block_never_grows():
    small, large = Storage(16), Storage(4096)
    slots = Slots()
    slots.assign([copy(small, Storage(16))], set())
    sizes = [s.nbytes for s in slots.all]
    fork = slots.fork()
    fork.assign([copy(large, Storage(4096))], set())
    assert [s.nbytes for s in slots.all] == sizes
    assert np.all([fork.where[large].nbytes >= 4096])
