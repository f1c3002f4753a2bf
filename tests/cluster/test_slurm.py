"""scripts/slurm_on_one_machine.sh: a real Slurm of two nodes, scripts/train.sbatch on it, and its removal."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.chapters.law import LONG, assert_same_curve, flags_of
from tests.chapters.program import ROOT, Chapter
from tests.cluster.conftest import SCRIPT, Slurm
from tests.cluster.test_torchrun import worst_gap
from tests.fakes import write_programs
from tests.limits import wait_until


def processes_of(folder: Path) -> list[str]:
    """The command lines that name the cluster's folder."""
    table = subprocess.check_output(["ps", "-eo", "args"], text=True).splitlines()
    return [line for line in table if str(folder) in line and "pytest" not in line]


@pytest.mark.deep
@pytest.mark.parametrize("name", ["02_ddp", "06_zero", "07_patrickstar"])
def test_a_chapter_under_slurm_follows_the_curve(two_slurm_nodes: Slurm, curve, tmp_path: Path, name: str) -> None:
    slurm, chapter, log = two_slurm_nodes, Chapter(name, tmp_path), tmp_path / "log"
    assert set(slurm("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()) == {"n1 idle", "n2 idle"}
    flags = chapter.command(*flags_of(LONG))[2:]
    slurm("sbatch", "--wait", f"--output={log}", ROOT / "scripts" / "train.sbatch", name, *flags)
    print(f"{name} under Slurm: worst gap {worst_gap(chapter.metrics(), curve(LONG)):.1e}")
    assert "2 ranks" in log.read_text(), log.read_text()
    assert_same_curve(chapter.metrics(), curve(LONG), rel=1e-4)


@pytest.mark.deep
def test_down_takes_a_running_job_with_it(two_slurm_nodes: Slurm, tmp_path: Path) -> None:
    slurm, folder = two_slurm_nodes, two_slurm_nodes.folder
    started = tmp_path / "started"
    slurm("srun", "--nodes=2", "bash", "-c", f"touch {started}.$SLURM_NODEID")
    assert {file.name for file in tmp_path.glob("started.*")} == {"started.0", "started.1"}
    slurm("sbatch", "--nodes=2", f"--output={tmp_path}/log", "--wrap",
          f"srun bash -c 'touch {started}; sleep 1000 # {folder}'")  # fmt: skip
    wait_until(started.exists, "the job")
    assert "it is running already" in slurm("bash", SCRIPT, "up")
    assert "a Slurm without accounts is running" in slurm("bash", SCRIPT, "up", "accounting", status=2)
    assert "n[1-2]" in slurm("bash", SCRIPT, "status")
    assert "is gone" in slurm("bash", SCRIPT, "down")
    assert not processes_of(folder) and not folder.exists()
    assert "no Slurm of this script is running" in slurm("bash", SCRIPT, "status", status=1)
    assert "no Slurm of this script is here" in slurm("bash", SCRIPT, "down")


@pytest.mark.deep
def test_a_cluster_that_is_only_half_made_is_taken_away(slurm: Slurm, two_slurm_nodes: Slurm, tmp_path: Path) -> None:
    folder = slurm.folder
    slurm("pkill", "-KILL", "-f", f"^munged .*{folder}")
    wait_until(lambda: not processes_of(folder), "the end of the others: without munge they are of no use")
    assert "no Slurm of this script is running" in slurm("bash", SCRIPT, "status", status=1)
    (folder / "slurm.conf").unlink()
    assert "is gone" in slurm("bash", SCRIPT, "down")
    assert not processes_of(folder) and not folder.exists()
    # A slurmd that fails at its start: `up` itself takes the rest away and says why.
    fake = tmp_path / "bin"
    fake.mkdir()
    write_programs(fake, slurmd="#!/bin/sh\necho this slurmd does not start\n")
    said = slurm("bash", SCRIPT, "up", status=2, PATH=f"{fake}:{os.environ['PATH']}")
    assert "this slurmd does not start" in said and "error: the nodes are not ready" in said, said
    assert not processes_of(folder) and not folder.exists()


def test_a_folder_with_other_files_and_an_unknown_word_are_refused(slurm: Slurm) -> None:
    for words in (("upp",), ("up", "acounting"), ("down", "accounting")):
        assert "up, up accounting, status or down" in slurm("bash", SCRIPT, *words, status=2)
    slurm.folder.mkdir()
    (slurm.folder / "thesis.txt").write_text("mine")
    assert "no Slurm of this script is here" in slurm("bash", SCRIPT, "down")
    if os.geteuid() == 0:
        assert "is not a folder of this script" in slurm("bash", SCRIPT, "up", status=2)
    assert (slurm.folder / "thesis.txt").read_text() == "mine"
