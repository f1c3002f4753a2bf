"""The drawn figures on a dark page: the same shapes, with the colours of lines, letters and empty cells exchanged."""

from __future__ import annotations

import re
from pathlib import Path

from docs.generate.recorded.measured import write_whole

PAGE = "#1e2129"  # the theme's dark background
# Light -> dark. The coloured boxes stay: their white letters have a contrast of at least 4.5 to 1.
LINES = {"#212121": "#e6e8ee", "#424242": "#b4bac8", "#616161": "#b8bcc8", "#9e9e9e": "#868d9c", "#eeeeee": "#3a3f4d",
         "#e0e0e0": "#3a3f4d"}  # fmt: skip

PALE = {"0.22": "0.4", "0.25": "0.5", "0.3": "0.55"}  # the opacities of pale boxes: on a dark ground the same look like none


def dark(svg: str) -> str:
    """A light figure's SVG -> the dark one's."""
    svg = re.sub(r'fill-opacity="([\d.]+)"', lambda pale: f'fill-opacity="{PALE[pale[1]]}"', svg)
    svg = re.sub(r'(<rect width="[\d.]+" height="[\d.]+" )fill="#ffffff"', rf'\1fill="{PAGE}"', svg, count=1)
    svg = svg.replace('stroke="#ffffff"', f'stroke="{PAGE}"')
    return re.sub("|".join(LINES), lambda colour: LINES[colour[0]], svg)


def write(folder: Path) -> None:
    """NAME.dark.svg for each NAME.svg of a folder."""
    for path in folder.glob("*.svg"):
        if not path.name.endswith(".dark.svg"):
            write_whole(path.with_suffix(".dark.svg"), dark(path.read_text(encoding="utf-8")))
