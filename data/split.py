"""Splits array-JSON files into a training and a validation folder, by the content of each item.

    python data/split.py my_corpus/*.json --train data/mine/train --valid data/mine/valid [--percent 5]

An item goes to the validation set when the SHA-256 of its text says so. The choice depends on nothing but the text: the
same paragraph lands on the same side however the files are ordered, joined or extended, so a corpus can grow without
leaking yesterday's validation text into today's training set.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path


def is_validation(text: str, percent: float) -> bool:
    """True for about `percent` per cent of all texts; a pure function of the text."""
    number = int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big")
    return number % 10_000 < percent * 100


def write_array(path: Path, items: list[str]) -> None:
    """Writes an array-JSON file with one item per line, into a temporary file that is then renamed."""
    staging = path.with_name(path.name + ".tmp")
    lines = ",\n".join(json.dumps(item, ensure_ascii=False) for item in items)
    staging.write_text(f"[\n{lines}\n]\n" if items else "[]\n", encoding="utf-8")
    os.replace(staging, path)


def check_places(files: list[Path], train: Path, valid: Path) -> None:
    """Raises ValueError if a file would be written over one that was given, or over another part."""
    if train.resolve() == valid.resolve():
        raise ValueError(f"--train and --valid are both {train}: give two folders")
    places: dict[str, Path] = {}
    for file in files:
        if file.resolve().parent in (train.resolve(), valid.resolve()):
            raise ValueError(f"{file} would be overwritten by its own part: give other folders for --train and --valid")
        other = places.setdefault(file.name, file)
        if other is not file:
            raise ValueError(f"{other} and {file} would both become {train / file.name}: rename one of them")


def read_array(file: Path) -> list[str]:
    """The items of an array-JSON file. Raises ValueError that says what is wrong with it."""
    try:
        items = json.loads(file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text: save it as UTF-8, or use gpt2_chinese.corpora --encoding") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"{file} is not a JSON array of strings")
    for number, item in enumerate(items, 1):
        try:
            item.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(f"{file}: item {number} has half a surrogate pair, which is no character: remove it") from None
    return items


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="array-JSON files, one paragraph an item")
    parser.add_argument("--train", type=Path, required=True, help="folder for the training part")
    parser.add_argument("--valid", type=Path, required=True, help="folder for the validation part")
    parser.add_argument("--percent", type=float, default=5.0, help="size of the validation part (default: 5)")
    parser.error = lambda message: parser.exit(2, f"error: {message}\n")
    arguments = parser.parse_args()
    if not 0 <= arguments.percent <= 100:
        parser.error(f"--percent must be from 0 to 100, not {arguments.percent:g}")
    try:
        check_places(arguments.files, arguments.train, arguments.valid)
    except ValueError as error:
        parser.error(str(error))
    for folder in (arguments.train, arguments.valid):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            parser.error(f"{folder} cannot be made: {getattr(error, 'strerror', None) or error}; give another folder")
    for file in arguments.files:
        try:
            items = read_array(file)
        except ValueError as error:
            parser.error(str(error))
        parts: dict[bool, list[str]] = {True: [], False: []}
        for item in items:
            parts[is_validation(item, arguments.percent)].append(item)
        write_array(arguments.train / file.name, parts[False])
        write_array(arguments.valid / file.name, parts[True])
        print(f"{file.name}: {len(parts[False])} for training, {len(parts[True])} for validation")


if __name__ == "__main__":
    main()
