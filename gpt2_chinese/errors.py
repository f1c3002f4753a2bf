"""Errors that a user can put right: one line on stderr, exit status 2, no traceback."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

from durable.closed_pipe import exit_on_closed_pipe
from durable.command_line import WholeFlagsParser, one_line
from durable.printable import escape_what_stdout_lacks

SPEAK_S = 5.0  # how long the other ranks leave to rank 0 to print an error and to end
LOST_PEER = 3  # exit status of a rank that ends because another rank ended or did not answer


class UserError(Exception):
    """The user's input is wrong. The message is one line: the file, item or flag, and what to do about it."""


class RunError(Exception):
    """A run cannot continue, whatever the input. Rank 0 prints one line, and the exit status is 1 (see launch)."""


def fail(message: str) -> NoReturn:
    """Prints `error: message` to stderr and exits with status 2.

    Under a launcher every rank finds the same error, and rank 0 prints it (see print_on_rank_0). A user's text in the
    message may contain line breaks or control characters and have any length; the output is still one line.
    """
    rank, count = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    of_a_launcher = rank.isdecimal() and count.isdecimal() and int(rank) < int(count)
    print_on_rank_0(one_line(str(message)), int(rank) if of_a_launcher else 0)
    raise SystemExit(2)


def print_on_rank_0(message: str, rank: int) -> None:
    """Prints an error that all ranks found: rank 0 at once; another rank only if no launcher ends it within SPEAK_S.

    A launcher ends all ranks as soon as one has ended. If another rank ended first, rank 0 might not have printed yet. And
    an error that rank 0 did not find would be lost: then the launcher does not end this rank, and it prints its number too.
    """
    if rank > 0:
        with contextlib.suppress(ValueError):  # only the main thread may
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's; a run's own handler would go on
        time.sleep(SPEAK_S)
    print(f"error: {f'rank {rank}: ' if rank > 0 else ''}{message}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turns a UserError raised in its block into one line on stderr and exit status 2; ends quietly on a closed pipe.

    From here on, stdout escapes characters that its encoding lacks, in the rest of the program too.
    """
    escape_what_stdout_lacks()
    with exit_on_closed_pipe():
        try:
            yield
        except UserError as error:
            fail(str(error))


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turns an exception of a library in its block into a UserError: `what`, then the library's message.

    A panic of a library written in Rust is a BaseException, which `except Exception` does not catch.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise UserError(f"{what}: {error}") from None
        raise


LAUNCHED_VARIABLE = "GPT2_CHINESE_LAUNCHED"  # set by launch(), to its process id; ranks then do not repeat its notices


def notice(line: str) -> None:
    """Prints a line once for a whole job: by the process that the user started."""
    if os.environ.get("RANK", "0") == "0" and LAUNCHED_VARIABLE not in os.environ:
        print(line, flush=True)


class OneLineParser(WholeFlagsParser):
    """A parser that raises UserError, which exit_on_user_error prints as one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Raises UserError with this message."""
        raise UserError(f"{message.removeprefix('argument ')} (--help lists all flags)")


def command_parser(prog: str, description: str | None, usage: str | None = None) -> OneLineParser:
    """A OneLineParser that shows the description as it is written, and takes whole flags only."""
    raw = argparse.RawDescriptionHelpFormatter
    return OneLineParser(prog=prog, usage=usage, description=description, formatter_class=raw, allow_abbrev=False)
