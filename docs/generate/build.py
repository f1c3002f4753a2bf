"""Writes what the pages include into docs/_generated/: nothing on a page is typed that a program can print.

    python -m docs.generate               the fragments that the pages ask for, and the figures
    python -m docs.generate --readme      also the generated parts of README.md and README.zh.md, except the captured run
    python -m docs.generate --capture     also the captured run: the README's first command, for real, some minutes
    python -m docs.generate --capture-chapters [NN ...]
                                          also what chapters print and learn, all or some of them: docs/captured/, by git

A page includes a fragment with a snippet line; its name says what it is:

    code/FILE/NAME.md        a function, a class or Class.method, taken by name
    file/FILE.md             a whole file; of a chapter's train.py the lines that are new against its PARENT are marked
    diff/CHAPTER.md          train.py against its PARENT
    help/CHAPTER.md          what --help prints
    said/CHAPTER.md          what the captured run printed
    en/captured/CHAPTER.md   the same to unfold, with command, versions and date; zh/captured/CHAPTER.md
    ran/NAME.md              what docs/programs/NAME.py printed, below the command that starts it
    en/timed/CHAPTER.md      how long the commands of its first tab took; zh/timed/CHAPTER.md
    seen/NAME.md             a command of recorded/seen.py and what it printed
    en/basics/TABLE.md       one of TABLES of arithmetic/basics.py; zh/basics/TABLE.md
    en/results/NAME.md       what benchmarks/results/NAME.md says of how it was measured, and its table; zh/results/NAME.md
    en/arithmetic/CHAPTER.md memory and traffic of a chapter, worked with formulas.py; zh/arithmetic/CHAPTER.md
    en/wall/CHAPTER.md       what the chapter before ran into; en/prediction/CHAPTER.md: a question, its answer folded
    en/links/CHAPTER.md      how long a chapter's messages take over real links; zh/links/CHAPTER.md
    section/FILE/NAME.md     the part of a program below the comment line "# -- NAME ---"
    en/results_all/NAME.md   the same with all its tables; zh/results_all/NAME.md
    en/uses/PAGE.md          the basics and tools that a page uses, or the pages that use it; zh/uses/PAGE.md
    en/real_links.md         the links, their speeds and sources; zh/real_links.md
    en/api.md, zh/api.md     what pstar exports, from its docstrings
    en/TABLE.md, zh/TABLE.md one of TABLES below; Chinese words come from zh.json, and one that is missing is an error
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.generate import readme
from docs.generate.arithmetic import adaptation, arithmetic, basics
from docs.generate.lessons import links, texts
from docs.generate.pictures import collectives, dark, overview, pictures, recorded_run, results, roofline
from docs.generate.recorded import captures, measured, programs, seen, timed
from docs.generate.recorded.measured import GENERATED, REPO, write_whole
from docs.generate.tables import api, tables, uses

DOCS = REPO / "docs"
LESSON = {"wall": texts.wall, "prediction": texts.prediction, "links": links.times}
SNIPPET = re.compile(r'^\s*--8<--\s+"([^"]+)"', re.MULTILINE)


def wanted() -> dict[str, list[str]]:
    """Each fragment that a page includes -> the pages that include it."""
    found: dict[str, list[str]] = {}
    for page in sorted([*DOCS.glob("zh/**/*.md"), *DOCS.glob("en/**/*.md")]):
        for name in SNIPPET.findall(page.read_text(encoding="utf-8")):
            found.setdefault(name, []).append(str(page.relative_to(REPO)))
    return found


def fragment(name: str) -> str:
    """The text of a fragment; raises SystemExit for an unknown name."""
    kind, _, rest = name.removesuffix(".md").partition("/")
    if kind == "code":
        path, _, symbol = rest.rpartition("/")
        return fence(source_of((REPO / path).read_text(encoding="utf-8"), symbol), "python", path)
    if kind == "file":
        text = (REPO / rest).read_text(encoding="utf-8")
        return fence(text, "python" if rest.endswith(".py") else "bash", rest, new_lines(text, parent_of(text)))
    if kind == "diff":
        return fence(diff_to_parent(rest), "diff")
    if kind == "help":
        return fence(measured.help_of(rest), "text")
    if kind == "said":
        return fence(captures.captured(rest)["said"], "text")
    if kind in ("en", "zh") and rest.startswith("captured/"):
        return captures.block(Words(kind), rest.removeprefix("captured/"))
    if kind == "ran":
        return fence(f"$ {programs.command_of(rest)}\n{programs.outputs()[rest]}", "text")
    if kind in ("en", "zh") and rest.removeprefix("basics/") in basics.TABLES and rest.startswith("basics/"):
        return basics.TABLES[rest.removeprefix("basics/")](Words(kind))
    if kind == "seen":    # the class `said` wraps long lines: messages are sentences; `columns` does not on a phone
        text = seen.block(rest)
        rows = sum(len(re.findall(r"\S {2,}(?=\S)", line)) > 1 for line in text.splitlines())
        return fence(text, "{ .text .said .columns }" if rows > 2 else "{ .text .said }")
    if kind in ("en", "zh") and rest.startswith("results/"):
        return tables.result(Words(kind), (REPO / "benchmarks" / f"{rest}.md").read_text(encoding="utf-8"))
    if kind in ("en", "zh") and rest == f"arithmetic/{adaptation.CHAPTER}":
        return adaptation.chapter(Words(kind))
    if kind in ("en", "zh") and rest.startswith("arithmetic/"):
        return arithmetic.chapter(Words(kind), rest.partition("/")[2])
    if kind == "section":
        path, _, name = rest.rpartition("/")
        return fence(section_of((REPO / path).read_text(encoding="utf-8"), name), "python", path)
    if kind in ("en", "zh") and rest.partition("/")[0] in LESSON:
        return LESSON[rest.partition("/")[0]](Words(kind), rest.partition("/")[2])
    if kind in ("en", "zh") and rest.startswith("results_all/"):
        name = rest.partition("/")[2]
        return tables.results(Words(kind), name, (REPO / "benchmarks/results" / f"{name}.md").read_text(encoding="utf-8"))
    if kind in ("en", "zh") and rest.startswith("timed/"):
        return timed.line(Words(kind), rest.partition("/")[2])
    if kind in ("en", "zh") and rest.startswith("uses/"):
        return uses.line(Words(kind), rest.removeprefix("uses/"))
    if kind in ("en", "zh") and rest == "real_links":
        return links.all_links(Words(kind))
    if kind in ("en", "zh") and rest == "api":
        return api.reference(Words(kind))
    if kind in ("en", "zh") and rest in tables.TABLES:
        return tables.TABLES[rest](Words(kind))
    raise SystemExit(f"error: no fragment is called {name}; docs/generate/build.py lists the kinds")


class Words:
    """Words of generated tables in one language.

    Args:
        language: 'en' or 'zh'. English text is in the code; zh.json maps it to Chinese.
    """

    def __init__(self, language: str) -> None:
        self.language = language
        self._chinese = json.loads((DOCS / "zh.json").read_text(encoding="utf-8"))

    def __call__(self, english: str) -> str:
        if self.language == "en":
            return english
        if english not in self._chinese:
            raise SystemExit(f"error: docs/zh.json has no Chinese for {english!r}")
        return self._chinese[english]


    def known(self, english: str) -> str:
        """The word in the page's language if zh.json has it; else the word itself: a name."""
        return english if self.language == "en" else self._chinese.get(english, english)


# ---- code


def source_of(text: str, name: str) -> str:
    """The source of a function, a class or Class.method, with its decorators, not indented."""
    body: Any = ast.parse(text)
    for part in name.split("."):
        nodes = [n for n in body.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part]
        if not nodes:
            raise SystemExit(f"error: there is no {name} in the file that a page takes it from")
        body = nodes[-1]
    first = min([body.lineno, *(decorator.lineno for decorator in body.decorator_list)])
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : body.end_lineno]))


def section_of(text: str, name: str) -> str:
    """The lines of a program from "# -- NAME ---" to the next such line."""
    found = re.search(rf"^# -- {re.escape(name)}(?: -|[:,])[^\n]*\n(.*?)(?=^# -- |\Z)", text, re.MULTILINE | re.DOTALL)
    if not found:
        raise SystemExit(f"error: there is no section {name} in the file that a page takes it from")
    return found[1].strip("\n")


def parent_of(text: str) -> str:
    """The train.py of the chapter that a text names as PARENT; '' if it names none."""
    named = re.search(r'^PARENT = "(.+)"$', text, re.MULTILINE)
    return (REPO / "chapters" / named[1] / "train.py").read_text(encoding="utf-8") if named else ""


def new_lines(text: str, parent: str) -> list[int]:
    """Numbers, from 1, of the non-blank lines that the parent does not have; [] without a parent."""
    if not parent:
        return []
    lines = text.splitlines()
    matcher = difflib.SequenceMatcher(None, parent.splitlines(), lines, autojunk=False)
    return [number + 1 for tag, _, _, first, end in matcher.get_opcodes() if tag in ("insert", "replace")
            for number in range(first, end) if lines[number].strip()]  # fmt: skip


def diff_to_parent(chapter: str) -> str:
    """The unified diff of a chapter's train.py against its parent's."""
    text = (REPO / "chapters" / chapter / "train.py").read_text(encoding="utf-8")
    parent = parent_of(text)
    if not parent:
        raise SystemExit(f"error: chapter {chapter} has no PARENT to be compared with")
    name = re.search(r'^PARENT = "(.+)"', text, re.MULTILINE).group(1)
    lines = difflib.unified_diff(parent.splitlines(), text.splitlines(), f"chapters/{name}/train.py",
                                 f"chapters/{chapter}/train.py", n=1, lineterm="")  # fmt: skip
    return "\n".join(lines)


def fence(text: str, language: str, title: str = "", marked: list[int] | None = None) -> str:
    """A fenced block; its fence is longer than every run of backticks in the text."""
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`{3,}", text)), default=2))
    options = (f' title="{title}"' if title else "") + (f' hl_lines="{" ".join(_runs(marked))}"' if marked else "")
    return f"{ticks}{language}{options}\n{text.rstrip()}\n{ticks}\n"


def _runs(numbers: list[int]) -> Iterator[str]:
    """[1, 2, 3, 7] -> '1-3', '7'"""
    start = None
    for number, after in zip(numbers, [*numbers[1:], None], strict=True):
        start = number if start is None else start
        if after != number + 1:
            yield str(number) if start == number else f"{start}-{number}"
            start = None


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser("python -m docs.generate", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--readme", action="store_true", help="renew the generated parts of both READMEs as well")
    parser.add_argument("--capture", action="store_true", help="and run their first command, for the captured output")
    parser.add_argument("--log", type=Path, help="take the captured output from what that command printed into this file")
    parser.add_argument("--capture-chapters", nargs="*", metavar="NN", help="and run these chapters, all without NN")
    arguments = parser.parse_args()
    if arguments.capture_chapters is not None:
        captures.capture(arguments.capture_chapters)
    if arguments.readme or arguments.capture or arguments.log:
        readme.renew(Words, arguments.log, arguments.capture)
    with measured.alone():
        generate()


def generate() -> None:
    """Writes every file that a page includes. Files that are up to date are not rewritten: mkdocs serve watches times."""
    for name, pages in wanted().items():
        try:
            text = fragment(name)
        except (OSError, SystemExit) as error:
            raise SystemExit(f"{error} (included by {', '.join(pages)})") from error
        write_whole(GENERATED / name, text)
    figures = GENERATED / "figures"
    pictures.write(Words, figures)
    collectives.write(Words, figures)
    overview.write(Words, figures)
    roofline.write(Words, figures)
    results.write(Words, figures)
    recorded_run.write(Words, figures)
    for old in figures.glob("*.png"):  # of a build by an earlier version
        old.unlink()
    dark.write(figures)
