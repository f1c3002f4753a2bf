"""The glossary, docs/glossary.json: its terms with their anchors, and the words that pages must not use for a term."""

from __future__ import annotations

import json
import re
from typing import Any

from docs.generate.recorded.measured import REPO

FILE = REPO / "docs" / "glossary.json"


def terms() -> list[dict[str, Any]]:
    """[{en, zh, says_en, says_zh, avoid}] in the order of the file; `avoid` are expressions for refused Chinese words.

    An expression can look at its neighbours: 聚合 is refused for all-gather, but allowed in 聚合梯度 (a sum).
    """
    return json.loads(FILE.read_text(encoding="utf-8"))


def anchor(term: dict[str, Any]) -> str:
    """The id of a term, the same in both languages: 'reduce-scatter', 'gradient-accumulation'."""
    return re.sub(r"[^a-z0-9]+", "-", term["en"].lower()).strip("-")


def discouraged(text: str) -> list[str]:
    """Complaints about Chinese words that are not the glossary's: '令牌: the glossary says token for token' and so on."""
    prose = re.sub(r"^( *)(`{3,}).*?^\1\2", "", text, flags=re.MULTILINE | re.DOTALL)
    return [f"{found[0]}: the glossary says {term['zh']} for {term['en']}"
            for term in terms() for word in term["avoid"] if (found := re.search(word, prose))]  # fmt: skip
