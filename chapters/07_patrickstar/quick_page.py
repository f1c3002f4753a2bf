"""The table and the figure of quick.py, from what its variants measured."""

from __future__ import annotations

import datetime
import importlib.util
import platform
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from durable.cores import num_cores
from durable.files import replacing

MB = 1e6
COLUMNS = ("switched", "step time", "middle half", "s a step", "MB in", "MB out", "MB disk", "waits s", "MB near, chunks",
           "MB near, activations", "MB near, at least", "losses")


def ratios(variant: Any, base: Any) -> list[float]:
    """Seconds of a step against the common settings, round by round."""
    return [mine["seconds"] / other["seconds"] for mine, other in zip(variant.rounds, base.rounds, strict=True)]


def middle(values: list[float]) -> tuple[float, float]:
    """The quartiles; of a single value the value."""
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return low, high


def row(variant: Any, base: Any) -> dict[str, Any]:
    """The medians over the rounds: {name, ratio, low, high, seconds, bytes, waits, peaks}."""
    against = ratios(variant, base)
    low, high = middle(against)
    of = {key: median(each[key] for each in variant.rounds) for key in variant.rounds[0]}
    disk = sum(value for key, value in of.items() if key.endswith("_bytes") and "disk" in key and "_to_" in key)
    return {"name": variant.name, "about": variant.about, "ratio": median(against), "low": low, "high": high,
            "seconds": of["seconds"], "in": of["far_to_near_bytes"], "out": of["near_to_far_bytes"], "disk": disk,
            "waits": of["copy_wait_s"], **variant.facts}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows in Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    for each in rows:
        same = "same bits" if each["gap"] == 0 else f"within {each['gap']:.0e}"
        cells = [f"`{each['name']}`", f"{each['ratio']:.2f}", f"{each['low']:.2f} to {each['high']:.2f}",
                 f"{each['seconds']:.3f}", *(f"{each[key] / MB:.1f}" for key in ("in", "out", "disk")),
                 f"{each['waits']:.3f}", *(f"{each[key] / MB:.1f}" for key in ("chunks near", "activations", "least near")),
                 same]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def facts(size: dict[str, int], batch: int, keys: dict[str, Any], timed: int, device: str, lacks: list[str],
          command: str) -> list[tuple[str, str]]:
    """(name, fact) of the circumstances."""
    import torch

    link = f", link of {keys['simulated_link'] / MB:,.0f} MB/s" if "simulated_link" in keys else ""
    work = (f"GPT-2 of {size['n_layer']} layers, {size['n_embd']} wide, vocabulary {size['vocab_size']}, length "
            f"{size['n_positions']}, batch {batch}, fp32, near {keys['near_budget']}{link}; {torch.get_num_threads()} of "
            f"{num_cores()} cores compute ({processor()})")
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    found = [("work", work), ("versions", f"torch {torch.__version__}, Python {platform.python_version()}")]
    found += [("missing", "; ".join(lacks))] if lacks else []
    return [*found, ("date", now), ("command", f"`{command}`")]


def processor() -> str:
    """The processor's name, or its architecture where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def write(folder: Path, variants: list[Any], circumstances: list[tuple[str, str]]) -> str:
    """Writes quick.md and, with matplotlib, quick.png, each complete or not at all; returns the table's text."""
    rows = [row(each, variants[0]) for each in variants]
    rounds = [("rounds", f"{len(variants[0].rounds)}, interleaved; step time is the median of the ratios to the first row")]
    text = "\n".join(["# What each optimisation brings", "",
                      *(f"- {name}: {fact}" for name, fact in [*circumstances[:2], *rounds, *circumstances[2:]]), "",
                      *table(rows), ""])
    with replacing(folder / "quick.md") as staging:
        staging.write_text(text, encoding="utf-8")
    files = ["quick.md"]
    if importlib.util.find_spec("matplotlib") is not None:
        with replacing(folder / "quick.png") as staging:
            draw(rows, staging)
        files.append("quick.png")
    return f"{text}\nwritten: {', '.join(str(folder / name) for name in files)}"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Three panels with one bar a variant: step time, bytes moved, bytes near."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names, places = [each["name"] for each in rows], list(range(len(rows)))
    figure, (times, moved, near) = pyplot.subplots(1, 3, figsize=(12, 0.36 * len(rows) + 1.5), sharey=True, dpi=110,
                                                   layout="constrained")  # fmt: skip
    reach = [[max(0.0, each["ratio"] - each["low"]) for each in rows],
             [max(0.0, each["high"] - each["ratio"]) for each in rows]]
    colors = ["#2a7f62" if each["high"] < 1 else "#c4622d" if each["low"] > 1 else "#b0b0b0" for each in rows]
    times.barh(places, [each["ratio"] for each in rows], xerr=reach, color=colors, ecolor="#333333", capsize=2)
    times.axvline(1, color="#333333", linewidth=0.8)
    times.set_title("Time of a step\n(1 = all as set; lines: middle half; gray: no clear difference)", fontsize=10)
    _stack(moved, places, rows, (("in", "to near", "#4477aa"), ("out", "from near", "#88ccee"), ("disk", "disk", "#bbbbbb")))
    moved.set_title("MB copied in a step", fontsize=10)
    _stack(near, places, rows, (("chunks near", "chunks", "#4477aa"), ("activations", "activations", "#ddaa33")))
    near.set_title("MB near at the peak", fontsize=10)
    times.set_yticks(places, names, fontsize=9)
    times.invert_yaxis()
    for panel in (times, moved, near):
        panel.grid(axis="x", color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")
    pyplot.close(figure)


def _stack(panel: Any, places: list[int], rows: list[dict[str, Any]], parts: tuple[tuple[str, str, str], ...]) -> None:
    left = [0.0] * len(rows)
    for key, label, color in parts:
        values = [each[key] / MB for each in rows]
        if any(values):
            panel.barh(places, values, left=left, color=color, label=label)
        left = [a + b for a, b in zip(left, values, strict=True)]
    panel.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=3, frameon=False)
