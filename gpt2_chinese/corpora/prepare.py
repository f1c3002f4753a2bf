"""What can be done to an item without knowing any other: parse, take its texts, clean, cut, hash, encode as JSON.

Pure functions of a list of items, so that processes can share the lists (processes.py). What remains for the process that
writes: count, drop duplicates, write.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

from gpt2_chinese.corpora.cleaning import clean, content_hash, is_validation, seen_number, split_long
from gpt2_chinese.corpora.formats import Item, parsed
from gpt2_chinese.corpora.records import BadRecord, Choices, LeftOut, record_texts

BROKEN_SHARE = 0.1  # an item is dropped if a broken encoding cost it more than this share of its characters


class Rules(NamedTuple):
    """The flags that decide what becomes of an item: --star and its kin, --min-length, --max-length, ..."""

    choices: Choices
    min_length: int
    max_length: int
    too_long: str
    valid_share: float


class Stretch(NamedTuple):
    """Consecutive items of one file or member.

    Attributes:
        name: of the file or member.
        form: a key of records.FORMATS for records, "" where each item is a text.
        raw: True where the values are lines of JSON that are not parsed yet.
        items: the items by column, the fields of Item: a pickle of columns takes a fifth of the time.
    """

    name: str
    form: str
    raw: bool
    items: list[tuple[Any, ...]]


class Prepared(NamedTuple):
    """Texts that are ready to be written, or the reasons why they are dropped, by column: an entry a text.

    Attributes:
        wheres: of its item.
        excerpts: the beginning of the text, or of what could not be read.
        problems: why the item cannot be read, else "".
        rules: the rule that drops the text, else "".
        control, broken: numbers of characters that cleaning removed.
        lengths: characters after cleaning; 0 where there is no text.
        numbers: a part of its content_hash, for Seen; None if it is dropped.
        valid: True for validation.
        lines: its pieces as JSON.
        pieces: the characters of each piece.
        late: the rule that drops the text unless it is a duplicate, else "".
    """

    wheres: tuple[str, ...] = ()
    excerpts: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    control: tuple[int, ...] = ()
    broken: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    numbers: tuple[int | None, ...] = ()
    valid: tuple[bool, ...] = ()
    lines: tuple[tuple[bytes, ...], ...] = ()
    pieces: tuple[tuple[int, ...], ...] = ()
    late: tuple[str, ...] = ()


def prepare(stretch: Stretch, rules: Rules) -> Prepared:
    """The texts of all items, in order."""
    found: list[tuple[Any, ...]] = []
    for item in map(Item, *stretch.items):
        if stretch.raw and not item.problem:
            item = parsed(item)
        if stretch.form and not item.problem:
            item = _with_texts(item, stretch.form, rules.choices)
        if item.rule or item.problem:
            found.append(_dropped(item.where, item.value, item.problem, item.rule))
            continue
        for text in item.value if isinstance(item.value, list) else [item.value]:
            found.append(_prepared(item.where, text, rules))
    return Prepared(*zip(*found, strict=True))


def _dropped(where: str, excerpt: str, problem: str, rule: str, control: int = 0, broken: int = 0, length: int = 0) -> tuple:
    return where, excerpt, problem, rule, control, broken, length, None, False, (), (), ""


def _with_texts(item: Item, form: str, choices: Choices) -> Item:
    """Turns the record of an item into a list of texts; an error becomes the item's problem or rule."""
    try:
        return Item(item.where, record_texts(form, item.value, choices))
    except (BadRecord, LeftOut) as error:
        excerpt = json.dumps(item.value, ensure_ascii=False)[:30]
        left_out = isinstance(error, LeftOut)
        return Item(item.where, excerpt, **{"rule" if left_out else "problem": str(error)})


def _prepared(where: str, raw: str, rules: Rules) -> tuple[Any, ...]:
    """The fields of Prepared for one text."""
    text, control, broken = clean(raw)
    length = len(text)
    if broken > BROKEN_SHARE * (length + broken):
        return _dropped(where, text[:30], "", "broken encoding", control, broken)
    if not text:
        return _dropped(where, "", "", "empty", control, broken)
    if length < rules.min_length:
        return _dropped(where, text[:30], "", "too short (--min-length)", control, broken, length)
    digest = content_hash(text)
    texts: tuple[str, ...] = (text,)
    late = ""
    if rules.max_length and length > rules.max_length:
        if rules.too_long == "drop":
            texts, late = (), "too long (--max-length)"
        else:
            texts = tuple(split_long(text, rules.max_length))
    # all pieces of one text go to one part, so that no validation text is a neighbour of training text
    valid = is_validation(digest, rules.valid_share)
    lines = tuple(map(orjson.dumps, texts))
    lengths, number = tuple(map(len, texts)), seen_number(digest)
    return where, text[:30], "", "", control, broken, length, number, valid, lines, lengths, late


def value_size(value: Any) -> int:
    """Characters of an item's value, about; for a record its fields."""
    if isinstance(value, dict):
        return sum(len(field) for field in value.values() if isinstance(field, str))
    return len(value) if isinstance(value, str) else 100


def batches(stretches: Iterator[Stretch], characters: int) -> Iterator[list[Stretch]]:
    """Lists of stretches with about so many characters in all; what comes before an error is in a list, too."""
    batch: list[Stretch] = []
    size = 0
    try:
        for stretch in stretches:
            batch.append(stretch)
            size += sum(map(value_size, stretch.items[1]))
            if size >= characters:
                yield batch
                batch, size = [], 0
    except Exception:
        if batch:
            yield batch
        raise
    if batch:
        yield batch
