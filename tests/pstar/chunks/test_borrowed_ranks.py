"""Borrowed parameters on several ranks: a fetch is a gather, and every rank must make it at the same moment.

Losses against one plain process within 1e-5 relative. The sum over ranks adds in another order than one process does, and
Adam's division magnifies it (see test_engine_ranks). Between near budgets, prefetch and ownerships: the same bits.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

import pstar
from tests import borrowers, toy
from tests.borrowers import FLOATING_BUFFERS, PATTERNS
from tests.cover import quick_only
from tests.harness import RankFailure

STEPS = 4

# Attention takes a batch's first row only: no mean over ranks gives that of the whole batch.
MEANS = [pattern for pattern in PATTERNS if pattern != "multi_head_attention_forward"]
KEYS = [{}, {"ownership": "sharded"}, {"communication": "chunk"}, {"bf16": {"enabled": True}}]


def case(rank: int, num_ranks: int, pattern: str, keys: dict) -> tuple[list[float], dict, int, int]:
    """(mean losses, weights, traces, pins)."""
    model_func, loss_of = PATTERNS[pattern]
    model, optimizer = toy.build(model_func, **{"default_chunk_size": 300} | keys)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, borrowers.rows(step, rank, num_ranks))
        model.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    pins = sum(block.pins for (kind, _), block in model._store.blocks.items() if kind in ("param", "gathered", "grad"))
    return (mean / num_ranks).tolist(), model.gather_state()[0], model.schedule.num_traced, pins


def plain(pattern: str) -> list[float]:
    model_func, loss_of = PATTERNS[pattern]
    return toy.plain_run(model_func, lambda model, step: loss_of(model, borrowers.rows(step)), STEPS)[0]


@pytest.mark.filterwarnings("ignore:lazy start is not possible")
@pytest.mark.each
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("ownership", ["whole", "sharded"])
@pytest.mark.parametrize("near, prefetch", [("min", 2), ("min", 0), ("60%", 2), ("60%", 0), ("100%", 2), ("100%", 0)])
@pytest.mark.parametrize("pattern", MEANS)
def test_a_borrowed_parameter_follows_one_process(ranks, pattern, near, prefetch, ownership, num_ranks):
    results = ranks(num_ranks).run(case, pattern, {"near_budget": near, "prefetch": prefetch, "ownership": ownership})
    expected = plain(pattern)
    for losses, _, traced, pins in results:
        assert losses == pytest.approx(expected, rel=1e-5)
        assert pins == 0 and (traced == 1 or pattern == "a borrow in every other step")


@pytest.mark.filterwarnings("ignore:lazy start is not possible")
@pytest.mark.parametrize("case_of", quick_only(
    itertools.product(MEANS, KEYS), (MEANS[0], KEYS[0]), ("another block's weight, checkpointed", KEYS[1]),
    ("a gradient penalty", KEYS[2]), ("two forwards in a step", KEYS[3])), ids=str)
def test_placement_changes_no_bit_of_borrowed_parameters(ranks, case_of):
    pattern, keys = case_of
    if "bf16" in keys and pattern == FLOATING_BUFFERS:
        pytest.skip("spectral norm keeps vectors in buffers, which the engine leaves in fp32")
    first, second = (ranks(2).run(case, pattern, keys | more)[0]
                     for more in ({"near_budget": "min", "prefetch": 0}, {"near_budget": "100%"}))
    assert first[0] == second[0]
    assert all(torch.equal(value, second[1][name]) for name, value in first[1].items())


def one_rank_reads_case(rank: int, num_ranks: int) -> None:
    """Rank 1 alone logs a norm between forward and backward."""
    model, optimizer = toy.build(borrowers.Deep, near_budget="min", default_chunk_size=300)
    for step in range(2):
        loss = model(borrowers.rows(step, rank, num_ranks))
        if rank == 1:
            model.module.embed.weight.norm()
        model.backward(loss)
        optimizer.step()


def test_a_borrow_on_one_rank_alone_ends_in_one_line(ranks):
    with pytest.raises(RankFailure, match=r"rank \d is in a gather of unit \d+ .*where rank \d is in a"):
        ranks(2).run(one_rank_reads_case)


def refused_case(rank: int, num_ranks: int) -> str:
    model, _ = toy.build(borrowers.Deep, near_budget="min", default_chunk_size=300)
    with pytest.raises(pstar.StateError) as caught:
        if rank == 0:    # logging on rank 0 alone raises an error and does not hang
            model.module.embed.weight.norm()
        raise pstar.StateError("between two steps")
    return str(caught.value)


def test_between_two_steps_a_norm_on_one_rank_is_refused_and_nothing_hangs(ranks):
    assert all("between two steps" in message for message in ranks(2).run(refused_case))
