"""A bar chart of times, in PNG, by Pillow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

__all__ = ["draw_chart"]

COLOURS = ("#2f6fb7", "#d1762b", "#7a9a3b", "#8a8a8a")
LEFT, RIGHT, BAR, GAP, TOP, WIDTH = 190, 90, 15, 14, 64, 960


def draw_chart(path: Path, title: str, rows: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> None:
    """Write a chart: a group of bars for each row, one for each name, on a logarithmic scale.

    Args:
        path: of the PNG.
        title: above it.
        rows: seconds by row and name; a name may be missing.
        names: in the order of the bars.
    """
    seconds = [value for row in rows.values() for value in row.values()]
    low = 10.0 ** math.floor(math.log10(min(seconds, default=0.01)))
    high = 10.0 ** math.ceil(math.log10(max(seconds, default=1.0) * 1.001))
    font, small = ImageFont.load_default(14), ImageFont.load_default(12)
    height = TOP + sum(len(row) * BAR + GAP for row in rows.values()) + 30
    image = Image.new("RGB", (WIDTH, height), "white")
    draw = ImageDraw.Draw(image)

    def across(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(value / low) / math.log(high / low)

    draw.text((12, 8), title, "black", font)
    x = 12.0
    for name, colour in zip(names, COLOURS, strict=False):
        draw.rectangle((x, 35, x + 12, 47), colour)
        draw.text((x + 18, 33), name, "black", small)
        x += 40 + draw.textlength(name, small)
    mark = low
    while mark <= high * 1.001:
        draw.line((across(mark), TOP - 6, across(mark), height - 24), "#dddddd")
        label = _label(mark)
        draw.text((across(mark) - draw.textlength(label, small) / 2, height - 20), label, "black", small)
        mark *= 10
    y = TOP
    for row, values in rows.items():
        draw.text((12, y + (len(values) * BAR - 16) / 2), row, "black", font)
        for name, colour in zip(names, COLOURS, strict=False):
            if name in values:
                draw.rectangle((LEFT, y, max(across(values[name]), LEFT + 1), y + BAR - 3), colour)
                draw.text((across(values[name]) + 5, y - 1), _label(values[name]), "black", small)
                y += BAR
        y += GAP
    image.save(path)


def _label(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
