"""Grades exercise 06: pieces must equal examples and cover everything once; ZeRO-1 on ranks must equal one process."""

from __future__ import annotations

import torch

from tests.chapters.technique import Small, rows
from tests.exercises.exercise import check, on_ranks, same

NUM_STEPS = 5


def test_pieces(exercise):
    pieces_of = exercise.module.pieces_of
    sizes = {"wte": 5, "wpe": 2, "bias": 1, "head": 3}  # 11 elements, 12 with padding for 3 and 4 ranks
    by_hand = {(0, 1): [("wte", 0, 5), ("wpe", 0, 2), ("bias", 0, 1), ("head", 0, 3)],
               (0, 3): [("wte", 0, 4)], (1, 3): [("wte", 4, 1), ("wpe", 0, 2), ("bias", 0, 1)], (2, 3): [("head", 0, 3)],
               (1, 4): [("wte", 3, 2), ("wpe", 0, 1)], (3, 4): [("head", 1, 2)]}  # fmt: skip
    for (rank, num_ranks), expected in by_hand.items():
        actual = [tuple(piece) for piece in pieces_of(dict(sizes), rank, num_ranks)]
        same(f"pieces of rank {rank} of {num_ranks}, sizes {sizes}", expected, actual)
    for num_ranks in (2, 5, 7, 16):  # with 16 some ranks own only padding
        seen = sorted((name, start + n) for rank in range(num_ranks)
                      for name, start, number in pieces_of(dict(sizes), rank, num_ranks) for n in range(number))  # fmt: skip
        each = sorted((name, n) for name, size in sizes.items() for n in range(size))
        same(f"{num_ranks} ranks: elements that some rank owns, each once", each, seen)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)


def train(rank, num_ranks, exercise):
    torch.manual_seed(0)
    model = Small()
    sharded = exercise.module.ShardedOptimizer(model, adamw)
    for step in range(1, NUM_STEPS + 1):
        model(*rows(step, rank, num_ranks)).backward()
        sharded.step()
        left = [name for name, p in model.named_parameters() if p.grad is not None]
        check(not left, f"gradients that are there after step(), on rank {rank}", "none", left)
    states = sharded.optimizer.state.values()
    num_elements = sum(value.numel() for state in states for name, value in state.items() if name != "step")
    return {name: p.detach().clone() for name, p in model.named_parameters()}, num_elements


def test_step(exercise, ranks):
    torch.manual_seed(0)
    model = Small()
    optimizer = adamw(model.parameters())
    for step in range(1, NUM_STEPS + 1):
        optimizer.zero_grad()
        model(*rows(step)).backward()
        optimizer.step()
    size = sum(p.numel() for p in model.parameters())
    for num_ranks in (2, 3):
        results = on_ranks(ranks, num_ranks, train, exercise)
        for rank, (weights, state) in enumerate(results):
            what = f"{num_ranks} ranks: elements of optimizer state on rank {rank}, two moments of {size} parameters in all"
            check(0 < state <= 2 * (size // num_ranks + 16), what, f"about {2 * size // num_ranks}", state)
            for name, weight in model.named_parameters():
                where = f"{num_ranks} ranks: {name} on rank {rank} after {NUM_STEPS} steps"
                # Adam's first steps are the gradients' signs: rounding can change the sign of one near zero
                same(f"{where}, against one process", weight, weights[name], 1e-4)
                check(torch.equal(weights[name], results[0][0][name]), f"{where} has other bits than on rank 0")
