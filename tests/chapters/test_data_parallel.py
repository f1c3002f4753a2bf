"""Chapters 01 and 02 as programs: the law of the curve, their files, refusals and lost ranks."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.chapters.inside import train
from tests.chapters.program import ROOT, SMALL, Chapter, end_a_rank, environment
from tests.chapters.technique import settings_error
from tests.limits import HANGS_S

FLAGS = ("--max-steps", 20, "--save-every", 10, "--eval-every", 20, "--seq-len", 8, "--lr", "0.003", "--warmup-steps", 3,
         "--clip-grad-norm", 0.3, "--batch-size", 24)  # fmt: skip


@pytest.fixture(scope="module")
def curve(ranks, tmp_path_factory) -> list[dict]:
    chapter = Chapter("00_single", tmp_path_factory.mktemp("curve"))
    train(ranks, 1, chapter, *FLAGS)
    return chapter.metrics()


def assert_follows(rows: list[dict], curve: list[dict], name: str, nproc: int) -> None:
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in curve], rel=1e-4)
    assert [row["grad_norm"] for row in rows] == pytest.approx([row["grad_norm"] for row in curve], rel=1e-3)
    assert [row["lr"] for row in rows] == [row["lr"] for row in curve] and rows[-1]["lr"] <= 0.01 * 0.003 * (1 + 1e-9)
    assert sum(row["grad_norm"] > 0.3 for row in rows) > len(rows) / 2, "clipping is not at work"
    assert rows[-1]["valid_loss"] == pytest.approx(curve[-1]["valid_loss"], rel=1e-4)
    if nproc > 1:
        keys = ("sent_bytes", "received_bytes") if name.startswith("01") else ("sent_bytes",)
        counted = sum(row[key] for row in rows for key in keys) / len(rows)
        assert counted == pytest.approx(rows[-1]["formula_bytes"], rel=0.05), "what the kernel counted is the formula"


@pytest.mark.parametrize("name, nproc, flags", [
    ("01_parameter_server", 2, ()),
    ("02_ddp", 2, ("--variant", "bucket", "--bucket-mb", 0.1, "--check-sync", 1)),
    pytest.param("01_parameter_server", 3, (), marks=pytest.mark.deep),
    pytest.param("02_ddp", 4, ("--variant", "bucket", "--bucket-mb", 0.1, "--check-sync", 1), marks=pytest.mark.deep),
])  # fmt: skip
def test_the_program_follows_the_curve(tmp_path: Path, curve, name, nproc, flags) -> None:
    chapter = Chapter(name, tmp_path)
    timeline = ("--timeline", tmp_path / "trace.json") if "bucket" in flags else ()
    program = chapter.train_forked if nproc == 2 else chapter.train  # the deep cases start from nothing
    said = program(*FLAGS, "--nproc", nproc, *flags, *timeline)
    assert_follows(chapter.metrics(), curve, name, nproc)
    assert "Warning" not in said and "Traceback" not in said and "communication" in said or "through rank 0" in said
    assert "peak memory" in said and "rank 1" in said
    assert not timeline or (tmp_path / "trace.png").exists()


@pytest.mark.parametrize("name, nproc, flags", [
    ("01_parameter_server", 2, ("--mode", "async", "--staleness", 0, "--grad-accum", 4)),
    ("02_ddp", 2, ("--backend", "torch", "--grad-accum", 4)),
    ("02_ddp", 1, ()),
])  # fmt: skip
def test_the_chapters_follow_the_curve_in_ranks_of_a_pool(ranks, tmp_path: Path, curve, name, nproc, flags) -> None:
    chapter = Chapter(name, tmp_path)
    train(ranks, nproc, chapter, *FLAGS, *flags)
    assert_follows(chapter.metrics(), curve, name, nproc)


@pytest.mark.parametrize("flags, line", [
    (("--variant", "star"), "--variant"),
    (("--variant", "ring", "--backend", "torch"), "--variant ring needs --backend own"),
    (("--bucket-mb", "0"), "--bucket-mb must be above 0"),
    (("--check-sync", "-1"), "--check-sync must be at least 0"),
    (("--timeout-s", "0"), "--timeout-s must be at least 1"),
    (("--hang-after", "-1"), "--hang-after must be at least 0"),
    (("--batch-size", "7"), "--batch-size 7 is not divisible by --nproc 2"),
    (("--bucket-md", "1"), "did you mean --bucket-mb"),
])  # fmt: skip
def test_a_wrong_flag_of_02_is_refused_in_one_line(capsys, tmp_path, flags, line) -> None:
    assert line in settings_error("02_ddp", "ddp_settings", capsys, "--output-dir", tmp_path, *flags)


@pytest.mark.parametrize("flags, line", [
    (("--mode", "lazy"), "--mode"),
    (("--staleness", "-1"), "--staleness must be at least 0"),
    (("--mode", "async", "--precision", "fp16"), "--mode async with --precision fp16"),
    (("--backend", "torch", "--device", "cpu"), "--backend torch is nn.DataParallel"),
    (("--slow-worker-s", "-1"), "--slow-worker-s must be at least 0 and below --timeout-s 600, not -1.0"),
    (("--slow-worker-s", "600"), "--slow-worker-s must be at least 0 and below --timeout-s 600, not 600.0"),
    (("--slow-worker-s", "1", "--nproc", "1"), "--slow-worker-s slows rank 1 down, which --nproc 1"),
    (("--backend", "torch", "--mode", "async"), "--mode async needs --backend own"),
])  # fmt: skip
def test_a_wrong_flag_of_01_is_refused_in_one_line(capsys, tmp_path, flags, line) -> None:
    assert line in settings_error("01_parameter_server", "server_settings", capsys, "--output-dir", tmp_path, *flags)


@pytest.mark.parametrize("name, number, rank, line", [
    ("01_parameter_server", signal.SIGSTOP, 2, "rank 2 did not come"),
    # a dead rank in the quick command: the one that hangs here is killed by the others, and named; and of chapter 03
    pytest.param("02_ddp", signal.SIGKILL, 1, "rank 1 failed with status -9 (SIGKILL)", marks=pytest.mark.deep),
    pytest.param("01_parameter_server", signal.SIGKILL, 0, "rank 0 failed with status -9 (SIGKILL)", marks=pytest.mark.deep),
    pytest.param("02_ddp", signal.SIGSTOP, 0, "rank 0 did not come", marks=pytest.mark.deep),
])  # fmt: skip
def test_a_dead_or_hanging_rank_ends_the_job_and_is_named(tmp_path: Path, name, number, rank, line) -> None:
    chapter = Chapter(name, tmp_path)
    patience_s = 5 if number == signal.SIGSTOP else 300  # a dead rank is noticed before the timeout
    said = end_a_rank(chapter, 3, rank, number, "--timeout-s", patience_s, "--seq-len", SMALL["n_positions"] // 2)
    assert line in said and "Traceback" not in said, said
    # the other ranks kill a rank that hangs: torchrun would wait for it, then name the rank that ended first
    assert f"rank {rank} failed with status -9 (SIGKILL)" in said, said


LATE = """
import os, time
if os.environ.get("RANK") == "1":
    time.sleep(float(os.environ["LATE_S"]))
"""


def with_a_late_rank(folder: Path, seconds: float) -> tuple[Chapter, subprocess.CompletedProcess[str]]:
    """Runs two steps on two ranks with --timeout-s 5; rank 1 starts so many seconds late."""
    (folder / "sitecustomize.py").write_text(LATE)
    chapter = Chapter("02_ddp", folder)
    command = chapter.command("--nproc", 2, "--timeout-s", 5, "--max-steps", 2, "--seq-len", SMALL["n_positions"] // 2)
    env = {**environment(), "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "LATE_S": str(seconds)}
    return chapter, subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANGS_S)


@pytest.mark.deep
def test_a_rank_that_starts_later_than_the_timeout_is_waited_for(tmp_path: Path) -> None:
    """On a busy machine ranks import torch for seconds more or less than others; --timeout-s begins after that."""
    chapter, done = with_a_late_rank(tmp_path, 8)
    assert done.returncode == 0, done.stdout + done.stderr
    assert chapter.num_rows() == 2


@pytest.mark.deep
def test_a_rank_that_never_starts_ends_the_job_and_is_named(tmp_path: Path) -> None:
    """After a minute, the least time for the start."""
    _, done = with_a_late_rank(tmp_path, 1000)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "error: rank 0 waited in vain at the start: rank 1 did not come" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
