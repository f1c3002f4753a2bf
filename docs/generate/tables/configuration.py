"""The configuration reference: every field of pstar/config.py's dataclasses, its type, default and sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

Row = tuple[str, str, str, str]


def rows(cls: type, prefix: str = "") -> Iterator[Row]:
    """(key, type, default, sentence) of every field; the keys of an object follow the object."""
    from pstar.config import sentences

    types, default, said = get_type_hints(cls), cls(), sentences(cls)
    for field in fields(cls):
        if field.name not in said:
            raise SystemExit(f"error: {cls.__name__}.{field.name} of pstar/config.py has no sentence under it")
        kind, key = types[field.name], prefix + field.name
        if is_dataclass(kind):
            yield key, "object", "", said[field.name]
            yield from rows(kind, f"{key}.")
        else:
            yield key, type_text(kind), json.dumps(getattr(default, field.name)), said[field.name]


def type_text(kind: Any) -> str:
    """`int | str` -> 'int, str'; a tuple becomes the JSON type for it."""
    if get_origin(kind) is tuple:
        return f"[{', '.join(item.__name__ for item in get_args(kind))}]"
    return ", ".join("null" if item is type(None) else item.__name__ for item in get_args(kind) or (kind,))


def reference(words: Callable[[str], str]) -> str:
    """A table of the keys outside any object, then one table per object of the configuration, below its name."""
    from pstar.config import Config

    found = list(rows(Config))
    objects = [row for row in found if row[1] == "object" and "." not in row[0]]
    alone = [row for row in found if "." not in row[0] and row not in objects]
    parts = [f"## {words('Keys of the top level')} {{ #top-level }}\n\n{_table(words, alone)}"]
    for name, _, _, sentence in objects:
        inside = [row for row in found if row[0].startswith(f"{name}.")]
        parts.append(f"## {name} {{ #{name} }}\n\n{words(sentence)}\n\n{_table(words, inside)}")
    return "\n".join(parts)


def _table(words: Callable[[str], str], found: list[Row]) -> str:
    from docs.generate.tables.tables import table

    cells = [(f"`{key}`", kind, f"`{default}`" if default else "", words(said)) for key, kind, default, said in found]
    inside = table([words(word) for word in ("key", "type", "default", "meaning")], cells)
    return f'<div class="config-table" markdown>\n\n{inside}\n</div>\n'
