"""The token cache: a corpus as one memory-mapped array of ids, made once and shared by every process.

    NAME.bin    the ids, uint16 where the vocabulary fits, else uint32
    NAME.json   the header: count, dtype, unknown tokens, SHA-256 of the .bin

NAME is a hash of the content of corpus and vocabulary and of FORMAT, so a changed file can never meet an old cache.
Both files are written beside and renamed, the header last: several processes may start at once, each writes the same
bytes, and whoever renames last changes nothing. What does not match its header is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from gpt2_chinese.corpus import corpus_files, read_paragraphs
from gpt2_chinese.errors import UserError
from gpt2_chinese.vocabulary import LAYOUT, Vocabulary, vocabulary_size

FORMAT = f"gpt2_chinese tokens 1: {LAYOUT}"
CACHE_VARIABLE = "GPT2_CHINESE_CACHE"
_DOCUMENTS_AT_ONCE = 1024


@dataclass(frozen=True)
class Tokens:
    """A tokenised corpus.

    Attributes:
        ids: (count,) uint16 or uint32, memory-mapped, read-only; documents one after the other, each with its marks.
        unknown: how many of the ids are the unknown token.
        path: the .bin file.
    """

    ids: np.ndarray
    unknown: int
    path: Path

    def __len__(self) -> int:
        return len(self.ids)


def cache_folder() -> Path:
    """Where caches live: $GPT2_CHINESE_CACHE, else cache/tokens of the repository, else the user's cache folder."""
    root = Path(__file__).resolve().parents[1]
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt2_chinese" / "tokens"
    given = os.environ.get(CACHE_VARIABLE)
    candidates = [Path(given)] if given else ([root / "cache" / "tokens"] if (root / "cache").is_dir() else []) + [user]
    for folder in candidates:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise UserError(f"no writable folder for the token cache: set {CACHE_VARIABLE} (tried {candidates[-1]})")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def cache_key(corpus: Path | str, vocab: Path | str) -> str:
    """Name of the cache of a corpus: a hash of content, not of paths or times."""
    vocab = Path(vocab)
    vocab_files = sorted(f for f in vocab.glob("*") if f.is_file()) if vocab.is_dir() else [vocab]
    try:
        parts = [FORMAT, *(_digest(file) for file in corpus_files(corpus)), "|", *(_digest(f) for f in vocab_files)]
    except OSError as error:
        raise UserError(f"cannot read the corpus {corpus} or the vocabulary {vocab}: {error.strerror}") from None
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def load_tokens(corpus: Path | str, vocab: Path | str) -> Tokens:
    """The ids of a corpus, from the cache when it is there and whole, else made now.

    Raises:
        UserError: the corpus or the vocabulary is missing or bad, or no folder for the cache is writable.
    """
    size = vocabulary_size(vocab)  # a missing vocabulary is told before anything is read
    path = cache_folder() / f"{cache_key(corpus, vocab)}.bin"
    return _open(path) or _build(path, corpus, vocab, np.dtype(np.uint16 if size <= 1 << 16 else np.uint32))


def _open(path: Path) -> Tokens | None:
    """The cache at `path`, or None when it is missing, half-written or damaged."""
    try:
        header = json.loads(path.with_suffix(".json").read_text())
        dtype, count = np.dtype(header["dtype"]), int(header["count"])
        if path.stat().st_size != count * dtype.itemsize or _digest(path) != header["sha256"]:
            return None
        return Tokens(np.memmap(path, dtype, mode="r", shape=(count,)), int(header["unknown"]), path)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _build(path: Path, corpus: Path | str, vocab: Path | str, dtype: np.dtype) -> Tokens:
    vocabulary = Vocabulary.load(vocab)
    count = unknown = 0
    digest = hashlib.sha256()
    handle, beside = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            for ids in _documents(corpus, vocabulary):
                array = np.asarray(ids, dtype)
                count += len(array)
                unknown += int((array == vocabulary.unk_id).sum()) if vocabulary.unk_id is not None else 0
                digest.update(array.tobytes())
                stream.write(array.tobytes())
            stream.flush()
            os.fsync(stream.fileno())
        header = {
            "dtype": dtype.name,
            "count": count,
            "unknown": unknown,
            "sha256": digest.hexdigest(),
            "format": FORMAT,
        }
        Path(beside + ".json").write_text(json.dumps(header) + "\n")
        os.replace(beside, path)
        os.replace(beside + ".json", path.with_suffix(".json"))
    except OSError as error:
        raise UserError(f"the token cache {path} cannot be written: {error.strerror}") from None
    finally:
        for leftover in (beside, beside + ".json"):
            Path(leftover).unlink(missing_ok=True)
    return Tokens(np.memmap(path, dtype, mode="r", shape=(count,)), unknown, path)


def _documents(corpus: Path | str, vocabulary: Vocabulary) -> Iterator[list[int]]:
    paragraphs = read_paragraphs(corpus)
    while group := list(islice(paragraphs, _DOCUMENTS_AT_ONCE)):
        for ids in vocabulary.encode_documents(group):
            if max(ids) >= vocabulary.size:
                raise UserError(f"the vocabulary gives id {max(ids)}, above its size {vocabulary.size}")
            yield ids
