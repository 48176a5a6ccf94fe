from __future__ import annotations

import math
import threading

import pytest

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
