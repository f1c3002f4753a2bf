"""Converts corpora to what every chapter trains on: folders train/ and valid/ of array-JSON files.

    bash scripts/python.sh -m gpt2_chinese.corpora convert wiki_zh.zip --output mine/wiki
    bash scripts/python.sh -m gpt2_chinese.corpora convert news2016zh_train.json novels/ --output mine/mix --max-length 2000
    bash scripts/python.sh -m gpt2_chinese.corpora convert wikipedia/data saved_dataset/ --output mine/hub
    bash chapters/00_single/train.sh --train-data mine/wiki/train --valid-data mine/wiki/valid

Inputs are files, folders and archives (.zip .gz .tar.gz); memory use does not grow with their size. Folders may hold
parquet and arrow files, as a data set cloned from the Hugging Face hub or written by save_to_disk. The output folder is
complete or absent.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from gpt2_chinese.corpora.convert import ENCODINGS, convert
from gpt2_chinese.corpora.detect import ALL_FORMATS
from gpt2_chinese.errors import OneLineParser, command_parser, exit_on_user_error


def _number(kind: type, least: float, most: float = float("inf")) -> Any:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            limits = f"{least:g} or more" if most == float("inf") else f"from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"must be a number, {limits}, not {text!r}")
        return value

    return parse


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = command_parser("bash scripts/python.sh -m gpt2_chinese.corpora", __doc__)
    commands = top.add_subparsers(required=True, dest="command", parser_class=OneLineParser)
    command = commands.add_parser("convert", help="convert to array-JSON", allow_abbrev=False, description=__doc__,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip

    def add(name: str, help: str, default: Any = None, **more: Any) -> None:
        command.add_argument(name, help=help if default is None else f"{help} (default: {default})", default=default, **more)

    command.add_argument("inputs", nargs="+", type=Path, metavar="INPUT",
                         help="files, folders, .zip, .gz, .tar.gz, .parquet, .arrow")  # fmt: skip
    add("--output", "the folder to make: train/, valid/, report.json", required=True, type=Path)
    command.add_argument("--overwrite", action="store_true",
                         help="replace what an earlier conversion wrote to --output (default: refuse)")  # fmt: skip
    add("--format", "what the inputs are; auto looks at the first 50 lines", "auto", choices=("auto", *ALL_FORMATS))
    add("--encoding", "encoding of text and JSON", "utf-8", choices=ENCODINGS)
    add("--field", "json-lines, parquet, arrow: the field with the text (default: text, else content)")
    add("--join", "clue-text, paragraphs: text put between joined lines (default: a line break; nothing in paragraphs)")
    add("--star", "webtext2019zh: keep answers with at least K stars", 3, type=_number(int, 0), metavar="K")
    command.add_argument("--both", action="store_true",
                         help="translation2019zh: keep the English, too, in a line below (default: no)")  # fmt: skip
    add("--min-length", "drop items of fewer characters", 0, type=_number(int, 0), metavar="N")
    add("--max-length", "most characters of an item, 0 for no limit", 0, type=_number(int, 0), metavar="N")
    add("--too-long", "what becomes of longer items", "split", choices=("split", "drop"))
    command.add_argument("--dedup", action=argparse.BooleanOptionalAction, default=True,
                         help="drop exact copies of an earlier item (default: yes)")  # fmt: skip
    add("--valid-share", "share for valid/, chosen by the hash of each text", 0.05, type=_number(float, 0, 1), metavar="S")
    add("--shard-mb", "size of an output file in MB", 64.0, type=_number(float, 0.001), metavar="MB")
    add("--max-bad", "give up after more unreadable items than this", 100, type=_number(int, 0), metavar="N")
    add("--max-unpacked-gb", "most GB that one archive may unpack to", 64.0, type=_number(float, 0.001), metavar="GB")
    add("--vocab", "vocab.txt or tokenizer.json: report the share of its unknown tokens (default: none)", type=Path)
    return top


def main(argv: list[str] | None = None) -> None:
    """The command line; errors are one line and status 2."""
    with exit_on_user_error():
        options = parser().parse_args(argv)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # removes what was written, as Ctrl-C does
        try:
            convert(options)
        except KeyboardInterrupt:
            print("\ninterrupted: nothing was written", file=sys.stderr)
            raise SystemExit(130) from None


if __name__ == "__main__":
    main()
