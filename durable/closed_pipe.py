"""Ends a program quietly when the reader of its output is gone, as `| head` goes after ten lines."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator

STATUS = 128 + 13  # what a shell reports for a program that SIGPIPE, 13, has ended


@contextlib.contextmanager
def exit_on_closed_pipe() -> Iterator[None]:
    """Turns a BrokenPipeError of its block into exit status 141, if it came from stdout or stderr; prints nothing.

    Output waits in a buffer, so it is flushed here: Python's own flush at the end of the program would report the error.
    A BrokenPipeError of another file or socket is raised unchanged.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        if not silence():
            raise
        raise SystemExit(STATUS) from None


def silence() -> bool:
    """Leads stdout and stderr, where their reader is gone, to nowhere; False if both have a reader.

    Else Python would write what is left in their buffers to the pipe at the end of the program, and report the error.
    """
    gone = [stream for stream in (sys.stdout, sys.stderr) if _has_no_reader(stream)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in gone:
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
    return bool(gone)


def _has_no_reader(stream: object) -> bool:
    """True if the stream is a pipe or a socket whose other end is closed."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # type: ignore[attr-defined]
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (AttributeError, OSError, ValueError):  # no stream, closed, or one of a test that is no file
        return False
