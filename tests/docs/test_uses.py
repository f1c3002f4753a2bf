"""Every page links to the basics and tools that it uses, and they link back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.generate.tables import uses
from tests.docs.pages import LANGUAGES, ROOT
from tests.docs.test_links import articles

# A page that has these words so often uses the page.
WORDS = {
    "basics/collectives": (r"all-reduce|all-gather|reduce-scatter|all-to-all", 3),
    "basics/precision": (r"bf16|fp16|loss scale", 4),
    "basics/profiling": (r"Perfetto|torch\.profiler", 1),
    "basics/speed": (r"\bMFU\b|roofline|\bNVLink\b", 2),
    "tools/bubble": (r"\bbubble\b", 2),
}


def missing(page: str, text: str, named: list[str]) -> list[str]:
    """The basics and tools whose words a page has, and that it does not name."""
    prose = re.sub(r"\]\([^)]*\)", "]", text)
    return [used for used, (words, times) in WORDS.items()
            if page != used and len(re.findall(words, prose)) >= times and used not in named]  # fmt: skip


def written() -> dict[str, str]:
    """The English pages that can use basics: page -> text."""
    found = {path.relative_to(ROOT / "docs/en").with_suffix("").as_posix(): path for path in ROOT.glob("docs/en/**/*.md")}
    return {page: path.read_text(encoding="utf-8") for page, path in found.items() if not page.startswith(uses.USED)}


def test_a_page_names_the_basics_and_tools_whose_words_it_has() -> None:
    wrong = {page: found for page, text in written().items() if (found := missing(page, text, uses.uses().get(page, [])))}
    assert not wrong
    assert missing("x", "all-reduce, all-gather, reduce-scatter", ["basics/memory"]) == ["basics/collectives"]


def test_every_lesson_uses_basics_and_a_tool() -> None:
    for page in written():
        if page.startswith("chapters/"):
            assert {used.partition("/")[0] for used in uses.uses()[page]} == {"basics", "tools"}, page


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_question_at_the_end_of_the_links_needs_no_full_stop(site: Path, language: str) -> None:
    page = site / ("" if language == "zh" else "en") / "tools/bubble/index.html"
    last = re.findall(r"([?？.。])</a>([.。]?)</p>", page.read_text(encoding="utf-8"))
    assert last and all(not stop for _, stop in last)


@pytest.mark.parametrize("language", LANGUAGES)
def test_links_to_basics_and_tools_lead_back(site: Path, language: str) -> None:
    """On the built pages, in both directions: from docs/uses.json, and every other link in a text."""
    found = {name.removesuffix("/index.html").removeprefix("en/"): text for name, text in articles(site).items()
             if name.startswith("en/") == (language == "en")}  # fmt: skip
    links = {page: {resolved(page, address) for address in re.findall(r'href="([^"#]+)', text)} & found.keys()
             for page, text in found.items()}  # fmt: skip
    pairs = [(page.replace("engine", "engine/index") if page == "engine" else page, used) for page, targets in links.items()
             for used in targets if used.startswith(uses.USED) and not page.startswith(uses.USED)]  # fmt: skip
    assert {(page, used) for page, named in uses.uses().items() for used in named} <= set(pairs)
    assert not [(used, page) for page, used in pairs if page.removesuffix("/index") not in links[used]]
    assert len(pairs) > 60


def resolved(page: str, address: str) -> str:
    """The page that a relative address on a page means: 'basics/memory'."""
    if re.match(r"[a-z]+:", address):
        return ""
    parts = [] if page == "index.html" else page.split("/")
    for one in address.split("/"):
        if one == "..":
            parts = parts[:-1]
        elif one not in ("", "."):
            parts.append(one)
    return "/".join(parts)


def test_a_page_that_neither_uses_nor_is_used_is_an_error() -> None:
    with pytest.raises(SystemExit, match="uses.json"):
        uses.line(str, "glossary")
