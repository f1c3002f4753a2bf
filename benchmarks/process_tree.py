"""Peak memory of a program together with the processes that it starts."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from process_memory import status


def run_and_watch(command: list[str], environment: dict[str, str]) -> tuple[str, float, int, int]:
    """Runs a command. Returns (what it prints, seconds, peak bytes, most processes at once).

    The peak is the sum over all processes of the kernel's VmHWM, asked for every 20 ms: libraries that they share count in
    each. Raises CalledProcessError if the command fails.
    """
    begin = time.perf_counter()
    peaks: dict[int, int] = {}
    most = 1
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            alive = _tree(process.pid)
            for number in alive:
                peaks[number] = max(peaks.get(number, 0), status("VmHWM", number))
            most = max(most, len(alive))
            time.sleep(0.02)
        seconds = time.perf_counter() - begin
        said = process.stdout.read()  # less than a pipe holds
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return said, seconds, sum(peaks.values()), most


def _tree(number: int) -> list[int]:
    """A process and all that it started, directly or indirectly."""
    found = [number]
    for task in Path(f"/proc/{number}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue
        for child in children:
            found += _tree(int(child))
    return found
