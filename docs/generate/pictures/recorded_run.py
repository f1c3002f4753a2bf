"""The two pictures of `pstar trace`, of the same recording, with the site's colours, letters and languages.

    near_LANGUAGE.svg      bytes near over time: chunks, activations on top of them, the limit
    blocks_LANGUAGE.svg    a row for each block: coloured while it is near, pale while only far has it
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from docs.generate.pictures.charts import Panel, steps_of
from docs.generate.pictures.pictures import COLOURS, MARGIN, WIDTH, Drawing, Words, width_of
from docs.generate.recorded import measured
from docs.generate.recorded.measured import write_whole

if TYPE_CHECKING:
    from pstar.profile.recording import Recording

MIB, LEFT, ROW = 2**20, 34, 6
STAGES = {"forward": "forward", "backward": "backward", "adam": "update"}
KINDS = {"param": "parameters", "grad": "gradients"}  # all others are states of the optimizer


def recording() -> Recording:
    """The steps of the profile that `measured.profile_commands` draw."""
    from pstar.profile.recording import load_profile
    from pstar.profile.timeline import cut

    first, last = map(int, measured.PROFILE_STEPS.split("-"))
    return cut(load_profile(measured.profile()), first, last)


def near(words: Words, shown: Recording) -> str:
    """Bytes near against the limit."""
    from pstar.profile.timeline import non_model_levels, used_levels

    model, other = used_levels(shown, "near"), non_model_levels(shown)
    times = sorted({shown.begin, *(at for at, _ in model), *(at for at, _ in other)})
    below = [(at, _value(model, at) / MIB) for at in times]
    above = [(at, low + _value(other, at) / MIB) for at, low in below]
    limit = shown.budget("near") / MIB
    drawing = Drawing(words, "near")
    drawing.heading(words("MiB near over two steps"))
    panel = Panel(drawing, (LEFT, drawing.y + 32, WIDTH - LEFT - MARGIN, 190), (shown.begin, shown.end), (0, 1.1 * limit))
    _stages(drawing, words, shown, panel)
    floor = [(at, 0.0) for at, _ in steps_of(below, shown.end)]
    panel.area(steps_of(below, shown.end), floor, "data")
    panel.area(steps_of(above, shown.end), steps_of(below, shown.end), "activations")
    panel.level(limit, words("limit: {n} MiB").format(n=f"{limit:g}"))
    panel.ticks(ys=(0, limit))
    drawing.y = panel.top + panel.height + 8
    for kind, word in (("data", "chunks"), ("activations", "activations, on top of them")):
        drawing.box(MARGIN, drawing.y, 14, 14, kind)
        drawing.text(MARGIN + 20, drawing.y + 7, words(word))
        drawing.y += 22
    return drawing.svg()


def blocks(words: Words, shown: Recording) -> str:
    """Where each block is."""
    from pstar.profile.timeline import in_order, lives

    found = {key: spans for key, spans in lives(shown).items() if spans}
    rows = list(in_order(found))
    drawing = Drawing(words, "blocks")
    drawing.heading(words("Which block is near"))
    place = (MARGIN, drawing.y + 32, WIDTH - 2 * MARGIN, ROW * len(rows))
    panel = Panel(drawing, place, (shown.begin, shown.end), (len(rows), 0))
    _stages(drawing, words, shown, panel)
    for number, key in enumerate(rows):
        kind = KINDS.get(key[0], "states")
        for life in found[key]:
            x, y = panel.at(life.begin, number)
            width = panel.at(life.end, number)[0] - x
            shape = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.3):.1f}" height="{ROW - 1}"'
            pale = "" if "near" in life.tiers else ' fill-opacity="0.25"'
            drawing.element(f'<rect {shape} fill="{COLOURS[kind]}"{pale}/>', kind)
    drawing.y = panel.top + panel.height + 2
    drawing.legend()
    drawing.note(words("A row is a block. Full colour: near; pale: only far has it."))
    return drawing.svg()


def _value(levels: list[tuple[float, int]], at: float) -> int:
    """The level at a time; 0 before the first."""
    place = bisect_right(levels, at, key=lambda level: level[0])
    return levels[place - 1][1] if place else 0


def _stages(drawing: Drawing, words: Words, shown: Recording, panel: Panel) -> None:
    """A strip above the panel: forward, backward and update, named where the strip has room."""
    from pstar.profile.timeline import stages

    for stage in stages(shown):
        if stage.name in STAGES:
            x, _ = panel.at(stage.begin, panel.ys[0])
            width = panel.at(stage.end, panel.ys[0])[0] - x
            name = words(STAGES[stage.name])
            drawing.box(x, panel.top - 26, width, 20, STAGES[stage.name], name if width_of(name) <= width else "")


def write(words_in: Callable[[str], Words], folder: Path) -> None:
    """Writes both pictures in both languages."""
    shown = recording()
    for language in ("en", "zh"):
        for draw in (near, blocks):
            write_whole(folder / f"{draw.__name__}_{language}.svg", draw(words_in(language), shown))
