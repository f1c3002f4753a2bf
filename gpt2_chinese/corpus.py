"""Reads a corpus: files of array-JSON, one paragraph an item, or folders of such files."""

from __future__ import annotations

import codecs
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

try:
    import orjson
except ModuleNotFoundError:  # a machine with a GPU and nothing of ours: its benchmarks read small corpora
    orjson = None

from gpt2_chinese.errors import UserError
from gpt2_chinese.files import display, kind, reason

_PIECE_BYTES = 1 << 20
_BLANK = " \t\r\n"
_CONVERTIBLE = {".jsonl", ".ndjson", ".txt", ".text", ".gz", ".tgz", ".tar", ".zip", ".parquet", ".arrow"}


_LARGEST_ITEM = 1 << 24  # characters; a longer item means a missing quotation mark, and must not fill the memory


def _how_to_convert(path: Path) -> str:
    """The command for a fresh shell, which has no environment on its PATH."""
    python = shlex.quote(str(display(Path(__file__).resolve().parents[1] / "scripts/python.sh")))
    given = shlex.quote(str(path))
    return f"convert it first with `bash {python} -m gpt2_chinese.corpora convert {given} --output FOLDER`"


def corpus_files(path: Path | str) -> list[Path]:
    """The files of a corpus, in order of their names: of a folder, or, if it has none of its own, of its sub-folders.

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
    if (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file():
        raise UserError(f"corpus folder {path} is a data set of Hugging Face: {_how_to_convert(path)}")
    files = sorted(file for file in path.glob("*.json") if file.is_file())
    files = files or sorted(file for file in path.glob("*/*.json") if file.is_file())
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
    """Yields lists of consecutive texts; a list ends with the text that brings it to at least so many characters."""
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
    reader = JsonWindow(_pieces(file))
    if reader.peek() == "\ufeff":
        reader.take()
    reader.skip_blank()
    if reader.take() != "[":
        begins = reader.excerpt(back=1)
        raise UserError(f"{file} is not a JSON array of strings: it begins with {begins!r}; {_advice(file, begins)}")
    item, tried = 0, ""
    while True:
        reader.skip_blank()
        if reader.text is not tried:  # once for each window
            tried = reader.text
            many = _many_items(reader)
            item += len(many)
            yield from many
            reader.skip_blank()
        item += 1
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
                if not reader.more():  # at the end of the window the string may only be cut off
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


def _many_items(reader: JsonWindow) -> list[str]:
    """Reads the items of the window up to its last string that a comma follows, and moves past this comma.

    Returns nothing, and moves nowhere, where orjson finds anything but strings there: then items are read one by one, which
    names the wrong one. A comma inside the last string does no harm either: then the text before it is no valid array.
    """
    end = reader.text.rfind('",', reader.position) + 1
    if not end or orjson is None:
        return []
    try:
        items = orjson.loads(f"[{reader.text[reader.position : end]}]")
    except orjson.JSONDecodeError:
        return []
    if set(map(type, items)) != {str}:
        return []
    reader.position = end + 1
    return items


def _advice(file: Path, begins: str, otherwise: str = "") -> str:
    """The advice for a text that begins with `begins` instead of an array or a string."""
    if begins.startswith(("//", "/*", "#")):
        return "JSON has no comments: remove them"
    if begins.startswith("{"):
        return _how_to_convert(file)
    return (otherwise or _how_to_convert(file)) if begins.strip() else "it is empty"


def _pieces(file: Path) -> Iterator[str]:
    """The text of a file, piece by piece. Raises UserError where it cannot be read or is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with file.open("rb") as stream:
            while True:
                data = stream.read(_PIECE_BYTES)
                if text := decoder.decode(data, final=not data):
                    yield text
                if not data:
                    return
    except OSError as error:
        raise UserError(f"cannot read {file}: {reason(error)}") from None
    except UnicodeDecodeError:
        raise UserError(f"{file} is not UTF-8 text: save it as UTF-8") from None


class JsonWindow:
    """The part of a text around a parser's position.

    Args:
        pieces: the text in pieces, none of them empty.
    """

    def __init__(self, pieces: Iterator[str]) -> None:
        self.text, self.position, self._pieces = "", 0, pieces
        self._line, self._counted = 1, 0  # the line number at index _counted of the text

    @property
    def line(self) -> int:
        """The line of the position, counted from 1."""
        self._line += self.text.count("\n", self._counted, self.position)
        self._counted = self.position
        return self._line

    def more(self) -> bool:
        """Drops the text before the position, then reads at least as many characters as are left. False at the end."""
        self._line, self._counted = self.line, 0
        kept = self.text[self.position :]
        added: list[str] = []
        size = 0
        for piece in self._pieces:
            added.append(piece)
            size += len(piece)
            if size >= len(kept):
                break
        self.text, self.position = kept + "".join(added), 0
        return bool(size)

    def peek(self) -> str:
        """The next character, or "" at the end."""
        while self.position >= len(self.text):
            if not self.more():
                return ""
        return self.text[self.position]

    def take(self) -> str:
        """Returns the next character and moves past it."""
        character = self.peek()
        self.position += len(character)
        return character

    def skip_blank(self) -> str:
        """Moves past blanks and line breaks; returns the last line break and the blanks after it."""
        blanks = ""
        while (mark := self.peek()) and mark in _BLANK:
            blanks = mark if mark == "\n" else (blanks + mark)[-1000:]
            self.position += 1
        return blanks

    def skip_to(self, text: str) -> bool:
        """Finds the next `text`, which begins with a line break, and moves past that break. False when there is none."""
        while True:
            found = self.text.find(text, self.position)
            if found >= 0:
                self.position = found + 1
                return True
            self.position = max(self.position, len(self.text) - len(text))
            if not self.more():
                return False

    def excerpt(self, back: int = 0) -> str:
        """Thirty characters, beginning `back` characters before the position."""
        start = max(0, self.position - back)
        return self.text[start : start + 30]
