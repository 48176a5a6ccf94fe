from __future__ import annotations

import json
import os
import sys

import pytest

from trionnx.gpu.device import drivers
from trionnx.gpu.device.adapters import driver_lock, restrict
from trionnx.gpu.device.drivers import driver_files, environment, machine, variables

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the loader goes by files on Linux only")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that is the only one with drivers in it: one.json, two.json, and something else."""
    for name, _ in variables():
        monkeypatch.delenv(name)
    place = tmp_path / "vulkan" / "icd.d"
    place.mkdir(parents=True)
    for name in ("one", "two"):
        (place / f"{name}.so").write_bytes(b"code")
        (place / f"{name}.json").write_text(json.dumps({"ICD": {"library_path": f"./{name}.so"}}))
    (place / "notes.txt").write_text("notes")
    monkeypatch.setattr(drivers, "_folders", lambda: [str(place), "/nowhere", str(place)])
    return place


def test_the_drivers_that_the_loader_would_open(folder, monkeypatch):
    one, two = str(folder / "one.json"), str(folder / "two.json")
    assert driver_files() == [one, two]
    monkeypatch.setenv("VK_ADD_DRIVER_FILES", "/other/three.json")
    assert driver_files() == ["/other/three.json", one, two]
    monkeypatch.setenv("VK_ICD_FILENAMES", two)
    assert driver_files() == ["/other/three.json", two]
    monkeypatch.setenv("VK_DRIVER_FILES", f"{folder}:/gone.json:")
    assert driver_files() == ["/other/three.json", one, two, "/gone.json"]


def test_the_environment_that_leaves_some_out(folder, monkeypatch):
    monkeypatch.setenv("VK_ADD_DRIVER_FILES", "/other/three.json")
    assert environment(None) == {}
    for name, value in environment([str(folder / "two.json")]).items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert driver_files() == [str(folder / "two.json")]


def test_drivers_are_opened_in_that_environment_and_it_is_put_back(monkeypatch):
    monkeypatch.setenv("VK_ICD_FILENAMES", "before")
    monkeypatch.delenv("VK_DRIVER_FILES", raising=False)
    try:
        restrict(["one", "two"])
        with driver_lock():
            assert (os.environ["VK_DRIVER_FILES"], os.environ["VK_ICD_FILENAMES"]) == ("one:two", "one:two")
        assert (os.environ.get("VK_DRIVER_FILES"), os.environ["VK_ICD_FILENAMES"]) == (None, "before")
    finally:
        restrict(None)
    with driver_lock():
        assert os.environ["VK_ICD_FILENAMES"] == "before"


def test_a_machine_is_another_one_once_its_drivers_are(folder, monkeypatch):
    seen = [machine()]
    assert machine() == seen[0]

    def changed():
        seen.append(machine())
        return seen[-1] not in seen[:-1]

    os.utime(folder / "one.so", ns=(1, 1))
    assert changed()
    (folder / "two.so").write_bytes(b"newer code")
    assert changed()
    (folder / "three.json").write_text("damaged")
    assert changed()
    monkeypatch.setenv("MESA_LOADER_DRIVER_OVERRIDE", "zink")
    assert changed()
    monkeypatch.setenv("WGPU_BACKEND", "gl")
    assert changed()
    monkeypatch.setenv("UNRELATED", "1")
    assert machine() == seen[-1]
