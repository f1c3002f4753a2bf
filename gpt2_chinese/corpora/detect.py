"""Detects the format of a text, and why, by pure functions of its first HEAD_LINES non-empty lines."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from gpt2_chinese.corpora.formats import DECODER, INDENTED
from gpt2_chinese.corpora.records import FORMATS, record_format
from gpt2_chinese.errors import UserError

HEAD_LINES = 50
HEAD_CHARS = 1 << 20

TEXT_FORMATS = ("clue-text", "lines", "paragraphs", "file")
ALL_FORMATS = (*FORMATS, *TEXT_FORMATS)


class Head(NamedTuple):
    """The beginning of a text, and whether that is all of it."""

    text: str
    whole: bool


class Decision(NamedTuple):
    """A format, and the reason in words."""

    format: str
    why: str


def take_head(pieces: Iterator[str]) -> tuple[Head, Iterator[str]]:
    """The head of a text, and an iterator over all its pieces, those of the head included."""
    taken: list[str] = []
    num_lines = size = 0
    for piece in pieces:
        taken.append(piece)
        size += len(piece)
        num_lines += sum(1 for line in piece.split("\n") if line.strip())
        if num_lines > HEAD_LINES or size >= HEAD_CHARS:
            return Head("".join(taken)[:HEAD_CHARS], False), itertools.chain(taken, pieces)
    return Head("".join(taken)[:HEAD_CHARS], size <= HEAD_CHARS), iter(taken)


def layout(head: Head) -> str:
    """The form of JSON in a text: "array", "lines" (a record a line) or "objects" (one after the other); "" for no JSON."""
    begin = head.text.lstrip()
    if begin[:1] == "[" and (begin[1:].lstrip()[:1] or "]") in '"{]':
        return "array"
    lines = _lines(head)
    records = [line for line in lines if line[0] in '"{' and _decode(line) is not None]
    if records and 2 * len(records) >= len(lines):
        return "lines"
    if begin[:1] == "{" and (begin[1:].lstrip()[:1] or '"') in '"}' and (_values(begin) or not head.whole):
        return "objects"
    return ""


def detect(head: Head, alone: bool, name: str) -> Decision | None:
    """The format of a text, None when it is blank.

    Args:
        head: the beginning of the text.
        alone: False when the text is one of several files of a folder or an archive.
        name: the name of the text in messages.

    Raises:
        UserError: JSON with fields that no format has.
    """
    lines = _lines(head)
    if not lines:
        return None
    json_layout = layout(head)
    if json_layout:
        return _detect_records(head, json_layout, name)
    text_lines = head.text.strip("\r\n ").split("\n")  # keeps U+3000 and tabs, which indent a line
    blank = sum(1 for line in text_lines if not line.strip())
    indented = sum(1 for line in text_lines if line.strip() and INDENTED.match(line))
    few = head.whole and len(lines) <= HEAD_LINES
    if not alone and few and (not blank or 2 * indented >= len(lines)):
        return Decision("file", f"one of several files, with only {len(lines)} lines")
    if 2 * indented >= len(lines):
        return Decision("paragraphs", f"{indented} of the first {len(lines)} lines are indented")
    if blank:
        return Decision("clue-text", f"{blank} blank lines between the first {len(lines)} lines of text")
    return Decision("lines", f"no blank line between the first {len(lines)} lines of text")


def _detect_records(head: Head, json_layout: str, name: str) -> Decision | None:
    if json_layout == "lines":
        records = [record for line in _lines(head) if (record := _decode(line)) is not None]
    else:
        begin = head.text.lstrip()
        records = _values(begin[1:] if json_layout == "array" else begin)
    how = {"array": "an array", "lines": "a record a line", "objects": "objects one after the other"}[json_layout]
    if not records:  # an empty array, or a first item longer than the head
        return Decision("array-json" if json_layout == "array" else "json-lines", how)
    votes = Counter(record_format(record, json_layout == "array") for record in records)
    form, count = votes.most_common(1)[0]
    if form is None:
        fields = ", ".join(map(str, records[0])) if isinstance(records[0], dict) else type(records[0]).__name__
        raise UserError(f"{name} is JSON of no known format (its records hold {fields[:80]!r}): name the text by --field")
    first = next(record for record in records if record_format(record, json_layout == "array") == form)
    fields = f"have the fields {', '.join(first)}"[:100] if isinstance(first, dict) else "are strings"
    return Decision(form, f"JSON, {how}; {count} of the first {len(records)} records {fields}")


def _lines(head: Head) -> list[str]:
    """The non-empty lines, at most HEAD_LINES, without the last line where the head may cut it."""
    lines = head.text.split("\n")
    if not head.whole and len(lines) > 1:
        lines.pop()
    return [line.strip() for line in lines if line.strip()][:HEAD_LINES]


def _decode(line: str) -> Any:
    try:
        return DECODER.decode(line.removesuffix(","))
    except (ValueError, RecursionError):
        return None


def _values(text: str) -> list[Any]:
    """The first values of a text: at most HEAD_LINES, and none after a value that is broken or cut by the head's end."""
    values: list[Any] = []
    place = 0
    while len(values) < HEAD_LINES:
        while text[place : place + 1] in tuple(" \t\r\n,"):
            place += 1
        try:
            value, place = DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            break
        values.append(value)
    return values
