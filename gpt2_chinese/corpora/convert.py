"""One conversion: from files, folders and archives to folders train/ and valid/ of array-JSON files."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from durable.cores import num_cores
from durable.printable import printable, utf8
from gpt2_chinese.corpora.cleaning import Seen
from gpt2_chinese.corpora.columnar import check_reader
from gpt2_chinese.corpora.detect import TEXT_FORMATS, Decision, Head, detect, layout, take_head
from gpt2_chinese.corpora.formats import (
    Item,
    block_items,
    decoded,
    json_values,
    line_items,
    paragraph_items,
    record_lines,
    whole_item,
)
from gpt2_chinese.corpora.output import PARTS, OutputFolder, Shards
from gpt2_chinese.corpora.prepare import Prepared, Rules, Stretch, batches, value_size
from gpt2_chinese.corpora.processes import prepared_by, prepared_here
from gpt2_chinese.corpora.records import Choices, record_format
from gpt2_chinese.corpora.report import Report
from gpt2_chinese.corpora.sources import Source, input_files, open_sources
from gpt2_chinese.errors import UserError
from gpt2_chinese.progress import ByteProgress

ENCODINGS = ("utf-8", "gb18030", "big5", "utf-16")
PARALLEL_BYTES = 1 << 25  # smaller inputs are converted before other processes have started
MOST_PROCESSES = 4  # this process, which reads and writes, keeps no more of them busy
_CHARACTERS_AT_ONCE = 1 << 17
_ITEMS_AT_ONCE = 500


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
        rules = Rules(self.choices, self.options.min_length, self.options.max_length, self.options.too_long,
                      self.options.valid_share)  # fmt: skip
        total = sum(file.stat().st_size for _, file in files)
        cores = min(num_cores(), MOST_PROCESSES) if total >= PARALLEL_BYTES else 1
        try:
            stretches = (stretch for source in open_sources(files, progress.add, self.report.leave_out, max_bytes)
                         for stretch in self._stretches(source))  # fmt: skip
            some = batches(stretches, _CHARACTERS_AT_ONCE)
            results = prepared_by(cores, some, rules) if cores > 1 else prepared_here(some, rules)
            with contextlib.closing(results):
                for batch, found in results:
                    for stretch, prepared in zip(batch, found, strict=True):
                        self._count_and_keep(stretch.name, prepared)
        finally:
            progress.close()
            if self.seen is not None:
                self.seen.close()
                self._seen_path.unlink(missing_ok=True)
        for shards in self.shards.values():
            shards.close()

    def _stretches(self, source: Source) -> Iterator[Stretch]:
        """The items of one text, at most _ITEMS_AT_ONCE and about _CHARACTERS_AT_ONCE at a time."""
        form, raw, items = self._items(source)
        some: list[Item] = []
        size, failure = 0, None
        while True:
            try:
                item = next(items, None)
            except UserError as error:  # raised after what was read before it is counted
                item, failure = None, error
            if item is not None:
                some.append(item)
                size += value_size(item.value)
            if some and (item is None or len(some) == _ITEMS_AT_ONCE or size >= _CHARACTERS_AT_ONCE):
                yield Stretch(source.name, form, raw, list(zip(*some, strict=True)))
                some, size = [], 0
            if failure is not None:
                raise failure
            if item is None:
                return

    def _items(self, source: Source) -> tuple[str, bool, Iterator[Item]]:
        """The items of one text, by its format, before the form and the mark that a Stretch has."""
        self.report.texts += 1
        if source.table is not None:
            return self._decide_columns(source), False, source.table.records(self.choices.field)
        head, pieces = take_head(decoded(source.read, self.options.encoding))
        _check_encoding(source.name, head, self.options.encoding)
        decision = self._decide(source, head)
        join = {} if self.options.join is None else {"join": self.options.join}
        if decision is None:
            return "", False, iter(())
        if decision.format == "lines":
            return "", False, line_items(pieces)
        if decision.format == "clue-text":
            return "", False, block_items(pieces, **join)
        if decision.format == "paragraphs":
            return "", False, paragraph_items(pieces, **join)
        if decision.format == "file":
            return "", False, whole_item(pieces)
        if layout(head) in ("lines", ""):
            return decision.format, True, record_lines(pieces)
        return decision.format, False, json_values(pieces, source.name)

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

    def _decide_columns(self, source: Source) -> str:
        """The format of a file with columns: --format, else what its columns are called. Raises UserError."""
        form, names = self.options.format, source.table.names
        if form in TEXT_FORMATS:
            raise UserError(f"--format {form} is for text, but {source.name} has columns: leave --format out")
        if self.choices.field:
            form = "json-lines" if form == "auto" else form
            if self.choices.field not in names:
                raise UserError(f"{source.name} has no column {self.choices.field!r} (--field), but {_few(names)}")
        elif form == "auto":
            form = record_format(dict.fromkeys(names), False)
            if form is None:
                raise UserError(f"{source.name} has columns of no known format ({_few(names)}): name the text by --field")
        if source.group not in self.decisions:
            self.decisions[source.group] = Decision(form, f"columns {_few(names)}")
            self.report.formats[source.name] = f"{form} (columns {_few(names)})"
            print(f"{source.name}: {form} (columns {_few(names)})", flush=True)
        return form

    def _count_and_keep(self, name: str, found: Prepared) -> None:
        """Counts texts of one source, and writes those that no rule drops."""
        report = self.report
        numbers = [number for number in found.numbers if number is not None]
        fresh = [True] * len(numbers) if self.seen is None else self.seen.add(numbers)
        report.control += sum(found.control)
        report.broken += sum(found.broken)
        report.lengths.add(filter(None, found.lengths))
        if len(fresh) < len(found.wheres) or not all(fresh) or any(found.late):
            found = self._without_dropped(name, found, iter(fresh))
        else:
            report.read += len(fresh)
        longest = self.options.max_length
        report.cut += sum(length > longest for length in found.lengths) if longest else 0
        for part, shards in self.shards.items():
            chosen = [valid == (part == "valid") for valid in found.valid]
            lines = list(itertools.chain.from_iterable(itertools.compress(found.lines, chosen)))
            shards.extend(lines, sum(map(sum, itertools.compress(found.pieces, chosen))))
        report.keep(list(itertools.chain.from_iterable(found.lines)), sum(map(sum, found.pieces)))

    def _without_dropped(self, name: str, found: Prepared, fresh: Iterator[bool]) -> Prepared:
        """Counts each text that is dropped and cannot be read. Returns the others. Raises UserError after too many."""
        report, kept = self.report, []
        for row in zip(*found, strict=True):
            one = Prepared(*row)  # here each field is that of one text
            place = f"{name}:{one.wheres}"
            if one.problems:
                self._bad(place, one.problems, one.excerpts)
                continue
            report.read += 1
            rule = one.rules or ("" if next(fresh) else "duplicate (--dedup)") or one.late
            if rule:
                report.drop(rule, place, one.excerpts)
            else:
                kept.append(row)
        return Prepared(*zip(*kept, strict=True))

    def _bad(self, place: str, problem: str, excerpt: str) -> None:
        """Counts an item that cannot be read. Raises UserError after too many."""
        self.report.bad(place, problem, excerpt)
        if self.report.unreadable.count > self.options.max_bad:
            raise UserError(
                f"more than {self.options.max_bad} items cannot be read, the last is {place}, it {problem}: "
                f"{excerpt!r}; raise --max-bad, or give the right --format"
            )


def _few(names: list[str]) -> str:
    return printable(", ".join(names))[:80]


def _check_encoding(name: str, head: Head, encoding: str) -> None:
    """Refuses a text with many undecodable or null characters in its beginning: --encoding is wrong. Raises UserError."""
    strange = head.text.count("\ufffd") + head.text.count("\0")
    if strange > 20 and strange > len(head.text) / 20:
        others = ", ".join(each for each in ENCODINGS if each != encoding)
        raise UserError(f"{name} is not {encoding.upper()} text: is it in another --encoding ({others})?")


def convert(options: argparse.Namespace) -> None:
    """The command `convert`. Raises UserError."""
    files, left_out = input_files(options.inputs)
    check_reader([printable(file) for _, file in files])
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
        shown_options["inputs"] = [str(path) for path in options.inputs]
        text = json.dumps({"options": shown_options, **report.as_dict()}, ensure_ascii=False, indent=2, default=str)
        (output.staging / "report.json").write_text(utf8(text) + "\n", encoding="utf-8")
        output.finish()
        output = None
    except (OSError, sqlite3.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--output {printable(options.output)} cannot be written: {reason}") from None
    finally:
        if output is not None:
            output.discard()
    print(report.text())
    train, valid = (options.output / part for part in PARTS)
    if conversion.shards["valid"].items and conversion.shards["train"].items:
        print(f"\nTrain on it with: --train-data {printable(train)} --valid-data {printable(valid)}")
    else:
        there, missing = (train, valid) if conversion.shards["train"].items else (valid, train)
        print(f"\nAll items are in {printable(there)}, none in {printable(missing)}: "
              "--valid-share and the texts alone decide that")  # fmt: skip


def _refuse_own_output(files: list[tuple[Path, Path]], final: Path) -> None:
    """Refuses inputs inside --output: the end of the conversion would delete them. Raises UserError."""
    for _, file in files:
        if final in Path(os.path.abspath(file)).parents:
            raise UserError(f"{printable(file)} is inside --output {printable(final)}: give another --output")
