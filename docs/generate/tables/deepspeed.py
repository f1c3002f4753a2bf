"""What becomes of DeepSpeed's and PatrickStar's keys, from the table of pstar/deepspeed/keys.py."""

from __future__ import annotations

import json
from collections.abc import Callable

EXAMPLE = "chapters/07_patrickstar/ds_config.json"


def keys(words: Callable[[str], str]) -> str:
    """One table for each fate: the keys that share a sentence, with the values that a row is for, and the sentence."""
    from docs.generate.tables.tables import table
    from pstar.deepspeed.keys import FATES, KEYS

    parts = []
    for fate in FATES:
        rows: dict[str, list[str]] = {}
        for row in KEYS:
            if row.fate == fate:
                values = " or ".join(f"`{json.dumps(value)}`" for value in row.on if value is not None)
                values = f": {values}" if values and len(row.on) <= 4 else ""
                rows.setdefault(row.sentence, []).append(f"`{row.name}`{values.replace(' or ', ', ')}")
        inside = table([words("key"), words("meaning")], [("<br>".join(names), words(said)) for said, names in rows.items()])
        parts.append(f"### {words(fate)} {{ #{fate} }}\n\n<div class=\"config-table\" markdown>\n\n{inside}\n</div>\n")
    return "\n".join(parts)


def example(words: Callable[[str], str]) -> str:
    """A file of DeepSpeed, and what `pstar config` says of it for two processes."""
    from docs.generate.recorded.measured import REPO
    from docs.generate.tables.tables import asked

    text = (REPO / EXAMPLE).read_text(encoding="utf-8")
    return f'```json title="{EXAMPLE}"\n{text.rstrip()}\n```\n\n{asked("config", EXAMPLE, "--ranks", "2")}'
