"""Starts a chapter on two nodes by the command of docs/en/production/clusters.md, the same on each of them."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.chapters.program import ROOT, environment
from tests.cluster.nodes import Node
from tests.limits import wait_until

PAGE = ROOT / "docs" / "en" / "production" / "clusters.md"
FALLS = str(ROOT / "tests" / "cluster" / "falls.py")


@dataclass
class Job:
    """One torchrun on each node.

    Attributes:
        launchers: of node1 and node2.
        logs: the files with what they and their ranks print; a node that came back has another one.
    """

    launchers: list[subprocess.Popen[str]]
    logs: list[Path]

    def said(self) -> str:
        """What both nodes have printed."""
        return "\n".join(f"---- {log.stem}\n{log.read_text(errors='replace')}" for log in self.logs)

    def start_again(self, node: Node, command: list[str]) -> None:
        """Starts the command on a node whose launcher has ended."""
        number = [log.stem for log in self.logs].index(node.name)
        log = self.logs[number].with_name(f"{node.name}-again.log")
        self.launchers[number] = node.start(command, log, _environment())
        self.logs.append(log)

    def running(self) -> bool:
        """Whether some launcher has not ended. Asks all, so that none remains a zombie."""
        return None in [launcher.poll() for launcher in self.launchers]

    def wait(self) -> list[int]:
        """Waits for the end; returns the exit status of each launcher."""
        wait_until(lambda: not self.running(), lambda: f"the end of the job\n{self.said()}")
        return [launcher.returncode for launcher in self.launchers]


def torchrun(num_ranks: int, program: list[str], survives: bool = False) -> list[str]:
    """The command of the page with `num_ranks` ranks a node, another program, and an id that no other job has.

    survives: take the command of a job that survives a node.
    """
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if "--rdzv-backend=c10d" in line]
    [line] = [line for line in lines if ("--nnodes=1:2" in line) == survives]
    *words, chapter = shlex.split(line)
    assert chapter == "chapters/02_ddp/train.py", line
    changed = {"--nproc-per-node": num_ranks, "--rdzv-id": uuid.uuid4()}
    words = [f"{name}={changed[name]}" if (name := word.partition("=")[0]) in changed else word for word in words]
    return ["env", *(str(ROOT / word) if (ROOT / word).is_file() else word for word in words), *program]


@contextlib.contextmanager
def started(nodes: tuple[Node, Node], command: list[str], folder: Path) -> Iterator[Job]:
    """A job under way: `command` on both nodes. After the block none of its processes runs, whatever happened."""
    logs = [folder / f"{node.name}.log" for node in nodes]
    job = Job([node.start(command, log, _environment()) for node, log in zip(nodes, logs, strict=True)], logs)
    try:
        yield job
    finally:
        if job.running():
            for node in nodes:
                node.kill()
            job.wait()


def _environment() -> dict[str, str]:
    return {**environment(), "PYTHON": sys.executable}


def run(nodes: tuple[Node, Node], num_ranks: int, program: list[str], folder: Path) -> str:
    """Runs a program on `num_ranks` ranks a node; returns what both nodes printed, asserts that both end with status 0."""
    with started(nodes, torchrun(num_ranks, program), folder) as job:
        statuses = job.wait()
        assert statuses == [0, 0], f"status {statuses}\n{job.said()}"
        return job.said()
