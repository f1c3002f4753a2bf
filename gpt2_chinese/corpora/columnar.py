"""Reads Parquet and Arrow files as records, in constant memory: what Hugging Face's `datasets` and its hub store.

    data/train-00000-of-00005.parquet      the files of a cloned data set
    mine/train/data-00000-of-00001.arrow   what `Dataset.save_to_disk` writes; load_dataset's cache has such files, too

pyarrow (the extra `parquet`) decodes a few rows at a time. Of a row only the columns are read that hold text by their names,
those of records.py, so pictures and embeddings cost nothing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from gpt2_chinese.corpora.formats import ITEM_CHARS, Item
from gpt2_chinese.errors import UserError

SUFFIXES = (".parquet", ".arrow")
ROWS = 256  # decoded at a time; a row of 8 million characters is the longest that is taken
COLUMNS = ("text", "content", "title", "desc", "answer", "qid", "news_id", "star", "answer_id", "chinese", "english",
           "sentence", "sentence1", "sentence2")  # fmt: skip

# Next to the .arrow files of `datasets`: JSON that is no text, and results of map(), which repeat the data.
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_CACHE = "cache-"
_POINTER = b"version https://git-lfs.github.com/spec/"


def belongs_to_datasets(file: Path) -> bool:
    """True for a file that `datasets` keeps beside its data, and that is none of the data."""
    if file.name in _DESCRIPTIONS:
        return file.name != "state.json" or file.with_name("dataset_info.json").is_file()
    return file.suffix.lower() == ".arrow" and file.name.startswith(_CACHE)


def kind_of(first: bytes, name: str) -> str:
    """The kind of a file by its first bytes: "parquet", "arrow-file", "arrow-stream", "" for another file.

    Raises:
        UserError: a name that ends in .parquet or .arrow, and other bytes.
    """
    if first.startswith(b"PAR1"):
        return "parquet"
    if first.startswith(b"ARROW1"):
        return "arrow-file"
    if first.startswith(b"\xff\xff\xff\xff"):
        return "arrow-stream"
    if name.lower().endswith(SUFFIXES):
        if first.startswith(_POINTER):
            raise UserError(f"{name} is a pointer of Git LFS, not the file: get the file itself by `git lfs pull`")
        what = name.rpartition(".")[2].lower()
        begins = f"it begins with {first[:8]!r}" if first else "it is empty"
        raise UserError(f"{name} is no {what} file: {begins}; get it again, or give it the name of what it is")
    return ""


def check_reader(names: list[str]) -> None:
    """Raises UserError when one of the files needs pyarrow, and it is not there."""
    needs = next((name for name in names if name.lower().endswith(SUFFIXES)), None)
    if needs is not None and importlib.util.find_spec("pyarrow") is None:
        raise UserError(f'{needs} needs pyarrow, which is not installed: pip install -e ".[parquet]"')


class Table:
    """An open Parquet or Arrow file.

    Attributes:
        names: of all its columns.
    """

    def __init__(self, stream: BinaryIO, kind: str, name: str) -> None:
        """stream: at its beginning; seekable for "parquet" and "arrow-file". Raises UserError for a damaged file."""
        check_reader([f"{name}.{kind}"] if kind == "parquet" else [f"{name}.arrow"])
        self.name, self._kind = name, kind
        self._file = self._guarded(lambda: _opened(stream, kind))
        schema = self._guarded(lambda: self._file.schema_arrow if kind == "parquet" else self._file.schema)
        self.names: list[str] = self._guarded(lambda: schema.names)

    def records(self, field: str) -> Iterator[Item]:
        """A record a row, with the columns COLUMNS and `field` that the file has; strings that are not UTF-8 get U+FFFD.

        Raises:
            UserError: the file is damaged; two columns have one of these names.
        """
        wanted = [column for column in dict.fromkeys((*COLUMNS, field)) if column in self.names]
        twice = next((column for column in wanted if self.names.count(column) > 1), None)
        if twice is not None:
            raise UserError(f"{self.name} has two columns {twice!r}: rename one of them")
        batches, number = self._batches(wanted), 0
        while (batch := self._guarded(lambda: next(batches, None))) is not None:
            for start in range(0, batch.num_rows, ROWS):
                part = batch.slice(start, ROWS)
                columns = self._guarded(lambda part=part: [_values(part.column(column)) for column in wanted])
                for values in zip(*columns, strict=True):
                    number += 1
                    record = dict(zip(wanted, values, strict=True))
                    longest = max((value for value in values if isinstance(value, str)), key=len, default="")
                    problem = f"is longer than {ITEM_CHARS:,} characters" if len(longest) > ITEM_CHARS else ""
                    yield Item(f"row {number}", longest[:30] if problem else record, problem)

    def _batches(self, wanted: list[str]) -> Iterator[Any]:
        """Record batches with the wanted columns. Those of an Arrow file have the size that its writer gave them."""
        if self._kind == "parquet":
            yield from self._file.iter_batches(batch_size=ROWS, columns=wanted, use_threads=False)
            return
        batches = self._file if self._kind == "arrow-stream" else (
            self._file.get_batch(number) for number in range(self._file.num_record_batches))  # fmt: skip
        for batch in batches:
            yield batch.select(wanted)

    def _guarded(self, act: Callable[[], Any]) -> Any:
        """Calls `act`; every error of the library becomes a UserError that names the file."""
        try:
            return act()
        except UserError:
            raise
        except Exception as error:  # pyarrow raises ArrowException, OSError, and others for damaged metadata
            message = " ".join(str(error).split())[:120] or type(error).__name__
            raise UserError(f"{self.name} is damaged, cut short or encrypted ({message}): get it again") from None


def _opened(stream: BinaryIO, kind: str) -> Any:
    import pyarrow
    from pyarrow import ipc, parquet

    if kind == "parquet":  # a buffer: pages come one by one, not a whole column of a row group
        return parquet.ParquetFile(stream, buffer_size=1 << 20, pre_buffer=False)
    source = pyarrow.PythonFile(stream, "r")
    return ipc.open_file(source) if kind == "arrow-file" else ipc.open_stream(source)


def _values(column: Any) -> list[Any]:
    """The values of a part of a column. Offsets are checked first: a damaged file must not lead beyond its memory."""
    import pyarrow

    types = pyarrow.types
    column.validate()
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    strings = types.is_string(column.type) or types.is_large_string(column.type)
    if strings:  # bytes first: one string that is not UTF-8 would cost the whole column
        column = column.cast(pyarrow.large_binary() if types.is_large_string(column.type) else pyarrow.binary())
    column.validate(full=True)
    values = column.to_pylist()
    return [None if value is None else value.decode("utf-8", "replace") for value in values] if strings else values
