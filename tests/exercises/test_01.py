"""Grades exercise 01: the mean, the rule of staleness, and a step of a server and its workers on real processes."""

from __future__ import annotations

import torch

from tests.chapters.technique import Small, rows
from tests.exercises.exercise import check, on_ranks, same
from tests.exercises.forbidden import only_point_to_point


def test_mean(exercise):
    mean = exercise.module.mean_of
    same("mean of [1, 2], [3, 4], [8, 0]", torch.tensor([4.0, 2.0]),
         mean([torch.tensor(v) for v in ([1.0, 2.0], [3.0, 4.0], [8.0, 0.0])]), 1e-6)  # fmt: skip
    same("mean of 3e38 and 3e38, whose sum overflows", torch.tensor([3e38]), mean([torch.tensor([3e38])] * 2), 1e-6)
    first = torch.tensor([2.0])
    same("mean of [2], [4]", torch.tensor([3.0]), mean([first, torch.tensor([4.0])]), 1e-6)
    same("the first vector after the call: it must stay as it is", torch.tensor([2.0]), first)
    same("mean of one vector alone", torch.tensor([2.0]), mean([first]), 1e-6)


def test_wait(exercise):
    wait = exercise.module.must_wait
    cases = {(8, 7, None): True, (8, 7, 0): True, (8, 7, 1): False, (8, 6, 1): True, (8, 5, 3): False, (8, 4, 3): True,
             (8, 2, 3): True}  # fmt: skip
    for (step, works_on, bound), expected in cases.items():
        what = f"server about to take step {step}, worker computes with version {works_on}, bound {bound}: must it wait?"
        same(what, expected, bool(wait(step, works_on, bound)))


def start():
    torch.manual_seed(0)
    model = Small()
    del model.scale  # as the exercise promises, the model has no buffers
    model.scale = 1.0
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def steps_of(rank, num_ranks, exercise):
    model, optimizer = start()
    num_steps, after = [], []
    optimizer.register_step_post_hook(lambda *_: num_steps.append(1))
    for step in (1, 2):
        optimizer.zero_grad()
        model(*rows(step, rank, num_ranks)).backward()
        with only_point_to_point():
            exercise.module.synchronous_step(model, optimizer, rank, num_ranks)
        after.append(weights_of(model))
    return len(num_steps), after


def one_process():
    model, optimizer = start()
    for step in (1, 2):
        optimizer.zero_grad()
        model(*rows(step)).backward()
        optimizer.step()
        yield weights_of(model)


def test_step(exercise, ranks):
    for num_ranks in (2, 3):
        results = on_ranks(ranks, num_ranks, steps_of, exercise)
        for step, expected in enumerate(one_process()):
            for rank, (_, after) in enumerate(results):
                for name, weight in expected.items():
                    what = f"{num_ranks} ranks: {name} on rank {rank} after step {step + 1}"
                    # Adam's first steps are the gradients' signs: rounding can change the sign of one near zero
                    same(f"{what}, against one process", weight, after[step][name], 1e-4)
                    same_bits = torch.equal(after[step][name], results[0][1][step][name])
                    check(same_bits, f"{what} has other bits than the server's")
        for rank, (num_steps, _) in enumerate(results):
            same(f"{num_ranks} ranks: steps that rank {rank}'s optimizer took in 2 steps", 0 if rank else 2, num_steps)
