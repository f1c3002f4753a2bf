"""The parser that all benchmarks begin with, and the page that most of them end with."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def parser_of(script: str, description: str | None) -> argparse.ArgumentParser:
    """Shows the description as it is written, takes whole flags only, and answers a wrong one by one line and status 2."""
    parser = argparse.ArgumentParser(prog=script, description=description, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.error = lambda message: (print(f"error: {message}", file=sys.stderr), sys.exit(2))
    return parser


def publish(page: str, file: Path) -> None:
    """Writes a page of results, in a folder that it makes if it is missing, and prints the page."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page, encoding="utf-8")
    print(page, end="")
