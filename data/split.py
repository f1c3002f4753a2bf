"""Splits array-JSON files into a training and a validation folder, by the content of each item.

    bash scripts/python.sh data/split.py mine/corpus/*.json --train mine/train --valid mine/valid --percent 5

An item goes to the validation set when the SHA-256 of its text says so. The choice depends on nothing but the text: the
same paragraph lands on the same side however the files are ordered, joined or extended, so a corpus can grow without
leaking yesterday's validation text into today's training set. All files are read before the first one is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from durable.files import replacing
from gpt2_chinese.corpora.cleaning import content_hash, is_validation
from gpt2_chinese.corpus import read_file
from gpt2_chinese.errors import UserError, command_parser, exit_on_user_error
from gpt2_chinese.files import reason


def write_array(path: Path, items: Iterable[str]) -> None:
    """Writes an array-JSON file with one item a line, complete or not at all."""
    lines = ",\n".join(json.dumps(item, ensure_ascii=False) for item in items)
    with replacing(path) as staging:
        staging.write_text(f"[\n{lines}\n]\n" if lines else "[]\n", encoding="utf-8")


def check_places(files: list[Path], train: Path, valid: Path) -> None:
    """Raises UserError if a file would be written over one that was given, or over another part."""
    if train.resolve() == valid.resolve():
        raise UserError(f"--train and --valid are both {train}: give two folders")
    places: dict[str, Path] = {}
    for file in files:
        if file.resolve().parent in (train.resolve(), valid.resolve()):
            raise UserError(f"{file} would be overwritten by its own part: give other folders for --train and --valid")
        other = places.setdefault(file.name, file)
        if other is not file:
            raise UserError(f"{other} and {file} would both become {train / file.name}: rename one of them")


def split(files: list[Path], train: Path, valid: Path, share: float) -> None:
    """Writes the two parts of each file. Raises UserError, before anything is written, if one cannot be read."""
    check_places(files, train, valid)
    for file in files:
        for _ in read_file(file):
            pass
    for folder in (train, valid):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise UserError(f"{folder} cannot be made: {reason(error)}; give another folder") from None
    for file in files:
        parts: dict[bool, list[str]] = {True: [], False: []}
        for item in read_file(file):
            parts[is_validation(content_hash(item), share)].append(item)
        write_array(train / file.name, parts[False])
        write_array(valid / file.name, parts[True])
        print(f"{file.name}: {len(parts[False])} for training, {len(parts[True])} for validation")


def main() -> None:
    """The command line; a wrong input is one line and exit status 2."""
    with exit_on_user_error():
        parser = command_parser("bash scripts/python.sh data/split.py", __doc__)
        parser.add_argument("files", nargs="+", type=Path, help="array-JSON files, one paragraph an item")
        parser.add_argument("--train", type=Path, required=True, help="folder for the training part")
        parser.add_argument("--valid", type=Path, required=True, help="folder for the validation part")
        parser.add_argument("--percent", type=float, default=5.0, help="size of the validation part (default: 5)")
        arguments = parser.parse_args()
        if not 0 <= arguments.percent <= 100:
            raise UserError(f"--percent must be from 0 to 100, not {arguments.percent:g}")
        split(arguments.files, arguments.train, arguments.valid, arguments.percent / 100)


if __name__ == "__main__":
    main()
