"""Grades exercise 03 with a small Horovod on real processes."""

from __future__ import annotations

import torch

from tests.chapters.technique import CLIP, STEPS, Small, build, learning_rate, mean_over_ranks, oracle, rows
from tests.exercises import small_horovod
from tests.exercises.exercise import check, on_ranks, same

NUM_MICROS = 2


def start(rank, num_ranks, exercise, has_state):
    torch.manual_seed(rank)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    if has_state:
        model(*rows(1, rank, num_ranks)).backward()
        optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()] if has_state else []
    exercise.module.broadcast(small_horovod, model, optimizer)
    after = [p.detach() for p in model.parameters()]
    return before, after, moments, [state["exp_avg"] for state in optimizer.state.values()]


def test_broadcast(exercise, ranks):
    for has_state in (False, True):
        results = on_ranks(ranks, 2, start, exercise, has_state)
        weights, _, moments, _ = results[0]
        kind = "an optimizer with state" if has_state else "a fresh optimizer"
        for rank, (_, after, _, exp_avg) in enumerate(results):
            for n, (mine, own) in enumerate(zip(weights, after, strict=True)):
                same(f"{kind}: weight {n} on rank {rank} against rank 0's before the broadcast", mine, own)
            same(f"{kind}: moments that rank {rank} has after the broadcast", len(moments), len(exp_avg))
            for n, (mine, own) in enumerate(zip(moments, exp_avg, strict=True)):
                same(f"{kind}: moment {n} on rank {rank} against rank 0's", mine, own)


def train(rank, num_ranks, exercise):
    model, adamw = build(0)
    optimizer = small_horovod.DistributedOptimizer(adamw, model, backward_passes_per_step=NUM_MICROS)
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        adamw.param_groups[0]["lr"] = learning_rate(step)
        micro_batches = [rows(step, rank, num_ranks, micro, NUM_MICROS) for micro in range(NUM_MICROS)]
        loss, norm = exercise.module.train_step(model, optimizer, micro_batches, CLIP)
        losses.append(float(loss))
        norms.append(float(norm))
    return {"losses": mean_over_ranks(losses), "norms": norms, "seen": optimizer.norms, "times": optimizer.num_averages,
            "weights": {name: p.detach() for name, p in model.named_parameters()}}  # fmt: skip


def test_step(exercise, ranks):
    expected = oracle()  # one process, the whole batch
    results = on_ranks(ranks, 2, train, exercise)
    for rank, result in enumerate(results):
        same(f"steps that rank {rank}'s optimizer took in {STEPS} steps", STEPS, len(result["seen"]))
        for step in range(STEPS):
            what = f"step {step + 1}, rank {rank}"
            norm = result["seen"][step]
            check(norm <= CLIP * (1 + 1e-4), f"{what}: norm of what the optimizer saw", f"at most {CLIP}", norm)
            same(f"{what}: norm before clipping, against one process", expected["norms"][step], result["norms"][step], 1e-4)
            same(f"{what}: loss against one process", expected["losses"][step], result["losses"][step], 1e-5)
        same(f"averages over the ranks in {STEPS} steps", STEPS, result["times"])
        for name, weight in expected["weights"].items():
            same(f"{name} on rank {rank} after {STEPS} steps, against one process", weight, result["weights"][name], 1e-4)
