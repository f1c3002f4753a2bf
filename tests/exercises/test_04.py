"""Grades exercise 04: the scaler on gradients made by hand, on ranks of which one overflows, and the order of a step."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn

from tests.exercises.exercise import check, on_ranks, same

FIRST = 65536.0


class One(nn.Module):
    """A model of two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))


def model_and_adamw():
    model = One()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(scaler, model, optimizer, grad):
    """Does one step with these SCALED gradients; returns whether the weights changed."""
    before = model.weight.detach().clone()
    model.weight.grad = torch.tensor(grad)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return not torch.equal(before, model.weight.detach())


def test_scale(exercise):
    scaler = exercise.module.LossScaler(100, lambda number: number)
    same("the first scale", FIRST, float(scaler.value))
    same("the loss 0.5, scaled", 0.5 * FIRST, float(scaler.scale(torch.tensor(0.5))))
    model, optimizer = model_and_adamw()
    model.weight.grad = torch.tensor([3 * FIRST, -FIRST])
    scaler.unscale_(optimizer)
    same("gradients of [3, -1] times the scale, unscaled", torch.tensor([3.0, -1.0]), model.weight.grad, 1e-6)


def test_overflow(exercise):
    for bad in (math.inf, -math.inf, math.nan):
        scaler = exercise.module.LossScaler(100, lambda number: number)
        model, optimizer = model_and_adamw()
        changed = step(scaler, model, optimizer, [bad, 1.0])
        check(not changed, f"a gradient of {bad}: weights after the step", [1.0, 2.0], model.weight.tolist())
        same(f"a gradient of {bad}: parameters of which AdamW has a state", 0, len(optimizer.state))
        same(f"a gradient of {bad}: the scale after it", FIRST / 2, float(scaler.value))
        check(step(scaler, model, optimizer, [1.0, 1.0]), "a good step after a skipped one must change the weights")
        same("the scale after a skipped and a good step", FIRST / 2, float(scaler.value))


def largest(number):
    tensor = torch.tensor(float(number))
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


def one_overflows(rank, num_ranks, exercise):
    scaler = exercise.module.LossScaler(100, largest)
    model, optimizer = model_and_adamw()
    changed = [step(scaler, model, optimizer, [math.inf if rank == 1 and n == 0 else 1.0, 1.0]) for n in range(2)]
    return changed, float(scaler.value)


def test_overflow_on_one_rank(exercise, ranks):
    for rank, (changed, value) in enumerate(on_ranks(ranks, 2, one_overflows, exercise)):
        same(f"rank 1 overflows in the first of two steps: did rank {rank} step?", [False, True], changed)
        same(f"rank 1 overflows in the first of two steps: rank {rank}'s scale", FIRST / 2, value)


def test_grow(exercise):
    scaler = exercise.module.LossScaler(3, lambda number: number)
    model, optimizer = model_and_adamw()
    grads = [1.0, 1.0, math.inf, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, math.inf, 1.0]
    scales = []
    for grad in grads:
        step(scaler, model, optimizer, [grad, 1.0])
        scales.append(float(scaler.value) / FIRST)
    expected = [1.0, 1.0, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0]
    same(f"window 3, gradients {grads}: the scale after each step, in units of 2^16", expected, scales)


def test_order(exercise):
    model = One()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=FIRST, growth_interval=1)
    scaler.scale(torch.zeros(()))  # creates the scaler's tensors
    model.weight.grad = torch.tensor([3 * FIRST, 4 * FIRST])
    norm = exercise.module.finish_step(scaler, optimizer, model, 1.0)
    same("true gradients [3, 4]: the norm before clipping", 5.0, norm, 1e-5)
    same("weights [1, 2], true gradients [3, 4] clipped to norm 1, one step of SGD with lr 1", torch.tensor([0.4, 1.2]),
         model.weight, 1e-5)  # fmt: skip
    same("the scaler's update was called: the scale after one good step, growth interval 1", 2 * FIRST, scaler.get_scale())
    model.weight.grad = torch.tensor([math.inf, 0.0])
    exercise.module.finish_step(scaler, optimizer, model, 1.0)
    same("an infinite gradient: the weights stay", torch.tensor([0.4, 1.2]), model.weight, 1e-5)
