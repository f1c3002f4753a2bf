"""Tools inside the lessons: the player in 05, the memory bar in 06 and the view of chunks in 07."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from docs.generate.arithmetic import formulas
from tests.chapters.technique import ROOT, technique
from tests.docs.browser import Browser, missing
from tests.docs.test_figures import press, show

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "zero3_offload")
PIPELINES = [("1f1b", 4, 8), ("gpipe", 4, 8), ("naive", 3, 4), ("interleaved", 4, 8), ("interleaved", 2, 2), ("1f1b", 2, 1)]


def choose(browser: Browser, *values: str | int) -> None:
    """Chooses the values of the figure's selects, from left to right."""
    for place, value in enumerate(values):
        browser.evaluate(f"""(() => {{ const select = document.querySelectorAll(".figure select")[{place}];
            select.value = "{value}"; select.dispatchEvent(new Event("change")); }})()""")


def said(browser: Browser) -> str:
    return browser.evaluate("document.querySelector('.figure-said').textContent")


def changed(folder: Path, change: tuple[str, str, str] | None) -> Path:
    """The site's assets, with one text of a script exchanged: (script, right, wrong)."""
    if change is None:
        return ROOT / "docs/assets"
    script, right, wrong = change
    copy = shutil.copytree(ROOT / "docs/assets", folder / "assets")
    text = (copy / script).read_text(encoding="utf-8")
    assert text.count(right) == 1, f"{script} does not have once: {right}"
    (copy / script).write_text(text.replace(right, wrong), encoding="utf-8")
    return copy


# ---- the pipeline in lesson 05


def the_pipeline_agrees(browser: Browser, folder: Path, change: tuple[str, str, str] | None = None) -> None:
    schedules = technique("05_model_parallel", "schedules")
    show(browser, folder, "pipeline", assets=changed(folder, change))
    drawn = "[...document.querySelectorAll('[data-work]')].map(one => one.dataset.work)"
    kept = "[...document.querySelectorAll('[data-live]')].map(one => one.textContent)"
    for name, p, m in PIPELINES:
        choose(browser, name, p, m)
        v = 2 if name == "interleaved" else 1
        order = schedules.orders(name, p, m, v)
        events, most = schedules.simulate(order), [schedules.peak_live(works) for works in order]
        span = int(max(event.end for event in events))
        press(browser, "Home")
        assert f"{100 * schedules.bubble(events, p):.1f} %" in said(browser), (name, p, m)
        for now in range(span + 1):
            begun = [event for event in events if event.begin < now]
            assert browser.evaluate(drawn) == [
                f"{e.work.kind} {e.work.stage} {e.work.micro} {e.rank} {e.begin:g} {e.end:g}" for e in begun]
            live = [sum(e.work.kind == "F" for e in begun if e.rank == rank)
                    - sum(e.work.kind == "B" and e.end <= now for e in begun if e.rank == rank) for rank in range(p)]
            assert browser.evaluate(kept) == [f"{one}/{peak}" for one, peak in zip(live, most, strict=True)]
            assert press(browser, "ArrowRight") == min(now + 1, span)
    assert not browser.complaints


def test_the_pipeline_of_the_lesson_is_the_chapter_s_schedule(browser: Browser, tmp_path: Path) -> None:
    the_pipeline_agrees(browser, tmp_path)
    choose(browser, "interleaved", 4, 2)
    assert "needs a multiple of 4 micro-batches" in said(browser)


@pytest.mark.parametrize("change", [
    ("figures/pipeline.js", "event.begin < now)) {", "event.begin <= now)) {"),
    ("tools/schedules.js", "&& begin < now) live[rank]++", ") live[rank]++"),
    ("figures/pipeline.js", "order = S.orders(name, p, m, v);", "order = S.orders(name, p, m, 1);"),
])  # fmt: skip
def test_a_wrong_pipeline_is_found(browser: Browser, tmp_path: Path, change: tuple[str, str, str]) -> None:
    with pytest.raises(AssertionError, match="assert"):
        the_pipeline_agrees(browser, tmp_path, change)


# ---- the memory bar in lesson 06


def job(model: str, strategy: str, ranks: int) -> dict[str, Any]:
    """One full sequence a rank, with GPT-2's vocabulary."""
    from gpt2_chinese.model.config import PRESETS

    sizes = {key: getattr(PRESETS[model], key) for key in ("n_layer", "n_embd", "n_head", "n_positions")}
    return {**sizes, "vocab_size": 50257, "strategy": strategy, "precision": "O2" if strategy == "ddp" else "bf16",
            "ranks": ranks, "batch": ranks, "seq_len": sizes["n_positions"], "micro_batches": 1, "checkpointing": False,
            "virtual_stages": 1, "near_percent": 100}  # fmt: skip


def the_bars_agree(browser: Browser, folder: Path, change: tuple[str, str, str] | None = None) -> None:
    show(browser, folder, "states", assets=changed(folder, change))
    drawn = """[...document.querySelectorAll("[data-strategy]")].map(one => [one.dataset.strategy,
        ...[...one.querySelectorAll("[data-bytes]")].map(part => part.dataset.bytes)])"""
    for model, p in (("xl", 8), ("small", 2), ("medium", 64)):
        choose(browser, model, p)
        press(browser, "Home")
        for now, strategy in enumerate(STRATEGIES):
            held = {one: formulas.memory(job(model, one, p), 0) for one in STRATEGIES}
            assert browser.evaluate(drawn) == [
                [one, *(f"{kind} {held[one][kind]}" for kind in formulas.KINDS if place <= now)]
                for place, one in enumerate(STRATEGIES)]  # fmt: skip
            num_bytes = formulas.device_bytes(held[strategy])
            number, unit = re.search(r"([\d,.]+) (MiB|GiB)", said(browser)).groups()
            assert float(number) * {"MiB": 2**20, "GiB": 2**30}[unit] == pytest.approx(num_bytes, rel=0.005)
            fits = next((gib for gib in (8, 24, 80) if num_bytes <= formulas.usable_bytes(gib)), None)
            assert (f"fits on a GPU of {fits} GB" if fits else "does not fit on a GPU of 80 GB") in said(browser)
            press(browser, "ArrowRight")
    assert not browser.complaints


def test_the_bars_of_the_lesson_are_the_calculator_s_formulas(browser: Browser, tmp_path: Path) -> None:
    the_bars_agree(browser, tmp_path)


@pytest.mark.parametrize("change", [
    ("figures/states.js", "seq_len: PRESETS[model].n_positions", "seq_len: 512"),
    ("figures/states.js", 'strategy === "ddp" ? "O2" : "bf16"', '"bf16"'),
    ("figures/states.js", "if (at <= now) {", "if (at < now) {"),
])  # fmt: skip
def test_a_wrong_bar_is_found(browser: Browser, tmp_path: Path, change: tuple[str, str, str]) -> None:
    with pytest.raises(AssertionError, match="assert"):
        the_bars_agree(browser, tmp_path, change)


# ---- on the built pages


@pytest.mark.parametrize("language", ["en/", ""])
def test_each_lesson_shows_its_tool_before_its_code(browser: Browser, address: str, language: str) -> None:
    """The player in 05, the bar in 06 and the view in 07 work, and come before the code, for mouse, keys and fingers."""
    for chapter, selector in (("05_model_parallel", "[data-figure=pipeline]"), ("06_zero", "[data-figure=states]"),
                              ("07_patrickstar", ".chunk-steps")):  # fmt: skip
        browser.open(f"{address}/{language}chapters/{chapter}/")
        place = f'document.querySelector("{selector}")'
        browser.wait_for(f"{place}.querySelectorAll('button').length > 3")
        above = f"{place}.getBoundingClientRect().bottom < document.getElementById('code').getBoundingClientRect().top"
        assert browser.evaluate(above) and browser.evaluate(f"{place}.closest('details') === null")
        assert browser.evaluate(f"{place}.tabIndex") == 0
        small = f"""[...{place}.querySelectorAll("button")].filter(one => one.getClientRects().length &&
            Math.min(one.getBoundingClientRect().width, one.getBoundingClientRect().height) < 24).length"""
        assert browser.evaluate(small) == 0, "buttons of at least 24 px"
        assert not browser.complaints


def test_the_view_of_chunks_plays_nothing_for_a_reader_who_wants_less_motion(browser: Browser, address: str) -> None:
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    try:
        browser.open(f"{address}/en/chapters/07_patrickstar/")
        assert browser.wait_for("document.querySelector('.cs-play') !== null")
        assert browser.evaluate("document.querySelector('.cs-play').getClientRects().length") == 0
        steps = """(() => { const root = document.querySelector(".chunk-steps");
            return [" ", "ArrowRight"].map(key => {
                root.dispatchEvent(new KeyboardEvent("keydown", {key}));
                return root.dataset.frame;
            }); })()"""
        assert browser.evaluate(steps) == ["0", "1"]
    finally:
        browser.call("Emulation.setEmulatedMedia", features=[])
