"""The launcher names the rank that failed, and says so when the system killed it for its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from gpt2_chinese.distributed.lost_rank import describe, num_killed_for_memory
from tests.chapters.program import ROOT
from tests.control_group import join, limited_group
from tests.limits import HANGS_S

LIMIT = 1 << 30  # bytes: enough for the launcher, which imports torch


@pytest.mark.parametrize("status, memory_ran_out, how", [
    (1, False, "1"), (1, True, "1"), (-15, True, "-15 (SIGTERM)"), (-9, False, "-9 (SIGKILL)"),
    (-40, False, "-40 (signal 40)"), (-9, True, "-9 (SIGKILL): memory ran out, and the system killed it"),
])  # fmt: skip
def test_the_line(status: int, memory_ran_out: bool, how: str) -> None:
    assert describe(3, status, memory_ran_out) == f"rank 3 failed with status {how}; its output is above"


COUNTS = {  # files below sys/fs/cgroup, and /proc/self/cgroup
    "version 2": (2, {"job/memory.events": "oom 9\noom_kill 2\n", "memory.events": "oom_kill 5\n"}, "0::/job\n"),
    "version 1": (4, {"memory/job/memory.oom_control": "under_oom 0\noom_kill 4\n"}, "4:memory:/job\n0::/\n"),
    "no group": (7, {}, "0::/\n"),
}


@pytest.mark.parametrize("count, files, own", COUNTS.values(), ids=COUNTS)
def test_the_kills_of_a_group_or_of_the_machine(count: int, files: dict[str, str], own: str, tmp_path: Path) -> None:
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in (files | {"proc/self/cgroup": own, "proc/vmstat": "pgfault 3\noom_kill 7\n"}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert num_killed_for_memory(tmp_path) == count
    assert num_killed_for_memory(tmp_path / "no Linux") == 0


def test_memory_runs_out(tmp_path: Path) -> None:
    """One rank of two takes all that a control group allows."""
    program = tmp_path / "program.py"
    program.write_text("import os, time\n"
                       "held = [bytes(range(256)) * 4096 for _ in range(3 << 10) if os.environ['RANK'] == '1']\n"
                       "time.sleep(600)\n")  # fmt: skip
    command = [sys.executable, "-m", "gpt2_chinese.distributed.torchrun_launcher", "--nproc-per-node=2"]
    limit = (dict.fromkeys(("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), str(LIMIT)),
             {"memory.max": str(LIMIT), "memory.swap.max": "0"})  # fmt: skip
    with limited_group("memory", *limit) as group:
        done = subprocess.run([*command, "--standalone", str(program)], env=os.environ | {"PYTHONPATH": str(ROOT)},
                              preexec_fn=partial(join, group), capture_output=True, text=True, timeout=HANGS_S)  # fmt: skip
        line = "error: rank 1 failed with status -9 (SIGKILL): memory ran out, and the system killed it; its output is above"
        assert done.returncode == 1 and done.stderr.splitlines()[-1] == line, done.stderr
