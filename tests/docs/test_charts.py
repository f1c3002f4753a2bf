"""Charts: their numbers are those of the committed results, in both languages, with letters that a phone shows."""

from __future__ import annotations

import re
import statistics
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from docs.generate import build
from docs.generate.pictures import charts, recorded_run, results
from docs.generate.recorded import captures
from tests.docs.pages import LANGUAGES, ROOT
from tests.docs.test_pictures import PHONE, SMALLEST

# What stays in English on a Chinese page: names of programs, chapters, settings, formats and units.
NAMES = re.compile(r"MiB|MB|GB|fp\d+|bf16|torch|DDP|Horovod|PatrickStar|ZeRO|token|nat\b|ln\(vocabulary\)|\d\d_\w+|pstar|"
                   r"1F1B|min\b|DeepSpeed|CPUAdam|AdamW?|\(?fused\)?|\(foreach\)|bitsandbytes|int\d(?:-plain)?|gptq|nf4(?:-double)?|"
                   r"(?:near|prefetch|eviction|overlap|offload|state|disk|far|use|gguf)[_-]\w+|prefetch|near \d+%|lru|fifo|"
                   r"margin|false")  # fmt: skip


@pytest.fixture(scope="module")
def drawn() -> dict[str, dict[str, str]]:
    """Language -> name -> SVG."""
    return {language: results.drawn(build.Words(language)) for language in LANGUAGES}


def texts(svg: str) -> list[str]:
    return [one.text or "" for one in ElementTree.fromstring(svg).iter() if one.tag.endswith("text")]


@pytest.mark.parametrize("language", LANGUAGES)
def test_letters_are_large_enough_for_a_phone(drawn, language: str) -> None:
    for name, svg in drawn[language].items():
        width = float(ElementTree.fromstring(svg).get("viewBox").split()[2])
        assert min(float(size) for size in re.findall(r'font-size="([\d.]+)"', svg)) * PHONE / width >= SMALLEST, name


def test_axes_and_rows_are_in_the_language_of_the_page(drawn) -> None:
    assert drawn["en"].keys() == drawn["zh"].keys()
    for name in drawn["zh"]:
        english = [word for text in texts(drawn["zh"][name]) for word in re.findall(r"[a-z]{3,}", NAMES.sub("", text))]
        assert not english, f"{name}: {english}"
        assert re.search(r"[\u4e00-\u9fff]", "".join(texts(drawn["zh"][name]))), name
        assert not re.search(r"[\u4e00-\u9fff]", "".join(texts(drawn["en"][name]))), name


@pytest.mark.parametrize("name, column", [("adam", "share of the stream"), ("quick", "step time"),
                                          ("ablation_speedup", "speed-up")])  # fmt: skip
def test_bars_have_the_lengths_of_their_numbers(drawn, name: str, column: str) -> None:
    """Each bar against the longest one, up to a tenth of a unit, and each number as text."""
    found = bars_of(drawn["en"][name])
    numbers = expected(name, column)
    most = max(numbers)
    assert [bar / max(found) for bar in found] == pytest.approx([number / most for number in numbers], abs=0.001)
    shown = " ".join(texts(drawn["en"][name]))
    assert all(f"{number:.2f}" in shown for number in numbers)


def bars_of(svg: str) -> list[float]:
    return [float(one.get("width")) for one in ElementTree.fromstring(svg).iter()
            if one.tag.endswith("rect") and one.get("height") == f"{charts.BAR:.1f}"]  # fmt: skip


def expected(name: str, column: str) -> list[float]:
    if name == "ablation_speedup":
        rows = [row for row in results.rows_of("ablation") if row["p"] != "1" and "—" not in row[column]]
        means = [statistics.fmean(row["speed_up"]) for row in results.ablation()["rows"]
                 if row["nproc"] > 1 and row["speed_up"]]  # fmt: skip
        assert [f"{mean:.2f}" for mean in means] == [row[column].partition(" ±")[0] for row in rows]
        return means
    return [float(row[column]) for row in results.rows_of(name) if row[column] and not row.get("", "").startswith("stream")]


def test_a_wrong_bar_is_found() -> None:
    fine, column = results.adam(build.Words("en")), "share of the stream"
    test_bars_have_the_lengths_of_their_numbers({"en": {"adam": fine}}, "adam", column)
    width = re.search(rf'width="([\d.]+)" height="{charts.BAR:.1f}"', fine)[1]
    with pytest.raises(AssertionError):
        test_bars_have_the_lengths_of_their_numbers({"en": {"adam": fine.replace(width, "9.0", 1)}}, "adam", column)


def test_curves_are_the_captured_losses(drawn) -> None:
    losses = captures.captured("02_ddp")["losses"]
    lines = re.findall(r'<polyline points="([^"]+)"', drawn["en"]["curve_02_ddp"])
    ys = [float(point.split(",")[1]) for point in lines[1].split()]
    assert len(lines) == 2 and len(ys) == captures.STEPS
    scale = (ys[0] - ys[-1]) / (losses[0] - losses[-1])
    assert ys == pytest.approx([ys[0] + scale * (loss - losses[0]) for loss in losses], abs=0.11)
    panels = re.findall(r"<polyline", drawn["en"]["curves_all"])
    assert len(panels) == 2 * (len(captures.CHAPTERS) - 1), "small multiples: chapter 00 and one other in each panel"


def test_the_ablation_s_curves_have_a_panel_each(monkeypatch) -> None:
    rows = [{"chapter": "00_single", "name": "one process", "nproc": 1, "speed_up": [1.0], "same_curve": True,
             "losses": [8.0, 7.0, 6.5]},
            {"chapter": "02_ddp", "name": "DDP ring", "nproc": 2, "speed_up": [1.5, 1.7, 1.6], "same_curve": True,
             "losses": [8.0, 7.0, 6.5]}]  # fmt: skip
    monkeypatch.setattr(results, "ablation", lambda: {"cores": 2, "rows": rows})
    found = results.drawn(build.Words("en"))
    assert found["ablation_loss"].count("<polyline") == 2 and "02 DDP ring" in texts(found["ablation_loss"])
    assert "2: 1.60" in texts(found["ablation_speedup"])
    assert "Line: from the smallest to the largest of the seeds." in texts(found["ablation_speedup"])


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_recorded_run_is_drawn_from_its_profile(site: Path, language: str) -> None:
    from pstar.profile.timeline import lives

    shown, words = recorded_run.recording(), build.Words(language)
    near, blocks = recorded_run.near(words, shown), recorded_run.blocks(words, shown)
    assert f"{shown.budget('near') / 2**20:g} MiB" in " ".join(texts(near))
    stays = sum(len(spans) for spans in lives(shown).values())
    assert len(re.findall(rf'height="{recorded_run.ROW - 1}"', blocks)) == stays > 50
    assert (site / f"_generated/figures/near_{language}.svg").read_text(encoding="utf-8") == near


def test_pages_show_no_chart_of_one_language_alone() -> None:
    for language in LANGUAGES:
        for page in ROOT.glob(f"docs/{language}/**/*.md"):
            for name in re.findall(r"_generated/figures/([\w.]+)", page.read_text(encoding="utf-8")):
                assert name.endswith(f"_{language}.svg"), f"{page.name}: {name}"
