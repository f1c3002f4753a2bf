"""A long command with its output in a log and one line for the user: it moves on a terminal, else it comes now and then."""

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

SECONDS_BETWEEN_LINES = 20  # where there is no terminal


def say(line: str) -> None:
    """Talks to the user; stdout is for answers."""
    print(line, file=sys.stderr, flush=True)


def run_with_progress(command: list[Any], log: Path, name: str, doing: Callable[[str], str], **popen: Any) -> int:
    """Runs the command; returns its exit status. What ends this process (Ctrl-C) ends it too, with all that it started.

    Args:
        command, popen: of subprocess.Popen.
        log: takes its stdout and stderr.
        name: begins the line.
        doing: from the log's text to what the line says after the seconds.
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
