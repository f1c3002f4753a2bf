"""A job on two nodes whose rank raises, whose node dies, whose link is cut: it ends on both nodes and says why."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

from tests.chapters.program import Chapter, wait_for_rows
from tests.cluster import jobs
from tests.cluster.nodes import two_nodes

MANY = ("--max-steps", 10**5, "--eval-every", 10**6, "--save-every", 10**6)
LOST = r"error: rank \d waited in vain for the others: "


@pytest.mark.deep
def test_a_rank_that_raises_ends_the_job_on_both_nodes(nodes, tmp_path: Path) -> None:
    chapter = Chapter("02_ddp", tmp_path)
    falls = [jobs.FALLS, json.dumps({"raise": 3})]
    with jobs.started(nodes, jobs.torchrun(1, [*falls, *chapter.command(*MANY)[1:]]), tmp_path) as job:
        assert 0 not in job.wait(), job.said()
        first, second = (log.read_text() for log in job.logs)
    assert "[rank1]: ValueError: step 3 breaks on purpose" in second, job.said()
    assert "error: rank 0 waited in vain for the others: rank 1 did not come" in first, job.said()


@pytest.mark.deep
@pytest.mark.parametrize("victim", [0, 1], ids=["node1", "node2"])
def test_a_node_that_dies_ends_the_job_on_the_other(needs_nodes, tmp_path: Path, victim: int) -> None:
    chapter = Chapter("02_ddp", tmp_path)
    with two_nodes(tmp_path) as nodes, jobs.started(nodes, jobs.torchrun(2, chapter.command(*MANY)[1:]), tmp_path) as job:
        wait_for_rows(chapter, job.launchers[1 - victim], 4, job.logs[1 - victim])
        begin = time.monotonic()
        nodes[victim].kill()
        statuses = job.wait()
        seconds, said = time.monotonic() - begin, job.logs[1 - victim].read_text()
    print(f"{nodes[victim].name} killed: the other ended after {seconds:.1f} s")
    assert statuses[victim] == -signal.SIGKILL and statuses[1 - victim] == 1, said
    missing = "node1, where they meet, no longer answers" if victim == 0 else "rank 2, 3 did not come"
    assert re.search(LOST + missing, said), said


@pytest.mark.deep
@pytest.mark.parametrize("cut", [0, 1], ids=["node1", "node2"])
def test_the_job_ends_on_both_sides_of_a_link_that_is_cut(needs_nodes, tmp_path: Path, cut: int) -> None:
    """Long before --timeout-s, the ranks and both torchruns."""
    chapter = Chapter("02_ddp", tmp_path)
    command = jobs.torchrun(2, chapter.command(*MANY, "--timeout-s", 3600, "--hang-after", 3600)[1:])
    with two_nodes(tmp_path) as nodes, jobs.started(nodes, command, tmp_path) as job:
        wait_for_rows(chapter, job.launchers[0], 4, job.logs[0])
        begin = time.monotonic()
        nodes[cut].cut()
        statuses = job.wait()
        print(f"link cut: the job has ended on both nodes after {time.monotonic() - begin:.1f} s")
        assert not any("python -u " in node.run("ps", "axo", "args") for node in nodes)
    first, second = (log.read_text() for log in job.logs)
    assert statuses == [1, 1] and re.search(LOST + "rank 2, 3 did not come", first), job.said()
    assert re.search(LOST + "node1, where they meet, no longer answers", second), job.said()
    assert "error: no connection to the other torchruns: " in second and "Traceback" not in first + second, job.said()
