"""Splits the text of a file into items: one function per layout, each reads pieces of text of any size.

    lines            a line is an item (UER's `lm` files)
    clue-text        a block of lines is an item, blank lines between them (CLUECorpusSmall)
    paragraphs       hard-wrapped text: a paragraph ends at a blank line or before an indented one
    file             the whole file is one item
    JSON             one record a line, a top-level array, or objects one after the other; see records.py for the fields

No function holds more than one item and one piece; an item above ITEM_CHARS is skipped as unreadable.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import orjson

from gpt2_chinese.corpus import JsonWindow
from gpt2_chinese.errors import UserError

ITEM_CHARS = 8 << 20  # a novel has one million
PIECE_BYTES = 1 << 18

DECODER = json.JSONDecoder(strict=False)  # accepts raw line breaks and tabs in strings: cleaning removes them
_PLAIN = {str, int, bool, type(None)}
INDENTED = re.compile(r"\u3000| {2}|\t")


class Item(NamedTuple):
    """One item of a file, or the reason why there is none.

    Attributes:
        where: the line, counted from 1, and in an array also the number of the item.
        value: the text, or the record.
        problem: why the item cannot be read, else ""; with a problem, `value` is an excerpt.
        rule: the rule that drops the item, else ""; with a rule, `value` is an excerpt.
    """

    where: str
    value: Any
    problem: str = ""
    rule: str = ""


def decoded(read: Callable[[int], bytes], encoding: str) -> Iterator[str]:
    """Decodes a stream of bytes, piece by piece; undecodable bytes become U+FFFD, a byte order mark is removed."""
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    begun = False
    while True:
        raw = read(PIECE_BYTES)
        piece = decoder.decode(raw, final=not raw)
        if piece and not begun:
            piece, begun = piece.removeprefix("\ufeff"), True
        if piece:
            yield piece
        if not raw:
            return


def numbered_lines(pieces: Iterable[str]) -> Iterator[Item]:
    r"""The lines without their `\n`; a line longer than ITEM_CHARS is an item with a problem."""
    rest, number, too_long = "", 0, ""
    for piece in pieces:
        *whole, rest = (rest + piece).split("\n")
        for line in whole:
            number += 1
            if too_long:
                yield Item(str(number), too_long, _too_long())
                too_long = ""
            else:
                yield Item(str(number), line)
        if len(rest) > ITEM_CHARS:
            too_long, rest = too_long or rest[:30], ""
    if too_long:
        yield Item(str(number + 1), too_long, _too_long())
    elif rest:
        yield Item(str(number + 1), rest)


def _too_long() -> str:
    return f"is longer than {ITEM_CHARS:,} characters"


# ---- plain text


def line_items(pieces: Iterable[str]) -> Iterator[Item]:
    """A line is an item; blank lines are skipped."""
    return (line for line in numbered_lines(pieces) if line.problem or line.value.strip())


def block_items(pieces: Iterable[str], join: str = "\n") -> Iterator[Item]:
    """The lines up to a blank line are an item, joined with `join`."""
    return _blocks(pieces, join, indented_begins=False)


def paragraph_items(pieces: Iterable[str], join: str = "") -> Iterator[Item]:
    """The lines up to a blank line, or up to an indented line, are an item, joined with `join`."""
    return _blocks(pieces, join, indented_begins=True)


def _blocks(pieces: Iterable[str], join: str, indented_begins: bool) -> Iterator[Item]:
    block: list[str] = []
    begin, size = "", 0
    for line in numbered_lines(pieces):
        if line.problem:
            yield line
            continue
        ends = not line.value.strip()
        if block and (ends or (indented_begins and INDENTED.match(line.value))):
            yield _joined(begin, block, size, join)
            block, size = [], 0
        if ends:
            continue
        if not block:
            begin = line.where
        size += len(line.value) + 1
        if size <= ITEM_CHARS or not block:
            block.append(line.value.strip())
    if block:
        yield _joined(begin, block, size, join)


def _joined(begin: str, block: list[str], size: int, join: str) -> Item:
    if size > ITEM_CHARS:
        return Item(begin, block[0][:30], _too_long())
    return Item(begin, join.join(block))


def whole_item(pieces: Iterable[str]) -> Iterator[Item]:
    """The whole text is one item."""
    kept: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > ITEM_CHARS:
            yield Item("1", "".join(kept)[:30] or piece[:30], _too_long())
            for _ in pieces:  # read to the end, so that damage in the rest is detected
                pass
            return
        kept.append(piece)
    if "".join(kept).strip():
        yield Item("1", "".join(kept))


# ---- JSON


def record_lines(pieces: Iterable[str]) -> Iterator[Item]:
    """The lines of a file with a record a line, to be parsed; a comma at the end of a line is ignored."""
    for line in numbered_lines(pieces):
        if line.problem:
            yield line
        elif text := line.value.strip().removesuffix(","):
            yield Item(line.where, text)


def parsed(line: Item) -> Item:
    """The record of such a line, or the problem."""
    try:
        return Item(line.where, _loaded(line.value))
    except RecursionError:
        return Item(line.where, line.value[:30], "is nested too deeply")
    except ValueError as error:
        return Item(line.where, line.value[:30], f"is no JSON ({getattr(error, 'msg', error)})")


def _loaded(text: str) -> Any:
    """What DECODER gives, by orjson where the two agree: a string, or an object of strings and integers.

    orjson rounds long integers, takes no NaN and no raw line breaks in strings, and has other words for errors.
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return DECODER.decode(text)
    if type(value) is str or (type(value) is dict and _PLAIN.issuperset(map(type, value.values()))):
        return value
    return DECODER.decode(text)


def json_lines(pieces: Iterable[str]) -> Iterator[Item]:
    """The records of a file with a record a line."""
    return (line if line.problem else parsed(line) for line in record_lines(pieces))


def json_values(pieces: Iterable[str], name: str) -> Iterator[Item]:
    """The values of a top-level array, or of objects that follow each other in any layout.

    After a broken value, reading resumes at the next line that begins like the first value: same indentation, same
    character.

    Raises:
        UserError: an array without an end, or a broken value without such a line after it.
    """
    window = JsonWindow(iter(pieces))
    window.skip_blank()
    array = window.peek() == "["
    blanks = "\n"
    if array:
        window.position += 1
        blanks = window.skip_blank()
    margin = blanks.rpartition("\n")[2] + window.peek() if "\n" in blanks else ""
    number = 0
    while True:
        window.skip_blank()
        mark = window.peek()
        if mark == "" and not array:
            return
        if mark == "]" and array:
            window.position += 1
            window.skip_blank()
            if window.peek():
                raise UserError(f"{name}:{window.line}: something follows the array: {window.excerpt()!r}")
            return
        if mark == ",":
            window.position += 1
            continue
        number += 1
        where = f"{window.line}, item {number}"
        excerpt = window.excerpt()
        if mark == "":
            raise UserError(f"{name}:{where} is missing: the array is cut short, no ] at its end; get the file again")
        value, problem = _value(window)
        if not problem:
            yield Item(where, value)
            continue
        yield Item(where, excerpt, problem)
        if not (margin and window.skip_to("\n" + margin)):
            raise UserError(f"{name}:{where} {problem}, and nothing after it can be read: {excerpt!r}; repair the file")


def _value(window: JsonWindow) -> tuple[Any, str]:
    """Reads the value at the position and moves past it. Returns (value, ""), or (None, problem)."""
    while True:
        try:
            value, end = DECODER.raw_decode(window.text, window.position)
        except RecursionError:
            return None, "is nested too deeply"
        except ValueError as error:
            message, place = getattr(error, "msg", str(error)), getattr(error, "pos", 0)
            # an error near the window's end may be a value cut off there: the longest escape has 12 characters
            certain = "Unterminated" not in message and place < len(window.text) - 16
            if len(window.text) - window.position > ITEM_CHARS:
                return None, _too_long()
            if certain or not window.more():
                return None, f"is no JSON ({message})"
        else:
            window.position = end
            return value, ""
