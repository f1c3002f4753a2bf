"""Fixtures of the tests on two nodes: the nodes, the curve of chapter 00, and why a machine cannot run them."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests.chapters.law import curves
from tests.chapters.program import ROOT, environment, free_port
from tests.cluster.nodes import Node, reason_why_not, two_nodes
from tests.harness.pool import preload
from tests.limits import HANGS_S
from tests.tally import STRICT_VARIABLE

preload("tests.chapters.inside", "torch.utils.tensorboard", "torch.distributed.run")  # as tests/chapters/conftest.py does

SCRIPT = ROOT / "scripts" / "slurm_on_one_machine.sh"
Slurm = Callable[..., str]


def skip_or_fail(why: str, could_change: bool) -> NoReturn:
    """Skips a test. Where CI is set it fails, if whoever set the machine up could change that."""
    if could_change and os.environ.get(STRICT_VARIABLE):
        pytest.fail(why, pytrace=False)
    pytest.skip(why)


@pytest.fixture(scope="session")
def needs_nodes() -> None:
    """Skips without root, the tools or the kernel's permission. Where CI is set only the kernel's refusal is a skip."""
    why, could_change = reason_why_not()
    if why:
        skip_or_fail(why, could_change)


@pytest.fixture(scope="module")
def nodes(needs_nodes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    """Two nodes for the tests of a file that neither kill nor cut anything."""
    with two_nodes(tmp_path_factory.mktemp("nodes")) as both:
        yield both


@pytest.fixture(scope="session")
def curve(ranks, tmp_path_factory: pytest.TempPathFactory):
    """curve(steps, grad_accum): the rows of chapter 00 in the run that tests/chapters/law.py describes."""
    return curves(ranks, tmp_path_factory.mktemp)


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """slurm(command...) runs a command with a folder and ports of its own; afterwards the cluster is taken away."""
    short = Path(tempfile.mkdtemp(prefix="slurm_"))  # the path of a socket has at most 108 bytes
    folder = short / "cluster"
    variables = {**environment(), "GPT2_CHINESE_SLURM": str(folder), "GPT2_CHINESE_SLURM_PORT": str(free_port()),
                 "SLURM_CONF": str(folder / "slurm.conf")}  # fmt: skip

    def run(*command: object, status: int = 0, **more: str) -> str:
        done = subprocess.run([str(word) for word in command], env={**variables, **more}, cwd=ROOT, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=HANGS_S)  # fmt: skip
        assert done.returncode == status, f"{command}: status {done.returncode}\n{done.stdout}"
        return done.stdout

    run.folder = folder
    yield run
    run("bash", SCRIPT, "down")
    shutil.rmtree(short)


@pytest.fixture
def two_slurm_nodes(needs_nodes: None, slurm: Slurm) -> Slurm:
    """The same, with the cluster up. It needs root and namespaces, too."""
    return _up(slurm, "slurmd")


@pytest.fixture
def slurm_with_accounts(needs_nodes: None, slurm: Slurm) -> Slurm:
    """The same, with accounting."""
    return _up(slurm, "slurmdbd", "accounting")


def _up(slurm: Slurm, daemon: str, *words: str) -> Slurm:
    if not shutil.which(daemon) and not shutil.which("apt-get"):
        skip_or_fail(f"there is no {daemon}, and no apt-get to install it", could_change=True)
    slurm("bash", SCRIPT, "up", *words)
    return slurm
