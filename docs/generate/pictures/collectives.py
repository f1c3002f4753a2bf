"""The pictures of the collectives, from what their programs printed: what each rank holds before and after.

    basics_NAME_LANGUAGE.svg    for the names of KINDS; basics_barrier_LANGUAGE.svg is a timeline

A picture has the colour of the data that the collective carries most often in training.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from docs.generate.pictures.pictures import MARGIN, Drawing, Timeline, Words, width_of
from docs.generate.recorded import programs
from docs.generate.recorded.measured import write_whole

KINDS = {
    "broadcast": "parameters", "reduce": "gradients", "all_reduce": "gradients", "gather": "parameters",
    "all_gather": "parameters", "scatter": "data", "reduce_scatter": "gradients", "all_to_all": "activations",
    "send_recv": "activations",
}  # fmt: skip
PLACED = ("gather", "all_gather", "scatter", "reduce_scatter")  # a single number is the rank's piece of the whole
CELL, HEIGHT, LEFT, RIGHT = 40, 30, 62, 268


def rows_of(said: str) -> list[tuple[list[str], list[str]]]:
    """Parses a collective's output into (before, after) of each rank; an undefined result has no cells."""
    found = re.findall(r"^rank (\d+): \[(.*)\] -> (?:\[(.*)\]|undefined)$", said, re.MULTILINE)
    if [int(rank) for rank, _, _ in found] != list(range(len(found))) or len(found) != len(said.splitlines()):
        raise SystemExit(f"error: no rows of ranks in what a program printed:\n{said}")
    return [(before.split(", ") if before else [], after.split(", ") if after else []) for _, before, after in found]


def collective(words: Words, name: str, said: str) -> str:
    """One line per rank: its cells before, an arrow, its cells after."""
    drawing = Drawing(words, name.replace("_", "-"))
    drawing.text(LEFT + 2 * CELL, drawing.y + 10, words("before"), "middle", bold=True)
    drawing.text(RIGHT + 2 * CELL, drawing.y + 10, words("after"), "middle", bold=True)
    drawing.y += 26
    for rank, both in enumerate(rows_of(said)):
        drawing.text(MARGIN, drawing.y + HEIGHT / 2, words("rank {n}").format(n=rank))
        for x, cells in zip((LEFT, RIGHT), both, strict=True):
            first = rank if len(cells) == 1 and name in PLACED else 0
            for place in range(4):
                if first <= place < first + len(cells):
                    number = cells[place - first]
                    drawing.box(x + place * CELL, drawing.y, CELL, HEIGHT, KINDS[name], number, light=number == "0")
                else:
                    drawing.outline(x + place * CELL, drawing.y, CELL, HEIGHT)
        drawing.arrow(LEFT + 4 * CELL + 8, drawing.y + HEIGHT / 2, RIGHT - 8, drawing.y + HEIGHT / 2)
        drawing.y += HEIGHT + 8
    return drawing.svg()


def barrier(words: Words, said: str) -> str:
    """One lane per rank: it computes until it arrives, then it waits."""
    times = [float(time) for time in re.findall(r"arrives after ([\d.]+) s", said)]
    drawing = Drawing(words, "barrier")
    lanes = [words("rank {n}").format(n=rank) for rank in range(len(times))]
    timeline = Timeline(drawing, lanes, max(times) * 1.25)
    for lane, arrives in zip(lanes, times, strict=True):
        if arrives:    # on a slow machine even rank 0 arrives late, in a box too small for its label
            label = words("at work")
            timeline.block(lane, 0, arrives, "data", label if width_of(label) <= timeline.scale * arrives else "")
        timeline.block(lane, max(times), max(times) * 1.25, "data", words("goes on"))
    drawing.note(words("The last to arrive decides when all go on; grey is waiting."))
    return drawing.svg()


def write(words_in: Callable[[str], Words], folder: Path) -> None:
    """Writes all pictures in both languages."""
    said = programs.outputs()
    for language in ("en", "zh"):
        words = words_in(language)
        drawn = {name: collective(words, name, said[name]) for name in KINDS} | {"barrier": barrier(words, said["barrier"])}
        for name, svg in drawn.items():
            write_whole(folder / f"basics_{name}_{language}.svg", svg)
