"""Reads a vocabulary file: its entries by id, its rules for splitting text, and the marks before and after a document.

A `vocab.txt` (one entry a line, the line number is the id) does not record how to use it. Two conventions share the format
and give different ids for the same text; a profile names the convention:

    profile         layout               digits
    gpt2_chinese    [MASK] text [CLS]    each digit is split off   Morizeyao/GPT2-Chinese
    uer             [CLS] text [SEP]     2019 may be one entry     UER-py, Hugging Face's BertTokenizer
    own             set by the file      set by the file           a tokenizer.json

`auto` reads the folder's record: our key layout_profile in tokenizer_config.json; uer, where that file or config.json
names BertTokenizer; without a record gpt2_chinese. This module does not import tokenizers, so that errors come quickly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt2_chinese.errors import UserError
from gpt2_chinese.files import kind, read_text

PROFILES = {"gpt2_chinese": ("[MASK]", "[CLS]"), "uer": ("[CLS]", "[SEP]")}  # the marks before and after a document
PROFILE_CHOICES = ("auto", *PROFILES)
OWN = "own"
PROFILE_KEY = "layout_profile"  # in tokenizer_config.json

# possible marks before and after a document in a tokenizer.json without a template, best first
BEGIN = ("[CLS]", "<s>", "<|startoftext|>", "<|endoftext|>")
END = ("[SEP]", "</s>", "<|endoftext|>")

_LARGEST_ID = (1 << 24) - 1  # far above all real vocabularies; the list of entries must not fill the memory


@dataclass(frozen=True)
class VocabularyFile:
    """A vocabulary as read from its file.

    Attributes:
        path: the file.
        profile: gpt2_chinese, uer or own.
        entries: the entry of each id; "" where an id has none.
        begin, end: the marks before and after a document.
        content: the content of a tokenizer.json, else None.
    """

    path: Path
    profile: str
    entries: list[str]
    begin: str
    end: str
    content: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def layout(self) -> str:
        """The form of an encoded document, for display."""
        return f"{self.begin} text {self.end}"

    @property
    def digest(self) -> str:
        """SHA-256 of all that decides the ids of a text; line ends and the formatting of a tokenizer.json do not count."""
        own = {k: v for k, v in (self.content or {}).items() if k not in ("post_processor", "padding", "truncation")}
        rules = own or self.entries
        text = json.dumps([self.profile, self.begin, self.end, rules], ensure_ascii=True, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def facts(self) -> dict[str, str]:
        """What a checkpoint records about the vocabulary, to compare it with the vocabulary of a later run."""
        return {"profile": self.profile, "layout": self.layout, "sha256": self.digest}


COMMON = "今天气的一是"  # characters that every vocabulary of Chinese text has


def knows_chinese(entries: Iterable[str]) -> bool:
    """True if one of COMMON is an entry, as it is or as the three bytes of byte-level BPE; not so with English text."""
    plain = [byte for byte in range(256) if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174]
    others = [byte for byte in range(256) if byte not in set(plain)]
    letters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}  # as GPT-2
    wanted = {*COMMON, *("".join(letters[byte] for byte in character.encode()) for character in COMMON)}
    return not wanted.isdisjoint(entries)


def read_vocabulary(path: Path | str, profile: str = "auto") -> VocabularyFile:
    """Reads a `vocab.txt`, a `tokenizer.json`, or a folder that holds one.

    Args:
        path: the file or the folder.
        profile: auto, gpt2_chinese or uer; for a tokenizer.json auto, or own, which an earlier call returned.

    Raises:
        UserError: a missing or unreadable file, a vocab.txt without the profile's marks, a profile for a tokenizer.json.
    """
    path = vocabulary_file(Path(path), profile)
    text = read_text(path, f"vocabulary {path}")
    if path.suffix == ".json":
        if profile not in ("auto", OWN):
            raise UserError(f"--vocab-profile {profile}: {path} has its own rules, a profile is for a vocab.txt only")
        content = _json_content(text, path)
        entries = _json_entries(content, path)
        return VocabularyFile(path, OWN, entries, *_json_marks(content, entries, path), content)
    entries = [entry.removesuffix("\r") for entry in text.removesuffix("\n").split("\n")]
    profile = (_recorded(path.parent) or "gpt2_chinese") if profile == "auto" else profile
    if profile not in PROFILES:
        raise UserError(f"--vocab-profile {profile}: {path} is a vocab.txt, give {' or '.join(PROFILES)}")
    begin, end = PROFILES[profile]
    if missing := [token for token in ("[UNK]", begin, end) if token not in entries]:
        raise UserError(
            f"vocabulary {path} lacks {', '.join(missing)}: profile {profile} needs a WordPiece vocab.txt "
            f"with [UNK] that lays a text out as {begin} text {end} (--vocab-profile)"
        )
    return VocabularyFile(path, profile, entries, begin, end)


def vocabulary_size(path: Path | str, profile: str = "auto") -> int:
    """Number of entries of a vocabulary file. Raises UserError as `read_vocabulary`."""
    return len(read_vocabulary(path, profile).entries)


def vocabulary_file(path: Path, profile: str = "auto") -> Path:
    """The file that a path means. A folder with both gives vocab.txt if a profile is known, else tokenizer.json.

    Raises:
        UserError: there is none.
    """
    found = kind(path, f"vocabulary {path}")
    if found == "missing":
        raise UserError(f"vocabulary {path} does not exist: make one with cache/make_vocab.sh")
    if found == "file":
        return path
    plain, whole = path / "vocab.txt", path / "tokenizer.json"
    if not plain.is_file() and not whole.is_file():
        raise UserError(f"vocabulary folder {path} holds neither vocab.txt nor tokenizer.json")
    known = profile in PROFILES or (profile == "auto" and _recorded(path) is not None)
    return plain if plain.is_file() and (known or not whole.is_file()) else whole


def _recorded(folder: Path) -> str | None:
    """The profile that a folder records next to its vocab.txt; None without a record."""
    for name in ("tokenizer_config.json", "config.json"):
        if not (folder / name).is_file():
            continue
        try:
            content = json.loads(read_text(folder / name, str(folder / name)))
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise UserError(f"{folder / name} is no JSON object: repair it, or give --vocab-profile")
        if content.get(PROFILE_KEY) in PROFILES:
            return content[PROFILE_KEY]
        if str(content.get("tokenizer_class")) in ("BertTokenizer", "BertTokenizerFast"):
            return "uer"
    return None


def _json_content(text: str, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(text)
        if isinstance(content, dict) and isinstance(content["model"]["vocab"], dict | list):
            return content
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise UserError(f"{path} is not a tokenizer.json of the tokenizers library")


def _json_entries(content: dict[str, Any], path: Path) -> list[str]:
    vocab = content["model"]["vocab"]
    try:
        ids = dict(vocab) if isinstance(vocab, dict) else {entry[0]: i for i, entry in enumerate(vocab)}
        ids.update({token["content"]: token["id"] for token in content.get("added_tokens") or []})
        if not all(isinstance(token, str) and type(i) is int and 0 <= i <= _LARGEST_ID for token, i in ids.items()):
            raise ValueError
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise UserError(f"{path} is not a tokenizer.json of the tokenizers library: its vocabulary is broken") from None
    entries = [""] * (max(ids.values(), default=-1) + 1)
    for token, i in ids.items():
        entries[i] = token
    return entries


def _json_marks(content: dict[str, Any], entries: list[str], path: Path) -> tuple[str, str]:
    """The marks of a tokenizer.json: from its template, else the first of BEGIN and END among its entries."""
    known = set(entries)
    processor = content.get("post_processor")
    single = processor.get("single") if isinstance(processor, dict) else None
    kinds = [piece for piece in single if isinstance(piece, dict)] if isinstance(single, list) else []
    text = next((place for place, piece in enumerate(kinds) if "Sequence" in piece), 0)
    special = [str((piece.get("SpecialToken") or {}).get("id")) for piece in kinds]
    begin = next((token for token in (*special[:text], *BEGIN) if token in known), None)
    end = next((token for token in (*special[text + 1 :], *END) if token in known), None)
    if begin is None or end is None:
        raise UserError(f"{path} has none of {', '.join(dict.fromkeys(BEGIN + END))} to mark a document")
    return begin, end
