"""The pictures of the chapters as SVG: a small drawing kit; ranks.py and timelines.py draw with it.

    NN_name_LANGUAGE.svg        ranks, what each of them holds, and the messages between them
    NN_name_time_LANGUAGE.svg   one step: what each rank computes when, and which messages it sends at the same time

A picture is 440 units wide. Its letters have 14 units, which is 11 px on a phone 390 px wide. Text that does not fit raises
an error. Widths of words are overestimated, so that text never overflows unnoticed.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from docs.generate.recorded.measured import write_whole

Words = Callable[[str], str]

WIDTH, FONT, MARGIN = 440, 14, 6
DARK, FAINT, LINE = "#212121", "#eeeeee", "#424242"
# The colour key of the whole site. docs/assets/tools/tools.css has the same colours, with variants for dark pages.
COLOURS = {"parameters": "#3f51b5", "gradients": "#bf4f00", "states": "#2e7d32", "activations": "#8e24aa", "data": "#546e7a",
           "measured": "#00796b", "baseline": "#757575"}  # fmt: skip
# A computation has the colour of its result.
COLOURS |= {"forward": COLOURS["activations"], "backward": COLOURS["gradients"], "update": COLOURS["states"], "idle": FAINT}
MEANING = {
    "parameters": "model parameters", "gradients": "gradients", "states": "optimizer states", "activations": "activations",
    "data": "data", "measured": "measured here", "baseline": "compared with",
    "forward": "forward", "backward": "backward", "update": "update", "idle": "waiting",
}  # fmt: skip
FAMILIES = "system-ui, 'PingFang SC', 'Microsoft YaHei', 'Noto Sans CJK SC', 'Noto Sans SC', sans-serif"


def width_of(text: str, bold: bool = False) -> float:
    """The approximate width of a text in units, in one of the wider font families."""
    latin = 0.63 if bold else 0.57
    return sum(FONT if unicodedata.east_asian_width(c) in "WF" else latin * FONT for c in text)


def wrapped(text: str, width: float, bold: bool = False) -> list[str]:
    """Breaks a text into lines, at blanks and between Chinese characters. No line begins with a stop."""
    pieces: list[str] = []
    for c in text:
        wide = unicodedata.east_asian_width(c) in "WF"
        joined = pieces and not pieces[-1].endswith(" ") and not wide and not _is_wide_end(pieces[-1])
        if joined or (pieces and c in "，。；：、）”"):
            pieces[-1] += c
        else:
            pieces.append(c)
    lines = [""]
    for piece in pieces:
        if width_of((lines[-1] + piece).rstrip(), bold) > width:
            lines.append("")
        lines[-1] += piece
    return [line.strip() for line in lines]


def _is_wide_end(text: str) -> bool:
    return unicodedata.east_asian_width(text[-1]) in "WF"


class Row(NamedTuple):
    """One thing that a rank holds: a label above a bar of equal cells. 1: held, 0: held elsewhere, 2: held temporarily."""

    label: str
    kind: str
    cells: Sequence[int] = (1,)
    share: float = 1.0


class Drawing:
    """An SVG that grows downwards: `y` is the top of the next element."""

    def __init__(self, words: Words, title: str) -> None:
        self.words, self.y, self.title = words, 3.0, title
        self._parts: list[str] = []
        self._kinds: dict[str, None] = {}    # of boxes
        self._sent: dict[str, None] = {}     # of messages

    # ---- elements

    def text(self, x: float, y: float, text: str, anchor: str = "start", colour: str = DARK, bold: bool = False) -> None:
        """A line of text, centred vertically on y."""
        width = width_of(text, bold)
        left = {"start": x, "middle": x - width / 2, "end": x - width}[anchor]
        if left < -1 or left + width > WIDTH + 1:
            raise ValueError(f"{self.title}: the picture is too narrow for {text!r} at {x:g}")
        weight = ' font-weight="700"' if bold else ""
        place = f'x="{x:.1f}" y="{y + 0.35 * FONT:.1f}" text-anchor="{anchor}"'
        self._parts.append(f'<text {place} fill="{colour}"{weight}>{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str, text: str = "", light: bool = False) -> None:
        """A filled box of a kind; its text must fit."""
        self._kinds[kind] = None
        opacity = ' fill-opacity="0.3"' if light else ""
        shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self._parts.append(f'<rect {shape} fill="{COLOURS[kind]}"{opacity} stroke="#ffffff"/>')
        self._inside(x, y, width, height, text, DARK if light or kind == "idle" else "#ffffff")

    def element(self, text: str, kind: str) -> None:
        """An SVG element in the colour of a kind."""
        self._kinds[kind] = None
        self._parts.append(text)

    def outline(self, x: float, y: float, width: float, height: float, dashed: bool = True) -> None:
        """A frame."""
        dashes = ' stroke-dasharray="3 3"' if dashed else ' rx="6"'
        colour = "#9e9e9e" if dashed else LINE
        shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self._parts.append(f'<rect {shape} fill="none" stroke="{colour}"{dashes}/>')

    def chevron(self, x: float, y: float, width: float, height: float, kind: str, text: str = "") -> None:
        """A message from x to x + width: a box that ends in an arrowhead, in the colour of its content."""
        self._sent[kind] = None
        tip = min(5.0, width / 2)
        points = [(x, y), (x + width - tip, y), (x + width, y + height / 2), (x + width - tip, y + height), (x, y + height)]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        self._parts.append(f'<polygon points="{line}" fill="{COLOURS[kind]}" fill-opacity="0.22" stroke="{LINE}"/>')
        self._inside(x, y, width, height, text, DARK)

    def _inside(self, x: float, y: float, width: float, height: float, text: str, colour: str) -> None:
        if width_of(text) > width + 1:
            raise ValueError(f"{self.title}: {text!r} does not fit into a box of {width:.0f}")
        if text:
            self.text(x + width / 2, y + height / 2, text, "middle", colour)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, both: bool = False, thick: float = 2.0) -> None:
        """A message."""
        start = ' marker-start="url(#tip)"' if both else ""
        line = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self._parts.append(f'<line {line} stroke="{LINE}" stroke-width="{thick}" marker-end="url(#tip)"{start}/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, dashed: bool = False) -> None:
        """A line without an arrowhead."""
        dashes = ' stroke-dasharray="3 3"' if dashed else ' stroke-width="2"'
        place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self._parts.append(f'<line {place} stroke="{"#9e9e9e" if dashed else LINE}"{dashes}/>')

    def dot(self, x: float, y: float, kind: str) -> None:
        """A point of a diagram."""
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{COLOURS[kind]}" stroke="#ffffff"/>')

    # ---- blocks

    def heading(self, text: str) -> None:
        """Bold text, wrapped if it is too long for one line."""
        for line in wrapped(text, 0.93 * (WIDTH - 2 * MARGIN)):
            self.text(MARGIN, self.y + 12, line, bold=True)
            self.y += 20
        self.y += 4

    def panel(self, x: float, width: float, title: str, rows: Sequence[Row]) -> list[float]:
        """Draws a rank and its rows from self.y downwards; returns the middle of each bar. Does not change self.y."""
        y = self.y + 28
        if width_of(title, bold=True) > width:
            raise ValueError(f"{self.title}: {title!r} does not fit over a panel of {width:.0f}")
        self.text(x + width / 2, self.y + 14, title, "middle", bold=True)
        middles = []
        for row in rows:
            if width_of(row.label) > width - 12:
                raise ValueError(f"{self.title}: {row.label!r} does not fit into a panel of {width:.0f}")
            self.text(x + 8, y + 8, row.label)
            cell = row.share * (width - 16) / len(row.cells)
            for number, held in enumerate(row.cells):
                place = (x + 8 + number * cell, y + 18, cell, 14)
                if held:
                    self.box(*place, row.kind, light=held == 2)
                else:
                    self.outline(*place)
            middles.append(y + 25)
            y += 40
        self.outline(x, self.y, width, y - self.y + 2, dashed=False)
        return middles

    def messages(self, rows: Iterable[tuple[str, str, str]]) -> None:
        """The list of messages: (content, way such as '0 → 1', sentence)."""
        rows = list(rows)
        left = MARGIN + 34 + max((width_of(way, bold=True) for _, way, _ in rows), default=0)
        for kind, way, sentence in rows:
            self.box(MARGIN, self.y + 3, 14, 14, kind)
            self.text(MARGIN + 22, self.y + 10, way, bold=True)
            for line in wrapped(sentence, WIDTH - left - MARGIN):
                self.text(left, self.y + 10, line)
                self.y += 20
            self.y += 4

    def note(self, text: str) -> None:
        """A sentence over the whole width."""
        for line in wrapped(text, WIDTH - 2 * MARGIN):
            self.text(MARGIN, self.y + 10, line, colour="#616161")
            self.y += 20

    def legend(self) -> None:
        """The boxes and messages drawn so far, each with its name: gradients and their computation share a colour."""
        order = list(MEANING).index
        boxes = [(self.box, kind, self.words(MEANING[kind])) for kind in sorted(self._kinds, key=order)]
        sent = [(self.chevron, kind, self.words("message: {kind}").format(kind=self.words(MEANING[kind])))
                for kind in sorted(self._sent, key=order)]    # fmt: skip
        x, self.y = MARGIN, self.y + 8
        for draw, kind, word in boxes + sent:
            if x + 20 + width_of(word) > WIDTH - MARGIN:
                x, self.y = MARGIN, self.y + 22
            draw(x, self.y, 14, 14, kind)
            self.text(x + 20, self.y + 7, word)
            x += 20 + width_of(word) + 16
        self.y += 22

    def svg(self) -> str:
        """The whole file."""
        height = self.y + 4
        tip = (f'<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" '
               f'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="{LINE}"/></marker>')  # fmt: skip
        head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
                f'height="{height:.0f}" font-family="{FAMILIES}" font-size="{FONT}" role="img">')  # fmt: skip
        title = f"<title>{escape(self.title)}</title>"
        back = f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>'
        return "\n".join([head, title, f"<defs>{tip}</defs>", back, *self._parts, "</svg>", ""])


class Timeline:
    """Lanes of one panel over time, drawn below the existing content.

    Args:
        drawing: the picture to draw into.
        lanes: (name, height) from top to bottom; an empty name is a heading without a lane.
        until: the time at the right edge.
    """

    HEIGHT, LEFT = 24, 84

    def __init__(self, drawing: Drawing, lanes: Sequence[str], until: float) -> None:
        self.drawing, self.until = drawing, until
        self.scale = (WIDTH - self.LEFT - MARGIN) / until
        self.top: dict[str, float] = {}
        for lane in lanes:
            rank, _, name = lane.rpartition("/")
            if rank and not any(one.startswith(f"{rank}/") for one in self.top):
                drawing.text(MARGIN, drawing.y + 10, rank, bold=True)
                drawing.y += 21
            self.top[lane] = drawing.y
            drawing.text(MARGIN, drawing.y + self.HEIGHT / 2, name)
            drawing.box(self.LEFT, drawing.y, WIDTH - self.LEFT - MARGIN, self.HEIGHT, "idle")
            drawing.y += self.HEIGHT + 3
        drawing.y += 6

    def at(self, time: float) -> float:
        """The x of a time."""
        return self.LEFT + self.scale * time

    def block(self, lane: str, begin: float, end: float, kind: str, text: str = "", light: bool = False) -> None:
        """Draws a computation; leaves out a number that is too wide for its box."""
        width = self.scale * (end - begin)
        text = "" if text.isdigit() and width_of(text) > width else text
        self.drawing.box(self.at(begin), self.top[lane], width, self.HEIGHT, kind, text, light)

    def message(self, lane: str, begin: float, end: float, kind: str, text: str = "") -> None:
        """Draws a message from `begin` to `end`."""
        self.drawing.chevron(self.at(begin), self.top[lane] + 1, self.scale * (end - begin), self.HEIGHT - 2, kind, text)

    def arrow(self, time: float, sender: str, receiver: str, both: bool = False) -> None:
        """Draws an arrow from the sender's lane to the receiver's."""
        down = self.top[receiver] > self.top[sender]
        first = self.top[sender] + (self.HEIGHT if down else 0)
        last = self.top[receiver] + (0 if down else self.HEIGHT)
        self.drawing.arrow(self.at(time), first, self.at(time), last, both)


# Chapter -> its function in ranks.py; timelines.py has the same name with _time.
CHAPTERS = {
    "00_single": "single", "01_parameter_server": "parameter_server", "02_ddp": "ddp", "03_horovod": "horovod",
    "04_apex": "apex", "05_model_parallel": "model_parallel", "06_zero": "zero", "07_patrickstar": "patrickstar",
    "08_param_efficient": "param_efficient",
}  # fmt: skip


def drawn(words: Words) -> dict[str, str]:
    """The pictures of all chapters: name without language -> SVG."""
    from docs.generate.pictures import decision, ranks, timelines

    found = {chapter: getattr(ranks, name)(words) for chapter, name in CHAPTERS.items()}
    found["05_model_parallel_tensor"] = ranks.tensor_parallel(words)
    found["08_param_efficient_decision"] = decision.decision(words)
    return found | {f"{chapter}_time": getattr(timelines, f"{name}_time")(words) for chapter, name in CHAPTERS.items()}


def write(words_in: Callable[[str], Words], folder: Path) -> None:
    """Writes the pictures of all chapters in both languages."""
    for language in ("en", "zh"):
        for name, svg in drawn(words_in(language)).items():
            write_whole(folder / f"{name}_{language}.svg", svg)
