"""One conversion: from files, folders and archives to folders train/ and valid/ of array-JSON files."""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from gpt2_chinese.corpora.cleaning import Seen, clean, content_hash, is_validation, split_long
from gpt2_chinese.corpora.detect import TEXT_FORMATS, Decision, Head, detect, layout, take_head
from gpt2_chinese.corpora.formats import (
    Item,
    block_items,
    decoded,
    json_lines,
    json_values,
    line_items,
    paragraph_items,
    whole_item,
)
from gpt2_chinese.corpora.output import PARTS, OutputFolder, Shards
from gpt2_chinese.corpora.records import BadRecord, Choices, LeftOut, record_texts
from gpt2_chinese.corpora.report import Report
from gpt2_chinese.corpora.sources import Source, input_files, open_sources, shown
from gpt2_chinese.errors import UserError
from gpt2_chinese.progress import ByteProgress

ENCODINGS = ("utf-8", "gb18030", "big5", "utf-16")
BROKEN_SHARE = 0.1  # an item is dropped if a broken encoding cost it more than this share of its characters


class Conversion:
    """One conversion: from inputs to the items in the shards, and the report of what was dropped."""

    def __init__(self, options: argparse.Namespace, output: Path) -> None:
        self.options, self.report = options, Report()
        self.choices = Choices(options.star, options.both, options.field or "")
        self.shards = {part: Shards(output / part, int(options.shard_mb * 1e6)) for part in PARTS}
        self.seen = Seen(output / "seen.sqlite") if options.dedup else None
        self.decisions: dict[tuple[str, str], Decision] = {}
        self._seen_path = output / "seen.sqlite"

    def run(self, files: list[tuple[Path, Path]]) -> None:
        """Reads all files and writes the shards. Raises UserError."""
        progress = ByteProgress(sum(file.stat().st_size for _, file in files), "converting")
        max_bytes = int(self.options.max_unpacked_gb * 2**30)
        try:
            for source in open_sources(files, progress.add, self.report.leave_out, max_bytes):
                for item in self._items(source):
                    self._count_and_keep(source.name, item)
        finally:
            progress.close()
            if self.seen is not None:
                self.seen.close()
                self._seen_path.unlink(missing_ok=True)
        for shards in self.shards.values():
            shards.close()

    def _items(self, source: Source) -> Iterator[Item]:
        """The items of one text, by its format; for JSON, the value of an item is a list of texts."""
        self.report.texts += 1
        head, pieces = take_head(decoded(source.read, self.options.encoding))
        _check_encoding(source.name, head, self.options.encoding)
        decision = self._decide(source, head)
        join = {} if self.options.join is None else {"join": self.options.join}
        if decision is None:
            return iter(())
        if decision.format == "lines":
            return line_items(pieces)
        if decision.format == "clue-text":
            return block_items(pieces, **join)
        if decision.format == "paragraphs":
            return paragraph_items(pieces, **join)
        if decision.format == "file":
            return whole_item(pieces)
        records = json_lines(pieces) if layout(head) in ("lines", "") else json_values(pieces, source.name)
        return (self._with_format(item, decision.format) for item in records)

    def _with_format(self, item: Item, form: str) -> Item:
        """Turns the record of an item into a list of texts; an error becomes the item's problem or rule."""
        if item.problem:
            return item
        try:
            return item._replace(value=record_texts(form, item.value, self.choices))
        except (BadRecord, LeftOut) as error:
            excerpt = json.dumps(item.value, ensure_ascii=False)[:30]
            left_out = isinstance(error, LeftOut)
            return Item(item.where, excerpt, **{"rule" if left_out else "problem": str(error)})

    def _decide(self, source: Source, head: Head) -> Decision | None:
        """The format of a text: --format, else what the first text of its group shows, printed once."""
        if self.options.format != "auto":
            return Decision(self.options.format, "--format")
        if source.group not in self.decisions:
            if self.options.field and layout(head):
                decision = Decision("json-lines", f"--field {self.options.field}")
            else:
                decision = detect(head, source.alone, source.name)
            if decision is None:
                return None
            self.decisions[source.group] = decision
            self.report.formats[source.name] = f"{decision.format} ({decision.why})"
            other = "; give --format to read it otherwise" if decision.format in TEXT_FORMATS else ""
            print(f"{source.name}: {decision.format} ({decision.why}{other})", flush=True)
        return self.decisions[source.group]

    def _count_and_keep(self, name: str, item: Item) -> None:
        place = f"{name}:{item.where}"
        if item.rule:
            self.report.read += 1
            self.report.drop(item.rule, place, item.value)
        elif item.problem:
            self.report.bad(place, item.problem, item.value)
            if self.report.unreadable.count > self.options.max_bad:
                raise UserError(
                    f"more than {self.options.max_bad} items cannot be read, the last is {place}, it {item.problem}: "
                    f"{shown(item.value)!r}; raise --max-bad, or give the right --format"
                )
        else:
            for text in item.value if isinstance(item.value, list) else [item.value]:
                self.report.read += 1
                self._keep(place, text)

    def _keep(self, place: str, raw: str) -> None:
        """Cleans one text, and writes it unless a rule drops it."""
        options, report = self.options, self.report
        text, control, broken = clean(raw)
        report.control += control
        report.broken += broken
        if broken > BROKEN_SHARE * (len(text) + broken):
            return report.drop("broken encoding", place, text)
        if not text:
            return report.drop("empty", place, text)
        report.lengths.add(len(text))
        if len(text) < options.min_length:
            return report.drop("too short (--min-length)", place, text)
        digest = content_hash(text)
        if self.seen is not None and not self.seen.add(digest):
            return report.drop("duplicate (--dedup)", place, text)
        # all pieces of one text go to one part, so that no validation text is a neighbour of training text
        shards = self.shards["valid" if is_validation(digest, options.valid_share) else "train"]
        if not options.max_length or len(text) <= options.max_length:
            shards.add(text)
            report.keep(text)
        elif options.too_long == "drop":
            report.drop("too long (--max-length)", place, text)
        else:
            report.cut += 1
            for piece in split_long(text, options.max_length):
                shards.add(piece)
                report.keep(piece)
        return None


def _check_encoding(name: str, head: Head, encoding: str) -> None:
    """Refuses a text with many undecodable or null characters in its beginning: --encoding is wrong. Raises UserError."""
    strange = head.text.count("\ufffd") + head.text.count("\0")
    if strange > 20 and strange > len(head.text) / 20:
        others = ", ".join(each for each in ENCODINGS if each != encoding)
        raise UserError(f"{name} is not {encoding.upper()} text: is it in another --encoding ({others})?")


def convert(options: argparse.Namespace) -> None:
    """The command `convert`. Raises UserError."""
    files, left_out = input_files(options.inputs)
    vocabulary = None
    if options.vocab:
        from gpt2_chinese.vocabulary.vocabulary import Vocabulary

        vocabulary = Vocabulary.load(options.vocab)
    output = None
    try:
        output = OutputFolder(options.output, options.overwrite)
        _refuse_own_output(files, output.final)
        conversion = Conversion(options, output.staging)
        report = conversion.report
        for name in left_out:
            report.leave_out(name)
        report.count_tokens(vocabulary)
        conversion.run(files)
        report.finish(conversion.shards)
        if not report.kept:
            raise UserError(f"no item is left of {report.read} read: {report.reasons() or 'the inputs hold no text'}")
        shown_options = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
        shown_options["inputs"] = [shown(path) for path in options.inputs]
        text = json.dumps({"options": shown_options, **report.as_dict()}, ensure_ascii=False, indent=2, default=str)
        (output.staging / "report.json").write_text(text.encode("utf-8", "replace").decode() + "\n", encoding="utf-8")
        output.finish()
        output = None
    except (OSError, sqlite3.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--output {shown(options.output)} cannot be written: {reason}") from None
    finally:
        if output is not None:
            output.discard()
    print(report.text())
    train, valid = (options.output / part for part in PARTS)
    if conversion.shards["valid"].items and conversion.shards["train"].items:
        print(f"\nTrain on it with: --train-data {shown(train)} --valid-data {shown(valid)}")
    else:
        there, missing = (train, valid) if conversion.shards["train"].items else (valid, train)
        print(f"\nAll items are in {shown(there)}, none in {shown(missing)}: --valid-share and the texts alone decide that")


def _refuse_own_output(files: list[tuple[Path, Path]], final: Path) -> None:
    """Refuses inputs inside --output: the end of the conversion would delete them. Raises UserError."""
    for _, file in files:
        if final in Path(os.path.abspath(file)).parents:
            raise UserError(f"{shown(file)} is inside --output {shown(final)}: give another --output")
