"""Jobs that Slurm interrupts: they are queued again by themselves and end on the curve of a run without an interruption.

A test stops the ranks (SIGSTOP) after some steps, so that none ends before Slurm's signal comes: a real Slurm looks at time
limits every 30 s only. Before each of its signals Slurm sends SIGCONT, so the ranks go on by themselves.
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

SLICE_S = 0.1
BOTH_NODES = ("--nodes=2", "--exclusive")


class Job:
    """A job on the two nodes that trains `chapter`.

    Attributes:
        number: Slurm's.
        log: the file with its output.
    """

    def __init__(self, slurm: Slurm, chapter: Chapter, log: Path, *command: object) -> None:
        self.slurm, self.chapter, self.log = slurm, chapter, log
        self.number = slurm("sbatch", "--parsable", f"--output={log}", *BOTH_NODES, *command).strip().splitlines()[-1]
        self._seen: set[int] = set()

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

    def ranks(self) -> dict[int, int]:
        """{rank: process} of the ranks that run now."""
        program, output = f"chapters/{self.chapter.name}/train.py".encode(), str(self.chapter.output).encode()
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words, environ = ((process / file).read_bytes().split(b"\0") for file in ("cmdline", "environ"))
                if words[1:2] == [program] and output in words:
                    found |= {int(word[5:]): int(process.name) for word in environ if word.startswith(b"RANK=")}
        return found

    def at_row(self, number: int) -> dict[int, int]:
        """Waits for two new ranks, stops them after that row of metrics.jsonl, and returns them.

        They run for SLICE_S at a time: between a look at the rows and SIGSTOP a fast machine might take all steps.
        """
        wait_until(lambda: len(set(self.ranks().values()) - self._seen) == 2, self.said, lambda: not self.has_ended())
        ranks = self.ranks()
        self._seen |= set(ranks.values())

        def send(what: signal.Signals) -> None:
            for process in ranks.values():
                os.kill(process, what)

        def are_there() -> bool:
            send(signal.SIGCONT)
            time.sleep(SLICE_S)
            send(signal.SIGSTOP)
            return self.chapter.num_rows() >= number

        wait_until(are_there, self.said)
        assert self.chapter.num_rows() < LONG, "the run is already complete: stop it earlier"
        return ranks

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
    """uninterrupted(flags...): the rows of chapter 02 on two ranks that nobody interrupts."""

    def rows(*flags: object) -> list[dict]:
        chapter = Chapter("02_ddp", tmp_path / "uninterrupted")
        chapter.folder.mkdir()
        train(ranks, 2, chapter, *flags_of(LONG), *flags)
        return chapter.metrics()

    return rows


def assert_same_run(rows: list[dict], expected: list[dict]) -> None:
    """Every step once, and the same bits: a checkpoint holds all that decides the next step."""
    assert [row["step"] for row in rows] == list(range(1, LONG + 1))
    for name in ("loss", "grad_norm", "lr"):
        assert [row[name] for row in rows] == [row[name] for row in expected], name


@pytest.mark.deep
def test_a_job_that_is_requeued_or_preempted_goes_on(two_slurm_nodes: Slurm, uninterrupted, tmp_path: Path) -> None:
    slurm, chapter = two_slurm_nodes, Chapter("02_ddp", tmp_path)
    job = Job(slurm, chapter, tmp_path / "log", ROOT / "scripts" / "train.sbatch", "02_ddp",
              *chapter.command(*flags_of(LONG))[2:])  # fmt: skip
    urgent = ("sbatch", "--wait", "--partition=urgent", *BOTH_NODES, f"--output={tmp_path}/urgent", "--wrap", "srun true")

    job.at_row(5)  # Slurm continues stopped processes before it sends SIGTERM
    slurm("scontrol", "requeue", job.number)
    job.at_row(10)
    slurm(*urgent)
    job.at_row(15)
    slurm("scontrol", "update", "PartitionName=class", "GraceTime=60")
    slurm(*urgent)

    said = job.wait_for_end("Done.")
    assert said.count("Stopped by SIGTERM after step") == 3 and "Traceback" not in said, said
    assert said.count(": the job is queued again") == 1, f"in the grace time the job ends first, so it queues itself\n{said}"
    assert job.fact("Restarts") == "3"
    assert_same_run(chapter.metrics(), uninterrupted())


@pytest.mark.deep
def test_a_job_that_loses_a_node_goes_on_from_its_last_checkpoint(two_slurm_nodes: Slurm, uninterrupted, tmp_path) -> None:
    slurm, chapter = two_slurm_nodes, Chapter("02_ddp", tmp_path)
    job = Job(slurm, chapter, tmp_path / "log", ROOT / "scripts" / "train.sbatch", "02_ddp",
              *chapter.command(*flags_of(LONG), "--save-every", 10)[2:])  # fmt: skip
    ranks = job.at_row(15)
    slurmd = slurmd_of("n2", slurm.folder)
    os.kill(slurmd, signal.SIGSTOP)  # it must not see the end of its processes
    os.kill(parent_of(ranks[1]), signal.SIGKILL)  # slurmstepd
    os.kill(ranks[1], signal.SIGKILL)
    os.kill(ranks[0], signal.SIGCONT)
    wait_until(lambda: "rank 0 waited in vain for the others" in job.log.read_text(), job.said)
    slurm("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=dead")  # as Slurm does by itself after SlurmdTimeout
    wait_until(lambda: job.fact("Restarts") == "1", job.said)
    os.kill(slurmd, signal.SIGCONT)  # the node is there again, and Slurm takes it back

    said = job.wait_for_end("Done.")
    assert "step_000010, next is step 11" in said, said
    assert_same_run(chapter.metrics(), uninterrupted("--save-every", 10))


@pytest.mark.deep
def test_a_pipeline_that_its_time_limit_cuts_twice_ends_complete(two_slurm_nodes: Slurm, uninterrupted, tmp_path) -> None:
    chapter, results = Chapter("02_ddp", tmp_path / "mine"), tmp_path / "mine"
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    flags = ("--model-config", tmp_path / "config.json", *flags_of(LONG), "--comment", "cut twice")
    texts = [ROOT / "data" / part / "comments.json" for part in ("train", "valid")]
    job = Job(two_slurm_nodes, chapter, tmp_path / "log", ROOT / "scripts" / "pipeline.sbatch", "02_ddp", results, *texts,
              *flags)  # fmt: skip
    for row in (5, 20):
        job.at_row(row)
        job.update("TimeLimit=1")  # its signal, a minute before the limit, is due at once; Slurm looks every 30 s
        wait_until(lambda: job.fact("JobState") == "PENDING", job.said, lambda: not job.has_ended())
        job.update("TimeLimit=60")

    said = job.wait_for_end("complete: ")
    assert said.count("Stopped by SIGUSR1 after step") == said.count(": the job is queued again") == 2, said
    begins = {step: said.count(f"{step}: begins") for step in ("convert", "tokens", "train", "evaluate", "generate")}
    assert begins == {"convert": 1, "tokens": 1, "train": 3, "evaluate": 1, "generate": 1}, said
    assert said.count("vocabulary: skipped") == 2 and said.count("cut twice") >= 3, said
    assert json.loads((results / "run" / "config.json").read_text())["comment"] == "cut twice"
    same = ("--train-data", results / "text" / "train", "--valid-data", results / "text" / "valid")
    rows = chapter.metrics()
    assert_same_run(rows, uninterrupted(*same, "--vocab", results / "vocab.txt"))
    measured = json.loads((results / "evaluate.json").read_text())
    assert measured["all"]["loss"] == pytest.approx(rows[-1]["valid_loss"], rel=1e-5)  # other batches, other sums
    assert (results / "generate.txt").read_text().count("今天天气") == 3
