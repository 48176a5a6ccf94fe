"""The table of values that an engine keeps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trionnx.gpu.errors import DeviceLost, InvalidInput
from trionnx.gpu.kept import Kept
from trionnx.gpu.seam import TensorRef

F32 = np.dtype(np.float32)


def table(released: list[str]) -> Kept[str]:
    kept = Kept(released.append)
    kept.belong(actor=3, generation=1)
    return kept


def test_a_ref_says_whose_it_is_and_finds_its_value() -> None:
    kept = table([])
    one, two = (kept.add(value, 0, 7, F32, (2, 3)) for value in ("one", "two"))
    assert one == TensorRef(3, 1, 0, F32, (2, 3))
    assert (kept.find("x", one), kept.find("x", two)) == ("one", "two")


def test_refs_of_others_and_of_what_is_gone_are_refused() -> None:
    kept = table([])
    ref = kept.add("one", 0, 7, F32, ())
    with pytest.raises(InvalidInput, match=r"'x': expected a tensor on this session's device, got one on another"):
        kept.find("x", replace(ref, actor=4))
    with pytest.raises(DeviceLost, match="the tensor for 'x' went with the device"):
        kept.find("x", replace(ref, generation=0))
    kept.free([replace(ref, actor=4), replace(ref, generation=0), replace(ref, id=9)])
    assert kept.find("x", ref) == "one"
    kept.free([ref, ref])
    with pytest.raises(InvalidInput, match="expected a tensor that is there, got one that was freed"):
        kept.find("x", ref)


def test_what_a_run_made_goes_with_its_end_unless_that_says_otherwise() -> None:
    released: list[str] = []
    kept = table(released)
    kept.begin(7)
    stays, goes = (kept.add(value, 0, 7, F32, ()) for value in ("stays", "goes"))
    other = kept.add("other", 0, 6, F32, ())
    kept.end(7, [stays, other])
    assert released == ["goes"]
    assert [kept.find("", ref) for ref in (stays, other)] == ["stays", "other"]
    with pytest.raises(InvalidInput):
        kept.find("", goes)


def test_what_is_freed_during_a_run_is_released_at_its_end() -> None:
    released: list[str] = []
    kept = table(released)
    one, two = kept.add("one", 0, 1, F32, ()), kept.add("two", 5, 1, F32, ())
    kept.begin(2)
    kept.free([one])
    kept.free_model(5)
    kept.end(1, [])
    assert (len(kept), released) == (0, [])
    with pytest.raises(InvalidInput):
        kept.find("", two)
    kept.end(2, [])
    assert sorted(released) == ["one", "two"]


@given(st.lists(st.tuples(st.sampled_from(["add", "free", "begin", "end", "model"]), st.integers(0, 5)), max_size=40))
def test_everything_is_released_once_and_nothing_that_a_run_may_read(steps: list[tuple[str, int]]) -> None:
    released: list[str] = []
    kept = table(released)
    refs: list[TensorRef] = []
    running: int | None = None
    for number, (what, which) in enumerate(steps):
        before = len(released)
        if what == "add":
            refs.append(kept.add(str(len(refs)), which, number, F32, ()))
        elif what == "free":
            kept.free(refs[which : which + 2])
        elif what == "begin" and running is None:
            running = number
            kept.begin(running)
        elif what == "end" and running is not None:
            kept.end(running, [])
            running = None
        elif what == "model":
            kept.free_model(which)
        assert running is None or len(released) == before
    kept.clear()
    assert len(kept) == 0
    assert Counter(released) == Counter(str(n) for n in range(len(refs)))
