"""Plausible inputs for real models, the same each time: pictures, sounds, token ids, molecules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

__all__ = ["FEEDS", "LINE", "line", "normalised", "page", "speech"]

Array = np.ndarray[Any, Any]

LINE = "Hello ONNX 2048"
"""What is written in the picture that the text recogniser gets."""


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


def normal(*shape: int, seed: int = 0) -> Array:
    """Numbers with mean 0 and deviation 1: float32."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tokens(below: int, *shape: int) -> Array:
    """Token ids 3 <= i < below: int64."""
    return np.random.default_rng(0).integers(3, below, shape)


def molecule(atoms: int = 120, edges: int = 1200, residues: int = 15) -> dict[str, Array]:
    """A graph of atoms as a protein model takes it; its numbers mean nothing."""
    rng = np.random.default_rng(0)
    start = rng.integers(0, atoms, edges)

    def spread(*shape: int) -> Array:
        return np.clip(rng.standard_normal(shape) * 0.4, -1, 1)

    feeds = {
        "element": rng.integers(0, 4, atoms),
        "amino_acid": rng.integers(0, 20, atoms),
        "atom_role": rng.integers(0, 5, atoms),
        "bfactor": rng.standard_normal(atoms),
        "edge_index": np.stack([start, (start + rng.integers(1, atoms, edges)) % atoms]),
        "edge_dist": np.abs(rng.standard_normal(edges)) * 2 + 1,
        "seq_sep": rng.integers(0, 6, edges),
        "same_residue": (rng.random(edges) > 0.5) * 1.0,
        "target_indices": rng.integers(0, atoms, (residues, 6)),
        "target_mask": rng.random((residues, 6)) > 0.2,
        "residue_types": rng.integers(0, 20, residues),
        "residue_geometry": rng.standard_normal((residues, 52)),
        "target_environment": spread(residues, 6, 15),
        "temperature_feature": spread(residues, 1),
        "target_atom_rsasa": np.abs(spread(residues, 6)),
        "pos": spread(atoms, 3) + 8 * rng.standard_normal((atoms, 3)),
        "node_normal": spread(atoms, 3),
        "is_hbond": (spread(edges) > 0.3) * 1.0,
        "hb_cos": spread(edges),
    }
    feeds["node_normal"] /= np.linalg.norm(feeds["node_normal"], axis=1, keepdims=True)
    return {name: x.astype(np.float32) if x.dtype.kind == "f" else x for name, x in feeds.items()}


_MEAN = np.array([104, 117, 123], np.float32)

FEEDS: Mapping[str, Callable[[], dict[str, Array]]] = {
    "arname_decoder": lambda: {
        "prefix": tokens(100, 1, 6),
        "memory": normal(1, 12, 256, seed=1) * np.float32(0.3),
        "src_mask": np.ones((1, 12), np.bool_),
        "hidden": normal(1, 2, 256, seed=2) * np.float32(0.3),
    },
    "arname_encoder": lambda: {"src": tokens(40, 1, 12), "src_mask": np.ones((1, 12), np.bool_)},
    "captcha_crnn": lambda: {"image": line(60, 160, "aB3x7") / np.float32(255)},
    "caustic_painn": molecule,
    "ddddocr_det": lambda: {"images": page(416, 416)},
    "eeg_spindle": lambda: {"raw_signal": normal(1, 1, 7500), "spectrogram": normal(1, 15, 7500, seed=1)},
    "opennsfw": lambda: {"input:0": page(224, 224).transpose(0, 2, 3, 1) - _MEAN},
    "ort_logreg_iris": lambda: {"float_input": normal(3, 2)},
    "oww_embedding": lambda: {"input_1": normal(1, 76, 32, 1) * np.float32(2) + np.float32(5)},
    "ppocr_cls_v2": lambda: {"x": normalised(line(48, 192))},
    "ppocrv4_det": lambda: {"x": normalised(page(480, 640))},
    "ppocrv4_rec": lambda: {"x": normalised(line(48, 320))},
    "silero_vad": lambda: {
        "input": speech(576)[None],
        "state": np.zeros((2, 1, 128), np.float32),
        "sr": np.array(16000, np.int64),
    },
    "surfaces_knn_validity": lambda: {"input": normal(8, 4)},
    "t5small_title_encoder_int8": lambda: {
        "input_ids": tokens(32000, 1, 48),
        "attention_mask": np.ones((1, 48), np.int64),
    },
}
"""Name of a model -> makes its inputs: input name -> array."""
