"""The parser that all benchmarks begin with."""

from __future__ import annotations

import argparse
import sys


def parser_of(script: str, description: str | None) -> argparse.ArgumentParser:
    """Shows the description as it is written, takes whole flags only, and answers a wrong one by one line and status 2."""
    parser = argparse.ArgumentParser(prog=script, description=description, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.error = lambda message: (print(f"error: {message}", file=sys.stderr), sys.exit(2))
    return parser
