"""The parser that all benchmarks begin with, numbers of rounds and steps, and the page that most of them end with."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def parser_of(script: str, description: str | None) -> argparse.ArgumentParser:
    """Shows the description as it is written, takes whole flags only, and answers a wrong one by one line and status 2."""
    parser = argparse.ArgumentParser(prog=script, description=description, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.error = lambda message: (print(f"error: {message}", file=sys.stderr), sys.exit(2))
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """The `type` of a flag that counts something; a smaller number ends the program by one line that names the flag."""

    def count(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{number}: give at least {least}")
        return number

    count.__name__ = "int"  # in argparse's line about a text that is no number
    return count


def set_missing(options: argparse.Namespace, **numbers: tuple[int, int]) -> None:
    """Sets each flag that was not given: to its first number, with --quick to the second."""
    for name, pair in numbers.items():
        if getattr(options, name) is None:
            setattr(options, name, pair[options.quick])


def publish(page: str, file: Path) -> None:
    """Writes a page of results, in a folder that it makes if it is missing, and prints the page."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page, encoding="utf-8")
    print(page, end="")
