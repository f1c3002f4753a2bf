"""Chapter 04 on ranks: the law of the curve at O0, mixed precision near it, overflows skipped by all ranks alike.

The chapter's unchanged files train a GPT-2 of 2 layers on a made-up language of 96 words. Every word has few successors,
so that there is something to learn. The oracle is plain PyTorch in fp32 on one process.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from gpt2_chinese.distributed.ranks import Ranks
from gpt2_chinese.model.config import ModelConfig
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
from gpt2_chinese.run.optim import adamw, clip_gradients, learning_rate, set_learning_rate
from tests.cover import quick_only
from tests.harness import RankFailure

CHAPTER = Path(__file__).resolve().parents[2] / "chapters" / "04_apex"
WORDS, LENGTH, BATCH, CLIP = 96, 12, 48, 0.3


def model_of_seed() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    return GPT2LMHeadModel(ModelConfig(n_layer=2, n_embd=32, n_head=2, n_positions=LENGTH, vocab_size=WORDS))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets) (BATCH, LENGTH): each word is followed by one of four."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, WORDS, (BATCH, 1), generator=generator)
    for _ in range(LENGTH):
        ids = torch.cat([ids, (ids[:, -1:] * 5 + torch.randint(0, 4, (BATCH, 1), generator=generator)) % WORDS], 1)
    return ids[:, :-1], ids[:, 1:]


def plan(steps: int, **changes) -> SimpleNamespace:
    """The settings that the chapter's files read."""
    values = {"opt_level": "O0", "half": "bf16", "loss_scale": "1", "scale_window": 2000, "backend": "own", "comm": "ddp",
              "apex": False, "grad_accum": 1, "lr": 3e-3, "weight_decay": 0.1, "warmup_steps": 5,
              "max_steps": steps, "clip_grad_norm": CLIP}  # fmt: skip
    return SimpleNamespace(**values | changes)


@functools.cache
def oracle(steps: int, micros: int = 1) -> tuple[list[float], list[float]]:
    """(losses, norms) of chapter 00's loop in fp32."""
    model, settings = model_of_seed(), plan(steps)
    optimizer = adamw(model, settings)
    losses, norms = [], []
    for step in range(1, steps + 1):
        set_learning_rate(optimizer, learning_rate(step, settings))
        optimizer.zero_grad()
        total = 0.0
        for inputs, targets in zip(*(part.chunk(micros) for part in batch(step)), strict=True):
            loss = model(inputs, targets) / micros
            loss.backward()
            total += loss.item()
        norms.append(clip_gradients(model, CLIP).item())
        optimizer.step()
        losses.append(total)
    return losses, norms


def train(rank: int, num_ranks: int, settings: SimpleNamespace, overflow_at: int = 0, alone: bool = False) -> dict:
    """The loop of the chapter's train.py; rank 1's gradients overflow at one step; `alone` removes the collective."""
    sys.path.insert(0, str(CHAPTER))
    try:
        import amp
        import comm
        import torch_amp  # noqa: F401  (amp imports it late)
    finally:
        sys.path.remove(str(CHAPTER))
    ranks = Ranks(rank, num_ranks, rank, torch.device("cpu"), dist.group.WORLD)
    model = model_of_seed()
    masters, scaler = amp.initialize(model, ranks, settings)
    replica = comm.Alone(model) if alone else comm.replicate(model, ranks, settings)
    optimizer = amp.optimizer_for(masters, settings)
    seen = []  # the norm that the optimizer sees, at each of its steps
    norm = lambda *_: math.hypot(*(float(p.grad.norm()) for p in masters.parameters()))  # noqa: E731
    optimizer.register_step_pre_hook(lambda *_: seen.append(norm()))
    report = {"losses": [], "norms": [], "seen": seen, "scales": [], "skipped": [], "weights": []}
    for step in range(1, settings.max_steps + 1):
        set_learning_rate(optimizer, learning_rate(step, settings))
        optimizer.zero_grad()
        total = torch.zeros(())
        rows = [part.chunk(num_ranks)[rank].chunk(settings.grad_accum) for part in batch(step)]
        for number, (inputs, targets) in enumerate(zip(*rows, strict=True), start=1):
            with replica.no_sync(number < settings.grad_accum):
                loss = replica(inputs, targets) / settings.grad_accum
                if step == overflow_at and rank == 1:
                    loss = loss * 1e30
                scaler.scale(loss).backward()
            total += loss.detach() if step != overflow_at else 0
        replica.wait()
        scaler.unscale_(optimizer)
        report["norms"].append(clip_gradients(masters, settings.clip_grad_norm).item())
        scaler.step(optimizer)
        scaler.update()
        report["losses"].append(ranks.mean(total))
        report["scales"].append(scaler.metrics()["loss_scale"])
        report["skipped"].append(scaler.metrics()["skipped_steps"])
        report["weights"].append(float(sum(p.detach().double().abs().sum() for p in masters.parameters())))
    replica.close()
    return report


def gap(ours: list[float], theirs: list[float]) -> float:
    """Mean relative gap over the last 20 steps."""
    return sum(abs(a - b) / b for a, b in zip(ours[-20:], theirs[-20:], strict=True)) / 20


@pytest.mark.each
@pytest.mark.parametrize("runs", quick_only([((50, 1), (12, 4)), ((50, 4),)], ((50, 1), (12, 4))), ids=str)  # steps, micros
@pytest.mark.parametrize("backend", ["own", "torch"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_at_o0_the_curve_is_that_of_one_process(ranks, num_ranks: int, backend: str, runs: tuple) -> None:
    for steps, micros in runs:
        losses, norms = oracle(steps, micros)
        assert sum(norm > CLIP for norm in norms) > steps / 2, "clipping is at work"
        assert losses[-1] < losses[0] - 0.02 * steps, "it learns"
        for report in ranks(num_ranks).run(train, plan(steps, grad_accum=micros, backend=backend)):
            assert report["losses"] == pytest.approx(losses, rel=1e-4)
            assert report["norms"] == pytest.approx(norms, rel=1e-3)


def test_the_curve_differs_when_gradients_are_not_reduced(ranks) -> None:
    losses, _ = oracle(50)
    for report in ranks(2).run(train, plan(50), 0, True):
        assert report["losses"] != pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("level, half, backend, steps", [
    ("O1", "bf16", "own", 60), ("O2", "fp16", "own", 60),
    *(pytest.param(*case, 200, marks=pytest.mark.deep)  # torch's O1 is held to the chapter's below
      for case in itertools.product(("O1", "O2"), ("bf16", "fp16"), ("own", "torch")) if case[::2] != ("O2", "torch")),
])  # fmt: skip
def test_mixed_precision_stays_within_one_per_cent(ranks, level: str, half: str, backend: str, steps: int) -> None:
    scale = "dynamic" if half == "fp16" else "1"
    settings = plan(steps, opt_level=level, half=half, backend=backend, loss_scale=scale)
    first, second = ranks(2).run(train, settings)
    losses, _ = oracle(steps)
    assert 0 < gap(first["losses"], losses) < 0.01
    assert losses[-1] < losses[0] - steps / 100
    assert first["weights"] == second["weights"], "the ranks hold the same weights after every step"
    assert len(first["seen"]) == steps - first["skipped"][-1], "one optimizer step a batch, none where it was skipped"
    assert max(first["seen"]) <= CLIP * 1.001, "the optimizer sees gradients that are unscaled and clipped"


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_o1_is_near_torch_amp(ranks, half: str) -> None:
    scale = "dynamic" if half == "fp16" else "1"
    ours, theirs = (
        ranks(2).run(train, plan(40, opt_level="O1", half=half, backend=backend, loss_scale=scale))[0]
        for backend in ("own", "torch")
    )
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=2e-3)
    assert ours["scales"] == theirs["scales"]


@pytest.mark.parametrize("half", quick_only(["bf16", "fp16"], "bf16"))
def test_o3_learns(ranks, half: str) -> None:
    scale = "dynamic" if half == "fp16" else "1"
    report = ranks(2).run(train, plan(100, opt_level="O3", half=half, loss_scale=scale))[0]
    assert report["losses"][-1] < report["losses"][0] - 1


@pytest.mark.parametrize("num_ranks", quick_only([2, 3], 3))
def test_an_overflow_on_one_rank_is_skipped_by_all(ranks, num_ranks: int) -> None:
    settings = plan(60, opt_level="O2", half="fp16", loss_scale="dynamic")
    reports = ranks(num_ranks).run(train, settings, 30)
    losses, _ = oracle(60)
    for report in reports:
        before, after = report["scales"][28], report["scales"][29]
        assert after == before / 2 and report["skipped"][29] == report["skipped"][28] + 1
        assert report["weights"][29] == report["weights"][28], "the step was skipped"
        assert report["weights"][30] != report["weights"][29], "and the next one was not"
        assert len(report["seen"]) == 60 - report["skipped"][-1]
        assert gap(report["losses"], losses) < 0.02, "the curve goes on"
    assert all(report["weights"] == reports[0]["weights"] for report in reports)


def test_a_dynamic_scale_finds_its_place_and_grows(ranks) -> None:
    report = ranks(1).run(train, plan(40, opt_level="O2", half="fp16", loss_scale="dynamic", scale_window=10))[0]
    assert max(report["scales"]) > min(report["scales"])
    assert report["skipped"][-1] < 10


def test_a_fixed_scale_that_is_too_large_ends_the_run(ranks) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks(2).run(train, plan(100, opt_level="O2", half="fp16", loss_scale="1e12"))
    said = str(caught.value)
    assert "--loss-scale 1e+12 is too large: 20 steps in a row were skipped" in said
