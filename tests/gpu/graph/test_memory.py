from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trionnx.gpu.graph.memory import Place, Slots
from trionnx.gpu.graph.steps import Copy
from trionnx.gpu.graph.tensor import Storage


def copy(source: Storage, target: Storage) -> Copy:
    return Copy(source, 0, target, 0, 4, 0.0, "")


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Copy], list[Storage]]:
    """Steps that each read something written before and write something new."""
    storages = [Storage(16)]
    steps: list[Copy] = []
    for _ in range(draw(st.integers(1, 25))):
        source = storages[draw(st.integers(0, len(storages) - 1))]
        storages.append(Storage(16 * draw(st.integers(1, 8))))
        steps.append(copy(source, storages[-1]))
    return steps, storages


def overlap(one: Place, n: int, other: Place, m: int) -> bool:
    return one.slot is other.slot and one.offset < other.offset + m and other.offset < one.offset + n


def play(steps: list[Copy], slots: Slots, holds: dict[Storage, Place]) -> None:
    """Write and read as the steps do, and see that what is read has not been overwritten."""
    for step in steps:
        for storage in (step.source, step.target):
            place = slots.where[storage]
            assert place.offset % 256 == 0
            assert place.offset + storage.nbytes <= place.slot.nbytes
        source, target = slots.where[step.source], slots.where[step.target]
        assert source.slot is not target.slot
        holds.setdefault(step.source, source)
        assert holds[step.source] == source
        for storage in [s for s, place in holds.items() if overlap(place, s.nbytes, target, step.target.nbytes)]:
            del holds[storage]
        holds[step.target] = target


@given(programs(), programs(), st.randoms(use_true_random=False))
def test_no_value_is_overwritten_while_it_is_still_read(program, following, random):
    steps, storages = program
    kept = set(random.sample(storages, k=min(3, len(storages))))
    slots = Slots()
    slots.assign(steps, kept)
    holds: dict[Storage, Place] = {}
    play(steps, slots, holds)
    kept &= slots.where.keys()
    for storage in kept:
        assert holds[storage] == slots.where[storage]
    assert len({slots.where[s].slot for s in kept}) == len(kept)
    fork = slots.fork()
    steps, _ = following
    steps = [*(copy(s, Storage(16)) for s in kept), *steps, *(copy(a, b) for a, b in pairwise(kept))]
    fork.assign(steps, set())
    play(steps, fork, {s: holds[s] for s in kept})


def test_a_chain_takes_two_slots():
    chain = [Storage(64) for _ in range(20)]
    slots = Slots()
    slots.assign([copy(a, b) for a, b in pairwise(chain)], set())
    assert len(slots.all) == 2


def test_a_slot_is_as_large_as_the_largest_that_lies_in_it():
    first, second, third = Storage(16), Storage(16), Storage(1024)
    slots = Slots()
    slots.assign([copy(first, second), copy(second, third)], set())
    assert sorted(s.nbytes for s in slots.all) == [16, 1024]


def test_small_values_lie_beside_each_other_where_a_large_one_lay():
    large, small = Storage(4096), [Storage(1024) for _ in range(5)]
    slots = Slots()
    steps = [copy(large, small[0]), *(copy(small[0], s) for s in small[1:]), *(copy(s, small[0]) for s in small[1:])]
    slots.assign(steps, set())
    assert sorted(s.nbytes for s in slots.all) == [1024, 4096]
    assert sorted(slots.where[s].offset for s in small[1:]) == [0, 1024, 2048, 3072]


def test_what_lives_on_keeps_its_slot_in_every_block_that_may_follow():
    before, kept, after = Storage(64), Storage(64), Storage(64)
    slots = Slots()
    slots.assign([copy(before, kept)], {kept})
    for _ in range(2):
        fork = slots.fork()
        fork.assign([copy(kept, after)], {after})
        assert fork.where[kept] == slots.where[kept]
        assert fork.where[after].slot is not slots.where[kept].slot


def test_a_slot_of_an_earlier_block_never_grows():
    small, large = Storage(16), Storage(4096)
    slots = Slots()
    slots.assign([copy(small, Storage(16))], set())
    sizes = [s.nbytes for s in slots.all]
    fork = slots.fork()
    fork.assign([copy(large, Storage(4096))], set())
    assert [s.nbytes for s in slots.all] == sizes
    assert np.all([fork.where[large].slot.nbytes >= 4096])
