"""A picture of what was measured: each cancel a dot, and what checkpoints cost. Needs Pillow."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from record import Cancels, Cost, Record

__all__ = ["draw"]

INK, GREY, LINE, BAND, PAPER = "#1f2328", "#6e7781", "#d8dee4", "#f6f8fa", "#ffffff"
DOT, MARK, BOUND, RELAXED = (9, 105, 218), (5, 48, 107), "#cf222e", (191, 135, 0)
LABELS, PANEL, GAP, EDGE, ROW = 190, 400, 48, 24, 24
HEAD, AXIS = 74, 46
DENSE, FINE = 2, 2
"""Pixels of the picture for each unit of the layout, and pixels drawn for each of these."""


class Canvas:
    """A drawing in units of the layout, finer than the picture that comes out of it."""

    def __init__(self, width: float, height: float) -> None:
        self._size = round(width * DENSE), round(height * DENSE)
        self._image = Image.new("RGB", (self._size[0] * FINE, self._size[1] * FINE), PAPER)
        self._draw = ImageDraw.Draw(self._image, "RGBA")
        self._fonts: dict[float, ImageFont.FreeTypeFont | ImageFont.ImageFont] = {}

    def text(self, x: float, y: float, text: str, size: float = 12, fill: str = INK, anchor: str = "lm") -> None:
        """Write at a point; `anchor` as Pillow has it."""
        self._draw.text((self._at(x), self._at(y)), text, fill=fill, font=self._font(size), anchor=anchor)

    def width(self, text: str, size: float) -> float:
        """How wide a text is."""
        return self._font(size).getlength(text) / (DENSE * FINE)

    def line(self, x: float, y: float, to_x: float, to_y: float, fill: str | tuple[int, ...], width: float = 1) -> None:
        """A straight line."""
        points = [self._at(value) for value in (x, y, to_x, to_y)]
        self._draw.line(points, fill=fill, width=max(1, self._at(width)))

    def dashes(self, x: float, y: float, to_y: float, fill: str) -> None:
        """A vertical line of dashes."""
        while y < to_y:
            self.line(x, y, x, min(y + 4, to_y), fill, 1.2)
            y += 7

    def box(self, x: float, y: float, to_x: float, to_y: float, fill: str | tuple[int, ...]) -> None:
        """A filled rectangle."""
        self._draw.rectangle([self._at(value) for value in (x, y, to_x, to_y)], fill=fill)

    def dot(self, x: float, y: float, radius: float, fill: tuple[int, ...] | str, outline: str | None = None) -> None:
        """A filled circle."""
        corners = [self._at(value) for value in (x - radius, y - radius, x + radius, y + radius)]
        self._draw.ellipse(corners, fill=fill, outline=outline, width=self._at(1))

    def _font(self, size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
        if size not in self._fonts:
            self._fonts[size] = ImageFont.load_default(size * DENSE * FINE)
        return self._fonts[size]

    def image(self) -> Image.Image:
        """What was drawn."""
        return self._image.resize(self._size, Image.Resampling.LANCZOS)

    @staticmethod
    def _at(value: float) -> int:
        return round(value * DENSE * FINE)


@dataclass(frozen=True)
class Axis:
    """Values -> places along a panel. Values beyond its ends lie on them."""

    left: float
    low: float
    high: float
    unit: str

    def at(self, value: float) -> float:
        """Where a value lies."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.left + share * PANEL

    def ticks(self) -> list[float]:
        """Round values on it, about five."""
        rough = (self.high - self.low) / 5
        power = 10 ** math.floor(math.log10(rough))
        step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough)
        first = math.ceil(self.low / step)
        return [step * count for count in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def say(self, value: float) -> str:
        """A value with its unit."""
        return f"{value:+g}{self.unit}" if self.low < 0 and value else f"{value:g}{self.unit}"


def draw(records: Sequence[Record]) -> Image.Image:
    """The picture: a column for each adapter, above the cancels and below what checkpoints cost.

    Args:
        records: of one or several adapters; at least one.
    """
    adapters = list(dict.fromkeys(record.adapter for record in records))
    names = list(dict.fromkeys(record.work for record in records))
    costs = any(record.costs for record in records)
    rows = ROW * len(names)
    width = 2 * EDGE + LABELS + len(adapters) * (PANEL + GAP) - GAP
    height = 2 * EDGE + (HEAD + rows + AXIS) * (2 if costs else 1)
    canvas = Canvas(width, height)
    _section(canvas, EDGE, names, adapters, records, _cancels_axis(records), _cancels_title(records), _cancels_row)
    if costs:
        top = EDGE + HEAD + rows + AXIS
        title = "What checkpoints cost", "against the plan submitted whole: median and quartiles of paired runs"
        _section(canvas, top, names, adapters, records, _costs_axis(records), title, _costs_row)
        _legend(canvas, EDGE + LABELS + len(adapters) * (PANEL + GAP) - GAP, top + 12)
    return canvas.image()


def _legend(canvas: Canvas, right: float, y: float) -> None:
    """What the colours mean, ending at `right`."""
    x = right
    for text, colour in (("the most aimed at", BOUND), ("20 ms", RELAXED), ("5 ms", DOT)):
        canvas.text(x, y, text, 12, GREY, "rm")
        x -= canvas.width(text, 12) + 8
        if colour == BOUND:
            canvas.line(x, y - 5, x, y + 5, colour, 1.5)
        else:
            canvas.dot(x - 4, y, 3.6, colour)
        x -= 20
    canvas.text(x, y, "segments of", 12, GREY, "rm")


Row = Callable[[Canvas, Record, Axis, float], None]


def _section(
    canvas: Canvas,
    top: float,
    names: Sequence[str],
    adapters: Sequence[str],
    records: Sequence[Record],
    axis: Axis,
    title: tuple[str, str],
    row: Row,
) -> None:
    """A title, and for each adapter a panel with a row for each model."""
    canvas.text(EDGE, top + 12, title[0], 19)
    canvas.text(EDGE, top + 34, title[1], 12, GREY)
    first, last = top + HEAD, top + HEAD + ROW * len(names)
    for index, name in enumerate(names):
        if index % 2 == 0:
            right = EDGE + LABELS + len(adapters) * (PANEL + GAP) - GAP
            canvas.box(EDGE - 6, first + index * ROW, right + 6, first + (index + 1) * ROW, BAND)
        canvas.text(EDGE, first + (index + 0.5) * ROW, name, 12)
    for column, adapter in enumerate(adapters):
        here = Axis(EDGE + LABELS + column * (PANEL + GAP), axis.low, axis.high, axis.unit)
        some = {record.work: record for record in records if record.adapter == adapter}
        canvas.text(here.left, first - 14, next(iter(some.values())).driver, 13)
        for tick in here.ticks():
            canvas.line(here.at(tick), first, here.at(tick), last, INK if tick == 0 else LINE, 0.8)
            canvas.text(here.at(tick), last + 12, here.say(tick), 11, GREY, "mm")
        for index, name in enumerate(names):
            if name in some:
                row(canvas, some[name], here, first + (index + 0.5) * ROW)
        for bound_s in _bounds(records) if row is _cancels_row else ():
            canvas.dashes(here.at(bound_s * 1e3), first, last, BOUND)
            canvas.text(here.at(bound_s * 1e3), first - 14, f"bound {bound_s * 1e3:g} ms", 11, BOUND, "mm")


def _shown(record: Record) -> Cancels | None:
    """Of the policies that were measured the first that cuts, the default one where it is there."""
    bounded = [cancels for cancels in record.cancels if cancels.left_s]
    return min(bounded, key=lambda cancels: (cancels.policy != "default", cancels.bound_s is None), default=None)


def _bounds(records: Sequence[Record]) -> list[float]:
    shown = [cancels for record in records if (cancels := _shown(record)) is not None]
    return sorted({cancels.bound_s for cancels in shown if cancels.bound_s is not None})


def _cancels_title(records: Sequence[Record]) -> tuple[str, str]:
    shown = [cancels for record in records if (cancels := _shown(record)) is not None]
    most = max((len(cancels.left_s) for cancels in shown), default=0)
    said = f"{most} cancels at random moments of warm runs; marked are the median and p99; at the right a whole run"
    return "From a cancel to the scope left", said


def _cancels_axis(records: Sequence[Record]) -> Axis:
    worst = max((c.left(0.99) for record in records if (c := _shown(record)) is not None), default=0.01)
    bound = max(_bounds(records), default=worst)
    return Axis(0, 0, 1e3 * max(1.35 * bound, min(1.1 * worst, 3 * bound)), " ms")


def _cancels_row(canvas: Canvas, record: Record, axis: Axis, y: float) -> None:
    cancels = _shown(record)
    if cancels is None:
        return
    dice = random.Random(record.work)
    for left_s in cancels.left_s:
        canvas.dot(axis.at(left_s * 1e3), y + dice.uniform(-6, 6), 2.1, (*DOT, 90))
    for share, half in ((0.5, 5.0), (0.99, 8.5)):
        x = axis.at(cancels.left(share) * 1e3)
        canvas.line(x, y - half, x, y + half, MARK, 2)
    canvas.text(axis.left + PANEL, y, _duration(cancels.whole_s), 11, GREY, "rm")


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.{0 if seconds >= 0.01 else 1}f} ms"


def _costs_axis(records: Sequence[Record]) -> Axis:
    quartiles = [cost.quartiles for record in records for cost in record.costs]
    low = min((100 * q[0] for q in quartiles), default=0.0)
    high = max((100 * q[2] for q in quartiles), default=0.0)
    return Axis(0, max(-30.0, min(-5.0, 1.1 * low)), min(60.0, max(20.0, 1.1 * high)), " %")


def _costs_row(canvas: Canvas, record: Record, axis: Axis, y: float) -> None:
    for index, cost in enumerate(record.costs[:2]):
        _whisker(canvas, cost, axis, y - 4 + 8 * index, (DOT, RELAXED)[index])


def _whisker(canvas: Canvas, cost: Cost, axis: Axis, y: float, colour: tuple[int, int, int]) -> None:
    low, middle, high = (axis.at(100 * value) for value in cost.quartiles)
    canvas.line(low, y, high, y, (*colour, 150), 2)
    canvas.dot(middle, y, 3.4, colour)
    aim = axis.at(100 * cost.aim)
    canvas.line(aim, y - 3.5, aim, y + 3.5, BOUND, 1.5)
