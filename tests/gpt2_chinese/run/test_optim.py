"""Learning rate, parameter groups, clipping; evaluation against a plain count."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gpt2_chinese.data.batches import Batches
from gpt2_chinese.distributed.ranks import Ranks
from gpt2_chinese.evaluate.loss import evaluate_model
from gpt2_chinese.model.config import ModelConfig
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
from gpt2_chinese.run.optim import clip_gradients, learning_rate, set_learning_rate, weight_decay_groups


@pytest.fixture
def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(ModelConfig(n_layer=2, n_embd=16, n_head=2, n_positions=8, vocab_size=20))


@pytest.mark.parametrize("warmup, last", [(0, 1), (0, 10), (5, 10), (50, 800), (1, 2), (799, 800)])
def test_the_schedule_warms_up_peaks_and_ends_at_one_per_cent(warmup: int, last: int) -> None:
    settings = SimpleNamespace(lr=3e-3, warmup_steps=warmup, max_steps=last)
    rates = [learning_rate(step, settings) for step in range(1, last + 1)]
    assert 0 < rates[-1] <= 0.01 * 3e-3 * (1 + 1e-12)
    assert max(rates) <= 3e-3 and all(rate > 0 for rate in rates)
    for step in range(1, warmup + 1):
        assert rates[step - 1] == pytest.approx(3e-3 * step / warmup)
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


def test_matrices_decay_and_nothing_is_left_out(model: GPT2LMHeadModel) -> None:
    decay, rest = weight_decay_groups(model, 0.1)
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() == 2 for p in decay["params"]) and all(p.dim() == 1 for p in rest["params"])
    assert len(decay["params"]) + len(rest["params"]) == len(list(model.parameters())) == 12 * 2 + 4
    optimizer = torch.optim.AdamW([decay, rest], lr=1.0)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


@pytest.mark.parametrize("limit, after", [(0.5, 0.5), (0.0, 5.0), (100.0, 5.0)])
def test_clipping_scales_the_global_norm(limit: float, after: float) -> None:
    layer = torch.nn.Linear(1, 1)
    layer.weight.grad, layer.bias.grad = torch.tensor([[3.0]]), torch.tensor([4.0])
    assert clip_gradients(layer, limit).item() == 5.0
    assert torch.cat([layer.weight.grad.flatten(), layer.bias.grad]).norm().item() == pytest.approx(after, rel=1e-4)


def test_evaluation_counts_every_token_once(model: GPT2LMHeadModel) -> None:
    ids = np.random.default_rng(0).integers(0, 20, 53)
    model.train()
    found = evaluate_model(model, Batches(ids, 8, 4), Ranks())
    assert model.training
    losses, right = [], 0
    for start in range(0, 52, 8):
        window = torch.tensor(ids[start : start + 9])[None]
        logits = model(window[:, :-1])[0]
        losses += torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="none").tolist()
        right += int((logits.argmax(-1) == window[0, 1:]).sum())
    assert len(losses) == 52
    assert found["valid_loss"] == pytest.approx(sum(losses) / 52, rel=1e-6)
    assert found["valid_ppl"] == pytest.approx(math.exp(found["valid_loss"]))
    assert found["valid_acc"] == right / 52


def test_evaluation_takes_any_function() -> None:
    uniform = evaluate_model(lambda ids: torch.zeros(*ids.shape, 20), Batches(np.arange(20), 8, 2), Ranks())
    assert uniform["valid_ppl"] == pytest.approx(20)
