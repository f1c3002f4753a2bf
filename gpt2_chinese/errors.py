"""Errors that a user can put right: one line on stderr, exit status 2, no traceback."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn


class UserError(Exception):
    """Something the user gave is wrong. The message is one line: the file, item or flag, and what to do about it."""


class RunError(Exception):
    """A run cannot go on, whatever the user gave. One line, said by rank 0, and exit status 1 (see launch)."""


def fail(message: str) -> NoReturn:
    """Prints `error: message` to stderr and exits with status 2.

    Under a launcher every rank finds the same error; rank 0 alone says it.
    """
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
    raise SystemExit(2)


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turns a UserError raised in its block into one line on stderr and exit status 2."""
    try:
        yield
    except UserError as error:
        fail(str(error))


LAUNCHED_VARIABLE = "GPT2_CHINESE_LAUNCHED"  # set by launch(): what the parent said, its ranks do not say again


def notice(line: str) -> None:
    """Prints a line once for a whole job: by the process that the user started."""
    if os.environ.get("RANK", "0") == "0" and LAUNCHED_VARIABLE not in os.environ:
        print(line, flush=True)


class OneLineParser(argparse.ArgumentParser):
    """argparse whose errors are a UserError, for a caller inside exit_on_user_error: one line, no usage above it."""

    def error(self, message: str) -> NoReturn:
        """Raises the UserError."""
        raise UserError(f"{message.removeprefix('argument ')} (--help lists all flags)")
