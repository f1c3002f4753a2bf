"""Errors that a user can put right: one line on stderr, exit status 2, no traceback."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

LOST_PEER = 3  # exit status of a rank that ends because another one did, or did not come
LONGEST_LINE = 2000  # characters; a path of the system has up to 4096, a list of mismatches more


class UserError(Exception):
    """Something the user gave is wrong. The message is one line: the file, item or flag, and what to do about it."""


class RunError(Exception):
    """A run cannot go on, whatever the user gave. One line, said by rank 0, and exit status 1 (see launch)."""


def fail(message: str) -> NoReturn:
    """Prints `error: message` to stderr and exits with status 2.

    Under a launcher every rank finds the same error; rank 0 alone says it. What a user typed may hold line breaks or
    control characters, and be of any length: the line stays a line.
    """
    rank, count = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    of_a_launcher = rank.isdecimal() and count.isdecimal() and int(rank) < int(count)
    if not of_a_launcher or int(rank) == 0:
        line = " ".join(str(message).split())
        line = line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE - 200]} [...] {line[-200:]}"
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
        print(f"error: {line}", file=sys.stderr, flush=True)
    raise SystemExit(2)


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turns a UserError raised in its block into one line on stderr and exit status 2."""
    try:
        yield
    except UserError as error:
        fail(str(error))


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turns what a library raises in its block into a UserError: `what`, and what the library says.

    A panic of a library written in Rust is a BaseException, which `except Exception` lets pass.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise UserError(f"{what}: {error}") from None
        raise


LAUNCHED_VARIABLE = "GPT2_CHINESE_LAUNCHED"  # set by launch(), to its process id: what it said, its ranks do not say again


def notice(line: str) -> None:
    """Prints a line once for a whole job: by the process that the user started."""
    if os.environ.get("RANK", "0") == "0" and LAUNCHED_VARIABLE not in os.environ:
        print(line, flush=True)


class OneLineParser(argparse.ArgumentParser):
    """argparse whose errors are a UserError, for a caller inside exit_on_user_error: one line, no usage above it."""

    def error(self, message: str) -> NoReturn:
        """Raises the UserError."""
        raise UserError(f"{message.removeprefix('argument ')} (--help lists all flags)")


def command_parser(prog: str, description: str | None, usage: str | None = None) -> OneLineParser:
    """A OneLineParser that shows the description as it is written, and takes whole flags only."""
    raw = argparse.RawDescriptionHelpFormatter
    return OneLineParser(prog=prog, usage=usage, description=description, formatter_class=raw, allow_abbrev=False)
