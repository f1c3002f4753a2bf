"""scripts/pipeline.sbatch without Slurm: its steps, what it skips and what it refuses; tests/cluster runs it under Slurm."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chapters.program import ROOT, SMALL, environment
from tests.fakes import write_programs
from tests.harness.handed_over import handing_over
from tests.limits import HANGS_S
from tests.scripts.test_train_sbatch import SCONTROL

SCRIPT = ROOT / "scripts" / "pipeline.sbatch"
STEPS = ("convert", "vocabulary", "tokens", "train", "evaluate", "generate")


def pipeline(folder: Path, *words: object, status: int = 0, **more: str) -> str:
    """Runs it in `folder`, and asserts its exit status; returns what it printed."""
    variables = {name: value for name, value in environment().items() if not name.startswith("SLURM_")} | more
    variables["PYTHON"] = sys.executable
    done = subprocess.run(["bash", SCRIPT, *map(str, words)], env=handing_over(variables), cwd=folder,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=HANGS_S)  # fmt: skip
    assert done.returncode == status, f"status {done.returncode}\n{done.stdout}"
    return done.stdout


def test_each_step_whose_result_is_there_is_skipped(tmp_path: Path) -> None:
    texts = [ROOT / "data" / part / "comments.json" for part in ("train", "valid")]
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    words = ("00_single", "mine", *texts, "--model-config", "config.json", "--batch-size", 8, "--comment", "two words")

    said = pipeline(tmp_path, *words, "--max-steps", 2)
    assert [line.split(":")[0] for line in said.splitlines() if line.endswith(": begins")] == list(STEPS), said
    made = {file.name for file in (tmp_path / "mine").iterdir()}
    assert made == {"text", "vocab.txt", "tokens.txt", "run", "evaluate.json", "generate.txt"}
    assert json.loads((tmp_path / "mine" / "run" / "config.json").read_text())["comment"] == "two words"

    said = pipeline(tmp_path, *words, "--max-steps", 2)
    skipped = [line.split(":")[0] for line in said.splitlines() if "skipped" in line]
    assert skipped == [step for step in STEPS if step != "train"] and "This run is complete: 2 steps" in said, said

    (tmp_path / "mine" / "tokens.txt").unlink()
    said = pipeline(tmp_path, *words, "--max-steps", 3)  # evaluation and text are now older than the model
    assert [line.split(":")[0] for line in said.splitlines() if "skipped" in line] == ["convert", "vocabulary"], said
    assert json.loads((tmp_path / "mine" / "run" / "final" / "run.json").read_text())["step"] == 3


@pytest.mark.parametrize(
    "words, said",
    [
        (("02_ddp", "mine"), "give a chapter, a folder for the results, and files or folders with text; then flags"),
        (("02_dp", "mine", "text"), "there is no chapter 02_dp"),
        (("03_horovod", "mine", "text"), "chapter 03 needs the launcher of Horovod"),
        (("08_param_efficient", "mine", "text"), "chapter 08 adapts a trained model"),
        (("02_ddp", "mine", "text", "none"), "there is no file or folder none"),
        (("02_ddp", "mine", "text", "--output-dir=x"), "--output-dir is set by this job: leave it out"),
        (("02_ddp", "mine", "text", "--max-stepz", 3), "unknown flag --max-stepz: did you mean --max-steps?"),
        (("02_ddp", "mine", "text", "--vocab", "none"), "--vocab none: there is no such file"),
    ],
)
def test_a_mistake_is_one_line_before_the_first_step(tmp_path: Path, words: tuple, said: str) -> None:
    (tmp_path / "text").mkdir()
    *rest, line = pipeline(tmp_path, *words, status=2).splitlines()
    assert said in line and not [other for other in rest if not other.startswith("setup: using")], rest
    assert not (tmp_path / "mine").exists()


def test_gpus_that_ranks_would_not_find_by_their_number_are_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    said = pipeline(tmp_path, "02_ddp", "mine", "text", status=2, SLURM_SUBMIT_DIR=str(ROOT), SLURM_GPUS_PER_TASK="1",
                    SLURM_NTASKS_PER_NODE="4")
    assert said.startswith("error: --gpus-per-task shows each rank one GPU") and said.count("\n") == 1


def test_a_step_that_the_time_limit_cuts_twice_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    write_programs(tmp_path, srun="#!/bin/sh\nexit $ENDS\n", scontrol=SCONTROL, squeue="#!/bin/sh\necho $LEFT\n")

    def under_slurm(ends: int, status: int, left: str = "UNLIMITED") -> str:
        variables = {"ENDS": str(ends), "LEFT": left, "MAY_REQUEUE": "yes", "CALLS": f"{tmp_path}/calls",
                     "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_CPUS_ON_NODE": "1",
                     "PATH": f"{tmp_path}:/bin:/usr/bin"}  # fmt: skip
        return pipeline(tmp_path, "02_ddp", tmp_path / "mine", tmp_path / "text", status=status, **variables)

    assert "convert: ended by SIGTERM: the job is queued again" in under_slurm(143, status=-signal.SIGTERM)
    assert "convert: cut by the time limit: the job is queued again" in under_slurm(138, status=-signal.SIGTERM)
    assert "error: the time limit cut convert twice: give the job more time" in under_slurm(138, status=2)
    assert under_slurm(1, status=1).endswith("convert: begins\n")
    for left in ("1:59", "0:00"):    # the first step begins in any case: otherwise a short job would be queued for ever
        assert under_slurm(0, left=left, status=-signal.SIGTERM).endswith(
            "convert: begins\nvocabulary: the time limit is near: the job is queued again\n")
    for left in ("2:00", "1:00:00", "2-00:00:09", "UNLIMITED"):
        assert "\ntokens: begins\n" in under_slurm(0, left=left, status=1), left
    assert (tmp_path / "calls").read_text().splitlines() == ["requeue 7"] * 4
