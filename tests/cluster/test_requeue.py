"""Jobs that Slurm interrupts: they are queued again by themselves and end on the curve of a run without an interruption.

The last rank holds the run at given steps (falls.py) until a signal comes: a real Slurm looks at time limits every 30 s
only, and a fast machine would take all steps meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chapters.inside import train
from tests.chapters.law import LONG, flags_of
from tests.chapters.program import ROOT, SMALL, Chapter
from tests.cluster.conftest import Slurm
from tests.limits import wait_until

AT_START = ROOT / "tests" / "cluster" / "at_start"
BOTH_NODES = ("--nodes=2", "--exclusive")


class Job:
    """A job on the two nodes that trains `chapter`. Its ranks fall by `plan` (falls.py).

    Attributes:
        number: Slurm's.
        log: the file with its output.
    """

    def __init__(self, slurm: Slurm, chapter: Chapter, folder: Path, plan: dict, *command: object) -> None:
        self.slurm, self.chapter, self.folder, self.log = slurm, chapter, folder, folder / "log"
        variables = {"FALLS_PLAN": json.dumps({"folder": str(folder), **plan}), "PYTHONPATH": f"{AT_START}:{ROOT}"}
        said = slurm("sbatch", "--parsable", f"--output={self.log}", *BOTH_NODES, *command, **variables)
        self.number = said.strip().splitlines()[-1]

    def fact(self, name: str) -> str:
        """What `scontrol show job` says; not too often, because each question starts a program."""
        time.sleep(0.2)
        found = re.search(rf"\b{name}=(\S*)", self.slurm("scontrol", "show", "job", self.number))
        assert found, name
        return found[1]

    def has_ended(self) -> bool:
        """Whether Slurm will not run it again."""
        return self.fact("JobState") in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")

    def update(self, change: str) -> None:
        """Changes the job by `scontrol update`."""
        self.slurm("scontrol", "update", f"JobId={self.number}", change)

    def limit_is_near(self) -> None:
        """Changes the time limit so that its signal, a minute before it, is due. Slurm sends it within 90 s."""
        hours, minutes, seconds = map(int, self.fact("RunTime").split(":"))
        self.update(f"TimeLimit={(hours * 3600 + minutes * 60 + seconds + 45) // 60 + 1}")

    def ranks(self) -> dict[int, int]:
        """{rank: process} of the ranks that run now."""
        program, output = f"chapters/{self.chapter.name}/train.py".encode(), str(self.chapter.output).encode()
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words, environ = ((process / file).read_bytes().split(b"\0") for file in ("cmdline", "environ"))
                if words[3:4] == [program] and output in words:  # after Python, falls.py and the plan
                    found |= {int(word[5:]): int(process.name) for word in environ if word.startswith(b"RANK=")}
        return found

    def reaches(self, name: str) -> None:
        """Waits for a file of the plan: "held_STEP" or "between"."""
        wait_until((self.folder / name).exists, lambda: f"{name}\n{self.said()}", lambda: not self.has_ended())

    def is_queued_again(self, times: int) -> None:
        """Waits until the job has queued itself again for the n-th time."""
        line = ": the job is queued again"
        wait_until(lambda: self.log.read_text().count(line) == times and self.fact("JobState") != "RUNNING", self.said,
                   lambda: not self.has_ended())  # fmt: skip

    def wait_for_end(self, line: str) -> str:
        """Waits until the job has printed `line` and ended; returns what it printed."""
        wait_until(lambda: line in self.log.read_text(), self.said, lambda: not self.has_ended())
        wait_until(self.has_ended, self.said)
        assert (self.fact("JobState"), self.fact("ExitCode")) == ("COMPLETED", "0:0"), self.said()
        return self.said()

    def said(self) -> str:
        """The log so far, and the state of the job."""
        return f"{self.log.read_text() if self.log.exists() else ''}\n{self.slurm('scontrol', 'show', 'job', self.number)}"


def parent_of(process: int) -> int:
    """The process that started another one."""
    [number] = re.findall(r"^PPid:\s*(\d+)$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    return int(number)


def slurmd_of(node: str, folder: Path) -> int:
    """The slurmd of a node of the cluster whose files are in `folder`."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words, environ = ((process / file).read_bytes().split(b"\0") for file in ("cmdline", "environ"))
            of_this_cluster = f"SLURM_CONF={folder}/slurm.conf".encode() in environ
            if of_this_cluster and words[:4] == [b"slurmd", b"-D", b"-N", node.encode()]:
                return int(process.name)
    raise AssertionError(f"no slurmd of {node}")


@pytest.fixture
def uninterrupted(ranks, tmp_path: Path) -> Callable[..., list[dict]]:
    """uninterrupted(chapter, flags...): the rows of that chapter on two ranks that nobody interrupts."""

    def rows(name: str, *flags: object) -> list[dict]:
        chapter = Chapter(name, tmp_path / "uninterrupted")
        chapter.folder.mkdir()
        train(ranks, 2, chapter, *flags_of(LONG), *flags)
        return chapter.metrics()

    return rows


def assert_same_run(rows: list[dict], expected: list[dict]) -> None:
    """Every step once, and the same bits: a checkpoint holds all that decides the next step."""
    assert [row["step"] for row in rows] == list(range(1, LONG + 1))
    for name in ("loss", "grad_norm", "lr"):
        assert [row[name] for row in rows] == [row[name] for row in expected], name


def training(chapter: Chapter, *flags: object) -> tuple[object, ...]:
    """The words of sbatch that train it by scripts/train.sbatch."""
    return ROOT / "scripts" / "train.sbatch", chapter.name, *chapter.command(*flags_of(LONG), *flags)[2:]


@pytest.mark.deep
def test_a_job_that_is_requeued_or_preempted_goes_on(two_slurm_nodes: Slurm, uninterrupted, tmp_path: Path) -> None:
    slurm, chapter = two_slurm_nodes, Chapter("02_ddp", tmp_path)
    job = Job(slurm, chapter, tmp_path, {"hold": {"2": [5, 10, 15]}}, *training(chapter))
    urgent = ("sbatch", "--wait", "--partition=urgent", *BOTH_NODES, f"--output={tmp_path}/urgent", "--wrap", "srun true")

    job.reaches("held_5")
    slurm("scontrol", "requeue", job.number)
    job.reaches("held_10")
    slurm(*urgent)
    job.reaches("held_15")
    slurm("scontrol", "update", "PartitionName=class", "GraceTime=60")
    slurm(*urgent)

    said = job.wait_for_end("Done.")
    assert said.count("Stopped by SIGTERM after step") == 3 and "Traceback" not in said, said
    assert said.count(": the job is queued again") == 1, f"in the grace time the job ends first, so it queues itself\n{said}"
    assert job.fact("Restarts") == "3"
    assert_same_run(chapter.metrics(), uninterrupted("02_ddp"))


@pytest.mark.deep
@pytest.mark.parametrize("name, flags", [
    ("06_zero", ("--zero-stage", 3)), ("07_patrickstar", ("--near-budget", "50%"))])  # fmt: skip
def test_chapters_whose_ranks_save_their_parts_go_on(two_slurm_nodes, uninterrupted, tmp_path, name: str, flags) -> None:
    """Once after `scontrol requeue`, once after the time limit."""
    chapter = Chapter(name, tmp_path)
    job = Job(two_slurm_nodes, chapter, tmp_path, {"hold": {"2": [5, 15]}}, *training(chapter, *flags))
    job.reaches("held_5")
    two_slurm_nodes("scontrol", "requeue", job.number)
    job.reaches("held_15")
    job.limit_is_near()
    job.is_queued_again(1)
    job.update("TimeLimit=60")
    said = job.wait_for_end("Done.")
    assert said.count("Stopped by SIGTERM after step") == said.count("Stopped by SIGUSR1 after step") == 1, said
    assert_same_run(chapter.metrics(), uninterrupted(name, *flags))


@pytest.mark.deep
def test_a_job_that_loses_a_node_goes_on_from_its_last_checkpoint(two_slurm_nodes: Slurm, uninterrupted, tmp_path) -> None:
    slurm, chapter = two_slurm_nodes, Chapter("02_ddp", tmp_path)
    job = Job(slurm, chapter, tmp_path, {"hold": {"2": [15]}}, *training(chapter, "--save-every", 10))
    job.reaches("held_15")
    rank_1, slurmd = job.ranks()[1], slurmd_of("n2", slurm.folder)
    os.kill(slurmd, signal.SIGSTOP)  # it must not see the end of its processes
    os.kill(parent_of(rank_1), signal.SIGKILL)  # slurmstepd
    os.kill(rank_1, signal.SIGKILL)
    wait_until(lambda: "rank 0 waited in vain for the others" in job.log.read_text(), job.said)
    slurm("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=dead")  # as Slurm does by itself after SlurmdTimeout
    wait_until(lambda: job.fact("Restarts") == "1", job.said)
    os.kill(slurmd, signal.SIGCONT)  # the node is there again, and Slurm takes it back

    said = job.wait_for_end("Done.")
    assert "step_000010, next is step 11" in said, said
    assert_same_run(chapter.metrics(), uninterrupted("02_ddp", "--save-every", 10))


@pytest.mark.deep
def test_a_run_that_has_used_its_cpu_minutes_goes_on_when_it_gets_more(slurm_with_accounts, uninterrupted, tmp_path) -> None:
    """Slurm charges running jobs each minute, and ends those that are over their limit within 30 s, with SIGTERM."""
    slurm, chapter, sacctmgr = slurm_with_accounts, Chapter("02_ddp", tmp_path), ("sacctmgr", "--immediate")
    slurm(*sacctmgr, "add", "account", "class")
    slurm(*sacctmgr, "add", "user", "root", "account=class", "MaxSubmitJobs=1")
    command = ("--account=class", *training(chapter))
    job = Job(slurm, chapter, tmp_path, {"hold": {"2": [5]}}, *command)
    job.reaches("held_5")
    assert "AssocMaxSubmitJobLimit" in slurm("sbatch", *BOTH_NODES, *command, status=1)
    slurm(*sacctmgr, "modify", "user", "root", "account=class", "set", "GrpTRESMins=cpu=1")
    wait_until(job.has_ended, job.said)
    assert "Stopped by SIGTERM after step" in job.said() and job.fact("JobState") == "TIMEOUT", job.said()
    table = ("sacct", "--noheader", "--allocations", "--format=JobID,State")
    wait_until(lambda: slurm(*table).split() == [job.number, "TIMEOUT"], lambda: slurm(*table))

    job = Job(slurm, chapter, tmp_path, {"hold": {}}, *command)
    wait_until(lambda: job.fact("Reason") == "AssocGrpCPUMinutesLimit", job.said)
    slurm(*sacctmgr, "modify", "user", "root", "account=class", "set", "GrpTRESMins=cpu=-1")
    job.wait_for_end("Done.")
    assert_same_run(chapter.metrics(), uninterrupted("02_ddp"))


@pytest.mark.deep
def test_a_pipeline_that_its_time_limit_cuts_ends_complete(two_slurm_nodes: Slurm, uninterrupted, tmp_path: Path) -> None:
    """Twice while it trains, and once between two steps: before it evaluates it asks whether the run is complete."""
    chapter, results = Chapter("02_ddp", tmp_path / "mine"), tmp_path / "mine"
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    flags = ("--model-config", tmp_path / "config.json", *flags_of(LONG), "--comment", "cut twice")
    texts = [ROOT / "data" / part / "comments.json" for part in ("train", "valid")]
    plan = {"hold": {"2": [5, 20]}, "between": "gpt2_chinese.run.complete"}
    job = Job(two_slurm_nodes, chapter, tmp_path, plan, ROOT / "scripts" / "pipeline.sbatch", "02_ddp", results, *texts,
              *flags)  # fmt: skip
    for times, place in enumerate(("held_5", "held_20"), 1):
        job.reaches(place)
        job.limit_is_near()
        job.is_queued_again(times)
        job.update("TimeLimit=60")
    job.reaches("between")
    job.limit_is_near()
    (tmp_path / "go_on").touch()
    job.is_queued_again(3)
    job.update("TimeLimit=60")

    said = job.wait_for_end("complete: ")
    assert said.count("Stopped by SIGUSR1 after step") == 2 and said.count(": the job is queued again") == 3, said
    assert "evaluate: the time limit is near: the job is queued again" in said, said
    begins = {step: said.count(f"{step}: begins") for step in ("convert", "tokens", "train", "evaluate", "generate")}
    assert begins == {"convert": 1, "tokens": 1, "train": 4, "evaluate": 1, "generate": 1}, said
    assert said.count("vocabulary: skipped") == 3 and said.count("cut twice") >= 3, said
    assert json.loads((results / "run" / "config.json").read_text())["comment"] == "cut twice"
    same = ("--train-data", results / "text" / "train", "--valid-data", results / "text" / "valid")
    rows = chapter.metrics()
    assert_same_run(rows, uninterrupted("02_ddp", *same, "--vocab", results / "vocab.txt"))
    measured = json.loads((results / "evaluate.json").read_text())
    assert measured["all"]["loss"] == pytest.approx(rows[-1]["valid_loss"], rel=1e-5)  # other batches, other sums
    assert (results / "generate.txt").read_text().count("今天天气") == 3


TURN = f"""#!/usr/bin/env bash
set -euo pipefail
source {ROOT}/scripts/slurm_job.sh
echo "$SLURM_JOB_NAME" >>"$ORDER"
until [ -e "$ORDER.all" ]; do sleep 0.1; done
sleep 8 # longer than Slurm keeps a requeued job back
if [ "${{SLURM_RESTART_COUNT:-0}}" -lt 2 ]; then queue_again "$SLURM_JOB_NAME"; fi
"""


@pytest.mark.deep
def test_three_jobs_that_queue_themselves_again_take_turns(two_slurm_nodes: Slurm, tmp_path: Path) -> None:
    """With the priority that Slurm keeps for them, the first two would take turns. A held job does not count."""
    order, script = tmp_path / "order", tmp_path / "turn.sh"
    script.write_text(TURN)

    def submit(*flags: str) -> None:
        log = (f"--output={tmp_path}/log", "--open-mode=append")
        two_slurm_nodes("sbatch", *BOTH_NODES, *log, *flags, script, ORDER=str(order))

    submit("--job-name=held", "--hold")
    for name in "ABC":
        submit(f"--job-name={name}")
    (tmp_path / "order.all").touch()
    wait_until(lambda: order.exists() and len(order.read_text().split()) == 9,
               lambda: f"{order.read_text()}\n{(tmp_path / 'log').read_text()}\n{two_slurm_nodes('squeue')}")  # fmt: skip
    assert order.read_text().split() == list("ABCABCABC"), (tmp_path / "log").read_text()
    two_slurm_nodes("scancel", "--name=held")
