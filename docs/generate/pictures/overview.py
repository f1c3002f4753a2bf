"""The picture of the home page as SVG: which parts of one four-layer model each rank of each chapter holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from docs.generate.pictures import pictures
from docs.generate.pictures.pictures import FAINT, MEANING
from docs.generate.pictures.pictures import LINE as LINE_COLOUR
from docs.generate.recorded.measured import write_whole

FAMILIES = "system-ui, 'PingFang SC', 'Microsoft YaHei', 'Noto Sans CJK SC', sans-serif"
COLOURS = {MEANING[kind]: pictures.COLOURS[kind] for kind in ("data", "parameters", "gradients", "states")}
EMPTY, DARK = FAINT, LINE_COLOUR
WIDTH, FONT = 440, 14  # 14 units are more than 11 px on a phone of 390
CELL, ROW = 13, 12
LEFT, LINE = 112, 76  # x of the first rank; height of a chapter's line


class Rank(NamedTuple):
    """The rows that a rank holds: data, parameters, gradients and states. One letter per layer (in data, per sequence).

    # all of it   - at half the bytes   _ a few per cent   < its first half   > its second half   . none of it
    """

    name: str
    rows: Sequence[str]


# The part of a cell that a letter colours: left, top, width, height.
PARTS = {"#": (0, 0, 1, 1), "-": (0, 0.5, 1, 0.5), "_": (0, 0.85, 1, 0.15), "<": (0, 0, 0.5, 1), ">": (0.5, 0, 0.5, 1)}


def _replicas(first: str, second: str) -> list[Rank]:
    """Two ranks that share the data. `first` and `second`: a letter each for parameters, gradients and states."""
    return [Rank("0", ["##..", *(4 * held for held in first)]), Rank("1", ["..##", *(4 * held for held in second)])]


# chapter, technique, what its ranks exchange, ranks
PLANS = (
    ("00", "one process", "", [Rank("0", ["####"] * 4)]),
    ("01", "parameter server", "gradients, parameters", [Rank("server", ["##..", "####", "####", "####"]),
                                                         Rank("1", ["..##", "####", "####", "...."])]),
    ("02", "data parallel", "gradients", _replicas("###", "###")),
    ("03", "Horovod", "gradients", _replicas("###", "###")),
    ("04", "mixed precision", "16-bit gradients", _replicas("--#", "--#")),
    ("05", "model parallel", "activations", [Rank("0", ["####", "##..", "##..", "##.."]),
                                             Rank("1", ["####", "..##", "..##", "..##"])]),
    ("06", "ZeRO", "gradients, parameters", _replicas("<<<", ">>>")),
    ("07", "chunks, near", "chunks; the rest waits far", [Rank("0", ["##..", ".#..", "....", "...."]),
                                                          Rank("1", ["..##", ".#..", "....", "...."])]),
    ("08", "LoRA", "few gradients", _replicas("#__", "#__")),
)  # fmt: skip


def picture(words: Callable[[str], str]) -> str:
    """All chapters one below the other, each with its ranks side by side; what a rank does not hold is grey."""
    parts: list[str] = []
    y = 8
    for kind, colour in COLOURS.items():
        parts.append(_rect(8, y, CELL, ROW, colour))
        parts.append(_text(8 + CELL + 6, y + 11, words(kind)))
        y += 18
    y += 6
    for chapter, technique, travels, ranks in PLANS:
        parts.append(f'<line x1="8" y1="{y}" x2="{WIDTH - 8}" y2="{y}" stroke="#e0e0e0"/>')
        parts.append(_text(8, y + 20, chapter, bold=True))
        for number, line in enumerate(_lines(words(technique))):
            parts.append(_text(8, y + 38 + 16 * number, line))
        step = (WIDTH - LEFT) / 3
        for number, rank in enumerate(ranks):
            x = LEFT + number * step
            title = words(rank.name) if rank.name == "server" else words("rank {}").format(rank.name)
            parts.append(_text(x, y + 16, title))
            for row, (held, colour) in enumerate(zip(rank.rows, COLOURS.values(), strict=True)):
                for layer, letter in enumerate(held):
                    left, top = x + layer * (CELL + 1), y + 21 + row * ROW
                    parts.append(_rect(left, top, CELL, ROW - 1, EMPTY))
                    if letter in PARTS:
                        u, v, width, height = PARTS[letter]
                        x1, y1 = left + u * CELL, top + v * (ROW - 1)
                        parts.append(_rect(x1, y1, width * CELL, height * (ROW - 1), colour))
            if number + 1 < len(ranks):
                parts.append(_arrow(x + 4 * (CELL + 1) + 4, x + step - 6, y + 45))
        if len(ranks) == 2 and travels:
            for number, line in enumerate(_lines(words(travels), 15)):
                parts.append(_text(LEFT + 2 * step, y + 42 + 16 * number, line))
        y += LINE
    body = "".join(parts)
    label = escape(words("What each rank of each chapter holds of the same model"))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img" aria-label="{label}" '
            f'font-size="{FONT}" font-family="{FAMILIES}">'
            f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>{body}</svg>\n')  # fmt: skip


def write(words: Callable[[str], Callable[[str], str]], folder: Path) -> None:
    """overview_zh.svg and overview_en.svg."""
    for language in ("zh", "en"):
        write_whole(folder / f"overview_{language}.svg", picture(words(language)))


def _lines(text: str, longest: int = 13) -> list[str]:
    """Breaks text at blanks into lines of at most `longest` letters; Chinese is short and needs no break."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > longest:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, bold: bool = False) -> str:
    weight = ' font-weight="700"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" fill="{DARK}"{weight}>{escape(text)}</text>'


def _arrow(x1: float, x2: float, y: float) -> str:
    """A double arrow."""
    heads = "".join(f"M{x:g} {y - 4:g}L{x - back:g} {y:g}L{x:g} {y + 4:g}" for x, back in ((x1 + 5, 5), (x2 - 5, -5)))
    return f'<path d="M{x1:g} {y:g}H{x2:g}{heads}" stroke="{DARK}" fill="none" stroke-width="1.5"/>'
