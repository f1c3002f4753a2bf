"""Worker processes: programs that read pickles from their stdin and answer on their stdout.

A worker is started anew, because a fork of a process with threads may hang. It ends at the end of its stdin, so also when
its parent is killed. It has a process group of its own, so Ctrl-C reaches the parent alone.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any


def start_worker(program: str, first: Any, pass_fds: tuple[int, ...] = (), **environment: str) -> subprocess.Popen[bytes]:
    """Starts Python with the text of a program and sends it its first pickle.

    Args:
        program: imports what it needs from this checkout.
        first: what the program reads first.
        pass_fds: open files that it inherits.
        environment: variables that differ from this process.
    """
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    worker = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path} | environment,
        pass_fds=pass_fds,
        process_group=0,
    )
    with contextlib.suppress(BrokenPipeError):  # whoever asks it next finds out how it ended
        pickle.dump(first, worker.stdin)
        worker.stdin.flush()
    return worker


def end_workers(workers: list[subprocess.Popen[bytes]]) -> None:
    """Kills workers, and waits until all have ended."""
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.wait()
        worker.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.close()
