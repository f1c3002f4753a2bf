"""`--recompute` in chapters 00 to 04: the curve of chapter 00, and backward really computes segments again.

Tolerance: none on one process, where backward repeats the same operations on the same numbers. 1e-4 relative at 2 and 3
processes, as in test_law_of_the_curve.py, which runs chapter 03 with `--recompute`. The mechanism is tested, bytes and
FLOPs by formula, in test_08_recompute.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
from gpt2_chinese.model.recomputation import recompute
from tests.chapters.inside import train
from tests.chapters.law import SHORT, assert_same_curve, flags_of
from tests.chapters.program import Chapter
from tests.chapters.technique import settings_error, technique
from tests.chapters.test_08_recompute import assert_equal, batch, build
from tests.cover import quick_only

SEGMENTS = {"block": 2, "every:2": 1, "selective": 2, "sqrt": 2}  # of Chapter's two layers; sqrt: round(1.41) is one block
CHAPTERS = {"00": ("00_single", ()), "01": ("01_parameter_server", ()), "02": ("02_ddp", ()),
            "02 torch": ("02_ddp", ("--backend", "torch")), "04": ("04_apex", ("--opt-level", "O0"))}  # fmt: skip


def run(ranks, folder, name: str, nproc: int, mode: str, accumulate: int = 1) -> list[dict]:
    """The rows of a chapter's metrics; asserts that backward ran every segment of every micro-batch again."""
    program, flags = CHAPTERS[name]
    chapter = Chapter(program, folder)
    reports = train(ranks, nproc, chapter, *flags_of(SHORT), *flags, "--recompute", mode, "--grad-accum", accumulate)
    again = SHORT * accumulate * SEGMENTS[mode]
    assert [report.segments for report in reports] == [again] * nproc
    return chapter.metrics()


@pytest.mark.each
@pytest.mark.parametrize("mode", SEGMENTS)
@pytest.mark.parametrize("name", CHAPTERS)
def test_on_one_process_it_is_the_curve_bit_for_bit(ranks, curve, tmp_path, name, mode) -> None:
    rows, expected = run(ranks, tmp_path, name, 1, mode), curve(SHORT)
    for key in ("loss", "grad_norm", "lr"):
        assert [row[key] for row in rows] == [row[key] for row in expected]
    assert rows[-1]["valid_loss"] == expected[-1]["valid_loss"]


ON_RANKS = [(name, mode, *split) for name in CHAPTERS if name != "00" for mode in SEGMENTS for split in ((2, 4), (3, 1))]


@pytest.mark.parametrize("case", quick_only(ON_RANKS, ("02", "selective", 2, 4), ("04", "sqrt", 3, 1)))
def test_on_ranks_it_follows_the_curve(ranks, curve, tmp_path, case) -> None:
    name, mode, nproc, accumulate = case
    assert_same_curve(run(ranks, tmp_path, name, nproc, mode, accumulate), curve(SHORT), rel=1e-4)


@pytest.mark.parametrize("level, backend, half", [("O1", "own", "bf16"), ("O1", "own", "fp16"), ("O2", "own", "bf16"),
                                                  ("O3", "own", "bf16"), ("O1", "torch", "bf16")])  # fmt: skip
def test_every_level_of_mixed_precision_has_the_same_bits(level, backend, half) -> None:
    """Backward runs after the forward's casts have ended, and must compute with the same ones."""
    settings = SimpleNamespace(opt_level=level, half=half, loss_scale="1", scale_window=1, backend=backend, apex=False)
    results = []
    for mode in ("none", "every:2", "selective"):
        model = build(dropout=0.2)
        recompute(model, mode)
        technique("04_apex", "amp").initialize(model, SimpleNamespace(max=lambda x: x), settings)
        results.append(gradients(model))
    for found in results[1:]:
        assert_equal(found, results[0])


def gradients(model: GPT2LMHeadModel) -> dict[str, torch.Tensor]:
    torch.manual_seed(9)
    loss = model(*batch())
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("chapter, module", [("05_model_parallel", "parallel_settings"), ("06_zero", "zero_settings"),
                                             ("07_patrickstar", "engine_settings")])  # fmt: skip
def test_chapters_with_another_flag_for_it_name_that(capsys, chapter, module) -> None:
    said = settings_error(chapter, module, capsys, "--recompute", "block")
    assert said == "error: unknown flag --recompute: did you mean --activation-checkpointing?\n"


def test_a_wrong_value_is_one_line(capsys) -> None:
    said = settings_error("02_ddp", "ddp_settings", capsys, "--recompute", "every:9")
    assert said == "error: --recompute every:9: the model has 4 layers, give every:4 at most\n"
    said = settings_error("01_parameter_server", "server_settings", capsys, "--recompute", "block", "--backend", "torch")
    assert said.startswith("error: --recompute needs --backend own: ")
