"""Grades exercise 00: the loss, the learning rate, accumulation over micro-batches."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from tests.chapters.technique import Small, rows
from tests.exercises.exercise import check, same


def test_loss(exercise):
    loss = exercise.module.next_token_loss
    logits = torch.tensor([[[0.0, math.log(3.0)], [0.0, 0.0]]])  # (1, 2, 2): probabilities 1/4 and 3/4, then 1/2 and 1/2
    expected = -math.log(0.75 * 0.5) / 2
    same("loss of targets that have probability 3/4 and 1/2", expected, loss(logits, torch.tensor([[1, 0]])), 1e-6)
    same("a target of -100 does not count", -math.log(0.25), loss(logits, torch.tensor([[0, -100]])), 1e-6)
    half = torch.randn(2, 3, 4000, generator=torch.Generator().manual_seed(0)).mul(8).half()
    targets = torch.tensor([[5, -100, 7], [1, 2, 3]])
    actual = loss(half, targets)
    check(actual.dtype == torch.float32, "type of the loss of float16 logits", torch.float32, actual.dtype)
    exact = F.cross_entropy(half.double().flatten(0, 1), targets.flatten()).item()
    same("loss of float16 logits, computed in float32", exact, actual, 1e-5)


def test_learning_rate(exercise):
    """Linear warm-up to the peak, then a cosine down to 1 % of it."""
    rate = exercise.module.learning_rate
    plan = SimpleNamespace(lr=2.0, warmup_steps=4, max_steps=12)
    expected = {1: 0.5, 2: 1.0, 4: 2.0, 8: 2.0 * (0.01 + 0.99 * 0.5), 12: 0.02, 20: 0.02}
    for step, value in expected.items():
        same(f"learning rate of step {step}, peak 2, 4 steps of warm-up, 12 in all", value, rate(step, plan), 1e-6)
    no_warmup = SimpleNamespace(lr=1.0, warmup_steps=0, max_steps=2)
    same("without warm-up, step 1 of 2", 0.01 + 0.99 * 0.5, rate(1, no_warmup), 1e-6)
    only_warmup = SimpleNamespace(lr=1.0, warmup_steps=3, max_steps=3)
    same("3 steps of warm-up, 3 in all, step 3", 1.0, rate(3, only_warmup), 1e-6)
    same("3 steps of warm-up, 3 in all, step 4", 0.01, rate(4, only_warmup), 1e-6)


def test_accumulate(exercise):
    torch.manual_seed(0)
    model, whole = Small(), Small()
    whole.load_state_dict(model.state_dict())
    expected = whole(*rows(1))
    expected.backward()
    loss = exercise.module.accumulate(model, [rows(1, micro=micro, num_micros=3) for micro in range(3)])
    for (name, parameter), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        check(parameter.grad is not None, f"gradient of {name} after 3 micro-batches", "a tensor", None)
        same(f"gradient of {name}, 3 micro-batches against the whole batch", other.grad, parameter.grad, 1e-5)
    same("the loss of 3 micro-batches against that of the whole batch", expected.item(), loss, 1e-5)
    check(not loss.requires_grad, "the loss that is returned holds a graph", "none (detach what you add up)", loss.grad_fn)
