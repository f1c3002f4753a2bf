"""Links between pages: the basics and tools that a page uses, from docs/uses.json, and the pages that use one of them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable

from docs.generate.recorded.measured import REPO

Words = Callable[[str], str]

DOCS = REPO / "docs"
USED = ("basics/", "tools/")  # folders of pages that others use
LINK = re.compile(r"\]\(([\w./-]+\.md)(?:#[\w-]+)?\)")


def uses() -> dict[str, list[str]]:
    """Page without its ending -> the basics and tools that it uses, in the order of the file."""
    return json.loads((DOCS / "uses.json").read_text(encoding="utf-8"))


def linked(page: str) -> set[str]:
    """The basics and tools to which the English text of a page links."""
    text = (DOCS / "en" / f"{page}.md").read_text(encoding="utf-8")
    found = {os.path.normpath(os.path.join(os.path.dirname(page), target)) for target in LINK.findall(text)}
    return {target.removesuffix(".md") for target in found if target.startswith(USED)}


def users(used: str) -> list[str]:
    """The pages that use a basics page or a tool, or link to it in their text: chapters first."""
    pages = [path.relative_to(DOCS / "en").with_suffix("").as_posix() for path in sorted(DOCS.glob("en/**/*.md"))]
    found = [page for page in pages if page != used and used in {*uses().get(page, ()), *linked(page)}]
    return sorted(found, key=lambda page: (not page.startswith("chapters/"), page))


def title(page: str, language: str) -> str:
    """The heading of a page."""
    text = (DOCS / language / f"{page}.md").read_text(encoding="utf-8")
    return re.search(r"^# (.+?)(?: \{ #[\w-]+ \})?$", text, re.MULTILINE).group(1)


def line(words: Words, page: str) -> str:
    """The links of a page: to what it uses, or back from what is used.

    Raises:
        SystemExit: the page neither uses a page nor is used.
    """
    language = "en" if words("step") == "step" else "zh"
    back = page.startswith(USED)
    targets = users(page) if back else uses().get(page, [])
    if not targets:
        raise SystemExit(f"error: docs/uses.json says of {page} neither what it uses nor who uses it")
    here = os.path.dirname(page) or "."
    links = [f"[{title(one, language)}]({os.path.relpath(one, here)}.md)" for one in targets]
    head = words("Used in") if back else words("What it uses")
    end = "" if title(targets[-1], language).endswith(("?", "？")) else words(".")
    # Not searched: a search for a page's title would find every page that links to it.
    return f"{head}{words(': ')}{words(', ').join(links)}{end}\n{{ data-search-exclude }}\n"
