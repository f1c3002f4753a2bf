"""A job that survives a node: the others go on from the last checkpoint, and the node that comes back joins them.

torchrun does it (--nnodes MIN:MAX --max-restarts), by the command of the page on clusters. A checkpoint resumes at another
number of ranks, and a batch is the same at each number: the curve is that of a run without a death, to 1e-5.
"""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chapters.law import LONG, assert_same_curve, flags_of
from tests.chapters.program import ROOT, Chapter, environment, needs_localhost
from tests.cluster import jobs
from tests.cluster.nodes import two_nodes
from tests.limits import HANGS_S, wait_until

SAVE = 10
SURVIVE = {
    "01_parameter_server": (),
    "02_ddp": (),
    "04_apex": ("--opt-level", "O0"),
    "06_zero": ("--zero-stage", 3),
    "07_patrickstar": ("--near-budget", "50%"),
}
LOST = "error: rank 0 waited in vain for the others: rank 1 did not come"


def command(chapter: Chapter, plan: dict, *flags: object) -> list[str]:
    """The page's command for a job that survives, one rank a node, with a program that falls by `plan`."""
    train = chapter.command(*flags_of(LONG), *flags, "--save-every", SAVE)[1:]
    return jobs.torchrun(1, [jobs.FALLS, json.dumps(plan), *train], survives=True)


@pytest.mark.deep
@pytest.mark.parametrize("name", SURVIVE)
def test_the_others_go_on_without_a_node_and_with_it_again(needs_nodes, curve, tmp_path: Path, name: str) -> None:
    """node2 is killed in step 25, where step 20 is saved. Alone node1 comes to step 35; then node2 returns."""
    chapter = Chapter(name, tmp_path)
    line = command(chapter, {"folder": str(tmp_path), "hold": {"2": [25], "1": [35]}}, *SURVIVE[name])
    with two_nodes(tmp_path) as nodes, jobs.started(nodes, line, tmp_path) as job:
        wait_until((tmp_path / "held_25").exists, job.said)
        nodes[1].kill()
        begin = time.monotonic()
        wait_until((tmp_path / "held_35").exists, job.said)
        seconds = time.monotonic() - begin
        assert job.launchers[1].wait(HANGS_S) == -signal.SIGKILL
        job.start_again(nodes[1], line)
        statuses, said = job.wait(), job.logs[0].read_text()
    print(f"{name}: node1 had done ten steps alone {seconds:.1f} s after the death of node2")
    assert statuses == [0, 0], job.said()
    assert LOST in said and re.search(r"(?s)resuming .*/step_000020, next.*resuming .*/step_00003[56], next", said), said
    assert re.findall(r"(\d) ranks? x", said) == ["2", "1", "2"], said
    assert_same_curve(chapter.metrics(), curve(LONG), rel=1e-5)


@pytest.mark.deep
def test_a_node_whose_link_is_cut_takes_nothing_with_it(needs_nodes, curve, tmp_path: Path) -> None:
    """node1, where they meet, goes on, and the torchrun of node2 ends, both long before --timeout-s."""
    chapter = Chapter("02_ddp", tmp_path)
    line = command(chapter, {"folder": str(tmp_path), "hold": {"2": [25]}}, "--timeout-s", 3600)
    with two_nodes(tmp_path) as nodes, jobs.started(nodes, line, tmp_path) as job:
        wait_until((tmp_path / "held_25").exists, job.said)
        nodes[1].cut()
        begin = time.monotonic()
        assert job.launchers[1].wait(HANGS_S) == 1, job.said()
        print(f"node2 ended {time.monotonic() - begin:.1f} s after its link was cut")
        assert job.launchers[0].wait(HANGS_S) == 0, job.said()
        said = job.logs[0].read_text()
    assert LOST in said and re.findall(r"resuming .*/(step_\d+), next", said) == ["step_000020"], said
    assert_same_curve(chapter.metrics(), curve(LONG), rel=1e-5)


@pytest.mark.deep
def test_without_the_first_node_the_job_ends_and_the_same_command_resumes_it(needs_nodes, curve, tmp_path: Path) -> None:
    """The others meet at the first node, so they cannot go on. A scheduler starts the job again."""
    chapter, again = Chapter("02_ddp", tmp_path), tmp_path / "again"
    again.mkdir()
    with two_nodes(tmp_path) as nodes:
        with jobs.started(nodes, command(chapter, {"kill": [0, 25, 0]}), tmp_path) as job:
            assert job.launchers[0].wait(HANGS_S) == -signal.SIGKILL
            begin = time.monotonic()
            statuses, said = job.wait(), job.logs[1].read_text()
        print(f"node2 ended with status {statuses[1]} {time.monotonic() - begin:.1f} s after the death of node1\n{said}")
        assert statuses[1] != 0 and "rank 1 waited in vain for the others: node1, where they meet, no longer answers" in said
        with jobs.started(nodes, command(chapter, {}), again) as job:
            assert job.wait() == [0, 0], job.said()
            assert "/step_000020, next is step 21" in job.logs[0].read_text(), job.said()
    assert_same_curve(chapter.metrics(), curve(LONG), rel=1e-5)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("how, ends", [("kill", -signal.SIGKILL), ("cut", 1)])
def test_killed_or_cut_off_at_any_moment(needs_nodes, curve, tmp_path: Path, how: str, ends: int, seed: int) -> None:
    random_moment = random.Random(seed)
    step, chapter = random_moment.randint(1, LONG - 2), Chapter("02_ddp" if seed % 2 else "07_patrickstar", tmp_path)
    line = command(chapter, {how: [1, step, random_moment.uniform(0, 0.05)]})
    with two_nodes(tmp_path) as nodes, jobs.started(nodes, line, tmp_path) as job:
        assert job.wait() == [0, ends], job.said()
        said = job.logs[0].read_text()
    from_step = [int(number) for number in re.findall(r"resuming .*/step_(\d+), next", said)] or [0]
    assert LOST in said and from_step[0] >= (step - 1) // SAVE * SAVE, f"{how} in step {step}\n{said}"
    assert_same_curve(chapter.metrics(), curve(LONG), rel=1e-5)


@needs_localhost
def test_torchrun_sh_lets_a_node_come_back(tmp_path: Path) -> None:
    """Only with a range of nodes it sets the variable; a value that the user has set stays."""
    program = tmp_path / "says.py"
    program.write_text("import os\nprint('set to', os.environ.get('TORCH_DISABLE_SHARE_RDZV_TCP_STORE'))\n")

    def said(*flags: str, **variables: str) -> str:
        line = ["bash", str(ROOT / "scripts" / "torchrun.sh"), *flags, "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
                "--local-addr=127.0.0.1", str(program)]  # fmt: skip
        done = subprocess.run(line, env={**environment(), "PYTHON": sys.executable, **variables}, capture_output=True,
                              text=True, timeout=HANGS_S)  # fmt: skip
        return re.search(r"set to (\S+)", done.stdout).group(1)

    assert said("--nnodes=1") == "None"
    assert said("--nnodes=1:1") == said("--nnodes", "1:1") == "1"
    assert said("--nnodes=1:1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="0") == "0"
