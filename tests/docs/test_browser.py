"""The built site in a real browser: no script error, no missing image, nothing wider than the screen, search finds.

One browser opens all pages, each at the width of a desktop and of a phone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.browser import Browser, missing, serve

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
WIDTHS = (1280, 390)
# The theme's language switch takes the other language's page for the root of a site and requests this file there.
# The request fails without harm.
ASKED_IN_VAIN = "/sitemap.xml"

# Sources of the images that cannot be decoded, including images below the window.
BROKEN_IMAGES = """Promise.all([...document.images].map(image => {
    image.loading = "eager";
    return image.decode().then(() => null, () => image.src);
})).then(sources => sources.filter(Boolean))"""

# The outermost elements that extend beyond the right edge, except inside a box with its own scrolling.
TOO_WIDE = """(() => {
    const width = document.documentElement.clientWidth, found = [];
    const scrolls = element => {
        for (let e = element; e && e !== document.body; e = e.parentElement)
            if (["auto", "scroll", "hidden"].includes(getComputedStyle(e).overflowX)) return true;
        return false;
    };
    for (const element of document.querySelectorAll(".md-content *, .md-footer *")) {
        const box = element.getBoundingClientRect();
        if (box.width && box.right > width + 1 && !scrolls(element) && !found.some(one => one.contains(element)))
            found.push(element);
    }
    const edge = element => Math.round(element.getBoundingClientRect().right);
    const said = found.map(e => `${e.tagName} to ${edge(e)}: ${e.textContent.trim().slice(0, 40)}`);
    if (document.documentElement.scrollWidth > width) said.push(`page: ${document.documentElement.scrollWidth}`);
    return said;
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with serve(site) as base:
        yield base


def problems(browser: Browser, url: str) -> list[str]:
    """The problems of a page, at each width."""
    browser.resize(WIDTHS[0])
    browser.open(url)
    found = [f"missing image: {source}" for source in browser.evaluate(BROKEN_IMAGES)]
    for width in WIDTHS:
        browser.resize(width)
        found += [f"wider than {width}: {what}" for what in browser.evaluate(TOO_WIDE)]
    return found + [f"script: {complaint}" for complaint in browser.complaints if not complaint.endswith(ASKED_IN_VAIN)]


@pytest.mark.deep
def test_every_page_is_whole_on_a_desktop_and_on_a_phone(browser: Browser, address: str, site: Path) -> None:
    pages = sorted(path.relative_to(site).as_posix().removesuffix("index.html") for path in site.rglob("index.html"))
    assert len(pages) > 20
    wrong = {page: found for page in pages if (found := problems(browser, f"{address}/{page}"))}
    assert not wrong, "\n".join(f"{page}: {what}" for page, found in wrong.items() for what in found)


@pytest.mark.parametrize(("start", "words", "page"), [
    ("", "流水线", "chapters/05_model_parallel/"), ("en/", "all-reduce", "en/basics/collectives/"),
])  # fmt: skip
def test_search_finds_in_the_language_of_the_page(
    browser: Browser, address: str, start: str, words: str, page: str
) -> None:
    browser.resize(WIDTHS[0])
    browser.open(f"{address}/{start}")
    browser.evaluate(f"""(() => {{
        const box = document.querySelector("[data-md-component=search-query]");
        box.focus();
        box.value = {words!r};
        box.dispatchEvent(new Event("input", {{bubbles: true}}));
        box.dispatchEvent(new KeyboardEvent("keyup", {{bubbles: true}}));
    }})()""")
    shown = '[...document.querySelectorAll("a.md-search-result__link")].filter(link => link.getClientRects().length)'
    browser.wait_for(f"{shown}.length > 0")
    found = browser.evaluate(f"{shown}.map(link => link.pathname)")
    assert f"/{page}" in found
    assert all(one.startswith("/en/") == (start == "en/") for one in found), "another language is found too"


# ---- the checks can fail


def test_a_calculator_marks_a_wrong_field_and_keeps_its_answer(browser: Browser, address: str) -> None:
    browser.open(f"{address}/en/chapters/08_param_efficient/")
    browser.wait_for("document.getElementById('tool-answer') !== null")

    def typed(value: str) -> list[str]:
        return browser.evaluate(f"""(() => {{
            const field = document.querySelector("#adaptation-tool [name=rank]");
            field.value = "{value}";
            field.dispatchEvent(new Event("input"));
            const answer = document.getElementById("tool-answer");
            return [field.getAttribute("aria-invalid"), answer && answer.textContent, location.hash.includes("rank=16")];
        }})()""")

    assert typed("8") == ["false", "0.24%", False]
    assert typed("16") == ["false", "0.47%", True]
    for wrong in ("0", "-3", "2.5", "", "70000"):
        assert typed(wrong) == ["true", "0.47%", True], wrong
    assert typed("800") == ["false", None, False], "a rank above the width: the chapter refuses it, and so does the page"
    said = browser.evaluate("document.querySelector('#adaptation-tool .tool-refused').textContent")
    assert "above the layer's width" in said
    assert [said for said in browser.complaints if not said.endswith(ASKED_IN_VAIN)] == []


def test_a_script_error_a_missing_image_and_a_wide_line_are_found(browser: Browser, tmp_path: Path) -> None:
    head = '<!doctype html><link rel="icon" href="data:,"><body style="margin:0"><div class="md-content">'
    (tmp_path / "index.html").write_text(f'{head}<pre style="overflow:auto">{"scrolls " * 200}</pre>')
    (tmp_path / "wrong.html").write_text(
        f'{head}<img src="none.png"><p style="width:600px;height:9px">wide</p><script>nothing()</script>')  # fmt: skip
    with serve(tmp_path) as base:
        assert problems(browser, f"{base}/") == []
        found = problems(browser, f"{base}/wrong.html")
    said = "\n".join(found)
    assert "missing image" in said and "none.png" in said and "nothing is not defined" in said
    assert "wider than 390: P to 600: wide" in said and "wider than 1280" not in said
