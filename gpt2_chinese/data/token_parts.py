"""Tokenises a group of a corpus's files part by part; token_shards.py says what the files of the parts are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from durable.files import write_flushed
from gpt2_chinese.corpus import read_file, stretches
from gpt2_chinese.data.sealed_json import sealed, unsealed
from gpt2_chinese.errors import UserError
from gpt2_chinese.vocabulary.profiles import VocabularyFile
from gpt2_chinese.vocabulary.vocabulary import Vocabulary

PART_CHARACTERS = 1 << 22  # about 12 MB of text: a kill loses a quarter of a second of work
GROUP_BYTES = 1 << 25
_CHARACTERS_AT_ONCE = 1 << 17  # in the library a token takes about 200 bytes
SUMS = ("documents", "characters", "count", "unknown")


class Job(NamedTuple):
    """What every process must know to tokenise a group.

    Attributes:
        folder: for the parts; no other job may write there.
        key: the key of corpus and vocabulary; parts of another key are not used.
        groups: the files of each group.
        vocabulary: encodes the documents.
        dtype: of the ids on the disk.
    """

    folder: Path
    key: str
    groups: list[list[Path]]
    vocabulary: VocabularyFile
    dtype: np.dtype


class Group(NamedTuple):
    """A tokenised group: the headers of its parts, and how many of them an earlier process had finished."""

    parts: list[dict[str, Any]]
    reused: int


def file_groups(files: list[Path]) -> list[list[Path]]:
    """Lists of consecutive files; a list ends with the file that brings it to GROUP_BYTES."""
    groups: list[list[Path]] = []
    size = GROUP_BYTES
    for file in files:
        if size >= GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.stat().st_size
    return groups


def tokenise_group(job: Job, number: int, vocabulary: Vocabulary, progress: Callable[[int], None]) -> Group:
    """Makes the parts of a group, except those that exist. Raises as `tokenise`.

    Args:
        vocabulary: the one of the job.
        progress: called with numbers of bytes of the corpus that are done.
    """
    paragraphs = _counted(job.groups[number], progress)
    parts: list[dict[str, Any]] = []
    reused = 0
    while True:
        path = job.folder / f"{number:05d}-{len(parts):06d}.bin"
        part = _finished(path, job.key)
        if part is None:
            part = _make(path, job, paragraphs, vocabulary)
        else:
            reused += sum(1 for _ in islice(paragraphs, part["documents"])) > 0
        if not part["documents"]:
            return Group(parts, reused)
        parts.append(part)


def _counted(files: list[Path], progress: Callable[[int], None]) -> Iterator[str]:
    """Yields the paragraphs of files, and calls progress with their bytes, about 1 MB at a time."""
    count = 0
    for paragraph in chain.from_iterable(map(read_file, files)):
        count += len(paragraph.encode()) + 4  # quotes, comma, line break
        if count >= 1 << 20:
            progress(count)
            count = 0
        yield paragraph
    progress(count)


def _finished(path: Path, key: str) -> dict[str, Any] | None:
    """The header of a part that exists and matches its checksum, else None."""
    try:
        part = unsealed(path.with_suffix(".json").read_bytes())
        if part and part["key"] == key and hashlib.sha256(path.read_bytes()).hexdigest() == part["sha256"]:
            return part
    except (OSError, KeyError):
        pass
    return None


def _make(path: Path, job: Job, paragraphs: Iterator[str], vocabulary: Vocabulary) -> dict[str, Any]:
    """Tokenises the next documents; writes the part unless there are none. Returns its header."""
    documents = characters = unknown = 0
    arrays: list[np.ndarray] = []
    for texts in stretches(paragraphs, _CHARACTERS_AT_ONCE):
        documents, characters = documents + len(texts), characters + sum(map(len, texts))
        ids = vocabulary.document_ids(texts)
        if ids.max() >= vocabulary.size:
            raise UserError(f"the vocabulary gives id {ids.max()}, above its size {vocabulary.size}")
        if vocabulary.unk_id is not None:
            unknown += int(np.count_nonzero(ids == vocabulary.unk_id))
        arrays.append(ids.astype(job.dtype))
        if characters >= PART_CHARACTERS:
            break
    data = np.concatenate(arrays) if arrays else np.empty(0, job.dtype)
    part = {"key": job.key, "sha256": hashlib.sha256(data).hexdigest()}
    part |= dict(zip(SUMS, (documents, characters, len(data), unknown), strict=True))
    if documents:
        write_flushed(path, data)
        write_flushed(path.with_suffix(".json"), sealed(part))
    return part
