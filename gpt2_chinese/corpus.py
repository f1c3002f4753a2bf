"""Reads a corpus: files of array-JSON, one paragraph an item, or folders of such files."""

from __future__ import annotations

import codecs
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from gpt2_chinese.errors import UserError
from gpt2_chinese.files import kind, reason

_PIECE_BYTES = 1 << 20
_BLANK = " \t\r\n"
_CONVERTIBLE = {".jsonl", ".ndjson", ".txt", ".text", ".gz", ".tgz", ".tar", ".zip"}


def _how_to_convert(path: Path) -> str:
    return f"convert it first with `python -m gpt2_chinese.corpora convert {shlex.quote(str(path))} --output FOLDER`"
_LARGEST_ITEM = 1 << 24  # characters; a larger one is a quotation mark that is missing, and must not fill the memory


def corpus_files(path: Path | str) -> list[Path]:
    """The files of a corpus, in order of their names.

    Raises:
        UserError: no such path, a pipe or a device, or a folder without `*.json` files.
    """
    path = Path(path)
    found = kind(path, f"corpus {path}")
    if found == "file":
        if path.suffix.lower() in _CONVERTIBLE:
            raise UserError(f"corpus {path} is no array-JSON file: {_how_to_convert(path)}")
        return [path]
    if found == "missing":
        raise UserError(f"corpus {path} does not exist: give an array-JSON file or a folder of them")
    files = sorted(file for file in path.glob("*.json") if file.is_file())
    if not files and any(file.suffix.lower() in _CONVERTIBLE for file in path.rglob("*")):
        raise UserError(f"corpus folder {path} holds no .json file: {_how_to_convert(path)}")
    if not files:
        raise UserError(f"corpus folder {path} holds no .json file: put array-JSON files there, one paragraph an item")
    return files


def read_paragraphs(path: Path | str) -> Iterator[str]:
    """Yields the paragraphs of a corpus, file by file, without ever holding a whole file in memory.

    Raises:
        UserError: missing or empty corpus; a file that is not an array of strings (with file, item and an excerpt).
    """
    empty = True
    for file in corpus_files(path):
        for paragraph in read_file(file):
            empty = False
            yield paragraph
    if empty:
        raise UserError(f"corpus {path} is empty: it holds no paragraph")


def stretches(texts: Iterator[str], characters: int) -> Iterator[list[str]]:
    """Yields lists of consecutive texts, each ended by the text with which it reaches so many characters."""
    group: list[str] = []
    length = 0
    for text in texts:
        group.append(text)
        length += len(text)
        if length >= characters:
            yield group
            group, length = [], 0
    if group:
        yield group


def read_file(file: Path) -> Iterator[str]:
    """Yields the strings of one array-JSON file; items are counted from 1 in errors."""
    decode = json.JSONDecoder().raw_decode
    reader = _Window(file)
    reader.skip_blank()
    if reader.take() != "[":
        begins = reader.excerpt(back=1)
        raise UserError(f"{file} is not a JSON array of strings: it begins with {begins!r}; {_advice(file, begins)}")
    item = 0
    while True:
        item += 1
        reader.skip_blank()
        if reader.peek() == "]" and item == 1:
            reader.take()
            break
        if reader.peek() != '"':
            what = (
                "is missing (a comma too many, or a file cut short)" if reader.peek() in ("]", "") else "is no string"
            )
            excerpt = reader.excerpt()
            advice = "; " + _advice(file, excerpt, "every item is one paragraph in quotation marks") if excerpt else ""
            raise UserError(f"{file}: item {item} {what}: {excerpt!r}{advice}")
        while True:
            try:
                text, end = decode(reader.text, reader.position)
                break
            except json.JSONDecodeError as error:
                if len(reader.text) - reader.position > _LARGEST_ITEM:
                    raise UserError(
                        f"{file}: item {item} is longer than {_LARGEST_ITEM:,} characters, as if a quotation mark were "
                        f"missing: {reader.excerpt()!r}"
                    ) from None
                if not reader.more():  # the string may only have been cut at the edge of the window
                    raise UserError(f"{file}: item {item} is broken ({error.msg}): {reader.excerpt()!r}") from None
        reader.position = end
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(
                f"{file}: item {item} has a \\ud800 to \\udfff alone, which is half a character: {text[:30]!r}"
            ) from None
        yield text
        reader.skip_blank()
        mark = reader.take()
        if mark == "]":
            break
        if mark != ",":
            raise UserError(f"{file}: after item {item} a comma or ] is missing: {text[:30]!r}")
    reader.skip_blank()
    if reader.peek():
        raise UserError(f"{file}: something follows the array: {reader.excerpt()!r}; a file holds one array")


def _advice(file: Path, begins: str, otherwise: str = "") -> str:
    """What to do about a text that begins like this, where an array or a string should."""
    if begins.startswith(("//", "/*", "#")):
        return "JSON has no comments: remove them"
    if begins.startswith("{"):
        return _how_to_convert(file)
    return (otherwise or _how_to_convert(file)) if begins.strip() else "it is empty"


class _Window:
    """A stretch of a text file around the place where the parser stands."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.text = ""
        self.position = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            self._stream = file.open("rb")
        except OSError as error:
            raise UserError(f"cannot read {file}: {reason(error)}") from None
        if self.peek() == "\ufeff":
            self.position = 1

    def more(self) -> bool:
        """Reads on; forgets what lies behind the position. False at the end of the file."""
        try:
            piece = b"" if self._stream.closed else self._stream.read(_PIECE_BYTES)
        except OSError as error:
            raise UserError(f"cannot read {self.file}: {reason(error)}") from None
        try:
            added = self._decoder.decode(piece, final=not piece)
        except UnicodeDecodeError:
            raise UserError(f"{self.file} is not UTF-8 text: save it as UTF-8") from None
        self.text, self.position = self.text[self.position :] + added, 0
        if not piece:
            self._stream.close()
        return bool(piece)

    def peek(self) -> str:
        """The next character, or "" at the end."""
        while self.position >= len(self.text):
            if not self.more():
                return ""
        return self.text[self.position]

    def take(self) -> str:
        """The next character, stepped over."""
        character = self.peek()
        self.position += len(character)
        return character

    def skip_blank(self) -> None:
        """Steps over blanks and line breaks."""
        while (character := self.peek()) and character in _BLANK:
            self.position += 1

    def excerpt(self, back: int = 0) -> str:
        """Thirty characters from the position on."""
        start = max(0, self.position - back)
        return self.text[start : start + 30]
