"""Phrases that pages must not use, docs/style.json: for each language regular expressions, and what to write instead."""

from __future__ import annotations

import json
import re

from docs.generate.recorded.measured import REPO

FILE = REPO / "docs" / "style.json"
# Not prose: code blocks, included files, headings, inline code, link targets.
NOT_PROSE = (
    r"^( *)(?P<fence>`{3,}).*?^\1(?P=fence)", r'^ *--8<-- "[^"\n]*"', r"^#+ .*$", r"`[^`\n]*`", r"\]\([^)\n]*\)",
)  # fmt: skip


def rules(language: str) -> dict[str, str]:
    """{regular expression: what to write instead} of a language."""
    return json.loads(FILE.read_text(encoding="utf-8"))[language]


def refused(text: str, language: str) -> list[str]:
    """Complaints about phrases in a page's prose: each the phrase, and what to write instead."""
    for pattern in NOT_PROSE:
        text = re.sub(pattern, "x", text, flags=re.MULTILINE | re.DOTALL if "fence" in pattern else re.MULTILINE)
    return [f"{found[0].strip()}: write {instead}"
            for pattern, instead in rules(language).items()
            if (found := re.search(pattern, text, re.MULTILINE))]  # fmt: skip
