from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import numpy as np
import pytest

from trionnx.gpu.errors import OutOfDeviceMemory
from trionnx.gpu.host import room
from trionnx.gpu.host.room import UNASKED, check_room

FLOAT = np.dtype(np.float32)


def test_what_there_is_no_room_for_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(room, "room", lambda: 1 << 30)
    check_room("a", FLOAT, (1 << 28,))
    check_room("a", FLOAT, ())
    check_room("a", FLOAT, (1 << 62, 0))
    with pytest.raises(OutOfDeviceMemory) as caught:
        check_room("node 'a' (Tile)", FLOAT, ((1 << 28) + 1,))
    assert str(caught.value) == "node 'a' (Tile): 1,073,741,828 bytes are wanted, for float32 of shape [268435457]"
    with pytest.raises(OutOfDeviceMemory, match=r"5,316,911,983,139,663,491,615,228,241,121,378,304 bytes"):
        check_room("a", np.dtype(np.uint8), (1 << 61, 1 << 61))


def test_small_arrays_are_not_asked_for(monkeypatch):
    monkeypatch.setattr(room, "room", lambda: 0)
    check_room("a", np.dtype(np.uint8), (UNASKED,))
    with pytest.raises(OutOfDeviceMemory):
        check_room("a", np.dtype(np.uint8), (UNASKED + 1,))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it is Linux that tells")
def test_the_room_is_that_of_machine_container_and_process(monkeypatch, tmp_path):
    available = room.room()
    assert 0 < available < 1 << 50
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    monkeypatch.setattr(room, "_CGROUP", tmp_path)
    assert room.room() == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert room.room() > 600_000
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), before[1]))
        assert room.room() <= 100 << 20
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
