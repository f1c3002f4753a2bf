"""What the command lines of both packages share: a message in one line, and a parser that takes no `--` for a value."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from durable.printable import printable

LONGEST_LINE = 2000  # characters; a path can have 4096, a list of mismatches more


def one_line(message: str) -> str:
    """A message with a user's text in it, which may have line breaks, control characters and any length."""
    line = " ".join(message.split())
    line = line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE - 200]} [...] {line[-200:]}"
    return printable(line)


class WholeFlagsParser(argparse.ArgumentParser):
    """As argparse; but `--flag=--`, of which argparse before Python 3.13 makes an empty list, is an error."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, after a look at the words before a lone `--`."""
        words = sys.argv[1:] if args is None else list(args)
        for word in words[: words.index("--")] if "--" in words else words:
            if word.startswith("--") and word.endswith("=--"):
                self.error(f"{word[:-3]}: -- is no value, it ends the flags: give another one")
        return super().parse_known_args(words, namespace)
