"""Runs the program of a chapter, as a user would, on a model small enough to take a step in milliseconds."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness.handed_over import handing_over
from tests.harness.program import run_forked
from tests.limits import HANGS_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32}
WARNING = re.compile("(Deprecation|Future|User)Warning: ")
VALID = ROOT / "data" / "valid" / "comments.json"  # evaluating all shipped texts takes as long as ten steps


def _is_known(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except socket.gaierror:
        return False


needs_localhost = pytest.mark.skipif(not _is_known("localhost"), reason="its launcher asks for localhost by name")


@dataclass
class Chapter:
    """A chapter's train.py with a folder of its own to write to.

    Attributes:
        name: as in chapters/.
        folder: a temporary folder; the run goes to folder/run.
    """

    name: str
    folder: Path

    @property
    def output(self) -> Path:
        """The --output-dir."""
        return self.folder / "run"

    def command(self, *flags: object) -> list[str]:
        """The command line of a small run on the shipped texts, validated on one file of them."""
        config = self.folder / "config.json"
        config.write_text(json.dumps(SMALL))
        program = str(ROOT / "chapters" / self.name / "train.py")
        given = [str(f) for f in flags]
        small = ["--model-config", config, "--batch-size", 12, "--valid-data", VALID, "--output-dir", self.output]
        return [sys.executable, program, *map(str, small), *given]

    def train(self, *flags: object, status: int = 0) -> str:
        """Runs it and returns what it printed; asserts its exit status."""
        return run(self.command(*flags), status)

    def train_forked(self, *flags: object, status: int = 0) -> str:
        """As `train`, in a process forked from one that has torch loaded (tests/harness/program.py)."""
        return fork(self.command(*flags), status)

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl."""
        return [json.loads(line) for line in (self.output / "metrics.jsonl").read_text().splitlines()]

    def num_rows(self) -> int:
        """The number of complete lines of metrics.jsonl; 0 while the file does not exist."""
        metrics = self.output / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def losses(self) -> list[float]:
        """The loss of every step."""
        return [row["loss"] for row in self.metrics()]


def without_torch(command: list[str]) -> list[str]:
    """A command line of Python whose program cannot import torch."""
    python, program, *flags = command
    code = f"import runpy, sys; sys.modules['torch'] = None; sys.argv = {[program, *flags]!r}; " \
           f"sys.path.insert(0, {str(Path(program).parent)!r}); runpy.run_path({program!r}, run_name='__main__')"
    return [python, "-c", code]


def environment() -> dict[str, str]:
    """The environment of the tests, with this checkout first and one thread a process."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}


def run(command: list[str], status: int = 0, forks: bool = False) -> str:
    """Runs a command; returns stdout and stderr together, asserts the exit status. A run that succeeds has no warnings.

    Args:
        forks: the Python programs that the command starts are forked from a process that has torch loaded.
    """
    given = handing_over(environment()) if forks else environment()
    done = subprocess.run(command, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=HANGS_S)
    assert done.returncode == status, f"status {done.returncode}\n{done.stdout}"
    assert status or not WARNING.search(done.stdout), done.stdout
    return done.stdout


def fork(command: list[str], status: int = 0) -> str:
    """As `run`, for a Python program, in a process forked from one that has torch loaded."""
    found, said = run_forked(command, environment())
    assert found == status, f"status {found}\n{said}"
    assert status or not WARNING.search(said), said
    return said


def wait_for_rows(chapter: Chapter, process: subprocess.Popen[Any], number: int = 1, log: Path | None = None) -> None:
    """Waits until the running program has written `number` rows of metrics; `log` is the file with its output."""
    wait_until(lambda: chapter.num_rows() >= number, lambda: f"{number} rows\n{log.read_text() if log else chapter}",
               lambda: process.poll() is None)  # fmt: skip


def parents() -> dict[int, int]:
    """{process: its parent} of all processes of this machine. A minimal Debian has no `ps`."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def ranks_below(launcher: int) -> dict[int, int]:
    """{rank: process} of the ranks that a launcher has started. Process numbers need not rise: they wrap around."""
    found = {}
    for pid in (pid for pid, parent in parents().items() if parent == launcher):
        with contextlib.suppress(OSError):  # it has ended
            lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
            found |= {int(line.partition("=")[2]): pid for line in lines if line.startswith("RANK=")}
    return found


def end_a_rank(chapter: Chapter, num_ranks: int, rank: int, number: int, *flags: object) -> str:
    """Starts a job of many steps, sends a signal to one rank after some of them; returns what the job said.

    Asserts that the job fails, with status 1.
    """
    many = ("--max-steps", 10**5, "--eval-every", 10**6, "--save-every", 10**6)
    command = chapter.command("--nproc", num_ranks, *many, *flags)
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for_rows(chapter, process, 4)
    os.kill(ranks_below(process.pid)[rank], number)
    said, _ = process.communicate(timeout=HANGS_S)
    assert process.returncode == 1, said
    return said


def free_port() -> int:
    """A free port that the system never assigns by itself, so it stays free until it is used."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
