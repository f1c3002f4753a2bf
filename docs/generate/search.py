"""The search index as sent: one file a language, without listings and tables, Chinese divided into words.

The theme's worker (lunr) looks up each word of a query as a prefix. So words enter the index as they are written: a stemmed
index holds "precis", and the prefix "precision" would find nothing. Chinese has no spaces, and a run of characters would be
one word. Zero-width spaces divide it; the worker divides a query into the words that the index has.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HAN = re.compile(r"[\u4e00-\u9fff]+")
BORDER = re.compile(r"(?<=[\u4e00-\u9fff])(?=[A-Za-z0-9])|(?<=[A-Za-z0-9])(?=[\u4e00-\u9fff])")
# No stemmer, no stop words: the same words for the index and the query. Titles count more, not so much that one word of a
# title outweighs a text that has all words of the query.
CONFIG = {"lang": ["en"], "pipeline": [],
          "separator": r"[\s\u200b\u3000\-/.,:;=()\[\]<>\"'`、。，．？！；：（）《》「」·]+",
          "fields": {"title": {"boost": 12.0}, "text": {"boost": 1.0}, "words": {"boost": 8.0}}}  # fmt: skip
LEFT_OUT = re.compile(r"<pre\b.*?</pre>|<svg\b.*?</svg>", re.DOTALL)
KEPT = ("pitfalls", "config-table")  # classes of tables in which readers look for a message or a name
ROWS = 11        # with the head
CELL = 1000      # characters
LONGEST = 3      # characters of a word
SELDOM = 3       # a word occurs at least so often on the pages
COHESION = 2.5   # nats: how much more often the parts meet than by chance
# Characters that join words or begin them.
ALONE = frozenset("的了是在与和或为就也都而每个这那它把被从到要又只让比再几两各本及请")  # in no word


WORDS = Path(__file__).resolve().parents[1] / "search_words.json"  # page -> what readers call its subject in each language


def split(sections: list[dict[str, Any]], named: dict[str, dict[str, str]]) -> dict[str, dict[str, Any]]:
    """The sections of both languages -> {'zh': index, 'en': index}; addresses are relative to the language's root.

    Args:
        sections: each with `location`, `title` and `text`, as mkdocs-material writes them.
        named: the content of search_words.json.
    """
    docs: dict[str, list[dict[str, Any]]] = {"zh": [], "en": []}
    for one in sections:
        english = one["location"] == "en/" or one["location"].startswith("en/")
        entry = {**one, "location": one["location"].removeprefix("en/") if english else one["location"],
                 "text": prose(one["text"])}  # fmt: skip
        docs["en" if english else "zh"].append(entry)
        page = entry["location"].rstrip("/")
        if "#" not in page and page in named:
            entry["words"] = named[page]["en" if english else "zh"]
    words = Dictionary(text for one in docs["zh"] for text in (one["title"], re.sub(r"<[^>]+>", "\n", one["text"])))
    for one in docs["zh"]:
        one |= {field: words.divide(one[field]) for field in ("title", "text", "words") if field in one}
    return {language: {"config": CONFIG, "docs": entries} for language, entries in docs.items()}


def prose(text: str) -> str:
    """A section's text without listings, pictures, and the tags of paragraphs, lists and inline code."""
    text = re.sub(r"</?(?:p|ul|ol|li)>", " ", LEFT_OUT.sub("", text))
    text = re.sub(r"</?(?:div|span|a|em|strong|code|img|figure|section|label|input)\b[^>]*>", "", text)
    return re.sub(r"\s+", " ", text).strip()


def without_long_tables(content: str) -> str:
    """A page's HTML in which the theme's search skips tables of more than ROWS rows or with a cell of more than CELL
    characters (a list of names), except those of KEPT, and tables of numbers: most of their cells are aligned to the right.
    """

    def marked(table: re.Match[str]) -> str:
        before = content[: table.start()]
        kept = any(before.rfind(f'class="{name}"') > before.rfind("</div>") for name in KEPT)
        longest = max(map(len, re.findall(r"<td.*?</td>", table[0], re.DOTALL)), default=0)
        long = (table[0].count("<tr") > ROWS or longest > CELL) and not kept
        numbers = 2 * table[0].count("text-align: right") > len(re.findall("<t[dh]", table[0]))
        return table[0].replace("<table", '<table data-search-exclude="true"', 1) if long or numbers else table[0]

    return re.sub(r"<table>.*?</table>", marked, content, flags=re.DOTALL)


def without_repetitions(content: str) -> str:
    """A page's HTML in which the theme's search skips what repeats the page's words: answers of folded questions, and texts
    in place of figures that need JavaScript."""
    for beginning in ('<details class="question"', "<div data-figure="):
        content = content.replace(beginning, beginning.replace(" ", ' data-search-exclude="true" ', 1))
    return content


class Dictionary:
    """Chinese words, found by how often characters meet, and the division of a text into them.

    A string of 2 to LONGEST characters is a word if it occurs SELDOM times and each of its two parts meets the other
    e^COHESION times as often as by chance. A text is divided into the words and characters with the highest likelihood.

    Args:
        texts: the texts in which to look.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        counts: Counter[str] = Counter()
        for run in (run for text in texts for run in HAN.findall(text)):
            for size in range(1, LONGEST + 1):
                counts.update(run[start : start + size] for start in range(len(run) - size + 1))
        total = sum(count for word, count in counts.items() if len(word) == 1)

        def is_word(word: str) -> bool:
            if len(word) == 1 or counts[word] < SELDOM or not ALONE.isdisjoint(word):
                return len(word) == 1
            parts = (counts[word[:cut]] * counts[word[cut:]] for cut in range(1, len(word)))
            return math.log(total * counts[word] / max(parts)) > COHESION

        self._cost = {word: math.log(total / count) for word, count in counts.items() if is_word(word)}

    def _cost_of(self, part: str) -> float:
        """In nats; a character that no page has is a word, a string that is not in the dictionary is none."""
        return self._cost.get(part, 20.0 if len(part) == 1 else math.inf)

    def words(self, run: str) -> list[str]:
        """The words of a run of Chinese characters, in order."""
        best: list[tuple[float, int]] = [(0.0, 0)]
        for end in range(1, len(run) + 1):
            starts = range(max(0, end - LONGEST), end)
            best.append(min((best[start][0] + self._cost_of(run[start:end]), start) for start in starts))
        cuts = [len(run)]
        while cuts[-1]:
            cuts.append(best[cuts[-1]][1])
        return [run[start:end] for start, end in itertools.pairwise(reversed(cuts))]

    def divide(self, text: str) -> str:
        """The text with a zero-width space between Chinese words, and between them and the letters of others."""
        divided = HAN.sub(lambda run: "\u200b".join(self.words(run[0])), text)
        return BORDER.sub("\u200b", divided)


def sections(site: Path) -> list[dict[str, Any]]:
    """The sections in the index that the theme's search has just written."""
    return json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))["docs"]


def write(site: Path, found: list[dict[str, Any]]) -> None:
    """Writes the indexes of a site: search/search_index.json for Chinese, the English one below en/."""
    for language, index in split(found, json.loads(WORDS.read_text(encoding="utf-8"))).items():
        target = site / ("en" if language == "en" else "") / "search/search_index.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(index, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
