"""Counts what a conversion reads, keeps and drops, and why; prints and writes the counts at the end."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from gpt2_chinese.corpora.output import Shards
    from gpt2_chinese.vocabulary.vocabulary import Vocabulary

EXAMPLES = 3  # kept for each rule
BAD_SHOWN = 10  # unreadable items that are printed; further ones are only counted
TEXTS_AT_ONCE = 256  # tokenised in one call


@dataclass
class Counted:
    """A number of items or files, with the first few of them as examples."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, example: Callable[[], str]) -> None:
        """Counts one. Calls example(), which costs more than the count, for the first EXAMPLES only."""
        self.count += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(example())


class Lengths:
    """A histogram of the lengths of cleaned items, before --min-length and --max-length apply.

    Attributes:
        items, characters: of the items whose length has this number of binary digits.
    """

    def __init__(self) -> None:
        self.items: Counter[int] = Counter()
        self.characters: Counter[int] = Counter()

    def add(self, lengths: Iterable[int]) -> None:
        """Counts items of these lengths."""
        for characters, items in Counter(lengths).items():
            digits = characters.bit_length()
            self.items[digits] += items
            self.characters[digits] += characters * items

    def rows(self) -> list[dict[str, Any]]:
        """Items by length, from <= length < to, and the share of items and of characters with lengths below `to`."""
        items, characters = max(1, self.items.total()), max(1, self.characters.total())
        rows, below, below_characters = [], 0, 0
        for digits in range(min(self.items, default=1), max(self.items, default=0) + 1):
            below += self.items[digits]
            below_characters += self.characters[digits]
            rows.append({"from": 1 << (digits - 1), "to": 1 << digits, "items": self.items[digits],
                         "items_below": below / items, "characters_below": below_characters / characters})  # fmt: skip
        return rows


class Tokens:
    """Counts the tokens of kept items, and those that the vocabulary does not know.

    Attributes:
        count: tokens, without the marks at both ends of an item. unknown: how many of them are the unknown token.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.count = self.unknown = 0
        self._vocabulary = vocabulary
        self._waiting: list[str] = []  # texts that are not tokenised yet

    def add(self, text: str) -> None:
        """Counts an item, together with TEXTS_AT_ONCE - 1 others."""
        self._waiting.append(text)
        if len(self._waiting) == TEXTS_AT_ONCE:
            self.finish()

    def finish(self) -> None:
        """Counts the items that wait."""
        ids = self._vocabulary.document_ids(self._waiting)
        self.count += len(ids) - 2 * len(self._waiting)
        if self._vocabulary.unk_id is not None:
            self.unknown += int((ids == self._vocabulary.unk_id).sum())
        self._waiting = []

    def unknown_rate(self) -> float:
        """Share of the tokens that the vocabulary does not know, 0 to 1."""
        return self.unknown / max(1, self.count)


class Report:
    """Counts of one conversion.

    Attributes:
        texts: files and members read. read: items in them. kept: items written; each piece of a split item counts.
        characters: of the kept items. cut: items above --max-length that were split.
        control, broken: characters that cleaning removed.
        formats: the format detected for each group of texts, by the name of its first text.
        dropped: items that a rule dropped, by rule. unreadable: items that could not be read.
        left_out: files and members that are no text by their names.
        lengths: of the cleaned items. tokens: of the kept items; None without a vocabulary.
        parts: files, items and characters of train and valid.
    """

    def __init__(self) -> None:
        self.texts = self.read = self.kept = self.characters = self.cut = self.control = self.broken = 0
        self.formats: dict[str, str] = {}
        self.dropped: dict[str, Counted] = {}
        self.unreadable, self.left_out = Counted(), Counted()
        self.lengths = Lengths()
        self.tokens: Tokens | None = None
        self.parts: dict[str, dict[str, int]] = {}

    def bad(self, place: str, problem: str, excerpt: str) -> None:
        """Counts an item that cannot be read; prints the first BAD_SHOWN at once."""
        self.unreadable.count += 1
        if self.unreadable.count <= BAD_SHOWN:
            self.unreadable.examples.append(f"{place} {problem}: {excerpt!r}")
            print(f"passed over: {self.unreadable.examples[-1]}", file=sys.stderr, flush=True)
        elif self.unreadable.count == BAD_SHOWN + 1:
            print("passed over: more such items, which are counted only", file=sys.stderr, flush=True)

    def drop(self, rule: str, place: str, text: str) -> None:
        """Counts an item that a rule drops."""
        self.dropped.setdefault(rule, Counted()).add(lambda: f"{place}: {text[:30]!r}")

    def leave_out(self, name: str) -> None:
        """Counts a file or member that is no text by its name."""
        self.left_out.add(lambda: name)

    def count_tokens(self, vocabulary: Vocabulary | None) -> None:
        """From now on the tokens of kept items are counted with this vocabulary; None counts none."""
        self.tokens = None if vocabulary is None else Tokens(vocabulary)

    def keep(self, lines: Sequence[bytes], characters: int) -> None:
        """Counts items that were written: texts as JSON, and the number of their characters in all."""
        self.kept += len(lines)
        self.characters += characters
        if self.tokens is not None:
            for line in lines:
                self.tokens.add(orjson.loads(line))

    def finish(self, shards: dict[str, Shards]) -> None:
        """Copies the counts of the shards, after the tokens of the last items are counted."""
        if self.tokens is not None:
            self.tokens.finish()
        self.parts = {
            name: {"files": part.files, "items": part.items, "characters": part.characters} for name, part in shards.items()
        }

    def _most_dropped(self) -> list[tuple[str, Counted]]:
        """(rule, dropped items), most items first."""
        return sorted(self.dropped.items(), key=lambda entry: -entry[1].count)

    def reasons(self) -> str:
        """The rules that dropped items, with counts."""
        reasons = [f"{dropped.count} {rule}" for rule, dropped in self._most_dropped()]
        return ", ".join(reasons + [f"{self.unreadable.count} unreadable"] * bool(self.unreadable.count))

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
            "dropped": {rule: {"items": each.count, "examples": each.examples} for rule, each in self.dropped.items()},
            "unreadable": {"items": self.unreadable.count, "examples": self.unreadable.examples},
            "removed_characters": {"control": self.control, "broken": self.broken},
            "left_out_files": {"files": self.left_out.count, "examples": self.left_out.examples},
            "lengths": self.lengths.rows(),
        }
        if self.tokens is not None:
            tokens = self.tokens
            found["tokens"] = {"count": tokens.count, "unknown": tokens.unknown, "unknown_rate": tokens.unknown_rate()}
        return found

    def text(self) -> str:
        """The report as it is printed."""
        lines = [f"read {self.read:,} items in {self.texts:,} texts; kept {self.kept:,} with {self.characters:,} characters"]
        lines += [f"  {name}/: {part['items']:,} items, {part['characters']:,} characters, {part['files']} files"
                  for name, part in self.parts.items()]  # fmt: skip
        if self.cut:
            lines.append(f"  {self.cut:,} items above --max-length were split")
        for rule, dropped in self._most_dropped():
            lines.append(f"dropped {dropped.count:,}: {rule}, such as {dropped.examples[0]}")
        if self.unreadable.count:
            lines.append(f"unreadable {self.unreadable.count:,}, such as {self.unreadable.examples[0]}")
        if self.control or self.broken:
            lines.append(f"removed {self.control:,} control or invisible characters, {self.broken:,} of a broken encoding")
        if self.left_out.count:
            lines.append(f"left out {self.left_out.count:,} files that are no text by their names, "
                         f"such as {self.left_out.examples[0]}")  # fmt: skip
        if self.tokens is not None:
            lines.append(f"{self.tokens.count:,} tokens, {self.tokens.unknown_rate():.2%} unknown to --vocab, "
                         f"{self.characters / max(1, self.tokens.count):.2f} characters a token")  # fmt: skip
        lines += ["", "      length      items   items below   characters below"]
        for row in self.lengths.rows():
            span = f"{row['from']}-{row['to'] - 1}"
            lines.append(f"{span:>12} {row['items']:>10,} {row['items_below']:>13.1%} {row['characters_below']:>18.1%}")
        return "\n".join(lines)
