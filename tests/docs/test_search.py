"""docs/generate/search.py: the words of Chinese, one small index a language; test_browser.py asks it questions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs.generate import search
from tests.docs.pages import LANGUAGES, ROOT

MOST_BYTES = 400_000  # of the file that a reader of one language downloads, without compression
NAMED = json.loads((ROOT / "docs/search_words.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def indexes(site: Path) -> dict[str, dict]:
    paths = {"zh": site / "search/search_index.json", "en": site / "en/search/search_index.json"}
    assert all(path.stat().st_size < MOST_BYTES for path in paths.values()), {p: p.stat().st_size for p in paths.values()}
    return {language: json.loads(path.read_text(encoding="utf-8")) for language, path in paths.items()}


def test_each_language_has_an_index_of_its_own_sections(indexes: dict[str, dict]) -> None:
    places = {language: {one["location"] for one in index["docs"]} for language, index in indexes.items()}
    assert places["zh"] == places["en"] and "chapters/06_zero/" in places["en"]
    assert not any(place.startswith("en/") for place in places["en"])
    for language in LANGUAGES:
        assert not re.search(r"<(?:pre|table|svg)\b", "".join(one["text"] for one in indexes[language]["docs"]))


def test_index_and_query_use_the_same_words(indexes: dict[str, dict]) -> None:
    """A stemmer in the index cuts words that a query does not cut."""
    assert all(index["config"]["pipeline"] == [] and index["config"]["lang"] == ["en"] for index in indexes.values())


def test_every_page_with_other_names_is_a_page(indexes: dict[str, dict]) -> None:
    pages = {one["location"].rstrip("/") for one in indexes["en"]["docs"] if "#" not in one["location"]}
    assert set(NAMED) <= pages
    assert all(set(names) == set(LANGUAGES) for names in NAMED.values())
    assert sum("words" in one for one in indexes["zh"]["docs"]) == len(NAMED)


def test_chinese_is_divided_where_characters_meet_only_by_chance() -> None:
    """30 characters meet each other once, and one pair of them three times; one pair of others meets only each other."""
    others = [chr(0x4E00 + 7 * number) for number in range(30)]
    pair = others[0] + others[1]
    words = search.Dictionary([*(one + two for one in others for two in others), pair, pair, *["显存"] * 3])
    assert words.words(f"显存{pair}显") == ["显存", others[0], others[1], "显"]
    assert words.divide(f"GPU显存{others[2]} a") == f"GPU\u200b显存\u200b{others[2]} a"
    assert words.divide("no Chinese") == "no Chinese" and words.words("新词") == ["新", "词"]


def test_the_words_of_the_course_are_found_on_its_pages(indexes: dict[str, dict]) -> None:
    divided = {word for one in indexes["zh"]["docs"] for word in re.split(r"[^\u4e00-\u9fff]+", one["text"])}
    assert {"显存", "梯度", "优化器", "流水线", "参数", "进程", "通信"} <= divided
    assert not {"的", "了", "在"} & set("".join(word for word in divided if len(word) > 1)), "they stay alone"


def test_only_long_tables_without_messages_or_settings_are_left_out() -> None:
    def table(rows: int) -> str:
        return "<table>" + "<tr><td>x</td></tr>" * rows + "</table>"

    content = f'<p>a</p>{table(5)}<div class="pitfalls">{table(30)}</div>{table(30)}'
    done = search.without_long_tables(content)
    assert done.count("data-search-exclude") == 1 and done.endswith(table(30).removeprefix("<table>"))
    assert done.index("data-search-exclude") > done.index("</div>")
    assert search.prose("<p>a  <code>b</code></p><pre><code>x</code></pre><p> </p>") == "a b"


def test_a_table_that_lists_names_is_left_out() -> None:
    tables = [f"<table><tr><td>x</td><td>{'name, ' * names}</td></tr></table>" for names in (100, 200)]
    assert search.without_long_tables(tables[0]) == tables[0]
    assert search.without_long_tables(tables[1]).startswith('<table data-search-exclude="true">')


def test_tables_of_numbers_are_left_out() -> None:
    def table(numbers: int) -> str:
        cells = "<td>x</td>" * (4 - numbers) + '<td style="text-align: right;">1</td>' * numbers
        return f"<table><tr>{cells}</tr></table>"

    assert search.without_long_tables(table(2)) == table(2)
    assert search.without_long_tables(table(3)).startswith('<table data-search-exclude="true">')


def test_answers_of_questions_and_texts_in_place_of_figures_are_not_searched() -> None:
    from material.plugins.search.plugin import Parser

    folded = '<details class="question"><summary>why</summary><p>because</p></details>'
    figure = '<div data-figure="ring"><p>drawing</p></div>'
    content = f'<h1 id="a">A</h1><p>text</p>{folded}{figure}<p>end</p>'
    texts = []
    for html in (content, search.without_repetitions(content)):
        parser = Parser()
        parser.feed(html)
        parser.close()
        texts.append("".join("".join(section.text) for section in parser.data))
    for word in ("because", "drawing"):
        assert word in texts[0] and word not in texts[1]
    assert "text" in texts[1] and "end" in texts[1]
