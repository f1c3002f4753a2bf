"""Charts as SVG, in both languages: bars with their numbers and panels of lines, 440 units wide as all pictures.

A chart has no legend where a label can be at its line or bar, so that it can be read on a phone and without colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from docs.generate.pictures.pictures import COLOURS, FONT, MARGIN, WIDTH, Drawing, width_of, wrapped

Points = Sequence[tuple[float, float]]
BAR, GAP = 6, 1


class Bar(NamedTuple):
    """One bar: parts of (value, kind) from left to right, and the middle half of the rounds or the range of the seeds."""

    parts: Sequence[tuple[float, str]]
    low: float | None = None
    high: float | None = None


class Group(NamedTuple):
    """A label, the numbers at the right end of its line, and the bars below the line."""

    label: str
    text: str
    bars: Sequence[Bar]


class Line(NamedTuple):
    """A line of a panel."""

    points: Points
    kind: str
    width: float = 2.0
    dashes: str = ""


def bars(drawing: Drawing, title: str, groups: Sequence[Group], reference: float | None = None) -> None:
    """A titled list of groups. All bars have one scale, which begins at 0; a dashed line marks the reference value."""
    drawing.heading(title)
    most = max([reference or 0.0, *(max(bar.high or 0.0, sum(value for value, _ in bar.parts)) for group in groups
                                    for bar in group.bars)])  # fmt: skip
    drawing.y += 3
    scale, top = (WIDTH - 2 * MARGIN) / most, drawing.y
    places = []
    for group in groups:
        lines = wrapped(group.label, WIDTH - 3 * MARGIN - width_of(group.text, bold=True) - 8)
        for number, line in enumerate(lines):
            drawing.text(MARGIN, drawing.y + 8, line)
            if number == len(lines) - 1:
                drawing.text(WIDTH - MARGIN, drawing.y + 8, group.text, "end", bold=True)
            drawing.y += 17
        for bar in group.bars:
            x = float(MARGIN)
            for value, kind in bar.parts:
                if value > 0:
                    drawing.box(x, drawing.y, value * scale, BAR, kind)
                    x += value * scale
            if bar.low is not None and bar.high is not None:
                places.append((MARGIN + bar.low * scale, MARGIN + bar.high * scale, drawing.y + BAR / 2))
            drawing.y += BAR + GAP
        drawing.y += 4
    if reference is not None:
        drawing.line(MARGIN + reference * scale, top, MARGIN + reference * scale, drawing.y, dashed=True)
    for left, right, y in places:
        drawing.line(left, y, right, y)
        for x in (left, right):
            drawing.line(x, y - 3, x, y + 3)


class Panel:
    """A frame for lines, with labelled ends of both axes.

    Args:
        drawing: the picture to draw into.
        place: left, top, width and height of the frame.
        xs, ys: the values at the ends of the axes.
    """

    def __init__(self, drawing: Drawing, place: tuple[float, float, float, float], xs: tuple[float, float],
                 ys: tuple[float, float]) -> None:  # fmt: skip
        self.drawing, self.xs, self.ys = drawing, xs, ys
        self.left, self.top, self.width, self.height = place
        bottom = self.top + self.height
        drawing.line(self.left, bottom, self.left + self.width, bottom, dashed=True)
        drawing.line(self.left, self.top, self.left, bottom, dashed=True)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The place of a point."""
        across, up = ((value - first) / (last - first) for value, (first, last) in ((x, self.xs), (y, self.ys)))
        return self.left + across * self.width, self.top + (1 - up) * self.height

    def title(self, text: str) -> None:
        """A name above the frame, in two lines if it is wider."""
        for number, line in enumerate(reversed(wrapped(text, self.width, bold=True))):
            self.drawing.text(self.left, self.top - 10 - 16 * number, line, bold=True)

    def ticks(self, xs: Sequence[float] = (), ys: Sequence[float] = ()) -> None:
        """Numbers below and to the left of the frame."""
        for number in xs:
            x, _ = self.at(number, self.ys[0])
            text, width = f"{number:g}", width_of(f"{number:g}") / 2
            self.drawing.text(min(x, WIDTH - MARGIN - width), self.top + self.height + 12, text, "middle")
        for number in ys:
            self.drawing.text(self.left - 5, self.at(self.xs[0], number)[1], f"{number:g}", "end")

    def draw(self, line: Line) -> None:
        """Draws a line."""
        points = " ".join("{:.1f},{:.1f}".format(*self.at(x, y)) for x, y in line.points)
        dashes = f' stroke-dasharray="{line.dashes}"' if line.dashes else ""
        self.drawing.element(f'<polyline points="{points}" fill="none" stroke="{COLOURS[line.kind]}" '
                             f'stroke-width="{line.width:g}"{dashes}/>', line.kind)  # fmt: skip

    def area(self, points: Points, base: Points, kind: str) -> None:
        """Fills the area between two lines of the same xs."""
        edge = [*(self.at(x, y) for x, y in points), *(self.at(x, y) for x, y in reversed(base))]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in edge)
        self.drawing.element(f'<polygon points="{line}" fill="{COLOURS[kind]}"/>', kind)

    def level(self, y: float, text: str) -> None:
        """A dashed line across the frame with a label above its right end."""
        _, place = self.at(self.xs[0], y)
        self.drawing.line(self.left, place, self.left + self.width, place, dashed=True)
        self.drawing.text(self.left + self.width, place - 0.6 * FONT, text, "end")


def steps_of(levels: Points, end: float) -> list[tuple[float, float]]:
    """The corners of a curve that keeps each value until the next one."""
    found = []
    for (x, y), (after, _) in zip(levels, [*levels[1:], (end, 0.0)], strict=True):
        found += [(x, y), (after, y)]
    return found
