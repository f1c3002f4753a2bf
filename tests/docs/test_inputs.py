"""Input fields of the calculators and of the player: a wrong value is marked, explained, and leaves no old result."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.chapters.technique import technique
from tests.docs.browser import Browser, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
TOOLS = {"memory-tool": "tools/memory/", "traffic-tool": "tools/traffic/", "bubble-tool": "tools/bubble/",
         "layouts-tool": "which/", "adaptation-tool": "chapters/08_param_efficient/"}  # fmt: skip
WRONG = ("0", "-3", "", "4097", "2.5")  # 4097 is wrong where the most is 4096 or less


def opened(browser: Browser, url: str, tool: str) -> None:
    browser.open(url)
    browser.wait_for(f"document.querySelector('#{tool} .tool-output') !== null")


def typed(browser: Browser, tool: str, name: str, value: str) -> dict:
    """Types a value into a field; returns whether it is marked, its hint, the result, and the sentence in place of one."""
    return browser.evaluate(f"""(() => {{
        const field = document.querySelector("#{tool} [name={name}]");
        field.value = {json.dumps(value)};
        field.dispatchEvent(new Event(field.tagName === "SELECT" ? "change" : "input"));
        const answer = document.querySelector("#{tool} #tool-answer");
        const refused = document.querySelector("#{tool} .tool-refused");
        const hint = document.getElementById(field.getAttribute("aria-describedby"));
        return {{marked: field.getAttribute("aria-invalid") === "true",
            hint: hint ? hint.textContent : "", answer: answer && answer.textContent,
            refused: refused && refused.textContent,
            others: document.querySelectorAll("#{tool} .tool-output > *").length}};
    }})()""")


def numbers_of(browser: Browser, tool: str) -> list[dict]:
    return browser.evaluate(f"""[...document.querySelectorAll("#{tool} input[type=number]")].map(field => ({{
        name: field.name, min: Number(field.min), max: Number(field.max),
        whole: field.step === "1", value: field.value}}))""")


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("below", ["en/", pytest.param("", marks=pytest.mark.deep)])
def test_a_wrong_number_is_marked_and_explained_and_has_no_result(
    browser: Browser, address: str, tool: str, below: str
) -> None:
    opened(browser, f"{address}/{below}{TOOLS[tool]}", tool)
    tried = 0
    for field in numbers_of(browser, tool):
        before = typed(browser, tool, field["name"], field["value"])
        for value in WRONG:
            possible = value and field["min"] <= float(value) <= field["max"] and (not field["whole"] or value != "2.5")
            if not possible:
                found = typed(browser, tool, field["name"], value)
                assert found["marked"] and found["answer"] is None and found["others"] == 1, (field, value)
                ends = [f"{field[end]:,.6f}".rstrip("0").rstrip(".") for end in ("min", "max")]
                assert (" to " if below else " 到 ").join(ends) in found["hint"], (field, found["hint"])
                tried += 1
        after = typed(browser, tool, field["name"], field["value"])
        assert after == before and not after["marked"] and not after["hint"]
    assert tried >= 8 and not browser.complaints


def test_one_corrected_field_of_two_is_not_enough(browser: Browser, address: str) -> None:
    opened(browser, f"{address}/en/tools/memory/", "memory-tool")
    assert typed(browser, "memory-tool", "ranks", "0")["answer"] is None
    assert typed(browser, "memory-tool", "batch", "-1")["answer"] is None
    corrected = typed(browser, "memory-tool", "ranks", "2")
    assert not corrected["marked"] and corrected["answer"] is None and "correct the marked" in corrected["refused"]
    assert typed(browser, "memory-tool", "batch", "16")["answer"] is not None


@pytest.mark.parametrize("changes, marked", [
    ({"strategy": "ddp", "ranks": "64"}, "batch"),
    ({"strategy": "tensor", "ranks": "5"}, "ranks"),
    ({"strategy": "1f1b", "ranks": "5"}, "ranks"),
    ({"strategy": "interleaved", "ranks": "3", "micro_batches": "4"}, "micro_batches"),
    ({"seq_len": "2048"}, "seq_len"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_what_the_course_refuses_names_a_field_and_values_that_it_runs(
    browser: Browser, address: str, changes: dict[str, str], marked: str
) -> None:
    opened(browser, f"{address}/en/tools/memory/#model=small&precision=fp32&batch=48", "memory-tool")
    for name, value in changes.items():
        found = typed(browser, "memory-tool", name, value)
    assert found["answer"] is None and "No program of the course runs this" in found["refused"]
    wrong = 'document.querySelectorAll("#memory-tool [aria-invalid=true]")'
    assert browser.evaluate(f"[...{wrong}].map(field => field.name)") == [marked]
    said = re.search(r"(?:for example|Possible ranks:|at most) ([\d, ]*\d)", found["refused"])[1]
    for possible in re.split(r", ", said):
        found = typed(browser, "memory-tool", marked, possible.replace(",", ""))
        if changes.get("strategy") != "interleaved":
            assert found["answer"] and not found["marked"], possible
    assert found["answer"]


def test_the_interleaved_player_says_which_micro_batches_are_possible(browser: Browser, address: str) -> None:
    opened(browser, f"{address}/en/tools/bubble/#schedule=interleaved&stages=4&micros=8&virtual=2", "bubble-tool")
    found = typed(browser, "bubble-tool", "micros", "6")
    assert found["marked"] and found["answer"] is None
    assert found["refused"] == ("The interleaved schedule needs a multiple of 4 micro-batches, the number of ranks: "
                                "for example 8, 12, 16.")  # fmt: skip
    assert typed(browser, "bubble-tool", "micros", "12")["answer"]


@pytest.mark.parametrize("below", ["en/", ""])
def test_the_comparisons_of_the_traffic_page_run(browser: Browser, address: str, below: str) -> None:
    """Each link of the page sets the calculator; the server's time grows with the ranks, the ring's does not."""
    opened(browser, f"{address}/{below}tools/traffic/", "traffic-tool")
    links = browser.evaluate('[...document.querySelectorAll("article li a[href^=\'#strategy\']")].map(a => a.hash)')
    assert len(links) == 4
    sent = []
    for link in links:
        browser.evaluate(f"void (location.hash = {json.dumps(link)})")
        ranks = re.search(r"ranks=(\d+)", link)[1]
        browser.wait_for(f"document.querySelector('#traffic-tool [name=ranks]').value === '{ranks}' && "
                         f"location.hash.includes({json.dumps(link.split('&')[0][1:])})")  # fmt: skip
        assert browser.evaluate("document.querySelector('#traffic-tool .tool-refused')") is None, link
        sent.append(float(browser.evaluate("document.querySelector('#traffic-tool #tool-answer').dataset.bytes")))
    two, eight, many, ring = sent
    assert many / two == pytest.approx(63) and eight / two == pytest.approx(7) and ring < 2.01 * two


def test_what_the_player_s_page_says_of_interleaving_is_true() -> None:
    """27.3 % and 15.8 %, half the waiting, and twice the messages, from the schedule that chapter 05 trains with."""
    schedules = technique("05_model_parallel", "schedules")
    shares, waits = [], []
    for name, v in (("1f1b", 1), ("interleaved", 2)):
        events = schedules.simulate(schedules.orders(name, 4, 8, v), 1, 1)
        span = max(event.end for event in events)
        busy = sum(event.end - event.begin for event in events if event.rank == 0)
        shares.append(round(100 * schedules.bubble(events, 4), 1))
        waits.append((span - busy) / v)  # in forwards of 1 / v of a rank's layers
    assert shares == [27.3, 15.8] and waits[1] == waits[0] / 2
    root = Path(__file__).resolve().parents[2] / "docs"
    for page in (root / "en/tools/bubble.md", root / "zh/tools/bubble.md"):
        assert re.findall(r"\d+\.\d(?= ?%)", page.read_text(encoding="utf-8"))[:2] == ["27.3", "15.8"]
    for name in ("gpipe", "1f1b"):
        assert schedules.orders(name, 4, 1, 1) == schedules.orders("naive", 4, 1, 1)
