"""Starts a chapter on two nodes as docs/en/production/clusters.md says: the same torchrun command on each of them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.chapters.program import ROOT, environment
from tests.cluster.nodes import DEVICE, Node
from tests.limits import wait_until

PORT = 29500  # each node has its own ports: this one is free


@dataclass
class Job:
    """One torchrun on each node.

    Attributes:
        launchers: of node1 and node2.
        logs: the files with what they and their ranks print.
    """

    launchers: list[subprocess.Popen[str]]
    logs: list[Path]

    def said(self) -> str:
        """What both nodes have printed."""
        return "\n".join(f"---- {log.stem}\n{log.read_text(errors='replace')}" for log in self.logs)

    def running(self) -> bool:
        """Whether some launcher has not ended. Asks all, so that none remains a zombie."""
        return None in [launcher.poll() for launcher in self.launchers]

    def wait(self) -> list[int]:
        """Waits for the end; returns the exit status of each launcher."""
        wait_until(lambda: not self.running(), lambda: f"the end of the job\n{self.said()}")
        return [launcher.returncode for launcher in self.launchers]


def torchrun(num_ranks: int, program: list[str]) -> list[str]:
    """The command line for each node, `num_ranks` ranks a node."""
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=node1:{PORT}", f"--rdzv-id={uuid.uuid4()}"]
    return ["bash", str(ROOT / "scripts" / "torchrun.sh"), "--nnodes=2", f"--nproc-per-node={num_ranks}", *meeting, *program]


@contextlib.contextmanager
def started(nodes: tuple[Node, Node], command: list[str], folder: Path) -> Iterator[Job]:
    """A job under way: `command` on both nodes. After the block none of its processes runs, whatever happened."""
    variables = {**environment(), "PYTHON": sys.executable, "GLOO_SOCKET_IFNAME": DEVICE}
    logs = [folder / f"{node.name}.log" for node in nodes]
    job = Job([node.start(command, log, variables) for node, log in zip(nodes, logs, strict=True)], logs)
    try:
        yield job
    finally:
        if job.running():
            for node in nodes:
                node.kill()
            job.wait()


def run(nodes: tuple[Node, Node], num_ranks: int, program: list[str], folder: Path) -> str:
    """Runs a program on `num_ranks` ranks a node; returns what both nodes printed, asserts that both end with status 0."""
    with started(nodes, torchrun(num_ranks, program), folder) as job:
        statuses = job.wait()
        assert statuses == [0, 0], f"status {statuses}\n{job.said()}"
        return job.said()
