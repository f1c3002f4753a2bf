"""The words of pages: no page, README or first line of a docstring uses a phrase that docs/style.json refuses."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

READMES = [*ROOT.glob("chapters/*/README.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
ENGLISH = sorted([*ROOT.glob("docs/en/**/*.md"), *READMES])
CHINESE = sorted([*ROOT.glob("docs/zh/**/*.md"), ROOT / "README.zh.md", ROOT / "docs/zh.json"])
# Chinese words inside programs: widgets of pages, figures and tables.
PROGRAMS = sorted([*ROOT.glob("docs/assets/**/*.js"), *ROOT.glob("docs/generate/**/*.py")])
PROGRAMS.remove(ROOT / "docs/generate/tables/terms.py")  # its docstring cites a refused word
DOCSTRINGS = ("gpt2_chinese", "pstar", "durable", "chapters", "docs/generate", "benchmarks")


@pytest.fixture(scope="module")
def words():
    """docs/generate/tables/style.py and terms.py."""
    from docs.generate.tables import style, terms

    return style, terms


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def complaints(words, path: Path) -> list[str]:
    style, terms = words
    text = path.read_text(encoding="utf-8")
    if path in ENGLISH:
        return style.refused(text, "en")
    return terms.discouraged(text) + style.refused(text, "zh")


@pytest.mark.parametrize("page", [*ENGLISH, *CHINESE, *PROGRAMS], ids=name)
def test_a_page_uses_no_refused_word(words, page: Path) -> None:
    assert not complaints(words, page)


def first_lines(text: str) -> list[str]:
    """The first line of each docstring of a program."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    return [doc.split("\n")[0] for node in nodes if (doc := ast.get_docstring(node))]


@pytest.mark.parametrize("folder", DOCSTRINGS)
def test_no_docstring_begins_with_a_refused_phrase(words, folder: str) -> None:
    style, _ = words
    programs = sorted(ROOT.glob(f"{folder}/**/*.py"))
    lines = [(name(path), line) for path in programs for line in first_lines(path.read_text(encoding="utf-8"))]
    assert len(lines) > 10
    assert not [(path, said) for path, line in lines if (said := style.refused(line, "en"))]


def test_a_refused_english_phrase_is_found(words) -> None:
    refused = words[0].refused
    found = {
        "A chunk lies in near.": "lies", "The number stands below.": "stands", "Rank 0 wants to send.": "wants",
        "Others wait for ever.": "for ever", "The rest. What is left waits.": "What is left waits.",
        "All have a piece.": "All have",
        "It is slow. Done for each parameter it is right.": "Done", "Wait. Before it gradients add up.": "Before it",
        "Orange is what a rank holds.": "is what a", "1. All\nranks\nshall have it.": "shall",
    }  # fmt: skip
    for text, word in found.items():
        assert len(refused(text, "en")) == 1 and word in refused(text, "en")[0], text


def test_what_is_no_prose_is_not_searched(words) -> None:
    refused = words[0].refused
    no_prose = ("```text\nit lies\n```\n", "the flag `lies`", "## What lies where\n", "[a page](lies.md)", "if you want to")
    for text in (*no_prose, "ZeRO stands for it."):
        assert not refused(text, "en"), text
    assert refused("```text\nx\n```\nit lies\n", "en")


def test_a_word_is_refused_by_its_neighbours(words) -> None:
    discouraged = words[1].discouraged
    assert not discouraged("聚合梯度，再更新。梯度聚合是求和。") and discouraged("使用前聚合参数。")
    assert not discouraged("微批次与批次大小") and len(discouraged("微批")) == 1
    assert discouraged("放不进 GPU 内存")[0] == "GPU 内存: the glossary says 显存 for GPU memory"
    assert not discouraged("显存与主机内存") and discouraged("0 号进程") and not discouraged("进程 0")


def test_a_refused_chinese_phrase_is_found(words) -> None:
    assert words[0].refused("每个批次走了两步优化器。", "zh") == ["走了两步优化器: write 执行了两次优化器更新"]
    assert not words[0].refused("每个批次执行了两次优化器更新。", "zh")


def test_every_rule_is_an_expression_with_an_advice(words) -> None:
    style, terms = words
    for language in ("en", "zh"):
        for pattern, instead in style.rules(language).items():
            assert re.compile(pattern) and instead
    assert all(re.compile(word) for term in terms.terms() for word in term["avoid"])
