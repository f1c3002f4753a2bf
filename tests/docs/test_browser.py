"""The built site in a real browser: no script error, no missing image, nothing wider than the screen, search finds.

One browser opens all pages, each at the width of a desktop and of a phone.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.docs.browser import Browser, Navigated, missing, serve

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
WIDTHS = (1280, 390)
# What readers ask -> the page that must be among the first three results, for each language.
QUESTIONS = json.loads(Path(__file__).with_name("questions.json").read_text(encoding="utf-8"))
NOWHERE = "qxzqxz"  # no page has it

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


def problems(browser: Browser, url: str) -> list[str]:
    """The problems of a page, at each width."""
    browser.resize(WIDTHS[0])
    browser.open(url)
    found = [f"missing image: {source}" for source in browser.evaluate(BROKEN_IMAGES)]
    for width in WIDTHS:
        browser.resize(width)
        found += [f"wider than {width}: {what}" for what in browser.evaluate(TOO_WIDE)]
    return found + [f"script: {complaint}" for complaint in browser.complaints]


@pytest.mark.deep
def test_every_page_is_whole_on_a_desktop_and_on_a_phone(browser: Browser, address: str, site: Path) -> None:
    pages = sorted(path.relative_to(site).as_posix().removesuffix("index.html") for path in site.rglob("index.html"))
    assert len(pages) > 20
    wrong = {page: found for page in pages if (found := problems(browser, f"{address}/{page}"))}
    assert not wrong, "\n".join(f"{page}: {what}" for page, found in wrong.items() for what in found)


BROKEN_FLAGS = """[...document.querySelectorAll('.md-content .flag')].filter(one => one.getClientRects().length > 1)
    .map(one => one.textContent)"""


@pytest.mark.parametrize("language", ["zh", "en"])
def test_no_line_ends_inside_a_flag(browser: Browser, address: str, language: str) -> None:
    widths = (1280, 430, 410, 390, 370)
    browser.resize(widths[0])  # before the page is opened: another file's tests may have left a narrow window
    browser.open(f"{address}{'/en' if language == 'en' else ''}/production/clusters/")
    assert browser.evaluate("document.querySelectorAll('.md-content .flag').length") > 15
    found = {}
    for wanted, style in (("whole", ""), ("broken", ".md-typeset .flag { display: inline; white-space: normal }")):
        browser.evaluate(f"document.head.append(Object.assign(document.createElement('style'), {{textContent: '{style}'}}))")
        found[wanted] = []
        for width in widths:
            browser.resize(width)
            found[wanted] += browser.evaluate(BROKEN_FLAGS)
            assert wanted == "broken" or not browser.evaluate(TOO_WIDE)
    browser.resize(WIDTHS[0])
    assert not found["whole"] and found["broken"], "the second style shows that the check can fail"


@pytest.mark.parametrize("page", ["engine/design", "start"])
def test_no_line_ends_inside_a_key_in_the_head_of_a_table(browser: Browser, address: str, page: str) -> None:
    browser.resize(390)
    found = {}
    for language in ("", "/en"):
        browser.open(f"{address}{language}/{page}/")
        found[language] = browser.evaluate("""[...document.querySelectorAll('.md-content th code')]
            .map(one => [one.textContent, one.getClientRects().length])""")
        assert not browser.evaluate(TOO_WIDE)
    browser.resize(WIDTHS[0])
    assert all(found.values()) and all(lines == 1 for heads in found.values() for _, lines in heads), found


def test_a_flag_is_marked_and_its_text_stays() -> None:
    from docs.generate.hooks import with_whole_flags

    html = ('<pre><code>a --flag</code></pre><p>--no <code>run.sh --near-budget 25% -k a-b</code></p>'
            '<div class="text said highlight"><pre><span></span><code>$ a --b</code></pre></div>')    # fmt: skip
    marked = with_whole_flags(html)
    assert re.findall(r'<span class="flag">(.*?)</span>', marked) == ["--near-budget", "-k", "--b"]
    assert re.sub(r'<span class="flag">(.*?)</span>', r"\1", marked) == html


def asked(browser: Browser, words: str, nothing: bool = False) -> list[str]:
    """The addresses of the results that the search box shows for some words, the best page first.

    Args:
        words: a question whose answer differs from the one that the box shows.
        nothing: wait for the message that no page has the words.
    """
    browser.evaluate(f"""(() => {{
        const box = document.querySelector("[data-md-component=search-query]");
        box.focus();
        box.value = {json.dumps(words)};
        box.dispatchEvent(new Event("input", {{bubbles: true}}));
        box.dispatchEvent(new KeyboardEvent("keyup", {{bubbles: true}}));
    }})()""")
    shown = '[...document.querySelectorAll(".md-search-result__item")].filter(item => item.getClientRects().length)'
    said = 'JSON.parse(document.getElementById("__config").textContent).translations["search.result.none"]'
    none = f'document.querySelector(".md-search-result__meta").textContent.trim() === {said}'
    browser.wait_for(f"{shown}.length === 0 && {none}" if nothing else f"{shown}.length > 0")
    return browser.evaluate(f"{shown}.map(item => item.querySelector('a.md-search-result__link').pathname)")


@pytest.mark.parametrize("language", QUESTIONS)
def test_a_reader_finds_the_page_among_the_first_three_results(browser: Browser, address: str, language: str) -> None:
    root = "/en/" if language == "en" else "/"
    browser.resize(WIDTHS[0])
    browser.open(f"{address}{root}")
    assert len(QUESTIONS[language]) >= 30
    wrong = {}
    for question, page in QUESTIONS[language].items():
        found = asked(browser, question)
        if f"{root}{page}" not in found[:3]:
            wrong[question] = found[:3]
        assert all(one.startswith("/en/") == (language == "en") for one in found), "another language is found too"
        assert asked(browser, NOWHERE, nothing=True) == []
    assert not wrong
    assert not browser.complaints


def test_a_stemmed_index_does_not_find_what_is_written(browser: Browser, site: Path, tmp_path: Path) -> None:
    """The fault of the theme's own settings: the index holds "precis", and a word is looked up as it is written."""
    copy = tmp_path / "site"
    shutil.copytree(site, copy)
    path = copy / "en/search/search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["config"]["pipeline"] = ["stemmer"]
    path.write_text(json.dumps(index), encoding="utf-8")
    with serve(copy) as base:
        browser.open(f"{base}/en/")
        assert asked(browser, "bucket")
        assert asked(browser, "precision", nothing=True) == []


# ---- the checks can fail


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


def test_a_call_between_two_pages_is_repeated(browser: Browser, tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / f"{name}.html").write_text(f"<title>{name}</title>")
    with serve(tmp_path) as base:
        browser.open(f"{base}/first.html")
        with pytest.raises(Navigated):
            browser.evaluate("new Promise(() => { location.href = 'second.html'; })")
        browser.open(f"{base}/first.html")
        leaves = "document.title === 'second' || new Promise(() => { location.href = 'second.html'; })"
        assert browser.wait_for(leaves) is True
