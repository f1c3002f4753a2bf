"""Tokenises a corpus part by part, so that a killed process can be resumed; in the end the parts become one file.

    00000-000000.bin     group 0, part 0: the ids of some documents, together about PART_CHARACTERS characters
    00000-000000.json    sealed: how many documents, characters and ids, SHA-256 of the .bin
    00000-000001.bin ...
    00001-000000.bin ... group 1: other files of the corpus
    whole.bin            the parts one after the other, renamed when it is complete

A group is consecutive files of the corpus, together about GROUP_BYTES. Groups and parts depend on the corpus alone, so a
finished part is skipped by reading its documents; one that does not match its checksum is made again. From PARALLEL_BYTES
on processes share the groups, one a core (token_workers.py). Memory is constant: some documents, the ids of a part.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from durable.cores import num_cores
from gpt2_chinese.corpus import corpus_files
from gpt2_chinese.data.sealed_json import block_digests
from gpt2_chinese.data.token_parts import SUMS, Group, Job, file_groups, tokenise_group
from gpt2_chinese.data.token_workers import tokenise_in_processes
from gpt2_chinese.errors import UserError, notice
from gpt2_chinese.progress import ByteProgress
from gpt2_chinese.vocabulary.profiles import VocabularyFile
from gpt2_chinese.vocabulary.vocabulary import Vocabulary

PARALLEL_BYTES = 1 << 26  # of a smaller corpus one process is done before others have started


def tokenise(
    folder: Path, key: str, corpus: Path | str, vocabulary: VocabularyFile, dtype: np.dtype, lock: int | None = None
) -> dict[str, Any]:
    """Makes `folder`/whole.bin and returns its header: documents, characters, count, unknown, blocks.

    Args:
        folder, key, vocabulary, dtype: of the Job.
        corpus: array-JSON file or folder.
        lock: the open lock of the folder; the processes keep it, so that it is free only after the last has ended.

    Raises:
        UserError: a bad corpus, a vocabulary that gives impossible ids, or a part that changed on the disk.
        OSError: the disk is full, or fails.
    """
    files = corpus_files(corpus)
    job = Job(folder, key, file_groups(files), vocabulary, dtype)
    total = sum(file.stat().st_size for file in files)
    progress = ByteProgress(total, "tokenising")
    try:
        if total >= PARALLEL_BYTES and len(job.groups) > 1 and (cores := num_cores()) > 1:
            groups = tokenise_in_processes(job, min(cores, len(job.groups)), progress.add, lock)
        else:
            encoder = Vocabulary(vocabulary)
            groups = [tokenise_group(job, number, encoder, progress.add) for number in range(len(job.groups))]
    finally:
        progress.close()
    parts = [part for group in groups for part in group.parts]
    if not parts:
        raise UserError(f"corpus {corpus} is empty: it holds no paragraph")
    if reused := sum(group.reused for group in groups):
        notice(f"tokenising resumed after an interruption: {reused} of {len(parts)} parts were finished")
    (folder / "whole.bin").unlink(missing_ok=True)  # left by another user's killed process
    with (folder / "whole.bin").open("wb") as stream:
        blocks = block_digests(_copied(folder, groups, stream))
        stream.flush()
        os.fsync(stream.fileno())
    return {name: sum(part[name] for part in parts) for name in SUMS} | {"blocks": blocks}


def _copied(folder: Path, groups: list[Group], stream: Any) -> Iterator[bytes]:
    """Yields the content of each part, written to the stream."""
    for number, group in enumerate(groups):
        for place, part in enumerate(group.parts):
            path = folder / f"{number:05d}-{place:06d}.bin"
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != part["sha256"]:
                advice = "start again; if it happens again, the disk is unsound"
                raise UserError(f"{path} changed after it was written: {advice}")
            stream.write(data)
            yield data
