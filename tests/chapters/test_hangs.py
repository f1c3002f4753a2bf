"""A program that hangs reports who waits for whom, ends, and its files become a table."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from gpt2_chinese.hangs import main
from tests.chapters.program import SMALL, Chapter, end_a_rank
from tests.hanging import reports

SHORT = ("--seq-len", SMALL["n_positions"] // 2)


@pytest.mark.deep
def test_a_worker_in_a_sleep_ends_the_job_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chapter = Chapter("01_parameter_server", tmp_path)
    said = chapter.train_forked("--nproc", 2, "--slow-worker-s", 500, "--hang-after", 20, *SHORT, status=1)
    assert "error: the job hangs: rank 0 has been in receive (gradients after version 0) for " in said, said
    assert "; rank 1 is missing: it is in no collective, its last was all_reduce" in said and " in work; files: " in said
    assert said.endswith("error: rank 1 failed with status 1; its output is above\n") and "Traceback" not in said
    main([str(chapter.output), "--stacks"])
    table = capsys.readouterr().out
    assert "receive (gradients after version 0)" in table and "missing: rank 1" in table
    assert "rank 1, most recent call first:" in table and "in work" in table


@pytest.mark.deep
@pytest.mark.parametrize("name", ["02_ddp", "07_patrickstar"])
def test_a_stopped_rank_cannot_answer_and_the_others_say_so(tmp_path: Path, name: str) -> None:
    chapter = Chapter(name, tmp_path)
    said = end_a_rank(chapter, 3, 1, signal.SIGSTOP, "--hang-after", 10, *SHORT)
    assert "rank 1 is missing and has not answered: it is stopped" in said and "Traceback" not in said, said
    assert "rank 1 failed with status -9 (SIGKILL)" in said, said
    assert sorted(reports(chapter.output)) == [0, 2]


@pytest.mark.deep
@pytest.mark.parametrize("name, flags", [("02_ddp", ()), ("05_model_parallel", ("--tp", 2)), ("07_patrickstar", ())])
def test_the_others_wait_timeout_s_for_a_stopped_rank(tmp_path: Path, name: str, flags: tuple[object, ...]) -> None:
    """Chapter 07's ranks wait for each other in pstar's shared memory, or in the process group between steps."""
    chapter = Chapter(name, tmp_path)
    said = end_a_rank(chapter, 2, 1, signal.SIGSTOP, "--hang-after", 0, "--timeout-s", 15, *flags, *SHORT)
    assert "error: rank 0 waited in vain for the others: rank 1 did not come, or not within --timeout-s\n" in said, said
    assert "Traceback" not in said, said
