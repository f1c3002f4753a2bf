"""Chapter 00 as a program: its output, its files, and that it resumes where it stopped.

One run and the run that is killed are started from nothing. The others are forked, or run in a rank that already
runs: a start takes longer than ten steps.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chapters.inside import train
from tests.chapters.program import ROOT, SMALL, Chapter, environment, fork, run, without_torch
from tests.cover import quick_only
from tests.harness.handed_over import handing_over
from tests.limits import wait_until

# 6 N + 12 L C T by hand: N = 3980 x 32 + 2 x 12 x 32^2; two layers of width 32, sequences of 32
FLOPS_PER_TOKEN = 6 * (3980 * 32 + 2 * 12 * 32 * 32) + 12 * 2 * 32 * 32
STEPS = ("--max-steps", 10, "--save-every", 5, "--eval-every", 5, "--lr", "1e-2")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Chapter, str]:
    """A run of ten steps, and what it printed."""
    chapter = Chapter("00_single", tmp_path_factory.mktemp("finished"))
    return chapter, chapter.train(*STEPS)


def copy_of(chapter: Chapter, folder: Path) -> Chapter:
    shutil.copytree(chapter.output, folder / "run")
    return Chapter(chapter.name, folder)


def test_deterministic_kernels_change_no_bit_on_a_cpu(finished, tmp_path: Path) -> None:
    chapter = Chapter("00_single", tmp_path)
    chapter.train_forked(*STEPS, "--deterministic")
    assert chapter.losses() == finished[0].losses()
    assert json.loads((chapter.output / "config.json").read_text())["deterministic"] is True


def test_metrics_have_a_row_a_step_with_all_the_contract_names(finished) -> None:
    rows = finished[0].metrics()
    assert [row["step"] for row in rows] == list(range(1, 11))
    for row in rows:
        names = {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "step_s", "peak_bytes", "flops_per_s", "mfu"}
        evaluated = {"valid_loss", "valid_ppl", "valid_acc"} if row["step"] in (5, 10) else set()
        assert set(row) == names | evaluated
        assert row["tokens"] == row["step"] * 12 * 32 and row["peak_bytes"] > 1 << 20 and row["step_s"] > 0
        assert row["flops_per_s"] == pytest.approx(row["tokens_per_s"] * FLOPS_PER_TOKEN) and row["mfu"] > 0
    assert rows[0]["loss"] == pytest.approx(math.log(3980), abs=0.1)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert rows[-1]["lr"] <= 0.01 * 1e-2 * (1 + 1e-9)
    assert rows[-1]["valid_ppl"] == pytest.approx(math.exp(rows[-1]["valid_loss"]))


def test_a_run_leaves_metrics_checkpoints_settings_and_final(finished) -> None:
    output = finished[0].output
    assert {p.name for p in output.iterdir()} == {"metrics.jsonl", "tensorboard", "checkpoints", "config.json", "final"}
    assert {p.name for p in (output / "checkpoints").iterdir()} == {"step_000005", "step_000010"}
    settings = json.loads((output / "config.json").read_text())
    assert settings["max_steps"] == 10 and settings["precision"] == "fp32" and settings["versions"]["torch"]
    assert {"model.safetensors", "config.json", "vocab.txt"} <= {p.name for p in (output / "final").iterdir()}


def test_tensorboard_has_curves_settings_and_samples(finished) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(finished[0].output / "tensorboard"))
    board.Reload()
    assert {"train/loss", "train/lr", "valid/valid_loss"} <= set(board.Tags()["scalars"])
    assert [e.step for e in board.Scalars("train/loss")] == list(range(1, 11))
    rows = finished[0].metrics()
    assert [e.value for e in board.Scalars("train/loss")] == pytest.approx([row["loss"] for row in rows])
    assert any("samples" in tag for tag in board.Tags()["tensors"])


def test_a_comment_is_kept_until_another_one_is_given(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    chapter = Chapter("00_single", tmp_path)

    def after(steps: int, *flags: str) -> str:
        said = chapter.train_forked("--max-steps", steps, "--eval-every", 9, *flags)
        return next(line for line in said.splitlines() if "comment" in line).split(maxsplit=1)[1]

    def written() -> str:
        return json.loads((chapter.output / "config.json").read_text())["comment"]

    assert after(1, "--comment", "first, lr of\nthe paper") == "first, lr of the paper"
    assert after(2) == "first, lr of the paper" and written() == "first, lr of\nthe paper"
    assert after(3, "--comment", "第二次") == written() == "第二次"
    board = EventAccumulator(str(chapter.output / "tensorboard"))
    board.Reload()
    texts = [(e.step, e.tensor_proto.string_val[0].decode()) for e in board.Tensors("comment/text_summary")]
    assert texts == [(0, "first, lr of\nthe paper"), (2, "第二次")]


def test_a_run_prints_header_progress_sample_and_summary(finished) -> None:
    said = finished[1]
    for words in (
        "2 layers, 32 wide",
        "unknown 0.00% in training",
        "tokens/s",
        "perplexity",
        "「今天天气」",
        "step 10/10",
    ):
        assert words in said, said
    assert f"scripts/tensorboard.sh {finished[0].output}\n" in said
    assert f"bash {ROOT}/chapters/00_single/generate.sh --model {finished[0].output}" in said.replace(
        "bash chapters", f"bash {ROOT}/chapters"
    )
    assert "\r" not in said, "no bar in a log file"
    assert "Warning" not in said and "Traceback" not in said


def test_a_bar_moves_on_a_terminal(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    command = Chapter("00_single", tmp_path).command("--max-steps", 40)
    process = subprocess.Popen(command, env=handing_over(environment()), stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    said = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        said += piece
    assert process.wait() == 0
    assert said.count(b"\r") > 2 and b"step 40/40" in said and b"loss " in said and b"tokens/s" in said


def test_a_checkpoint_of_another_precision_resumes(ranks, finished, tmp_path: Path) -> None:
    chapter = copy_of(finished[0], tmp_path)
    shutil.rmtree(chapter.output / "checkpoints" / "step_000010")
    train(ranks, 1, chapter, "--max-steps", 7, "--precision", "fp16")
    assert [row["step"] for row in chapter.metrics()] == list(range(1, 8))
    assert chapter.metrics()[:5] == finished[0].metrics()[:5], "not begun anew"


def test_resuming_continues_the_curve_bit_for_bit(finished, tmp_path: Path) -> None:
    chapter = copy_of(finished[0], tmp_path)
    straight = chapter.metrics()
    shutil.rmtree(chapter.output / "checkpoints" / "step_000010")
    said = chapter.train_forked(*STEPS)
    assert "step_000005, next is step 6" in said
    resumed = chapter.metrics()
    for name in ("step", "loss", "lr", "grad_norm", "tokens"):
        assert [row[name] for row in resumed] == [row[name] for row in straight]
    weights = "checkpoints/step_000010/model.safetensors"
    assert (chapter.output / weights).read_bytes() == (finished[0].output / weights).read_bytes()
    final = "final/model.safetensors"
    assert (chapter.output / final).read_bytes() == (finished[0].output / final).read_bytes()


@pytest.mark.deep  # in the quick command: a kill before every change of a save, and a run that goes on bit for bit
def test_a_killed_run_goes_on_bit_for_bit(ranks, tmp_path: Path) -> None:
    flags = ("--max-steps", 100, "--save-every", 10, "--eval-every", 100)
    straight = Chapter("00_single", tmp_path / "straight")
    killed = Chapter("00_single", tmp_path / "killed")
    for chapter in (straight, killed):
        chapter.folder.mkdir()
    process = subprocess.Popen(killed.command(*flags), env=environment(), stdout=subprocess.DEVNULL)
    wait_until((killed.output / "checkpoints" / "step_000010").exists, "step 10", lambda: process.poll() is None)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert "next is step" in killed.train_forked(*flags)
    train(ranks, 1, straight, *flags)
    assert killed.losses() == straight.losses() and len(straight.losses()) == 100


def test_a_second_call_prints_that_the_run_is_complete_without_loading_torch(finished) -> None:
    chapter = finished[0]
    before = (chapter.output / "metrics.jsonl").read_bytes()
    said = run(without_torch(chapter.command(*STEPS)))
    assert said.startswith("This run is complete: 10 steps") and "generate.sh" in said and "tensorboard" in said
    assert (chapter.output / "metrics.jsonl").read_bytes() == before


def test_a_lost_final_is_made_again_from_the_last_checkpoint(finished, tmp_path: Path) -> None:
    chapter = copy_of(finished[0], tmp_path)
    shutil.rmtree(chapter.output / "final")
    said = chapter.train_forked(*STEPS)
    assert "perplexity" in said and "「今天天气」" in said
    final = "final/model.safetensors"
    assert (chapter.output / final).read_bytes() == (finished[0].output / final).read_bytes()


def test_resume_never_starts_anew_and_keeps_the_old_checkpoints_aside(finished, tmp_path: Path) -> None:
    chapter = copy_of(finished[0], tmp_path)
    said = chapter.train_forked(*STEPS[:2], "--save-every", 10, "--lr", "1e-2", "--resume", "never")
    assert "moved to" in said
    assert {p.name for p in (chapter.output / "checkpoints.old1").iterdir()} == {"step_000005", "step_000010"}
    assert {p.name for p in (chapter.output / "checkpoints").iterdir()} == {"step_000010"}
    assert chapter.losses() == finished[0].losses()


def test_accumulation_gives_the_same_curve(ranks, finished, tmp_path: Path) -> None:
    chapter = Chapter("00_single", tmp_path)
    train(ranks, 1, chapter, *STEPS, "--grad-accum", 3)
    assert chapter.losses() == pytest.approx(finished[0].losses(), rel=1e-5)


def goes_on_bit_for_bit(ranks, chapter: Chapter, *flags: object) -> list[float]:
    """Runs six steps, and the last three again from the checkpoint between; the losses."""
    given = ("--max-steps", 6, "--save-every", 3, "--lr", "1e-2", *flags)
    train(ranks, 1, chapter, *given)
    straight = chapter.metrics()
    shutil.rmtree(chapter.output / "checkpoints" / "step_000006")
    train(ranks, 1, chapter, *given)
    assert chapter.metrics()[:3] == straight[:3] and chapter.metrics()[3:] != straight[3:], "times: three steps anew"
    losses = [row["loss"] for row in straight]
    assert chapter.losses() == losses
    return losses


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains_and_resumes(ranks, tmp_path: Path, precision: str) -> None:
    losses = goes_on_bit_for_bit(ranks, Chapter("00_single", tmp_path), "--precision", precision)
    assert losses[-1] < losses[0] - 0.3


def test_dropout_resumes_bit_for_bit(ranks, tmp_path: Path) -> None:
    config = tmp_path / "dropout.json"
    dropout = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    config.write_text(json.dumps(SMALL | dropout))
    goes_on_bit_for_bit(ranks, Chapter("00_single", tmp_path), "--model-config", config)


@pytest.mark.parametrize("where", quick_only(["", "final", "checkpoints/step_000005", "final/model.safetensors"], ""))
def test_generate_takes_a_run_its_final_or_a_checkpoint(finished, where: str) -> None:
    command = [sys.executable, "-m", "gpt2_chinese.generate", "--model", str(finished[0].output / where)]
    said = fork([*command, "--prompt", "今天", "--length", "20", "--num", "2", "--seed", "3"])
    assert said.count("今天") >= 2
    if not where:
        assert said == run([*command, "--prompt", "今天", "--length", "20", "--num", "2", "--seed", "3"])


def test_generate_names_a_missing_model_and_a_wrong_flag(finished, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gpt2_chinese.generate", "--model"]
    assert "no trained model in" in fork([*command, str(tmp_path)], status=2)
    assert "--top-p 1.5 is out of range" in fork([*command, str(finished[0].output), "--top-p", "1.5"], status=2)


def test_an_error_is_one_line_and_status_2(tmp_path: Path) -> None:
    chapter = Chapter("00_single", tmp_path)
    said = chapter.train("--train-data", tmp_path / "none", status=2)
    assert said == f"error: corpus {tmp_path}/none does not exist: give an array-JSON file or a folder of them\n"
    assert not chapter.output.exists()
