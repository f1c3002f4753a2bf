"""What scripts/train.sbatch does when its ranks have ended, with fakes of srun and scontrol; tests/cluster has real ones."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chapters.program import ROOT, environment, free_port
from tests.fakes import write_programs
from tests.limits import HANGS_S

SRUN = """#!/usr/bin/env bash
echo "they meet at $MASTER_ADDR port $MASTER_PORT"
if [ -n "$STOPPED_AT" ]; then echo "$STOPPED_AT" >"$GPT2_CHINESE_STOPPED"; fi
exit "$RANKS_END"
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then echo 127.0.0.1; exit; fi
echo "$*" >>"$CALLS"
if [ -z "$MAY_REQUEUE" ]; then echo "Requested operation is presently disabled" >&2; exit 1; fi
kill -TERM "$PPID" # as Slurm does with the script of the job
"""


@pytest.fixture
def job(tmp_path: Path):
    """job(ranks_end=..., ...): (status, output, calls of scontrol that change something) of train.sbatch."""
    write_programs(tmp_path, srun=SRUN, scontrol=SCONTROL)

    def run(*flags: str, number: int = 7, ranks_end: int = 0, stopped_at: str = "", may_requeue: str = "yes", **slurm: str):
        given = environment()
        variables = {
            "PATH": f"{tmp_path}:{given['PATH']}", "PYTHON": sys.executable, "TMPDIR": str(tmp_path),
            "CALLS": f"{tmp_path}/calls", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": str(number),
            "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1",
            "RANKS_END": str(ranks_end), "STOPPED_AT": stopped_at, "MAY_REQUEUE": may_requeue, **slurm,
        }  # fmt: skip
        done = subprocess.run(["bash", ROOT / "scripts" / "train.sbatch", "02_ddp", *flags], env=given | variables, cwd=ROOT,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=HANGS_S)  # fmt: skip
        calls = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
        assert not list(tmp_path.glob("gpt2_chinese_stopped*")), "the file of the last step is left over"
        return done.returncode, done.stdout, calls

    return run


REQUEUED = (-15, ["requeue 7"])


@pytest.mark.parametrize(
    "how, said, outcome",
    [
        ({"SLURM_GPUS_PER_TASK": "1"}, "", (0, [])),  # with one rank on each node
        ({"stopped_at": "40"}, "stopped after step 40: the job is queued again", REQUEUED),
        ({"stopped_at": "40", "may_requeue": ""}, "presently disabled", (0, ["requeue 7"])),
        ({"ranks_end": 143}, "SIGTERM came before the first step: the job is queued again", REQUEUED),
        ({"ranks_end": 138}, "give the job more time", (138, [])),
        ({"ranks_end": 3}, "", (3, [])),
        ({"ranks_end": 2}, "", (2, [])),
    ],
)
def test_only_a_job_that_can_go_on_is_queued_again(job, how: dict, said: str, outcome: tuple) -> None:
    status, output, calls = job(**how)
    assert said in output, output
    assert (status, calls) == outcome, output


def test_resume_is_refused_because_a_requeued_job_would_begin_again(job) -> None:
    for flags in (("--resume", "never"), ("--resume=never",)):
        status, output, calls = job(*flags)
        assert status == 2 and output.startswith("error: --resume would count after every requeue") and not calls


def test_gpus_that_ranks_would_not_find_by_their_number_are_refused(job) -> None:
    status, output, calls = job(SLURM_GPUS_PER_TASK="1", SLURM_NTASKS_PER_NODE="4", SLURM_NTASKS="8")
    assert status == 2 and output.startswith("error: --gpus-per-task shows each rank one GPU") and not calls


def test_ranks_meet_at_a_port_that_no_other_program_has(job) -> None:
    port = next(free for free in iter(free_port, None) if free >= 20_000)
    with socket.create_server(("127.0.0.1", port)):
        _, output, _ = job(number=port)
    assert port < int(output.partition("they meet at 127.0.0.1 port ")[2]) < port + 100, output


@pytest.mark.parametrize("waiting, change", [("0 90 95", ["update JobId=7 Nice=14"]), ("0 200", [])])
def test_a_job_is_queued_again_behind_all_that_wait(tmp_path: Path, waiting: str, change: list[str]) -> None:
    """The job's priority is 100, and 3 its nice value; `waiting` is what squeue says of the others."""
    write_programs(
        tmp_path,
        scontrol="#!/bin/sh\n"
                 "[ $1 = show ] && echo 'PriorityType = priority/basic' && exit\necho $* >>calls\n[ $1 = update ]",
        squeue=f"#!/bin/sh\ncase \"$*\" in *--jobs=7*) echo '100 3';; *) printf '%s\\n' {waiting};esac",
    )
    variables = {"PATH": f"{tmp_path}:/bin:/usr/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_PARTITION": "class"}
    command = ["bash", "-euo", "pipefail", "-c", f"source {ROOT}/scripts/slurm_job.sh; queue_again stopped"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=HANGS_S)  # fmt: skip
    assert done.stdout == "stopped: the job is queued again\n" and done.returncode == 0, done
    assert (tmp_path / "calls").read_text().splitlines() == [*change, "requeue 7"]


TWICE = """
import os, signal
from gpt2_chinese.distributed import stop_signal
stop_signal.listen(is_lost=lambda: LOST)
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
print(stop_signal.asked())
"""


@pytest.mark.parametrize("in_job, lost, status, said", [
    (True, False, 0, "SIGTERM\n"), (False, False, -signal.SIGTERM, ""), (True, True, -signal.SIGTERM, "")])  # fmt: skip
def test_srun_s_second_sigterm_does_not_end_a_rank_that_saves(in_job: bool, lost: bool, status: int, said: str) -> None:
    given = environment() | ({"GPT2_CHINESE_STOPPED": "file"} if in_job else {})
    done = subprocess.run([sys.executable, "-c", TWICE.replace("LOST", str(lost))], env=given, stdout=subprocess.PIPE,
                          text=True, timeout=HANGS_S)  # fmt: skip
    assert (done.returncode, done.stdout) == (status, said)
