from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import real_models

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("toolkit", ["asyncio", "tk"])
def test_the_example(toolkit: str) -> None:
    try:
        real_models.model("ppocrv4_rec")
    except real_models.Unavailable as error:
        pytest.skip(f"the example's model is not here: {error}")
    display: list[str] = []
    if toolkit == "tk":
        if importlib.util.find_spec("_tkinter") is None:
            pytest.skip("this Python has no Tk")
        if sys.platform == "linux" and not os.environ.get("DISPLAY"):
            if shutil.which("xvfb-run") is None:
                pytest.skip("there is no display, and no xvfb-run to make one")
            display = ["xvfb-run", "--auto-servernum"]
    done = subprocess.run(
        [*display, sys.executable, "examples/guest.py", "--toolkit", toolkit],
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
