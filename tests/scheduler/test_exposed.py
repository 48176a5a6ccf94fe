"""What a scheduler lets other processes see, and what `trionnx top` makes of it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import pytest
import trio
from trio.testing import MockClock

import trionnx
from trionnx.actors.fake import FakeModel
from trionnx.cli import main
from trionnx.scheduler.exposed import PERIOD_S, exposed, runtime_folder

Feed = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder of the test's own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    place = tmp_path / "trionnx"
    monkeypatch.setattr(platformdirs, "user_runtime_dir", lambda *_, **__: str(place))
    return place


async def test_another_process_sees_the_statistics_and_nothing_is_left(
    autojump_clock: MockClock, feed: Feed, folder: Path
) -> None:
    async with trionnx.open_scheduler(backend="fake", expose=True) as scheduler:
        session = await scheduler.load(FakeModel())
        await session.run(None, feed)
        await trio.sleep(PERIOD_S)
        (seen,) = exposed()
        assert seen.pid == os.getpid()
        assert seen.statistics == scheduler.statistics()
        assert seen.sessions == ("fake on fake",)
        (file,) = os.listdir(folder)
        if os.name != "nt":
            assert stat.S_IMODE(os.stat(folder / file).st_mode) == 0o600
            assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert not os.listdir(folder)


@pytest.mark.parametrize("how", ["error", "cancel"])
async def test_nothing_is_left_however_it_ends(autojump_clock: MockClock, folder: Path, how: str) -> None:
    with trio.CancelScope() as scope:
        try:
            async with trionnx.open_scheduler(backend="fake", expose=True):
                assert os.listdir(folder)
                if how == "error":
                    raise LookupError
                scope.cancel()
                await trio.sleep_forever()
        except LookupError:
            pass
    assert not os.listdir(folder)


async def test_it_is_off_by_default_and_the_environment_turns_it_on(
    autojump_clock: MockClock, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trionnx.open_scheduler(backend="fake"):
        assert folder.name not in os.listdir(folder.parent)
    monkeypatch.setenv("TRIONNX_EXPOSE", "1")
    async with trionnx.open_scheduler(backend="fake"), trionnx.open_scheduler(backend="fake"):
        assert len(exposed()) == 2
    async with trionnx.open_scheduler(backend="fake", expose=False):
        assert not exposed()


@pytest.mark.skipif(os.name == "nt", reason="about POSIX's permissions and processes")
async def test_a_folder_that_others_may_write_to_is_refused(folder: Path) -> None:
    os.mkdir(folder)
    os.chmod(folder, 0o777)
    with pytest.raises(PermissionError, match="this user's alone"):
        async with trionnx.open_scheduler(backend="fake", expose=True):
            pass
    os.rmdir(folder)
    os.mkdir(folder.parent / "elsewhere", 0o700)
    os.symlink(folder.parent / "elsewhere", folder)
    with pytest.raises(PermissionError):
        runtime_folder()


@pytest.mark.skipif(os.name == "nt", reason="about POSIX's permissions and processes")
def test_what_a_killed_process_left_is_removed_and_what_is_none_is_passed_over() -> None:
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    left = runtime_folder() / f"{int(child.stdout)}-0.json"
    other = runtime_folder() / f"{os.getpid()}-99.json"
    for file in (left, other):
        file.write_text("{}")
    assert exposed() == []
    assert (left.exists(), other.exists()) == (False, True)


async def test_top_shows_them_once(autojump_clock: MockClock, feed: Feed, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == 1
    assert "no scheduler" in capsys.readouterr().out
    async with trionnx.open_scheduler(backend="fake", expose=True) as scheduler:
        await (await scheduler.load(FakeModel())).run(None, feed)
        await trio.sleep(PERIOD_S)
        assert main(["top", "--once"]) == 0
    out = capsys.readouterr().out
    assert f"{os.getpid()}." in out
    assert "fake on fake" in out
