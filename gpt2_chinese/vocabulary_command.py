"""How well a vocabulary fits a corpus, and the command line of `python -m gpt2_chinese.vocabulary`."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from gpt2_chinese.corpus import read_paragraphs, stretches
from gpt2_chinese.errors import OneLineParser, UserError, exit_on_user_error
from gpt2_chinese.vocabulary import Vocabulary
from gpt2_chinese.vocabulary_files import PROFILE_CHOICES, PROFILES
from gpt2_chinese.vocabulary_train import KINDS, train, train_bpe

_CHARACTERS_AT_ONCE = 1 << 17


@dataclass
class Fit:
    """What a vocabulary makes of a corpus; the marks of documents are not counted.

    Attributes:
        documents, characters, tokens: how many there are.
        used: how often each id occurs.
        unknown: how many tokens are the unknown one.
        unknown_characters: what stands in the text where the token is unknown, character by character.
    """

    documents: int = 0
    characters: int = 0
    tokens: int = 0
    unknown: int = 0
    used: Counter[int] = field(default_factory=Counter)
    unknown_characters: Counter[str] = field(default_factory=Counter)

    @property
    def unknown_rate(self) -> float:
        """Share of the tokens, 0 to 1."""
        return self.unknown / max(self.tokens, 1)

    @property
    def characters_per_token(self) -> float:
        """The higher, the more text a sequence of the model holds."""
        return self.characters / max(self.tokens, 1)


def measure(vocabulary: Vocabulary, corpus: Path | str) -> Fit:
    """Encodes a corpus, a stretch at a time. Raises UserError for a bad corpus."""
    fit = Fit()
    for texts in stretches(read_paragraphs(corpus), _CHARACTERS_AT_ONCE):
        for text, encoding in zip(texts, vocabulary.encodings(texts), strict=True):
            ids = encoding.ids
            fit.documents += 1
            fit.characters += len(text)
            fit.tokens += len(ids)
            fit.used.update(ids)
            if vocabulary.unk_id in ids:
                for i, (start, end) in zip(ids, encoding.offsets, strict=True):
                    if i == vocabulary.unk_id:
                        fit.unknown += 1
                        fit.unknown_characters.update(text[start:end])
    return fit


def describe(vocabulary: Vocabulary, fit: Fit) -> list[tuple[str, str]]:
    """The report of `check`, as (name, value)."""
    special = ", ".join(f"{vocabulary.entries[i]} {i}" for i in sorted(vocabulary.special_ids))
    words = [i for i, entry in enumerate(vocabulary.entries) if entry and i not in vocabulary.special_ids]
    unused = sum(i not in fit.used for i in words)
    rows = [
        ("entries", f"{vocabulary.size:,}"),
        ("profile", f"{vocabulary.profile}: {vocabulary.layout}"),
        ("special", special),
        ("corpus", f"{fit.documents:,} documents, {fit.characters:,} characters, {fit.tokens:,} tokens"),
        ("characters per token", f"{fit.characters_per_token:.3f}"),
        ("unknown", f"{fit.unknown_rate:.2%} of the tokens"),
        ("unused entries", f"{unused:,} ({unused / max(len(words), 1):.1%})"),
    ]
    if fit.unknown:
        often = ", ".join(f"{character} {count}" for character, count in fit.unknown_characters.most_common(20))
        rows.append(("most often unknown", often))
    return rows


def main(argv: list[str] | None = None) -> None:
    """The commands `train` and `check`; a wrong input is one line and exit status 2."""
    with exit_on_user_error():
        arguments = _parse(argv)
        if arguments.command == "check":
            vocabulary = Vocabulary.load(arguments.vocab, arguments.vocab_profile)
            for name, value in describe(vocabulary, measure(vocabulary, arguments.corpus)):
                print(f"{name:<20}  {value}")
            return
        if (arguments.kind == "bpe") != (arguments.output.suffix == ".json"):
            wanted = "a tokenizer.json" if arguments.kind == "bpe" else "a vocab.txt"
            raise UserError(f"--output {arguments.output}: --kind {arguments.kind} makes {wanted}, name it so")
        if arguments.kind == "bpe":
            text = train_bpe(arguments.corpus, arguments.size)
        else:
            entries = train(arguments.corpus, arguments.size, arguments.kind, arguments.vocab_profile)
            text = "".join(entry + "\n" for entry in entries)
        _write(arguments.output, text)
        vocabulary = Vocabulary.load(arguments.output, "auto" if arguments.kind == "bpe" else arguments.vocab_profile)
        print(f"{arguments.output}: {vocabulary.size} entries")
        if arguments.vocab_profile != "gpt2_chinese" and arguments.kind != "bpe":
            print(f"train with --vocab-profile {arguments.vocab_profile}: a bare vocab.txt does not record it")
        for corpus in filter(None, (arguments.corpus, arguments.held_out)):
            fit = measure(vocabulary, corpus)
            each = f"characters per token: {fit.characters_per_token:.3f}"
            print(f"unknown tokens in {corpus}: {fit.unknown_rate:.2%}; {each}")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m gpt2_chinese.vocabulary", description="Trains a vocabulary, or tells how well one fits a corpus."
    )
    commands = parser.add_subparsers(required=True, dest="command")
    trained = commands.add_parser("train", help="train a vocabulary")
    trained.add_argument("--kind", choices=KINDS, default="wordpiece", help="what to train (default: wordpiece)")
    trained.add_argument("--corpus", required=True, type=Path, help="array-JSON file or folder")
    trained.add_argument("--size", type=int, default=4096, help="largest number of entries (default: 4096)")
    trained.add_argument("--output", required=True, type=Path, help="the vocab.txt to write; for bpe the tokenizer.json")
    trained.add_argument("--held-out", type=Path, help="a second corpus whose unknown tokens are counted, too")
    trained.add_argument("--vocab-profile", choices=tuple(PROFILES), default="gpt2_chinese",
                         help="how a vocab.txt will be used; uer keeps numbers whole (default: gpt2_chinese)")  # fmt: skip
    checked = commands.add_parser("check", help="tell how well a vocabulary fits a corpus")
    checked.add_argument("--vocab", required=True, type=Path, help="a vocab.txt, a tokenizer.json, or a folder with one")
    checked.add_argument("--corpus", required=True, type=Path, help="array-JSON file or folder")
    checked.add_argument("--vocab-profile", choices=PROFILE_CHOICES, default="auto",
                         help="how a vocab.txt is used (default: auto, what its folder records)")  # fmt: skip
    return parser.parse_args(argv)


def _write(path: Path, text: str) -> None:
    """Writes a file, beside and renamed."""
    beside = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8", newline="")
        os.replace(beside, path)
    except OSError as error:
        raise UserError(f"--output {path} cannot be written: {error.strerror}") from None
