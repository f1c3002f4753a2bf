"""Faults of the published PatrickStar that show on several ranks only; tests/pstar/test_faults.py has the table."""

from __future__ import annotations

import math

import pytest

from pstar.comm.collectives import Collectives
from tests import toy


def born_in_the_sum_case(rank: int, num_ranks: int):
    """Every rank's gradients are finite; in step 1 the reduction makes one element infinite, on its owner alone."""
    model, optimizer = toy.build(near_budget="min", default_chunk_size=11_000, fp16={
        "enabled": True, "initial_scale_power": 8, "hysteresis": 1})
    original, step, finite = Collectives.reduce_scatter_mean, 0, []

    def overflowing(self, piece, flat):
        finite.append(bool(flat.isfinite().all()))
        begun = original(self, piece, flat)
        if begun is not None:
            begun.wait()
        if step == 1 and rank == num_ranks - 1:
            piece[0] = float("inf")
        return begun

    Collectives.reduce_scatter_mean = overflowing
    try:
        skipped, norms = [], []
        for step in range(3):    # read by the function above
            toy.train(model, optimizer, 1, rank, num_ranks, first=step)
            skipped.append(optimizer.skipped)
            norms.append(optimizer.grad_norm)
    finally:
        Collectives.reduce_scatter_mean = original
    return all(finite), skipped, norms, optimizer.loss_scale, dict(optimizer.steps)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_fault_an_infinity_born_in_the_sum_over_ranks_is_noticed(ranks, num_ranks):
    for finite, skipped, norms, scale, steps in ranks(num_ranks).run(born_in_the_sum_case):
        assert finite and skipped == [False, True, False] and not math.isfinite(norms[1])
        assert scale == 2.0**7 and set(steps.values()) == {2}


def backward_case(rank: int, num_ranks: int):
    model, optimizer = toy.build(near_budget="min", default_chunk_size=5_000)
    most, tier, original = {}, model.near, model.near.allocate

    def watch(*arguments):
        buffer = original(*arguments)
        for each, used in tier.used_by_kind.items():
            most[each] = max(most.get(each, 0), used)
        return buffer

    tier.allocate = watch
    toy.train(model, optimizer, 2, rank, num_ranks)
    return most, max(group.piece_elems for group in model.layout.groups) * num_ranks * 4, model.near.budget_bytes


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_fault_backward_holds_p_chunks_and_not_p_squared(ranks, num_ranks):
    """In bytes of one group, which is p chunks: its gradients, its parameters, and the reduced piece."""
    for most, group_bytes, budget in ranks(num_ranks).run(backward_case):
        assert most["grad_full"] <= 2 * group_bytes and most["gathered"] <= 3 * group_bytes
        assert budget <= (3 + 1 / num_ranks) * group_bytes
