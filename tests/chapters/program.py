"""Runs the program of a chapter, as a user would, on a model small enough to take a step in milliseconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32}
VALID = ROOT / "data" / "valid" / "comments.json"  # to evaluate on all that is shipped takes as long as ten steps


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
        """The command line of a small run on the shipped texts, with some of those for validation."""
        config = self.folder / "config.json"
        config.write_text(json.dumps(SMALL))
        program = str(ROOT / "chapters" / self.name / "train.py")
        given = [str(f) for f in flags]
        small = ["--model-config", config, "--batch-size", 12, "--valid-data", VALID, "--output-dir", self.output]
        return [sys.executable, program, *map(str, small), *given]

    def train(self, *flags: object, status: int = 0, timeout: float = 120) -> str:
        """Runs it and returns what it printed; asserts its exit status."""
        return run(self.command(*flags), status, timeout)

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl."""
        return [json.loads(line) for line in (self.output / "metrics.jsonl").read_text().splitlines()]

    def losses(self) -> list[float]:
        """The loss of every step."""
        return [row["loss"] for row in self.metrics()]


def environment() -> dict[str, str]:
    """That of the tests, with this checkout first and one thread a process."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}


def run(command: list[str], status: int = 0, timeout: float = 120) -> str:
    """Runs a command; returns stdout and stderr together, asserts the exit status."""
    done = subprocess.run(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
    )
    assert done.returncode == status, f"status {done.returncode}\n{done.stdout}"
    return done.stdout


def end_a_rank(command: list[str], metrics: Path, num_ranks: int, rank: int, number: int) -> tuple[str, float]:
    """Starts a job, sends a signal to one rank after some steps; returns what the job said and the seconds until its end.

    Asserts that the job fails, with status 1.
    """
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert process.poll() is None
        time.sleep(0.05)
    table = subprocess.check_output(["ps", "-eo", "pid=,ppid="], text=True).splitlines()
    ranks = sorted(int(pid) for pid, parent in map(str.split, table) if int(parent) == process.pid)
    begin = time.monotonic()
    os.kill(ranks[-num_ranks:][rank], number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1, said
    return said, time.monotonic() - begin
