"""How well a vocabulary fits a corpus: characters per token, unknown characters, unused entries."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from gpt2_chinese.corpus import read_paragraphs, stretches
from gpt2_chinese.vocabulary.vocabulary import Vocabulary

_CHARACTERS_AT_ONCE = 1 << 17


@dataclass
class Fit:
    """How a vocabulary encodes a corpus; the begin and end tokens of documents are not counted.

    Attributes:
        documents, characters, tokens: how many the corpus has.
        used: how often each id occurs.
        unknown: number of unknown tokens.
        unknown_characters: how often each character is part of an unknown token.
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
        """The higher this ratio, the more text fits into a sequence of the model."""
        return self.characters / max(self.tokens, 1)


def measure(vocabulary: Vocabulary, corpus: Path | str) -> Fit:
    """Encodes a corpus part by part and counts. Raises UserError for a bad corpus."""
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
