"""Cleans the text of an item: removes characters that do not belong into text, cuts long texts, finds copies."""

from __future__ import annotations

import hashlib
import re
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_LINE_BREAK = re.compile("\r\n?|[\x85\u2028\u2029]")
_TAB = re.compile("[\t\v\f]")
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f]")
# No vocabulary has invisible characters (zero-width spaces, byte order marks); zero-width joiners stay, they build emoji.
_INVISIBLE = re.compile("[\u00ad\u200b\u2060\ufeff]")
# Traces of a broken encoding: the replacement character, halves of surrogate pairs, code points that are no characters.
_BROKEN = re.compile("[\ufffd\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
_UNUSUAL = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u00ad\u200b\u2028\u2029\u2060\ufeff\ufffd\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)


class Cleaned(NamedTuple):
    """A cleaned text, and how many characters were removed from it for each reason."""

    text: str
    control: int = 0
    broken: int = 0


def clean(text: str) -> Cleaned:
    r"""Turns line breaks into `\n`, tabs into blanks; drops control, invisible, broken characters, and blanks at both ends.

    Full-width punctuation and blanks inside stay as they are.
    """
    if not _UNUSUAL.search(text):  # nearly every text
        return Cleaned(text.strip())
    text = _TAB.sub(" ", _LINE_BREAK.sub("\n", text))
    text, control = _CONTROL.subn("", text)
    text, invisible = _INVISIBLE.subn("", text)
    text, broken = _BROKEN.subn("", text)
    return Cleaned(text.strip(), control + invisible, broken)


_SENTENCE_END = re.compile("[。！？!?；;…][”’」』）)]*")


def split_long(text: str, longest: int) -> Iterator[str]:
    """Cuts a text into pieces of at most `longest` characters: at a line break, else after a sentence, else anywhere."""
    start = 0
    while len(text) - start > longest:
        cut = text.rfind("\n", start + 1, start + longest)
        if cut < 0:
            ends = [match.end() for match in _SENTENCE_END.finditer(text, start, start + longest)]
            cut = ends[-1] if ends else start + longest
        if piece := text[start:cut].strip():
            yield piece
        start = cut
    if piece := text[start:].strip():
        yield piece


def content_hash(text: str) -> bytes:
    """SHA-256 of a text, 32 bytes; the same on every machine, now and later."""
    return hashlib.sha256(text.encode("utf-8")).digest()


def seen_number(digest: bytes) -> int:
    """The 8 bytes of a content_hash by which Seen knows a text."""
    return int.from_bytes(digest[8:16], "big", signed=True)


def is_validation(digest: bytes, share: float) -> bool:
    """True for about `share` (0 to 1) of all texts; a function of the text alone. digest: its content_hash."""
    return int.from_bytes(digest[:8], "big") % 10_000 < round(share * 10_000, 6)  # 0.9 % is 0.9 / 100, rounded


class Seen:
    """The texts seen so far, each as 8 bytes of its hash, in a table on disk.

    A set in memory would grow with the corpus (50 to 100 bytes a text in Python). The table uses 2 MB of memory, its cache.
    It is in the staging folder and removed after the conversion, so it is neither journalled nor synced. With n texts the
    chance that any two are confused is n^2 / 2^65: 1 in 370,000 for 10 million texts.
    """

    def __init__(self, path: Path) -> None:
        self._table = sqlite3.connect(path, isolation_level=None)
        for line in ("journal_mode = OFF", "synchronous = OFF", "locking_mode = EXCLUSIVE", "cache_size = -2048"):
            self._table.execute(f"PRAGMA {line}")
        self._table.execute("CREATE TABLE seen (number INTEGER PRIMARY KEY, place INTEGER)")
        self._table.execute("BEGIN")
        self._count = 0

    def add(self, numbers: Sequence[int]) -> list[bool]:
        """Adds texts by their seen_number; False for each text that was added before, also at an earlier place of the list.

        A number keeps the place at which it was added first. So the table is asked only if a number is missing among those
        that were new, which is rare.
        """
        first, self._count = self._count, self._count + len(numbers)
        rows = sorted(zip(numbers, range(first, self._count), strict=True))
        new = self._table.executemany("INSERT OR IGNORE INTO seen VALUES (?, ?)", rows).rowcount
        if new == len(numbers):
            return [True] * new
        find = "SELECT place FROM seen WHERE number = ?"
        return [self._table.execute(find, (number,)).fetchone()[0] == place for place, number in enumerate(numbers, first)]

    def close(self) -> None:
        """Closes the file; the caller deletes it."""
        self._table.close()
