from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import real_models

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_example() -> None:
    try:
        real_models.model("ppocrv4_rec")
    except real_models.Unavailable as error:
        pytest.skip(f"the example's model is not here: {error}")
    done = subprocess.run(
        [sys.executable, "examples/guest.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the run was cancelled" in done.stdout
    assert "the run raised RunTerminated" in done.stdout
    assert "the same output, bit for bit" in done.stdout
