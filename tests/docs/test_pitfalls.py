"""The code can print every message in the tables of pitfalls: string templates in the code cover it."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.docs.pages import ROOT

PAGES = sorted(ROOT.glob("docs/*/chapters/0*.md"))
MESSAGE = re.compile(r"`((?:error|warning|note): [^`]+)`")
LEAST = 12  # fewest letters in a template's fixed text


@cache
def templates() -> list[re.Pattern[str]]:
    """Every string of the code as a pattern; its placeholders match anything."""
    found = set()
    folders = ("gpt2_chinese/**", "pstar/**", "durable/**", "chapters/*/**", "scripts")
    for path in [path for folder in folders for path in ROOT.glob(f"{folder}/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value if isinstance(part, ast.Constant) else None for part in parts]
            if all(text is None or isinstance(text, str) for text in texts) and sum(map(len, filter(None, texts))) >= LEAST:
                found.add("".join(".*?" if text is None else re.escape(text) for text in texts))
    return [re.compile(pattern, re.DOTALL) for pattern in found]


def said_by_code(message: str) -> bool:
    """Whether templates cover at least three quarters of the message's letters."""
    text = message.removeprefix("error: ")
    covered = [False] * len(text)
    for pattern in templates():
        for match in pattern.finditer(text):
            covered[match.start() : match.end()] = [True] * (match.end() - match.start())
    letters = [known for known, c in zip(covered, text, strict=True) if c.isalpha()]
    return sum(letters) >= 0.75 * len(letters)


def messages(text: str) -> list[str]:
    """The messages in a page's tables of pitfalls; an ellipsis means any text."""
    table = text.partition("{ #pitfalls }")[2].partition("\n## ")[0]
    rows = [line.strip() for line in table.splitlines() if line.strip().startswith("|")]  # also the folded ones
    return [message for row in rows for message in MESSAGE.findall(row.split(" | ")[0])]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parts[-3]}/{page.stem}")
def test_the_code_can_print_every_message_of_the_page(page) -> None:
    found = messages(page.read_text(encoding="utf-8"))
    assert len(found) >= 3
    wrong = [message for message in found if not all(said_by_code(part) for part in message.split("…") if len(part) > LEAST)]
    assert not wrong


def test_both_languages_show_the_same_messages() -> None:
    for page in (page for page in PAGES if "en" in page.parts):
        other = ROOT / "docs/zh/chapters" / page.name
        assert messages(page.read_text(encoding="utf-8")) == messages(other.read_text(encoding="utf-8")), page.name


@pytest.mark.parametrize("message", [
    "error: --batch-size 24 cannot be divided by --nproc 5 and --grad-accum 1",
    "error: --bucket-mb should be larger than 0, not 0.0",
    "error: near budget 1MiB is far too small for module 'transformer.wte'",
])  # fmt: skip
def test_another_message_is_found(message: str) -> None:
    assert not said_by_code(message)
