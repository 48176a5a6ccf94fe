from __future__ import annotations

import errno
import math
import os
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trionnx.gpu.device.adapters import AdapterInfo
from trionnx.gpu.device.entries import KEPT
from trionnx.gpu.device.verdicts import DAY_S, Book, Survey, Verdict

ADAPTER = AdapterInfo(0, "Radeon", "1.0", "Vulkan", "hardware", "radeon")
SURVEY = Survey(
    Verdict("ok", at=5.0, boot="b"),
    (ADAPTER,),
    ("/drivers/sound.json",),
    {"/drivers/bad.json": Verdict("timeout", "hangs", 6.0, "b")},
    {"radeon": Verdict("wrong", "lies", 7.0, "")},
)


@pytest.mark.parametrize(
    ("outcome", "boot", "later", "next_boot", "holds"),
    [
        ("ok", "b", 1e12, "c", True),
        ("crash", "b", DAY_S - 1, "c", True),
        ("crash", "b", DAY_S, "b", False),
        ("wrong", "b", DAY_S, "b", False),
        ("error", "b", DAY_S - 1, "b", True),
        ("timeout", "b", 1e12, "b", True),
        ("timeout", "b", 1, "c", False),
        ("timeout", "", DAY_S - 1, "c", True),
        ("timeout", "", DAY_S, "", False),
        ("crash", "b", -1, "b", False),
        ("crash", "b", math.nan, "b", False),
    ],
)
def test_how_long_a_verdict_holds(outcome, boot, later, next_boot, holds):
    assert Verdict(outcome, "why", 1000.0, boot).holds(1000.0 + later, next_boot) is holds


def test_a_list_of_adapters_holds_as_long_as_what_was_left_out_is_rightly_left_out():
    assert SURVEY.holds(1e12, "b")
    assert not SURVEY.holds(1e12, "c")
    assert SURVEY.trial(ADAPTER, 8.0, "c") == Verdict("wrong", "lies", 7.0, "")
    assert SURVEY.trial(ADAPTER, 8.0 + DAY_S, "c") is None


def test_a_book_gives_back_what_was_put(tmp_path):
    book = Book(tmp_path / "new" / "folder")
    assert book.get("here") is None
    book.forget()
    book.put("here", SURVEY)
    assert Book(tmp_path / "new" / "folder").get("here") == SURVEY
    assert book.get("there") is None
    for number in range(KEPT):
        book.put(f"machine {number}", SURVEY)
    assert book.get("here") is None
    assert book.get("machine 0") == SURVEY
    book.forget()
    assert book.get("machine 0") is None


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES, errno.EIO])
@pytest.mark.parametrize(
    ("owner", "call"), [(Path, "mkdir"), (tempfile, "NamedTemporaryFile"), (os, "fsync"), (os, "replace")]
)
def test_what_cannot_be_written_leaves_what_was_there(tmp_path, monkeypatch, owner, call, fault):
    def refuse(*_, **options):
        raise OSError(fault, os.strerror(fault))

    book = Book(tmp_path)
    book.put("here", SURVEY)
    with monkeypatch.context() as patch:
        patch.setattr(owner, call, refuse)
        with pytest.raises(OSError, match=os.strerror(fault)):
            book.put("here", Survey(Verdict("crash")))
    assert book.get("here") == SURVEY
    assert [file.name for file in tmp_path.iterdir()] == ["probes.json"]


def test_a_file_that_is_half_written_is_taken_away(tmp_path):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    book = Book(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            book.put("here", SURVEY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    assert book.get("here") is None


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    book = Book(tmp_path_factory.mktemp("book"))
    book.put("here", SURVEY)
    return book, book.file.read_bytes()


def test_a_truncated_file_is_not_believed(whole):
    book, content = whole
    for length in range(len(content)):
        book.file.write_bytes(content[:length])
        assert book.get("here") is None
    book.file.write_bytes(content)
    assert book.get("here") == SURVEY


@given(data=st.data())
def test_a_damaged_file_is_not_believed(whole, data):
    book, content = whole
    at, length = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 9))
    book.file.write_bytes(content[:at] + data.draw(st.binary(max_size=9)) + content[at + length :])
    assert book.get("here") in (None, SURVEY)


def test_writers_at_the_same_time_leave_a_whole_file(tmp_path):
    books = [Book(tmp_path) for _ in range(4)]
    books[0].put("here", SURVEY)
    torn = []

    def write(book):
        for _ in range(50):
            book.put("here", SURVEY)
            if book.get("here") != SURVEY:
                torn.append(book)

    threads = [threading.Thread(target=write, args=[book]) for book in books]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torn == []
    assert [file.name for file in tmp_path.iterdir()] == ["probes.json"]
