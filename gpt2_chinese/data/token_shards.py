"""Tokenises a corpus part by part, so that a killed process can be resumed; in the end the parts become one file.

    000000.bin     the ids of the first documents, together about PART_CHARACTERS characters
    000000.json    sealed: how many documents, characters and ids, SHA-256 of the .bin
    000001.bin ...
    whole.bin      the parts one after the other, renamed when it is complete

The end of a part depends on the corpus alone. So a finished part is skipped by reading its documents, fifty times as fast
as tokenising them. A part that does not match its checksum is made again. Memory is constant: some documents, their tokens,
the ids of a part. The threads of the tokenizers library use all cores, so no processes are needed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from durable.files import write_flushed
from gpt2_chinese.corpus import corpus_files, read_paragraphs, stretches
from gpt2_chinese.data.sealed_json import block_digests, sealed, unsealed
from gpt2_chinese.errors import UserError, notice
from gpt2_chinese.progress import ByteProgress
from gpt2_chinese.vocabulary.vocabulary import Vocabulary

PART_CHARACTERS = 1 << 19  # about 1.5 MB of text: a kill loses a second of work
_CHARACTERS_AT_ONCE = 1 << 17  # enough to keep many cores busy; in the Rust library a token takes about 200 bytes
SUMS = ("documents", "characters", "count", "unknown")


def tokenise(folder: Path, key: str, corpus: Path | str, vocabulary: Vocabulary, dtype: np.dtype) -> dict[str, Any]:
    """Makes `folder`/whole.bin and returns its header: documents, characters, count, unknown, blocks.

    Args:
        folder: for the parts; no other process may write there.
        key: the key of corpus and vocabulary; parts of another key are not used.
        corpus: array-JSON file or folder.
        vocabulary: encodes the documents.
        dtype: of the ids on the disk.

    Raises:
        UserError: a bad corpus, a vocabulary that gives impossible ids, or a part that changed on the disk.
        OSError: the disk is full, or fails.
    """
    progress = ByteProgress(sum(file.stat().st_size for file in corpus_files(corpus)), "tokenising")
    paragraphs = _counted(corpus, progress)
    parts: list[dict[str, Any]] = []
    reused = 0
    try:
        while True:
            part = _finished(folder, key, len(parts))
            if part is None:
                part = _make(folder, key, len(parts), paragraphs, vocabulary, dtype)
            else:
                reused += sum(1 for _ in islice(paragraphs, part["documents"])) > 0
            if not part["documents"]:
                break
            parts.append(part)
    finally:
        progress.close()
    if reused:
        notice(f"tokenising resumed after an interruption: {reused} of {len(parts)} parts were finished")
    (folder / "whole.bin").unlink(missing_ok=True)  # left by another user's killed process
    with (folder / "whole.bin").open("wb") as stream:
        blocks = block_digests(_copied(folder, parts, stream))
        stream.flush()
        os.fsync(stream.fileno())
    return {name: sum(part[name] for part in parts) for name in SUMS} | {"blocks": blocks}


def _counted(corpus: Path | str, progress: ByteProgress) -> Iterator[str]:
    """Yields the paragraphs of a corpus, and advances the progress bar by their bytes."""
    for paragraph in read_paragraphs(corpus):
        progress.add(len(paragraph.encode()) + 4)  # quotes, comma, line break
        yield paragraph


def _finished(folder: Path, key: str, number: int) -> dict[str, Any] | None:
    """The header of a part that exists and matches its checksum, else None."""
    path = folder / f"{number:06d}.bin"
    try:
        part = unsealed(path.with_suffix(".json").read_bytes())
        if part and part["key"] == key and hashlib.sha256(path.read_bytes()).hexdigest() == part["sha256"]:
            return part
    except (OSError, KeyError):
        pass
    return None


def _make(
    folder: Path, key: str, number: int, paragraphs: Iterator[str], vocabulary: Vocabulary, dtype: np.dtype
) -> dict[str, Any]:
    """Tokenises the next documents; writes the part unless there are none. Returns its header."""
    documents, arrays, characters = 0, [], 0
    for texts in stretches(paragraphs, _CHARACTERS_AT_ONCE):
        documents, characters = documents + len(texts), characters + sum(map(len, texts))
        arrays.append(np.fromiter(chain.from_iterable(vocabulary.encode_documents(texts)), np.uint32))
        if characters >= PART_CHARACTERS:
            break
    ids = np.concatenate(arrays) if arrays else np.empty(0, np.uint32)
    if len(ids) and ids.max() >= vocabulary.size:
        raise UserError(f"the vocabulary gives id {ids.max()}, above its size {vocabulary.size}")
    unknown = 0 if vocabulary.unk_id is None else int((ids == vocabulary.unk_id).sum())
    data = ids.astype(dtype).tobytes()
    part = {"key": key, "sha256": hashlib.sha256(data).hexdigest()}
    part |= dict(zip(SUMS, (documents, characters, len(ids), unknown), strict=True))
    if documents:
        path = folder / f"{number:06d}.bin"
        write_flushed(path, data)
        write_flushed(path.with_suffix(".json"), sealed(part))
    return part


def _copied(folder: Path, parts: list[dict[str, Any]], stream: Any) -> Iterator[bytes]:
    """Yields the content of each part, written to the stream."""
    for number, part in enumerate(parts):
        path = folder / f"{number:06d}.bin"
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != part["sha256"]:
            raise UserError(f"{path} changed after it was written: start again; if it happens again, the disk is unsound")
        stream.write(data)
        yield data
