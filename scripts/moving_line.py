"""Runs a long command with its output in a log and one progress line: updated on a terminal, else repeated now and then."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS_BETWEEN_LINES = 20  # without a terminal


def say(line: str) -> None:
    """Prints a line to stderr; stdout is for results."""
    print(line, file=sys.stderr, flush=True)


def run_with_progress(command: list[Any], log: Path, name: str, doing: Callable[[str], str], **popen: Any) -> int:
    """Runs the command; returns its exit status. An exception here (Ctrl-C) kills it and all its child processes.

    Args:
        command, popen: arguments of subprocess.Popen.
        log: file for its stdout and stderr.
        name: begins the progress line.
        doing: makes the text after the seconds from the log's text.
    """
    begin = next_line = time.monotonic()
    terminal = sys.stderr.isatty()
    with open(log, "w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, close_fds=False, **popen
        )
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
                break
            now = time.monotonic()
            line = f"{name}: {now - begin:4.0f} s  {doing(log.read_text(errors='replace'))}"
            if terminal:
                width = shutil.get_terminal_size().columns - 1
                print(f"\r{line[:width]:<{width}}", end="", file=sys.stderr, flush=True)
            elif now >= next_line:
                next_line = now + SECONDS_BETWEEN_LINES
                say(line[:120])
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    return process.returncode
