from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import real_models

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_demo() -> None:
    try:
        for name in ("magika_v3_3", "ppocrv4_rec"):
            real_models.model(name)
        real_models.magika()
    except real_models.Unavailable as error:
        pytest.skip(f"the demo's models are not here: {error}")
    done = subprocess.run(
        [sys.executable, "examples/demo.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "segments handed over after it:     0" in done.stdout
    assert f"reads {real_models.LINE!r}" in done.stdout
