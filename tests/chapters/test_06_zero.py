"""Chapter 06 as a program: the law of the curve, checkpoints under another stage, cut or chapter, refusals, a lost rank."""

from __future__ import annotations

import math
import shutil
import signal
from pathlib import Path

import pytest

from tests.chapters.inside import train
from tests.chapters.law import CLIP, LONG, PEAK, SHORT, assert_same_curve, flags_of
from tests.chapters.program import SMALL, Chapter, end_a_rank
from tests.chapters.technique import settings_error

CASES = [
    (2, 1, SHORT, ("--zero-stage", 0, "--check-sync", 1)),
    (3, 4, SHORT, ("--zero-stage", 1, "--check-sync", 1)),
    (4, 1, SHORT, ("--zero-stage", 2, "--check-sync", 1)),
    (2, 4, SHORT, ("--zero-stage", 2, "--offload", "optimizer", "--activation-checkpointing")),
    (2, 4, SHORT, ("--zero-stage", 3)),
    (3, 1, SHORT, ("--zero-stage", 3, "--activation-checkpointing")),
    (4, 1, SHORT, ("--zero-stage", 3, "--offload", "optimizer,params")),
    (2, 4, SHORT, ("--zero-stage", 1, "--backend", "torch")),
    (2, 1, SHORT, ("--zero-stage", 2, "--backend", "torch", "--activation-checkpointing")),
    (3, 1, SHORT, ("--zero-stage", 3, "--backend", "torch")),
    (2, 1, SHORT, ("--zero-stage", 3, "--backend", "torch", "--offload", "optimizer,params")),
    *(pytest.param(nproc, accumulate, LONG, flags, marks=pytest.mark.deep) for nproc, accumulate, flags in (
        (3, 4, ("--zero-stage", 1, "--check-sync", 1)), (4, 1, ("--zero-stage", 2, "--check-sync", 1)),
        (2, 4, ("--zero-stage", 3)))),
]  # fmt: skip


@pytest.mark.parametrize("nproc, accumulate, steps, flags", CASES, ids=lambda value: " ".join(map(str, value))
                         if isinstance(value, tuple) else str(value))  # fmt: skip
def test_the_law_of_the_curve(ranks, curve, tmp_path, nproc, accumulate, steps, flags) -> None:
    chapter = Chapter("06_zero", tmp_path)
    reports = train(ranks, nproc, chapter, *flags_of(steps), *flags, "--grad-accum", accumulate)
    rows, expected = chapter.metrics(), curve(steps)  # the number of micro-batches changes its last bits only
    assert_same_curve(rows, expected, rel=1e-4)
    assert rows[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=1e-5), "the global norm, of the same weights"
    assert [len(report.seen) for report in reports] == [steps] * nproc, "one optimizer step a batch, on every rank"
    if "own" in flags or "torch" not in flags:
        squares = [sum(report.seen[step] ** 2 for report in reports) for step in range(steps)]
        most = max(squares) / (nproc if 0 in flags else 1)
        assert math.sqrt(most) <= CLIP * (1 + 1e-5), "all shards together are within the limit"
        sent = sum(value for row in rows for name, value in row.items() if name.endswith("_sent_bytes"))
        assert sum(row["sent_bytes"] for row in rows) == pytest.approx(sent, rel=0.05), "what the kernel counted"
    assert rows[-1]["lr"] <= 0.01 * PEAK * (1 + 1e-9)


def test_bf16_stays_near(ranks, tmp_path) -> None:
    """On few rows: products in 16 bit are slow on a CPU."""
    wide, narrow = Chapter("00_single", tmp_path / "00"), Chapter("06_zero", tmp_path / "06")
    flags = (*flags_of(30), "--batch-size", 8)
    for chapter, more in ((wide, ()), (narrow, ("--precision", "bf16", "--zero-stage", 3))):
        chapter.folder.mkdir()
        train(ranks, 2 if more else 1, chapter, *flags, *more)
    gaps = [abs(ours / theirs - 1) for ours, theirs in zip(narrow.losses(), wide.losses(), strict=True)]
    assert 0 < sum(gaps[-20:]) / 20 < 0.01


@pytest.mark.parametrize("stage", [2, 3])
def test_fp16_skips_overflows_on_all_ranks_alike(ranks, tmp_path, stage) -> None:
    """The first scale is too large on purpose for some models, and 2**40 is for all."""
    chapter = Chapter("06_zero", tmp_path)
    flags = (*flags_of(10), "--precision", "fp16", "--zero-stage", stage, "--lr", 0.003)
    reports = train(ranks, 2, chapter, *flags)
    rows = chapter.metrics()
    skipped = rows[-1]["skipped_steps"]
    assert skipped <= 3 and rows[-1]["loss_scale"] == 2.0 ** (16 - skipped)
    assert all(len(report.seen) == 10 - skipped for report in reports) and rows[-1]["loss"] < rows[0]["loss"] - 0.1
    stuck = Chapter("06_zero", tmp_path / "stuck")
    stuck.folder.mkdir()
    reports = train(ranks, 2, stuck, *flags, "--loss-scale", 2.0**40, "--max-steps", 6)
    assert all(len(report.seen) == 0 for report in reports) and stuck.metrics()[-1]["skipped_steps"] == 6


# ---- checkpoints


EIGHT = ("--seq-len", 8, "--batch-size", 24, "--lr", PEAK, "--warmup-steps", 2, "--max-steps", 8,
         "--save-every", 4, "--eval-every", 4)  # fmt: skip


@pytest.fixture(scope="module")
def finished(ranks, tmp_path_factory) -> Chapter:
    """Eight steps at stage 3 on two processes."""
    chapter = Chapter("06_zero", tmp_path_factory.mktemp("finished"))
    train(ranks, 2, chapter, *EIGHT)
    return chapter


def interrupted(chapter: Chapter, name: str, folder: Path) -> Chapter:
    """A copy of a finished run that lost all after step 4, to go on with a chapter."""
    shutil.copytree(chapter.output, folder / "run")
    shutil.rmtree(folder / "run/checkpoints/step_000008")
    shutil.rmtree(folder / "run/final")
    return Chapter(name, folder)


@pytest.mark.parametrize("nproc, flags", [
    (2, ()), (3, ("--zero-stage", 1)), (1, ("--zero-stage", 0)), (4, ("--zero-stage", 2, "--offload", "optimizer")),
    (3, ("--backend", "torch")), (2, ("--backend", "torch", "--zero-stage", 1)),
])  # fmt: skip
def test_it_resumes_at_another_stage_and_number_of_processes(ranks, finished, tmp_path, nproc, flags) -> None:
    chapter = interrupted(finished, "06_zero", tmp_path)
    train(ranks, nproc, chapter, *EIGHT, *flags)
    assert chapter.losses() == pytest.approx(finished.losses(), rel=1e-5 if flags else 0, abs=0)


@pytest.mark.parametrize("flags", [("--zero-stage", 3), ("--zero-stage", 2, "--backend", "torch"),
                                   ("--zero-stage", 1, "--backend", "torch")])  # fmt: skip
def test_chapter_00_and_06_resume_each_other(ranks, finished, tmp_path, flags) -> None:
    plain = interrupted(finished, "00_single", tmp_path)
    train(ranks, 1, plain, *EIGHT)
    assert plain.losses() == pytest.approx(finished.losses(), rel=1e-5)
    (tmp_path / "there").mkdir()
    there = interrupted(plain, "06_zero", tmp_path / "there")
    train(ranks, 2, there, *EIGHT, *flags)
    assert there.losses() == pytest.approx(finished.losses(), rel=1e-5)
    (tmp_path / "back").mkdir()
    back = Chapter("00_single", tmp_path / "back")
    train(ranks, 1, back, *EIGHT[:-4], "--max-steps", 10, "--resume", there.output / "checkpoints/step_000008")
    assert back.losses()[0] < finished.losses()[0]


def test_final_is_the_plain_format(finished) -> None:
    transformers = pytest.importorskip("transformers")
    final = finished.output / "final"
    model, loading = transformers.GPT2LMHeadModel.from_pretrained(final, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and model.config.n_layer == 2


# ---- what it refuses and survives


@pytest.mark.parametrize("flags, line", [
    (("--zero-stage", "4"), "--zero-stage"),
    (("--offload", "optimizer,params", "--zero-stage", "2"), "--offload optimizer,params needs --zero-stage 3"),
    (("--offload", "gradients"), "--offload"),
    (("--backend", "torch", "--zero-stage", "0"), "--backend torch has no --zero-stage 0: use chapter 02"),
    (("--backend", "torch", "--precision", "fp16"), "--backend torch is for fp32 and bf16"),
    (("--backend", "torch", "--offload", "optimizer"), "FSDP2's CPUOffloadPolicy moves parameters too"),
    (("--backend", "torch", "--zero-stage", "1", "--offload", "optimizer"), "uses FSDP2: it needs --zero-stage 2 or 3"),
    (("--loss-scale", "0"), "--loss-scale 0: give a number above 0"),
    (("--zero-stag", "1"), "did you mean --zero-stage"),
])  # fmt: skip
def test_a_wrong_flag_is_refused_in_one_line(capsys, tmp_path, flags, line) -> None:
    assert line in settings_error("06_zero", "zero_settings", capsys, "--output-dir", tmp_path, *flags)


@pytest.mark.deep
def test_a_killed_rank_ends_the_job_and_is_named(tmp_path: Path) -> None:
    chapter = Chapter("06_zero", tmp_path)
    said = end_a_rank(chapter, 3, 1, signal.SIGKILL, "--timeout-s", 300, "--seq-len", SMALL["n_positions"] // 2)
    assert "rank 1 failed with status -9 (SIGKILL)" in said and "Traceback" not in said, said


def test_a_run_prints_its_stage_and_the_table_of_memory(tmp_path: Path) -> None:
    """Under torchrun, on two processes: it prints the closing table and no warning."""
    said = Chapter("06_zero", tmp_path).train_forked("--max-steps", 3, "--offload", "optimizer", "--save-every", 3)
    for words in ("stage 3 by zero/stage3.py", "in host memory: optimizer", "model states", "by the formula", "host moments",
                  "whole at a time", "sent in a step", "moved in a step", "06_zero/generate.sh"):
        assert words in said, words
    assert "Warning" not in said and "Traceback" not in said
