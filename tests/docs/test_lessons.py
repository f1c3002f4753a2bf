"""The chapters as lessons: one order, at most six screens, numbers that other sources confirm, and a prediction to type."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from tests.cover import quick_only
from tests.docs.browser import Browser, missing
from tests.docs.contrast import scheme
from tests.docs.pages import LANGUAGES, OTHER_BLOCK, ROOT

needs_browser = pytest.mark.skipif(bool(missing()), reason=missing())
SECTIONS = ["wall", "prediction", "history", "idea", "code", "measurement", "use", "pitfalls", "exercise"]
CHAPTERS = sorted(path.stem for path in ROOT.glob("docs/en/chapters/*.md"))
HIGHEST = 7500  # pixels of a lesson at a width of 1280, everything folded: about six screens and the footer
ROWS = 10       # of a table that is not folded
EXCERPT = 45    # lines of the code that matters
SHOWN = """[...document.querySelectorAll("article table")].filter(table => !table.closest("details:not([open])"))
    .map(table => table.querySelectorAll("tbody tr").length)"""


@pytest.fixture(scope="module")
def lessons() -> ModuleType:
    from docs.generate.lessons import numbers

    return numbers


def written(language: str, chapter: str) -> str:
    return (ROOT / "docs" / language / "chapters" / f"{chapter}.md").read_text(encoding="utf-8")


def part(text: str, name: str) -> str:
    """A section of a page, without its folded blocks."""
    section = text.partition(f"{{ #{name} }}\n")[2].partition("\n## ")[0]
    return "\n".join(line for line in section.splitlines() if not line.startswith("    "))


# ---- one order


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_lesson_has_the_same_sections_in_the_same_order(language: str) -> None:
    for chapter in CHAPTERS:
        text = written(language, chapter)
        assert re.findall(r"^## .*\{ #([\w-]+) \}$", OTHER_BLOCK.sub("", text), re.MULTILINE) == SECTIONS, chapter
        for kind in ("wall", "prediction"):
            assert f'--8<-- "{language}/{kind}/{chapter}.md"' in part(text, kind), chapter
        assert (f'--8<-- "{language}/links/{chapter}.md"' in part(text, "use")) == (chapter != "00_single")
        assert len(re.findall(r"\(https://[^)]+\)", part(text, "use"))) >= 1, f"{chapter}: the library of production"
        titles = {one["title"] for one in json.loads((ROOT / "docs/papers.json").read_text(encoding="utf-8"))}
        named = set(re.findall(r"\*([^*]+)\*", part(text, "history").replace("**", "")))
        assert named and named <= titles, f"{chapter}: {named - titles}"


def test_the_code_that_matters_is_about_twenty_lines() -> None:
    from docs.generate import build

    for chapter in CHAPTERS:
        found = re.findall(r'--8<-- "((?:code|section)/[^"]+)"', part(written("en", chapter), "code"))
        lines = sum(build.fragment(name).count("\n") - 2 for name in found)
        assert found and 10 <= lines <= EXCERPT, f"{chapter}: {lines} lines"


def test_no_listing_is_shown_twice() -> None:
    included = re.compile(r'--8<-- "(code/[^"]+|en/losses.md)"')
    texts = [page.read_text(encoding="utf-8") for page in ROOT.glob("docs/en/**/*.md")]
    shown = Counter(name for text in texts for name in included.findall(text))
    assert [name for name, times in shown.items() if times > 1] == []


def test_a_section_that_a_program_lacks_is_an_error() -> None:
    from docs.generate import build

    program = "# -- first ---\na\n\n# -- the loop: twice ---\nfor b in c:\n    d\n\n# -- end ---\ne\n"
    assert build.section_of(program, "the loop") == "for b in c:\n    d" and build.section_of(program, "end") == "e"
    for name in ("the", "none"):
        with pytest.raises(SystemExit, match=f"no section {name}"):
            build.section_of(program, name)


# ---- the numbers, each from a second source


def test_the_model_and_its_states_are_those_of_the_packages(lessons: ModuleType) -> None:
    from dataclasses import replace

    from gpt2_chinese.model.config import PRESETS

    count = replace(PRESETS["xl"], vocab_size=50257).num_parameters()
    assert lessons.pipeline()["parameters"] == f"{count:,}"
    assert lessons.pipeline()["optimizer"] == f"{12 * count / 2**30:.1f} GiB"
    assert lessons.zero()["answer"] == pytest.approx((4 + 12 / 8) * count / 2**30, rel=1e-6)
    assert lessons.zero()["copies"] == f"{7 * 16 * count / 2**30:.0f} GiB"
    assert lessons.precision()["answer"] == 2 + 2 + 4 + 8
    assert lessons.chunks()["states"] == f"{16 * count / 2**30:.1f} GiB"


def test_traffic_is_that_of_the_chapters_own_functions(lessons: ModuleType) -> None:
    from docs.generate.pictures.data import chapter_module

    gradients = 4 * 124_439_808
    sent = chapter_module("02_ddp", "ring").ring_bytes(gradients, 64)
    assert lessons.ring()["answer"] == pytest.approx(sent / 2**30, rel=1e-6)
    assert lessons.server()["answer"] == 7 * gradients / 2**30
    assert lessons.server()["others"] == lessons.server()["ranks"] - 1
    assert lessons.ring()["bytes"] == f"{63 * gradients / 2**30:.1f} GiB"
    assert lessons.fusion()["answer"] == 148 * 2 * 7


def test_schedules_and_loads_are_those_of_the_programs(lessons: ModuleType) -> None:
    from docs.generate.pictures.data import chapter_module
    from pstar.schedule.schedule import count_loads

    schedules = chapter_module("05_model_parallel", "schedules")
    events = schedules.simulate(schedules.orders("1f1b", 4, 8))
    assert lessons.pipeline()["answer"] == pytest.approx(100 * schedules.bubble(events, 4), abs=0.01)
    assert lessons.chunks()["answer"] == count_loads([*range(8), *reversed(range(8))], 5, "next_use")


def test_what_lora_trains_is_counted_on_a_model(lessons: ModuleType) -> None:
    blocks, rank, width = 12, 8, 768
    assert lessons.adapting()["count"] == f"{blocks * rank * (width + 3 * width):,}"
    full, lora = 16 * 124_439_808, 4 * 124_439_808 + 16 * blocks * rank * 4 * width
    assert lessons.adapting()["answer"] == pytest.approx(full / lora, rel=1e-3)


def test_activations_and_logits_are_those_of_their_formulas(lessons: ModuleType) -> None:
    assert lessons.single()["answer"] == pytest.approx(24 * 128 * 3980 * 4 / 2**20)
    tokens = 512 * 1024  # six flops a token for each weight of a product, twelve for attention's two products of T × C
    flops = tokens * (6 * (12 * 12 * 768**2 + 768 * 50257) + 12 * 12 * 1024 * 768)
    assert lessons.server()["tflop"] == f"{flops / 1e12:.0f}"


def test_links_have_the_rates_of_their_standards() -> None:
    from docs.generate.lessons.links import LINKS, time_text

    rates = {link.name: link.gb_per_s for link in LINKS}
    for name, transfers in (("PCIe 5.0 x16", 32), ("PCIe 4.0 x16", 16)):
        assert rates[name] == pytest.approx(transfers * 16 * 128 / 130 / 8, rel=0.002), "16 lanes, 128b/130b"
    assert rates["NVLink 4"] == 18 * 25 and rates["InfiniBand NDR"] == 400 / 8
    assert rates["Ethernet 100G"] == 100 / 8 and rates["Ethernet 10G"] == 10 / 8
    assert [time_text(t) for t in (2.5e-6, 0.000968, 0.0774, 2.79)] == ["2.50 µs", "968 µs", "77.4 ms", "2.79 s"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_texts_name_their_numbers_instead_of_repeating_them(language: str) -> None:
    """Every number that numbers.py has is in a text, and none of the long ones is typed."""
    from docs.generate import build
    from docs.generate.lessons import numbers, texts

    words = build.Words(language)
    for chapter, lesson in texts.LESSONS.items():
        template = " ".join(words(text) for text in (lesson.wall, lesson.question, lesson.answer))
        names = set(re.findall(r"\{(\w+)\}", template))
        assert names == set(numbers.CHAPTERS[chapter]()), chapter
        assert not re.findall(r"\d+\.\d{2}|\d,\d{3}", template), chapter


@pytest.mark.parametrize("language", LANGUAGES)
def test_chapter_02_asks_what_its_reader_must_know(language: str) -> None:
    """Five questions with folded answers: what an all-reduce costs, by the chapter's function, and when not to use DDP."""
    from docs.generate.lessons.links import LINKS, time_text
    from docs.generate.pictures.data import chapter_module

    text = written(language, "02_ddp").partition("{ #questions }")[2]
    questions = re.findall(r'^\?\?\? question "(.+)"\n\n((?:    .*\n|\n)+)', text, re.MULTILINE)
    assert len(questions) == 5 and all(len(answer) > 60 for _, answer in questions)
    cost, wrong = questions[0][1], questions[1]
    gradients, p, rates = 4 * 124_439_808, 8, {link.name: link.gb_per_s * 1e9 for link in LINKS}
    sent = chapter_module("02_ddp", "ring").ring_bytes(gradients, p)
    for number in (f"{gradients / 2**20:.0f} MiB", f"{sent / 2**20:.0f} MiB", f"2 (p − 1) = {2 * (p - 1)}",
                   time_text(sent / rates["NVLink 4"]), time_text(sent / rates["Ethernet 10G"])):  # fmt: skip
        assert number in cost, number
    assert "(06_zero.md)" in wrong[1] and ("wrong" in wrong[0] or "不该" in wrong[0])


# ---- in a browser


@needs_browser
@pytest.mark.parametrize("language", quick_only(LANGUAGES, "en"))    # the longer texts
def test_a_lesson_fits_into_six_screens_and_folds_its_long_tables(browser: Browser, address: str, language: str) -> None:
    scheme(browser, "light")
    browser.resize(1280)
    high, long = {}, {}
    for chapter in CHAPTERS:
        browser.open(f"{address}/{'en/' if language == 'en' else ''}chapters/{chapter}/")
        browser.evaluate("""Promise.all([...document.images].map(image => {
            image.loading = "eager";
            return image.decode().catch(() => null);
        }))""")
        high[chapter] = browser.evaluate("document.documentElement.scrollHeight")
        if found := [rows for rows in browser.evaluate(SHOWN) if rows > ROWS]:
            long[chapter] = found
    assert {chapter: height for chapter, height in high.items() if height > HIGHEST} == {}
    assert long == {} and min(high.values()) > 2000


def type_and_enter(browser: Browser, text: str) -> str:
    """Types into the first prediction by the keyboard and returns what the page says."""
    browser.evaluate("document.querySelector('.prediction input').focus()")
    browser.call("Input.insertText", text=text)
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")
    return browser.wait_for("""document.querySelector(".prediction output").textContent""")


@needs_browser
@pytest.mark.parametrize("language, said", [
    ("en", {"27.3": "Right.", "27": "Very close.", "50 %": "Too large, by a factor of 1.83.", "0": "Far off.",
            "many": "Type a number, such as 12.5."}),
    ("zh", {"50 %": "你的数是答案的 1.83 倍。"}),
    pytest.param("zh", {"27.3": "正确。", "27": "很接近。", "0": "差得很远。", "many": "请输入一个数，例如 12.5。"},
                 marks=pytest.mark.deep)], ids=["en", "zh", "zh, the others"])  # fmt: skip
def test_a_typed_prediction_unfolds_the_answer(browser: Browser, address: str, language: str, said: dict[str, str]) -> None:
    page = f"{address}/{'en/' if language == 'en' else ''}chapters/05_model_parallel/"
    for given, verdict in said.items():
        browser.open("about:blank")
        browser.open(page)
        assert browser.evaluate("document.querySelectorAll('.prediction form').length") == 1
        assert browser.evaluate("document.querySelector('.prediction details').open") is False
        assert type_and_enter(browser, given) == verdict
        wrong = given == "many"
        assert browser.evaluate("document.querySelector('.prediction details').open") is not wrong
        assert browser.evaluate("document.querySelector('.prediction input').ariaInvalid") == str(wrong).lower()
    assert not browser.complaints


def test_without_a_script_the_answer_still_unfolds(site: Path) -> None:
    for root in ("", "en/"):
        for chapter in CHAPTERS:
            text = (site / root / "chapters" / chapter / "index.html").read_text(encoding="utf-8")
            (box,) = re.findall(r'<div class="prediction" data-answer="([\d.]+)".*?<details.*?</details>', text, re.DOTALL)
            folded = re.search(r'class="prediction".*?<details[^>]*>(.*?)</details>', text, re.DOTALL)[1]
            assert box in folded.replace(",", "") and "<form" not in folded
