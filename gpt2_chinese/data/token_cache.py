"""The token cache: a corpus as one memory-mapped array of ids, made once and shared by every process.

    NAME.bin       the ids, uint16 where the vocabulary fits, else uint32
    NAME.json      the header, sealed with a checksum of its own: counts, dtype, SHA-256 of each block of the .bin
    NAME.parts/    exists while the cache is made (token_shards.py)
    NAME.lock      locked while the cache is made; a second process waits; the file is kept

NAME is a hash of the corpus's content, of the vocabulary with its profile, and of FORMAT. So a changed file never uses an
old cache. Both files are renamed into their places, the header last. A cache that differs from its header in one bit is
made again, never used. To make a cache ahead of a run:

    bash scripts/python.sh -m gpt2_chinese.tokens --corpus data/train --vocab cache/vocab.txt
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from durable.files import write_flushed
from gpt2_chinese.corpus import corpus_files
from gpt2_chinese.data.sealed_json import file_digests, sealed, unsealed
from gpt2_chinese.data.token_shards import tokenise
from gpt2_chinese.errors import UserError, notice
from gpt2_chinese.locks import open_lock, try_lock, wait_for_lock
from gpt2_chinese.vocabulary.profiles import VocabularyFile, read_vocabulary

FORMAT = "gpt2_chinese tokens 2"
CACHE_VARIABLE = "GPT2_CHINESE_CACHE"


@dataclass(frozen=True)
class Tokens:
    """A tokenised corpus.

    Attributes:
        ids: (count,) uint16 or uint32, memory-mapped, read-only; documents one after the other, each with its marks.
        unknown: how many of the ids are the unknown token.
        path: the .bin file.
        documents, characters: of the corpus.
    """

    ids: np.ndarray
    unknown: int
    path: Path
    documents: int
    characters: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def unknown_rate(self) -> float:
        """Share of the ids that are the unknown token, 0 to 1."""
        return self.unknown / len(self)

    @property
    def characters_per_token(self) -> float:
        """Characters of text per id, the marks of documents left out."""
        return self.characters / max(1, len(self) - 2 * self.documents)


def cache_folders() -> list[Path]:
    """Folders of caches: $GPT2_CHINESE_CACHE, else cache/tokens of the repository and the user's cache folder."""
    root = Path(__file__).resolve().parents[2]
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt2_chinese" / "tokens"
    given = os.environ.get(CACHE_VARIABLE)
    return [Path(given)] if given else ([root / "cache" / "tokens"] if (root / "cache").is_dir() else []) + [user]


def writable_folder(corpus: Path | str, vocab: Path | str) -> Path:
    """The first of cache_folders() that is writable. Raises UserError, which says how to prepare this corpus elsewhere."""
    for folder in cache_folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise UserError(
        f"no writable folder for the tokens of {corpus}: set {CACHE_VARIABLE} (tried {cache_folders()[-1]}), or have them "
        f"prepared there: bash scripts/python.sh -m gpt2_chinese.tokens --corpus {corpus} --vocab {vocab}"
    )


def cache_key(corpus: Path | str, vocabulary: VocabularyFile) -> str:
    """Name of the cache of a corpus: a hash of content, not of paths or times."""
    parts = [FORMAT, vocabulary.digest]
    for file in corpus_files(corpus):
        try:
            parts += ["file", *file_digests(file)]
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}") from None
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def load_tokens(corpus: Path | str, vocab: Path | str, profile: str = "auto") -> Tokens:
    """The ids of a corpus, from the cache if that is complete, else tokenised now.

    Args:
        corpus: array-JSON file or folder.
        vocab, profile: the arguments of read_vocabulary.

    Raises:
        UserError: the corpus or the vocabulary is missing or bad, or the cache cannot be written.
    """
    vocabulary = read_vocabulary(vocab, profile)  # first: a missing vocabulary is reported before the corpus is read
    name = f"{cache_key(corpus, vocabulary)}.bin"
    for folder in cache_folders():  # a prepared cache may be in a read-only folder
        cached, parts = _open(folder / name), (folder / name).with_suffix(".parts")
        if cached is not None and not (parts.exists() and os.access(folder, os.W_OK)):
            return cached
    path = writable_folder(corpus, vocab) / name
    try:  # also if a cache exists: removes the parts that a process left which was killed after its last write
        with _locked_folder(path.with_suffix(".parts")) as (folder, lock):
            found = _open(path)  # another process may have made the cache while this process waited
            return _build(path, folder, corpus, vocabulary, lock) if found is None else found
    except OSError as error:
        if (cached := _open(path)) is not None:
            return cached
        raise UserError(
            f"the token cache {path} cannot be written: {error.strerror} (set {CACHE_VARIABLE} to another folder)"
        ) from None


def _open(path: Path) -> Tokens | None:
    """The cache at `path`, or None when it is missing, half-written or damaged."""
    try:
        header = unsealed(path.with_suffix(".json").read_bytes())
        if header is None or header["key"] != path.stem or file_digests(path) != header["blocks"]:
            return None
        ids = np.memmap(path, np.dtype(header["dtype"]), mode="r", shape=(header["count"],))
        return Tokens(ids, header["unknown"], path, header["documents"], header["characters"])
    except (OSError, KeyError, ValueError, TypeError):
        return None


def _build(path: Path, folder: Path, corpus: Path | str, vocabulary: VocabularyFile, lock: int) -> Tokens:
    """Makes the cache at `path`, its parts in `folder`, which the open `lock` protects. Raises UserError."""
    dtype = np.dtype(np.uint16 if len(vocabulary.entries) <= 1 << 16 else np.uint32)
    header = tokenise(folder, path.stem, corpus, vocabulary, dtype, lock)
    if cache_key(corpus, vocabulary) != path.stem:
        raise UserError(f"the corpus {corpus} was changed while it was read: start again")
    os.replace(folder / "whole.bin", path)
    write_flushed(path.with_suffix(".json"), sealed({**header, "key": path.stem, "dtype": dtype.name}))
    if (made := _open(path)) is None:
        raise UserError(f"the token cache {path} does not read back as written: is the disk sound?")
    return made


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[tuple[Path, int]]:
    """Makes a folder under a lock, and removes it at the end; a killed process leaves the folder and frees the lock.

    Yields the folder and the open lock.
    """
    handle = open_lock(folder.with_suffix(".lock"))
    try:
        if not try_lock(handle):
            notice(f"waiting for another process that makes the token cache {folder.with_suffix('.bin')}")
            wait_for_lock(handle)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            # where users share a cache, each may resume what another user's killed process has begun
            folder.chmod(folder.parent.stat().st_mode & 0o777)
        try:
            yield folder, handle
        except UserError:
            shutil.rmtree(folder)  # the corrected corpus will have a cache of another name
            raise
        shutil.rmtree(folder)
    finally:
        os.close(handle)
