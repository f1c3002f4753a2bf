"""Counts what a conversion reads, keeps and drops, and why; prints and writes the counts at the end."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from gpt2_chinese.corpora.sources import shown

if TYPE_CHECKING:
    from gpt2_chinese.corpora.output import Shards
    from gpt2_chinese.vocabulary.vocabulary import Vocabulary

EXAMPLES = 3  # kept for each rule
BAD_SHOWN = 10  # unreadable items that are printed; further ones are only counted
TEXTS_AT_ONCE = 256  # tokenised in one call


class Report:
    """Counts of one conversion.

    Attributes:
        texts: files and members read. read: items in them. kept: items written; each piece of a split item counts.
        num_bad: items that could not be read. cut: items above --max-length that were split.
        control, broken: characters that cleaning removed.
        formats: the format detected for each group of texts, by the name of its first text.
    """

    def __init__(self) -> None:
        self.texts = self.read = self.kept = self.characters = self.num_bad = self.cut = 0
        self.control = self.broken = self.num_left_out = 0
        self.formats: dict[str, str] = {}
        self.dropped: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}
        self.bad_examples: list[str] = []
        self.left_out: list[str] = []
        self._lengths: Counter[int] = Counter()  # by number of binary digits of the length
        self._length_characters: Counter[int] = Counter()
        self._vocabulary: Vocabulary | None = None
        self._waiting: list[str] = []
        self.tokens = self.unknown = 0
        self.parts: dict[str, dict[str, int]] = {}

    def bad(self, place: str, problem: str, excerpt: str) -> None:
        """Counts an item that cannot be read; prints the first BAD_SHOWN at once."""
        self.num_bad += 1
        line = f"{place} {problem}: {shown(excerpt)!r}"
        if len(self.bad_examples) < BAD_SHOWN:
            self.bad_examples.append(line)
            print(f"passed over: {line}", file=sys.stderr, flush=True)
        elif self.num_bad == BAD_SHOWN + 1:
            print("passed over: more such items, which are counted only", file=sys.stderr, flush=True)

    def drop(self, rule: str, place: str, text: str) -> None:
        """Counts an item that a rule drops."""
        self.dropped[rule] += 1
        examples = self.examples.setdefault(rule, [])
        if len(examples) < EXAMPLES:
            examples.append(f"{place}: {shown(text[:30])!r}")

    def leave_out(self, name: str) -> None:
        """Counts a file or member that is no text by its name."""
        self.num_left_out += 1
        if len(self.left_out) < EXAMPLES:
            self.left_out.append(name)

    def length(self, characters: int) -> None:
        """Counts the length of a cleaned item, before --min-length and --max-length apply."""
        digits = characters.bit_length()
        self._lengths[digits] += 1
        self._length_characters[digits] += characters

    def count_unknown(self, vocabulary: Vocabulary | None) -> None:
        """Sets the vocabulary with which the tokens of kept items are counted from now on; None counts none."""
        self._vocabulary = vocabulary

    def keep(self, text: str) -> None:
        """Counts an item that was written."""
        self.kept += 1
        self.characters += len(text)
        if self._vocabulary is not None:
            self._waiting.append(text)
            if len(self._waiting) == TEXTS_AT_ONCE:
                self._tokenise()

    def _tokenise(self) -> None:
        for ids in self._vocabulary.encode_documents(self._waiting) if self._waiting else ():
            self.tokens += len(ids) - 2  # without the marks at both ends
            self.unknown += ids.count(self._vocabulary.unk_id)
        self._waiting = []

    def finish(self, shards: dict[str, Shards]) -> None:
        """Copies the counts of the shards, after the tokens of the last items are counted."""
        if self._vocabulary is not None:
            self._tokenise()
        self.parts = {
            name: {"files": part.files, "items": part.items, "characters": part.characters} for name, part in shards.items()
        }

    def reasons(self) -> str:
        """The rules that dropped items, with counts."""
        reasons = [f"{count} {rule}" for rule, count in self.dropped.most_common()]
        return ", ".join(reasons + [f"{self.num_bad} unreadable"] * bool(self.num_bad))

    def histogram(self) -> list[dict[str, Any]]:
        """Items by length, from <= length < to, and the share of items and of characters with lengths below `to`."""
        items, characters = max(1, self._lengths.total()), max(1, self._length_characters.total())
        rows, below, below_characters = [], 0, 0
        for digits in range(min(self._lengths, default=1), max(self._lengths, default=0) + 1):
            below += self._lengths[digits]
            below_characters += self._length_characters[digits]
            rows.append({"from": 1 << (digits - 1), "to": 1 << digits, "items": self._lengths[digits],
                         "items_below": below / items, "characters_below": below_characters / characters})  # fmt: skip
        return rows

    def as_dict(self) -> dict[str, Any]:
        """All counts, for report.json."""
        found: dict[str, Any] = {
            "formats": self.formats,
            "texts": self.texts,
            "read": self.read,
            "kept": self.kept,
            "characters": self.characters,
            "parts": self.parts,
            "cut": self.cut,
            "dropped": {rule: {"items": n, "examples": self.examples[rule]} for rule, n in self.dropped.items()},
            "unreadable": {"items": self.num_bad, "examples": self.bad_examples},
            "removed_characters": {"control": self.control, "broken": self.broken},
            "left_out_files": {"files": self.num_left_out, "examples": self.left_out},
            "lengths": self.histogram(),
        }
        if self._vocabulary is not None:
            found["tokens"] = {"count": self.tokens, "unknown": self.unknown, "unknown_rate": self.unknown_rate()}
        return found

    def unknown_rate(self) -> float:
        """Share of the tokens that the vocabulary does not know, 0 to 1."""
        return self.unknown / max(1, self.tokens)

    def text(self) -> str:
        """The report as it is printed."""
        lines = [f"read {self.read:,} items in {self.texts:,} texts; kept {self.kept:,} with {self.characters:,} characters"]
        lines += [f"  {name}/: {part['items']:,} items, {part['characters']:,} characters, {part['files']} files"
                  for name, part in self.parts.items()]  # fmt: skip
        if self.cut:
            lines.append(f"  {self.cut:,} items above --max-length were split")
        for rule, count in self.dropped.most_common():
            lines.append(f"dropped {count:,}: {rule}, such as {self.examples[rule][0]}")
        if self.num_bad:
            lines.append(f"unreadable {self.num_bad:,}, such as {self.bad_examples[0]}")
        if self.control or self.broken:
            lines.append(f"removed {self.control:,} control or invisible characters, {self.broken:,} of a broken encoding")
        if self.num_left_out:
            lines.append(f"left out {self.num_left_out:,} files that are no text by their names, such as {self.left_out[0]}")
        if self._vocabulary is not None:
            lines.append(f"{self.tokens:,} tokens, {self.unknown_rate():.2%} unknown to --vocab, "
                         f"{self.characters / max(1, self.tokens):.2f} characters a token")  # fmt: skip
        lines += ["", "      length      items   items below   characters below"]
        for row in self.histogram():
            span = f"{row['from']}-{row['to'] - 1}"
            lines.append(f"{span:>12} {row['items']:>10,} {row['items_below']:>13.1%} {row['characters_below']:>18.1%}")
        return "\n".join(lines)
