"""Two charts of a recording: near bytes against the budget, and each block's tiers. Imports matplotlib only to draw."""

import importlib.util
import io
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from pstar.errors import ProfileError
from pstar.profile.recording import Recording, write_atomically
from pstar.profile.timeline import Interval, in_order, lives, non_model_levels, stages, tier_order, used_levels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB = 2**20
DPI = 110
WIDTH_INCHES = 13.0

STAGE_COLOURS = {"forward": "#a6cee3", "backward": "#fdd0a2", "adam": "#b8dfae", "idle": "#ececec"}
OTHER_STAGES = ("#d9c8e6", "#f5c6d6", "#c9d8d0", "#e3d9b0")
PLACE_COLOURS = {
    ("near",): "#e6550d",
    ("far",): "#3f8fc4",
    ("disk",): "#8f8a70",
    ("near", "far"): "#7b4fa3",
    ("near", "disk"): "#b0704f",
    ("far", "disk"): "#4d6a80",
    ("near", "far", "disk"): "#3c2a57",
}
UNKNOWN_PLACE = "#2ca25f"
MODEL_COLOUR, NON_MODEL_COLOUR, BUDGET_COLOUR = "#e6550d", "#76838f", "#111111"


def require_matplotlib() -> None:
    """Raises ProfileError, which says what to install, if there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ProfileError('the charts need matplotlib: pip install "matplotlib>=3.9" (the extra "docs" has it), '
                           "or give --no-charts for the trace alone")


def near_chart(recording: Recording, path: Path) -> None:
    """Writes a PNG: model data and non-model bytes near, stacked, over time; the budget dashed; stages as bands.

    Raises ProfileError when the recording has no near bytes, or the file cannot be written.
    """
    model = used_levels(recording, "near")
    if not model:
        raise ProfileError(f"rank {recording.rank}: the profile has no near bytes to draw; profile the run again")
    clock, other = _Clock(recording), non_model_levels(recording)
    figure, strip, axes = _frame(recording, clock, 4.6)
    colours = _stage_colours(recording)
    for stage in stages(recording):
        axes.axvspan(clock(stage.begin), clock(stage.end), color=colours[stage.name], alpha=0.35, linewidth=0)

    times = sorted({recording.begin, recording.end, *(at for at, _ in model), *(at for at, _ in other)})
    below, above = _values_at(times, model), _values_at(times, other)
    top = [low + high for low, high in zip(below, above, strict=True)]
    shown = [clock(at) for at in times]
    axes.fill_between(shown, 0, below, step="post", color=MODEL_COLOUR, linewidth=0,
                      label=f"model data: at most {_mib(max(below))}")
    if other:
        axes.fill_between(shown, below, top, step="post", color=NON_MODEL_COLOUR, linewidth=0,
                          label=f"non-model, on top of it: at most {_mib(max(above))}")
    height, budget = max(top), recording.budget("near")
    if budget is not None:
        budget /= MIB
        covers = "for model data and non-model" if recording.about.get("budget_includes_non_model") else "for model data"
        # A budget far above the curve would press it flat: then only the legend shows the budget.
        too_high = budget > 4 * height > 0
        label = f"near budget {covers}: {_mib(budget)}" + (", above this picture" if too_high else "")
        axes.axhline(budget, color=BUDGET_COLOUR, linestyle=(0, (6, 3)), linewidth=1.5, label=label)
        height = height if too_high else max(height, budget)
    axes.set_ylim(0, 1.1 * height or 1)
    axes.set_ylabel("near [MiB]")
    axes.grid(axis="y", color="#000000", alpha=0.12, linewidth=0.6)
    strip.set_title(f"Near bytes against the budget: {_subject(recording)}", fontsize=12, loc="left", pad=24)
    _finish(figure, recording, axes.get_legend_handles_labels(), path)


def places_chart(recording: Recording, path: Path) -> None:
    """Writes a PNG: a row for each block (parameters first, then gradients and optimizer kinds), coloured by where it is.

    Raises ProfileError when the recording has no blocks, or the file cannot be written.
    """
    from matplotlib.patches import Patch

    found = {key: found for key, found in lives(recording).items() if found}
    if not found:
        raise ProfileError(f"rank {recording.rank}: the profile has no blocks to draw; profile the run again")
    rows = {key: row for row, key in enumerate(in_order(found))}
    clock = _Clock(recording)
    height = min(max(0.22 * len(rows), 2.4), max(9.0, 0.062 * len(rows)))
    figure, strip, axes = _frame(recording, clock, height)
    half = 0.42 if height / len(rows) > 0.12 else 0.5          # gaps between rows of a few pixels would only flicker
    boxes: dict[tuple[str, ...], list] = {}
    for key, row in rows.items():
        for life in found[key]:
            boxes.setdefault(life.tiers, []).append((clock(life.begin), clock(life.end), row - half, row + half))
    places = sorted(boxes, key=lambda tiers: (len(tiers), [tier_order(tier) for tier in tiers]))
    # Places with the longest total time are drawn first, so that they do not hide short stays.
    for tiers in sorted(boxes, key=lambda tiers: -sum(right - left for left, right, _, _ in boxes[tiers])):
        _draw_boxes(axes, boxes[tiers], PLACE_COLOURS.get(tiers, UNKNOWN_PLACE), clock.pixel)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    _label_rows(axes, list(rows), height)
    handles = [Patch(color=PLACE_COLOURS.get(tiers, UNKNOWN_PLACE)) for tiers in places]
    labels = [f"{tiers[0]} only" if len(tiers) == 1 else "in " + " and ".join(tiers) for tiers in places]
    strip.set_title(f"Which block is where: {_subject(recording)}", fontsize=12, loc="left", pad=24)
    _finish(figure, recording, (handles, labels), path)


class _Clock:
    """Converts seconds of a recording to chart units: since its begin, in milliseconds if it is short."""

    def __init__(self, recording: Recording):
        self.begin, length = recording.begin, recording.end - recording.begin
        self.scale, self.unit = (1, "seconds") if length >= 2 else (1e3, "milliseconds")
        self.length = length * self.scale or 1.0
        self.pixel = self.length / (0.85 * WIDTH_INCHES * DPI)
        cut = recording.steps and recording.steps[0].at == recording.begin
        self.label = f"{self.unit} since " + (f"step {recording.steps[0].number}" if cut else "the profile") + " began"

    def __call__(self, seconds: float) -> float:
        return (seconds - self.begin) * self.scale


def _mib(amount: float) -> str:
    """'3.05 MiB', '81,920 MiB': three digits, or all digits from 1000 on."""
    return f"{amount:.3g} MiB" if amount < 1000 else f"{amount:,.0f} MiB"


def _subject(recording: Recording) -> str:
    about, words = recording.about, [f"rank {recording.rank}"]
    if about.get("num_ranks"):
        words[0] += f" of {about['num_ranks']}"
    words += [str(about[name]) for name in ("device", "policy") if about.get(name)]
    if isinstance(about.get("model_data_bytes"), int):
        words.append(f"{_mib(about['model_data_bytes'] / MIB)} of model data")
    return ", ".join(words)


def _frame(recording: Recording, clock: _Clock, height: float) -> "tuple[Figure, Axes, Axes]":
    """A figure with a strip that names stages and steps, and below it the axes of the chart."""
    from matplotlib.figure import Figure

    # Without pyplot: it needs no screen and changes no global state.
    figure = Figure(figsize=(WIDTH_INCHES, height + 2.0), dpi=DPI, layout="constrained")
    strip, axes = figure.subplots(2, 1, sharex=True, height_ratios=[0.28, height])
    figure.get_layout_engine().set(hspace=0.0, h_pad=0.04)
    _draw_stages(strip, recording, clock)
    axes.set_xlim(0, clock.length)
    axes.set_xlabel(clock.label)
    axes.ticklabel_format(axis="x", useOffset=False)
    for step in recording.steps:
        for part in (strip, axes):
            part.axvline(clock(step.at), color="#333333", linewidth=0.8, alpha=0.7)
    return figure, strip, axes


def _draw_stages(strip: "Axes", recording: Recording, clock: _Clock) -> None:
    found = stages(recording)
    for name, colour in _stage_colours(recording).items():
        _draw_boxes(strip, [(clock(stage.begin), clock(stage.end), 0, 1) for stage in found if stage.name == name], colour)
    for stage in found:
        if _fits(stage, recording):
            strip.text(clock((stage.begin + stage.end) / 2), 0.5, stage.name, ha="center", va="center", fontsize=8.5)
    strip.set_ylim(0, 1)
    strip.set_yticks([])
    strip.tick_params(axis="x", bottom=False, labelbottom=False)
    shown = _spread([clock(step.at) for step in recording.steps], 0.055 * clock.length)
    top = strip.secondary_xaxis("top")
    top.set_xticks([clock(recording.steps[index].at) for index in shown],
                   [f"step {recording.steps[index].number}" for index in shown], fontsize=8.5, ha="left")
    top.tick_params(length=3)


def _fits(stage: Interval, recording: Recording) -> bool:
    """Whether the stage's name fits into its band: the font takes about 0.07 inches a letter."""
    share = (stage.end - stage.begin) / ((recording.end - recording.begin) or 1)
    return 0.07 * len(stage.name) + 0.05 < share * 0.88 * WIDTH_INCHES


def _spread(positions: list[float], distance: float) -> list[int]:
    """Indices of positions, in order, each at least `distance` after the last chosen position."""
    shown: list[int] = []
    for index, position in enumerate(positions):
        if not shown or position - positions[shown[-1]] >= distance:
            shown.append(index)
    return shown


def _stage_colours(recording: Recording) -> dict[str, str]:
    names = list(dict.fromkeys(stage.name for stage in stages(recording)))
    others = [name for name in names if name not in STAGE_COLOURS]
    return {name: STAGE_COLOURS.get(name) or OTHER_STAGES[others.index(name) % len(OTHER_STAGES)] for name in names}


def _draw_boxes(axes: "Axes", boxes: list[tuple[float, float, float, float]], colour: str, least: float = 0.0) -> None:
    """Draws rectangles (left, right, low, high), at least `least` wide; as one object, for there may be many thousands."""
    from matplotlib.collections import PolyCollection

    boxes = [(left, max(right, left + least), low, high) for left, right, low, high in boxes]
    corners = [[(left, low), (right, low), (right, high), (left, high)] for left, right, low, high in boxes]
    # Without antialiasing there is no seam between two rectangles that touch.
    axes.add_collection(PolyCollection(corners, facecolor=colour, linewidth=0, antialiased=False), autolim=False)


def _values_at(times: list[float], levels: list[tuple[float, int]]) -> list[float]:
    """MiB at each of the sorted times; 0 before the first level."""
    values, index, now = [], 0, 0
    for at in times:
        while index < len(levels) and levels[index][0] <= at:
            now = levels[index][1]
            index += 1
        values.append(now / MIB)
    return values


def _label_rows(axes: "Axes", keys: list[tuple[str, int]], height: float) -> None:
    """Labels all rows, or as many as can be read; always the first row of each kind, with a line above it."""
    rows_a_label = max(1.0, 0.15 * len(keys) / height)         # 0.15 inches a line of text
    starts = [row for row, key in enumerate(keys) if row == 0 or keys[row - 1][0] != key[0]]
    ticks: list[int] = []
    for start, end in zip(starts, [*starts[1:], len(keys)], strict=True):
        every = -int(-rows_a_label // 1)
        room_until = end if end == len(keys) else end - rows_a_label + 1
        ticks += [row for row in range(start, end, every) if row == start or row < room_until]
    axes.set_yticks(ticks, [f"{keys[row][0]} {keys[row][1]}" for row in ticks], fontsize=8)
    axes.tick_params(axis="y", length=2)
    for row in starts[1:]:
        axes.axhline(row - 0.5, color="#000000", linewidth=0.8)


def _finish(figure: "Figure", recording: Recording, legend: tuple[list, list], path: Path) -> None:
    """Puts the legend below the chart, where it covers nothing, and writes the file."""
    from matplotlib.patches import Patch

    shown = list(zip(*legend, strict=True))
    of_stages = [(Patch(color=colour), f"stage: {name}") for name, colour in _stage_colours(recording).items()]
    # One row for the chart's entries and one for the stages; matplotlib fills column by column.
    empty = (Patch(alpha=0), "")
    columns = list(zip_longest(shown, of_stages, fillvalue=empty))
    handles, labels = zip(*(entry for column in columns for entry in column), strict=True)
    figure.legend(handles, labels, loc="outside lower left", ncols=len(columns), fontsize=8.5, frameon=False)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    write_atomically(path, content.getvalue())
