"""The glossary, docs/glossary.json: its terms with their anchors, and the words that pages must not use for a term."""

from __future__ import annotations

import json
import re
from typing import Any

from docs.generate.recorded.measured import REPO

FILE = REPO / "docs" / "glossary.json"


def terms() -> list[dict[str, Any]]:
    """[{en, zh, says_en, says_zh, avoid}] in the order of the file; `avoid` are Chinese words that mean the same."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def anchor(term: dict[str, Any]) -> str:
    """The id of a term, the same in both languages: 'reduce-scatter', 'gradient-accumulation'."""
    return re.sub(r"[^a-z0-9]+", "-", term["en"].lower()).strip("-")


def discouraged(text: str) -> list[str]:
    """Complaints about words in a Chinese page that are not the glossary's: 'token 的译名是 token，不是 令牌' and so on."""
    prose = re.sub(r"^( *)(`{3,}).*?^\1\2", "", text, flags=re.MULTILINE | re.DOTALL)
    return [f"{word}: the glossary says {term['zh']} for {term['en']}"
            for term in terms() for word in term.get("avoid", ()) if word in prose]  # fmt: skip
