"""Charts of what was measured, in both languages: the captured curves and the committed results of benchmarks/.

    curve_NN_name, curves_all, loss_00_07     losses of docs/captured
    quick, quick_bytes, adam, staleness, quantization, ablation_speedup, ablation_loss     benchmarks/results
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from docs.generate.pictures.charts import Bar, Group, Line, Panel, bars
from docs.generate.pictures.pictures import MARGIN, WIDTH, Drawing, Words
from docs.generate.recorded import captures
from docs.generate.recorded.measured import REPO, write_whole

RESULTS = REPO / "benchmarks/results"
COLUMNS = 2  # of small panels


def rows_of(name: str, table: int = 0) -> list[dict[str, str]]:
    """A table of a committed result: a dict for each row, by the heads of its columns. Backticks are removed."""
    text = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    found = re.findall(r"^\|(.+)\|\n\|[-:| ]+\|\n((?:\|.+\|\n?)+)", text, re.MULTILINE)[table]
    head = [cell.strip() for cell in found[0].split("|")]
    return [dict(zip(head, (cell.strip().strip("`") for cell in line.strip("|").split("|")), strict=True))
            for line in found[1].splitlines()]  # fmt: skip


# ---- captured curves


def curve(words: Words, chapters: Sequence[str]) -> str:
    """Losses of one chapter, or of two: the first wide and grey, the second dashed on top of it."""
    drawing = Drawing(words, "curve")
    drawing.heading(words("training loss, nats per token"))
    panel = _losses(drawing, chapters, (34, drawing.y + 12, WIDTH - 34 - MARGIN, 120), labelled=True)
    panel.ticks(xs=(1, 20, 40, captures.STEPS), ys=panel.ys)
    drawing.y = panel.top + panel.height + 20
    drawing.text(WIDTH - MARGIN, drawing.y + 10, words("step"), "end")
    drawing.y += 22
    return drawing.svg()


def small_multiples(words: Words) -> str:
    """A panel for each chapter: its losses on those of chapter 00."""
    drawing = Drawing(words, "curves_all")
    drawing.heading(words("training loss, nats per token, over {n} steps").format(n=captures.STEPS))
    wide, high, first = (WIDTH - 34 - MARGIN - 14) / COLUMNS, 82, drawing.y + 20
    for number, chapter in enumerate(captures.CHAPTERS[1:]):
        left, top = 34 + (number % COLUMNS) * (wide + 14), first + number // COLUMNS * (high + 36)
        panel = _losses(drawing, (captures.BASE, chapter), (left, top, wide, high), labelled=False)
        panel.title(chapter)
        panel.ticks(ys=panel.ys if left == 34 else ())
        drawing.y = top + high + 14
    drawing.note(words("Grey: {base}. Dashes: the chapter.").format(base=captures.BASE))
    return drawing.svg()


def _losses(drawing: Drawing, chapters: Sequence[str], place: tuple[float, float, float, float], labelled: bool) -> Panel:
    found = [list(enumerate(captures.captured(one)["losses"], start=1)) for one in chapters]
    vocabulary = float(re.search(r"ln = ([\d.]+)", captures.captured(captures.BASE)["said"]).group(1))
    low, high = min(y for line in found for _, y in line), max([vocabulary, *(y for line in found for _, y in line)])
    panel = Panel(drawing, place, (1, captures.STEPS), (int(low * 2) / 2, round(high + 0.25)))
    panel.draw(Line(found[0], "baseline", 7 if labelled else 5) if len(chapters) > 1 else Line(found[0], "measured", 3))
    for line in found[1:]:
        panel.draw(Line(line, "measured", 2.5, "7 4"))
    if labelled:
        panel.level(vocabulary, f"ln(vocabulary) = {vocabulary:.2f}")
        x, top = panel.left + panel.width, panel.at(1, vocabulary)[1] + 16
        for number, chapter in enumerate(chapters):
            y, kind = top + 22 * number, "baseline" if len(chapters) > 1 and not number else "measured"
            drawing.box(x - 14, y - 7, 14, 14, kind)
            drawing.text(x - 20, y, chapter, "end")
    return panel


# ---- benchmarks


def quick(words: Words) -> str:
    """Chapter 07's settings one by one: the time of a step against all of them as set."""
    groups = []
    for row in rows_of("quick"):
        low, high = map(float, row["middle half"].split(" to "))
        kind = "measured" if high < 1 or low > 1 else "baseline"
        groups.append(Group(words(row["switched"]), row["step time"], [Bar([(float(row["step time"]), kind)], low, high)]))
    drawing = Drawing(words, "quick")
    bars(drawing, words("Time of a step, 1: all as set"), groups, reference=1.0)
    drawing.note(words("Line: the middle half of the rounds. Grey: no clear difference."))
    return drawing.svg()


def quick_bytes(words: Words) -> str:
    """The same settings: bytes copied in a step, and bytes near at the peak."""
    drawing = Drawing(words, "quick_bytes")
    rows = rows_of("quick")
    copied = [(float(row["MB in"]), float(row["MB out"]), float(row["MB disk"])) for row in rows]
    near = [(float(row["MB near, chunks"]), float(row["MB near, activations"])) for row in rows]
    bars(drawing, words("MB copied in a step"),
         [Group(words(row["switched"]), f"{sum(parts):.1f}", [Bar([(sum(parts), "measured")])])
          for row, parts in zip(rows, copied, strict=True)])  # fmt: skip
    drawing.y += 8
    bars(drawing, words("MB near at the peak"),
         [Group(words(row["switched"]), f"{sum(parts):.1f}", [Bar([(parts[0], "data"), (parts[1], "activations")])])
          for row, parts in zip(rows, near, strict=True)])  # fmt: skip
    for kind, word in (("data", "chunks"), ("activations", "activations")):
        drawing.box(MARGIN, drawing.y + 4, 14, 14, kind)
        drawing.text(MARGIN + 20, drawing.y + 11, words(word))
        drawing.y += 22
    return drawing.svg()


def adam(words: Words) -> str:
    """Each Adam: the share of the speed of a kernel that only moves the same bytes."""
    rows = [row for row in rows_of("adam") if row["share of the stream"] and not row[""].startswith("stream")]
    groups = [Group(words(row[""]), row["share of the stream"],
                    [Bar([(float(row["share of the stream"]), "measured" if row[""].startswith("pstar") else "baseline")])])
              for row in rows]  # fmt: skip
    drawing = Drawing(words, "adam")
    bars(drawing, words("share of the speed of a kernel that only moves the same bytes"), groups, reference=1.0)
    return drawing.svg()


def staleness(words: Words) -> str:
    """The server's modes: what stale gradients cost in loss, and what not waiting brings in steps."""
    drawing, rows = Drawing(words, "staleness"), rows_of("staleness")
    bars(drawing, words("loss of the last tenth, above the synchronous one, in per cent"),
         [Group(words(row[""]), share := row["against synchronous"], [Bar([(float(share.strip("+%")), "gradients")])])
          for row in rows if row["staleness, mean"] != "0.00"])  # fmt: skip
    drawing.y += 8
    bars(drawing, words("steps of the server in a second"),
         [Group(words(row[""]), row["steps/s"], [Bar([(float(row["steps/s"]), "measured")])]) for row in rows])  # fmt: skip
    return drawing.svg()


def quantization(words: Words) -> str:
    """Each format: how much the perplexity of both models grows."""
    plain, hard = ([row for row in rows_of("quantization", number) if row["format"] != "fp32"] for number in (0, 1))
    groups = []
    for one, other in zip(plain, hard, strict=True):
        shares = [max(0.0, float(row["against fp32"].strip("+%"))) for row in (one, other)]
        label = words("{format}, {bits} bits a weight").format(format=one["format"], bits=one["bits a weight"])
        groups.append(Group(label, f"{one['against fp32']}, {other['against fp32']}",
                            [Bar([(shares[0], "baseline")]), Bar([(shares[1], "measured")])]))  # fmt: skip
    drawing = Drawing(words, "quantization")
    bars(drawing, words("perplexity above that of fp32, in per cent"), groups)
    drawing.note(words("Grey: the model as trained. Green: the model with 4 outlier features."))
    return drawing.svg()


# ---- the ablation: benchmarks/results/ablation.json


def ablation() -> dict[str, Any]:
    """{cores, rows: [{chapter, name, nproc, speed_up: [a number for each seed], losses}]}; losses may be absent."""
    return json.loads((RESULTS / "ablation.json").read_text(encoding="utf-8"))


def ablation_speedup(words: Words) -> str:
    """Tokens a second against one process: a group for each variant, a bar for each number of processes."""
    found, drawing, groups = ablation(), Drawing(words, "ablation_speedup"), {}
    for row in found["rows"]:
        if row["speed_up"] and row["nproc"] > 1:
            groups.setdefault((row["chapter"], row["name"]), []).append(row)
    chart = []
    for (chapter, name), rows in groups.items():
        means = [sum(row["speed_up"]) / len(row["speed_up"]) for row in rows]
        text = ", ".join(f"{row['nproc']}: {mean:.2f}" for row, mean in zip(rows, means, strict=True))
        shown = [Bar([(mean, "measured" if row["nproc"] <= found["cores"] else "baseline")],
                     *((min(row["speed_up"]), max(row["speed_up"])) if len(row["speed_up"]) > 1 else (None, None)))
                 for row, mean in zip(rows, means, strict=True)]  # fmt: skip
        chart.append(Group(f"{chapter[:2]} {words(name)}", text, shown))
    bars(drawing, words("tokens per second against one process, by the number of processes"), chart, reference=1.0)
    drawing.note(words("Grey: more processes than cores ({cores}). Dashed: one process.").format(cores=found["cores"]))
    if any(len(row["speed_up"]) > 1 for row in found["rows"]):
        drawing.note(words("Line: from the smallest to the largest of the seeds."))
    return drawing.svg()


def ablation_loss(words: Words) -> str:
    """A panel for each variant with its losses, on those of chapter 00: at most processes, of the first seed."""
    rows = {(row["chapter"], row["name"]): row for row in ablation()["rows"] if row.get("losses")}
    (base, *_), drawing = rows.values(), Drawing(words, "ablation_loss")
    others = [row for row in rows.values() if row is not base]
    every = [value for row in rows.values() for value in row["losses"]]
    ys, xs = (int(min(every) * 2) / 2, round(max(every) + 0.25)), (1, len(base["losses"]))
    drawing.heading(words("training loss, nats per token, over {n} steps").format(n=len(base["losses"])))
    wide, high, first = (WIDTH - 34 - MARGIN - 14) / COLUMNS, 70, drawing.y + 44
    for number, row in enumerate(others):
        left, top = 34 + number % COLUMNS * (wide + 14), first + number // COLUMNS * (high + 58)
        panel = Panel(drawing, (left, top, wide, high), xs, ys)
        panel.draw(Line(list(enumerate(base["losses"], start=1)), "baseline", 5))
        panel.draw(Line(list(enumerate(row["losses"], start=1)), "measured", 2, "" if row["same_curve"] else "3 3"))
        panel.title(f"{row['chapter'][:2]} {words(row['name'])}")
        panel.ticks(ys=ys if left == 34 else ())
        drawing.y = top + high + 14
    drawing.note(words("Grey: chapter 00. Dotted: the curve may differ (asynchronous, or in 16 bits)."))
    return drawing.svg()


def drawn(words: Words) -> dict[str, str]:
    """All charts by name."""
    charts: tuple[Callable[[Words], str], ...] = (quick, quick_bytes, adam, staleness, quantization, ablation_speedup)
    found = {chart.__name__: chart(words) for chart in charts}
    if any(row.get("losses") for row in ablation()["rows"]):
        found["ablation_loss"] = ablation_loss(words)
    found |= {f"curve_{chapter}": curve(words, (captures.BASE, chapter)) for chapter in captures.CHAPTERS[1:]}
    found[f"curve_{captures.BASE}"] = curve(words, (captures.BASE,))
    return found | {"loss_00_07": curve(words, (captures.BASE, "07_patrickstar")), "curves_all": small_multiples(words)}


def write(words_in: Callable[[str], Words], folder: Path) -> None:
    """Writes all charts in both languages."""
    for language in ("en", "zh"):
        for name, svg in drawn(words_in(language)).items():
            write_whole(folder / f"{name}_{language}.svg", svg)
