"""Chapter 07 as a program: its output and files, resuming anywhere, and its refusals.

The killed run is started from nothing, as are those of test_launch.py, which start this chapter in the quick command. The
others are forked, or run in ranks that already run: a start takes longer than ten steps.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpt2_chinese.checkpoint.trained_model import read_weights
from gpt2_chinese.distributed import devices
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
from gpt2_chinese.run.resolve import resolve
from pstar.config import load_config
from pstar.layout.budget import default_near_bytes
from pstar.planner.plan import Plan
from tests.chapters.inside import train
from tests.chapters.program import ROOT, Chapter, end_a_rank, environment, fork, run, without_torch
from tests.chapters.technique import settings_error, technique
from tests.cover import quick_only
from tests.limits import HANGS_S

STEPS = ("--max-steps", 10, "--save-every", 5, "--eval-every", 5, "--lr", "1e-2", "--near-budget", "min")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Chapter, str]:
    """A run of ten steps on two processes, and what it printed."""
    chapter = Chapter("07_patrickstar", tmp_path_factory.mktemp("finished"))
    return chapter, chapter.train_forked(*STEPS)


def interrupted(chapter: Chapter, folder: Path) -> Chapter:
    """A copy of a finished run that lost all after step 5."""
    shutil.copytree(chapter.output, folder / "run")
    shutil.rmtree(folder / "run/checkpoints/step_000010")
    shutil.rmtree(folder / "run/final")
    return Chapter(chapter.name, folder)


def test_a_run_prints_its_memory_and_leaves_all_files(finished) -> None:
    chapter, said = finished
    for words in ("2 ranks x 1 micro-batch x 6", "chunks ", "model data", "16 bytes a parameter", "near ", "far ",
                  " at most", "far to near", "perplexity", "「今天天气」", "tensorboard", "07_patrickstar/generate.sh"):
        assert words in said, words
    assert "Warning" not in said and "Traceback" not in said
    row = chapter.metrics()[-1]
    assert row["near_peak_bytes"] > 0 and row["far_to_near_bytes"] > 0 and row["gather_bytes"] > 0
    assert {"valid_loss", "valid_ppl", "valid_acc"} <= set(row)
    left = {path.name for path in chapter.output.iterdir()}
    assert left == {"metrics.jsonl", "tensorboard", "checkpoints", "config.json", "final"}


def test_the_trained_model_loads_in_hugging_face_and_generates(finished) -> None:
    transformers = pytest.importorskip("transformers")
    final = finished[0].output / "final"
    model, loading = transformers.GPT2LMHeadModel.from_pretrained(final, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and model.config.n_layer == 2
    command = [sys.executable, "-m", "gpt2_chinese.generate", "--model", str(finished[0].output)]
    assert "今天" in fork([*command, "--prompt", "今天", "--greedy"])


def test_a_second_call_prints_that_the_run_is_complete_without_loading_torch(finished) -> None:
    assert run(without_torch(finished[0].command(*STEPS))).startswith("This run is complete: 10 steps")


def test_a_resumed_run_prints_its_checkpoint_and_next_step(ranks, finished, tmp_path: Path, capsys) -> None:
    train(ranks, 2, interrupted(finished[0], tmp_path), *STEPS)
    assert "step_000005, next is step 6" in capsys.readouterr().out


@pytest.mark.parametrize("nproc", [2, 3, 1])
def test_it_resumes_at_another_number_of_processes(ranks, finished, tmp_path: Path, nproc: int) -> None:
    chapter = interrupted(finished[0], tmp_path)
    train(ranks, nproc, chapter, *STEPS)
    assert chapter.metrics()[:5] == finished[0].metrics()[:5], "not begun anew"
    assert chapter.losses() == pytest.approx(finished[0].losses(), rel=0 if nproc == 2 else 1e-5, abs=0)


def test_one_process_and_chapter_00_resume_each_other(ranks, tmp_path: Path) -> None:
    """On the same curve: the two differ in the roundings inside Adam alone."""
    plain = Chapter("00_single", tmp_path / "00")
    plain.folder.mkdir()
    train(ranks, 1, plain, *STEPS[:-2])
    chunked = interrupted(plain, tmp_path / "to07")
    chunked.name = "07_patrickstar"
    train(ranks, 1, chunked, *STEPS)
    back = interrupted(chunked, tmp_path / "to00")
    back.name = "00_single"
    train(ranks, 1, back, *STEPS[:-2])
    for chapter in (chunked, back):
        assert chapter.metrics()[:5] == plain.metrics()[:5] and chapter.metrics()[5:] != plain.metrics()[5:], "times"
        assert chapter.losses() == pytest.approx(plain.losses(), rel=1e-5)


@pytest.fixture(scope="module")
def in_8_bits(ranks, tmp_path_factory: pytest.TempPathFactory) -> Chapter:
    """The same ten steps on two ranks with --state-bits 8."""
    chapter = Chapter("07_patrickstar", tmp_path_factory.mktemp("eight"))
    train(ranks, 2, chapter, *STEPS, "--state-bits", 8)
    return chapter


def test_8_bit_states_keep_the_curve_within_one_per_cent(finished, in_8_bits) -> None:
    """1 % is the bound of a whole run; these ten steps stay within 1e-4."""
    assert in_8_bits.losses() == pytest.approx(finished[0].losses(), rel=0.01)
    assert in_8_bits.losses()[3:] != finished[0].losses()[3:], "the states are rounded"
    files = [chapter.output / "checkpoints/step_000010/parts" for chapter in (finished[0], in_8_bits)]
    wide, narrow = (sum(file.stat().st_size for file in folder.glob("*.distcp")) for folder in files)
    number = json.loads((in_8_bits.output / "config.json").read_text())["num_parameters"]
    assert 5 * number < wide - narrow < 6 * number, "6 bytes a parameter less; scales, and headers of files, more"


@pytest.mark.parametrize("nproc, bits", [(2, 8), (3, 8), (1, 32)])
def test_a_run_with_8_bit_states_resumes_anywhere(ranks, in_8_bits, tmp_path: Path, nproc: int, bits: int) -> None:
    """With the same states and ranks not one bit differs. 32-bit states are a different run from there on, near this one."""
    chapter = interrupted(in_8_bits, tmp_path)
    train(ranks, nproc, chapter, *STEPS, "--state-bits", bits)
    assert chapter.metrics()[:5] == in_8_bits.metrics()[:5], "not begun anew"
    rel = 0 if nproc == 2 else 1e-3 if bits == 8 else 0.01
    assert chapter.losses() == pytest.approx(in_8_bits.losses(), rel=rel, abs=0)


def test_a_run_with_32_bit_states_goes_on_with_8(ranks, finished, tmp_path: Path) -> None:
    chapter = interrupted(finished[0], tmp_path)
    train(ranks, 2, chapter, *STEPS, "--state-bits", 8)
    assert chapter.metrics()[:5] == finished[0].metrics()[:5] and chapter.losses()[6:] != finished[0].losses()[6:]
    assert chapter.losses() == pytest.approx(finished[0].losses(), rel=0.01)


@pytest.mark.parametrize("chapter, module, flags", [
    ("00_single", None, ()), ("02_ddp", "ddp_settings", ()), ("06_zero", "zero_settings", ()),
    ("07_patrickstar", "engine_settings", ("--backend", "own", "--near-budget", "min")),
], ids=lambda value: str(value))  # fmt: skip
def test_other_chapters_refuse_8_bit_states_before_a_process_starts(capsys, in_8_bits, chapter, module, flags) -> None:
    """Given by name, or found in --output-dir. Their weights are as usual, for --init-from."""
    model, step = in_8_bits.command()[2:], in_8_bits.output / "checkpoints/step_000010"
    for resume in ((), ("--resume", step)):
        said = settings_error(chapter, module, capsys, *model, *flags, *resume)
        assert said == (f"error: checkpoint {step} has optimizer states in 8 bits, which only chapter 07 with --backend "
                        f"pstar reads: resume it there, or begin with its weights: --resume never --init-from {step}\n")
    assert len(read_weights(step)) == len(read_weights(in_8_bits.output / "final"))


def test_a_near_budget_too_small_is_one_line_before_a_process_starts(tmp_path: Path) -> None:
    said = Chapter("07_patrickstar", tmp_path).train_forked("--near-budget", "100KiB", status=2)
    assert len(said.strip().splitlines()) == 1 and said.startswith("error: "), said
    assert "near budget 100KiB (102400 bytes) is too small: module 'transformer.wte' and its " in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flags, line", [
    (("--near-budget", "25 parsecs"), "'25 parsecs' is no amount of memory; write for example 25%, 64MiB or 2GiB"),
    (("--far-budget", "-1"), "--far-budget"),
    (("--far-budget", "100KiB", "--near-budget", "min"), "far budget 100KiB (102400 bytes) is too small: the chunks of one"),
    (("--near-memory", "100KiB"), "error: --near-memory 100KiB is too small: chunks alone need "),
    (("--near-memory", "all"), "error: --near-memory is 'all'; give bytes, as 12GiB, or auto"),
    (("--chunk-size", "big"), "--chunk-size big is not a number of elements"),
    (("--policy", "random"), "--policy"),
    (("--near-bugdet", "1MiB"), "--near-budget"),
    (("--nproc", "5"), "--batch-size 12 is not divisible by --nproc 5"),
    (("--train-data", "nowhere.json"), "nowhere.json"),
])
def test_wrong_flags_are_refused_before_anything_is_written(capsys, tmp_path: Path, flags, line: str) -> None:
    given = Chapter("07_patrickstar", tmp_path).command(*flags)[2:]
    assert line in settings_error("07_patrickstar", "engine_settings", capsys, *given)
    assert not (tmp_path / "run").exists()


def test_a_configuration_file_gives_the_curve_of_the_same_flags(ranks, tmp_path: Path) -> None:
    values = json.loads((ROOT / "chapters/07_patrickstar/config.json").read_text()) | {"near_budget": "min"}
    values["optimizer"]["params"]["betas"] = [0.8, 0.9]
    curves = []
    for betas, flags in (([0.8, 0.9], ()), ([0.9, 0.95], ()), (None, ("--near-budget", "min"))):
        chapter = Chapter("07_patrickstar", tmp_path / str(len(curves)))
        chapter.folder.mkdir()
        if betas:
            values["optimizer"]["params"]["betas"] = betas
            (tmp_path / "c.json").write_text(json.dumps(values))
            flags = ("--config", tmp_path / "c.json")
        train(ranks, 1, chapter, "--max-steps", 3, *flags)
        curves.append(chapter.losses())
    assert curves[1] == curves[2] != curves[0], "the shipped file holds the defaults; other betas give another curve"


@pytest.mark.parametrize("text, flags, line", [
    ('{"near_bugdet": "min"}', (), "c.json: unknown key 'near_bugdet'; did you mean 'near_budget'?"),
    ('{"near_budget": "min"', (), "c.json: not valid JSON"),
    ('{"near_budget": "min"}', ("--near-budget", "25%"), "--near-budget and 'near_budget' in --config"),
    ('{"optimizer": {"params": {"lr": 1}}}', ("--lr=1",), "--lr and 'optimizer.params.lr' in --config"),
    ('{"train_batch_size": 12, "scheduler": {"type": "WarmupLR"}}', (), "has a 'scheduler', but this chapter has its own"),
    ('{"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4}', ("--nproc", "2"), "x 2 process(es) is 8"),
    ('{"train_batch_size": 12}', ("--batch-size", "12"), "--batch-size and 'train_batch_size' in --config"),
    ('{"zero_optimization": {"stage": 5}}', (), "'zero_optimization.stage' is 5: Give a stage from 0 to 3."),
])
def test_a_configuration_file_that_is_refused(capsys, tmp_path: Path, text: str, flags, line: str) -> None:
    (tmp_path / "c.json").write_text(text)
    given = Chapter("07_patrickstar", tmp_path).command("--config", tmp_path / "c.json", *flags)[2:]
    assert line in settings_error("07_patrickstar", "engine_settings", capsys, *given)


def test_a_configuration_of_deepspeed_sets_the_batch_and_where_states_are(capsys, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({
        "train_batch_size": 12, "train_micro_batch_size_per_gpu": 3, "steps_per_print": 10, "gradient_clipping": 0.5,
        "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 0.002, "betas": [0.8, 0.9]}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "activation_checkpointing": {"cpu_checkpointing": True}}))
    given = [str(each) for each in Chapter("07_patrickstar", tmp_path).command("--config", tmp_path / "ds.json")[2:]]
    place = given.index("--batch-size")
    del given[place : place + 2]
    program = str(ROOT / "chapters/07_patrickstar/train.py")
    settings = resolve(technique("07_patrickstar", "engine_settings").Settings.from_command_line(program, "", given))
    assert (settings.batch_size, settings.grad_accum, settings.nproc, settings.precision) == (12, 2, 2, "bf16")
    config = settings.engine_config()
    assert config["optimizer"]["params"] | {"use_hybrid_adam": False, "betas": (0.8, 0.9)} == config["optimizer"]["params"]
    assert config["offload_activations"] and config["gradient_clipping"] == 0.5
    assert "--config: translated: zero_optimization.stage 2: Every stage becomes" in capsys.readouterr().out


def test_the_default_budget_is_a_quarter_or_the_least_that_works(ranks, tmp_path: Path) -> None:
    for flags, budget in ((("--model-config", "tiny"), "25%"), ((), "min")):    # the small test model is mostly embedding
        chapter = Chapter("07_patrickstar", tmp_path / budget)
        chapter.folder.mkdir()
        train(ranks, 1, chapter, "--max-steps", 1, "--seq-len", 16, *flags)
        assert json.loads((chapter.output / "config.json").read_text())["near_budget"] == budget


@pytest.mark.parametrize("num_gpus, near, precision", [(1, "auto", "bf16"), (0, "25%", "fp32")])
def test_on_a_gpu_the_engine_decides_and_a_small_model_stays_there(monkeypatch, tmp_path, num_gpus, near, precision) -> None:
    """On a GPU of 139 GiB GPT-2 with 124 million parameters is near with its optimizer states; a quarter would keep none."""
    monkeypatch.setattr(devices, "count_gpus", lambda: num_gpus)
    given = ["--model-config", "small", "--output-dir", str(tmp_path), "--nproc", "1"]
    program = str(ROOT / "chapters/07_patrickstar/train.py")
    settings = resolve(technique("07_patrickstar", "engine_settings").Settings.from_command_line(program, "", given))
    config = settings.engine_config()
    assert (settings.near_budget, config["near_budget"], config["near_memory"]) == (near, near, "auto")
    assert config["bf16"]["enabled"] == (precision == "bf16")
    with torch.device("meta"):
        plan = Plan(GPT2LMHeadModel(settings.model), load_config(config), 1, default_near_bytes([139 * 2**30]))
    assert plan.stays_near == bool(num_gpus)
    assert len(plan.near_state_groups) == (len(plan.layout.trained) if num_gpus else 0)


@pytest.mark.parametrize("steps", quick_only([40, 80, 200], 40))
def test_in_16_bit_the_curve_stays_within_one_per_cent(ranks, tmp_path: Path, steps: int) -> None:
    """The law of the curve for mixed precision: the mean gap over the last 20 steps."""
    flags = ("--max-steps", steps, "--eval-every", 1000, "--save-every", 1000, "--seq-len", 8)
    curves, rows = {}, []
    for name, precision in (("00_single", "fp32"), ("07_patrickstar", "bf16"), ("07_patrickstar", "fp16")):
        chapter = Chapter(name, tmp_path / precision)
        chapter.folder.mkdir()
        chunked = ("--precision", precision, "--near-budget", "min") if precision != "fp32" else ()
        train(ranks, 2 if chunked else 1, chapter, *flags, *chunked)
        curves[precision], rows = chapter.losses()[-20:], chapter.metrics()
    for precision in ("bf16", "fp16"):
        gaps = [abs(ours - theirs) / theirs for theirs, ours in zip(curves["fp32"], curves[precision], strict=True)]
        assert sum(gaps) / 20 < 0.01 and max(gaps) > 0, precision
    assert rows[-1]["loss_scale"] >= 1 and rows[-1]["skipped_steps"] <= 20


def test_fp16_goes_on_with_the_scale_of_its_checkpoint(ranks, tmp_path: Path) -> None:
    """The configuration's first scale is too large on purpose; the run that goes on takes the one that was found."""
    (tmp_path / "c.json").write_text('{"fp16": {"enabled": true, "initial_scale_power": 24, "hysteresis": 1}}')
    flags = (*STEPS, "--seq-len", 16, "--config", tmp_path / "c.json")
    chapter = Chapter("07_patrickstar", tmp_path / "whole")
    chapter.folder.mkdir()
    train(ranks, 2, chapter, *flags)
    rows = chapter.metrics()
    assert rows[0]["loss_scale"] == 2**23 and rows[0]["grad_norm"] is None and rows[-1]["skipped_steps"] > 0
    part = interrupted(chapter, tmp_path / "part")
    train(ranks, 2, part, *flags)
    assert part.metrics()[:5] == rows[:5] and part.losses() == chapter.losses()
    assert [row["loss_scale"] for row in part.metrics()] == [row["loss_scale"] for row in rows]


@pytest.mark.deep  # in the quick command the ranks of chapter 01 kill one that hangs (test_data_parallel.py)
def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    chapter = Chapter("07_patrickstar", tmp_path)
    said = end_a_rank(chapter, 2, 1, signal.SIGKILL, "--near-budget", "min")
    assert "rank 1 failed with status -9" in said, said


@pytest.mark.deep
def test_train_sh_runs_from_any_folder(tmp_path: Path) -> None:
    chapter = Chapter("07_patrickstar", tmp_path)
    command = ["bash", str(ROOT / "chapters/07_patrickstar/train.sh"), *chapter.command(*STEPS)[2:]]
    env = environment() | {"PYTHON": sys.executable}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
    assert "Done." in done.stdout


@pytest.mark.parametrize("nproc", quick_only([1, 2], 1))
def test_a_loss_scale_that_is_too_large_ends_the_run_in_one_line(tmp_path: Path, nproc: int) -> None:
    (tmp_path / "c.json").write_text('{"fp16": {"enabled": true, "loss_scale": 1e9}}')
    chapter = Chapter("07_patrickstar", tmp_path)
    flags = ("--max-steps", 100, "--seq-len", 8, "--nproc", nproc, "--config", tmp_path / "c.json")
    said = chapter.train_forked(*flags, status=1)
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "20 steps in a row" in lines[0] and "is too large" in lines[0] and "Traceback" not in said, said
    assert len(chapter.metrics()) == 19
