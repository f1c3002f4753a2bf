"""Placement never changes a number on several ranks either: two ranks give the bits of DDP wherever and whenever blocks
move."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from pstar.chunks.gradients import Gradients
from pstar.memory.tier import FAR
from tests import toy
from tests.cover import quick_only
from tests.pstar.test_engine_ranks import STEPS, case, ddp_case

NEAR = ("min", "40%", "100%")
POLICIES = ("next_use", "lru", "fifo")
PREFETCH = (0, 2)
STATES = ("host", "stream")
OVERLAP = (False, True)
FAR_BUDGETS = ("auto", "26%")    # beside a disk; a rank's own pieces are half of the model data
KINDS = ({}, {"communication": "chunk"}, {"ownership": "sharded"})


def combinations(num: int) -> list[dict]:
    found = []
    everything = itertools.product(NEAR, POLICIES, PREFETCH, STATES, OVERLAP, FAR_BUDGETS, KINDS)
    for near, policy, prefetch, states, overlap, far, kind in random.Random(1).sample(list(everything), num):
        found.append(kind | {"near_budget": near, "eviction_policy": policy, "prefetch": prefetch, "far_states": states,
                             "overlap_update": overlap, "far_budget": far, "default_chunk_size": 5_000})
    return found


@pytest.fixture(scope="module")
def ddp(ranks):
    return ranks(2).run(ddp_case)[0]


@pytest.mark.parametrize("part", quick_only(range(6), 0))
def test_sixty_placements_at_two_ranks(ranks, ddp, part, tmp_path):
    for keys in combinations(60)[part * 10 : part * 10 + 10]:
        keys |= {"disk_path": str(tmp_path)} if keys["far_budget"] != "auto" else {}
        got = ranks(2).run(case, keys)[0]
        assert got["losses"] == ddp["losses"] and got["norm"] == ddp["norm"], keys
        assert all(torch.equal(value, got["weights"][name]) for name, value in ddp["weights"].items()), keys
        assert got["traced"] == 1 and got["near"][0] <= got["near"][1], keys


@pytest.mark.parametrize("kind", KINDS, ids=["group", "chunk", "sharded"])
@pytest.mark.parametrize("near", ["min", "100%"])
def test_the_least_far_budget_beside_a_disk_changes_no_bit(ranks, ddp, near, kind, tmp_path):
    """A group's gradients may be written to disk between the reductions of two of its chunks."""
    for more in ({}, {"far_states": "stream"}, {"near_memory": "1GiB"}):
        keys = kind | more | {"near_budget": near, "far_budget": "min", "disk_path": str(tmp_path),
                              "default_chunk_size": 3_000}
        got = ranks(2).run(case, keys)[0]
        assert got["losses"] == ddp["losses"] and got["norm"] == ddp["norm"], keys
        assert all(torch.equal(value, got["weights"][name]) for name, value in ddp["weights"].items()), keys


def to_disk_case(rank: int, num_ranks: int, keys: dict):
    """As `case`, but a group's gradients are written to disk after the reduction of each of its chunks."""
    finish, evicted = Gradients.finish_reduction, []

    def finish_and_evict(self, reduction) -> None:
        finish(self, reduction)
        block = self.store.blocks.get(("grad", reduction.unit.spec.group))
        while block is not None and FAR in block.copies and self.store._evict(FAR):
            evicted.append(block.key)

    Gradients.finish_reduction = finish_and_evict
    try:
        return case(rank, num_ranks, keys) | {"evicted": evicted}
    finally:
        Gradients.finish_reduction = finish


def test_gradients_on_disk_between_the_reductions_of_two_chunks_are_not_lost(ranks, ddp, tmp_path):
    keys = {"communication": "chunk", "near_budget": "min", "disk_path": str(tmp_path), "default_chunk_size": 11_000}
    got = ranks(2).run(to_disk_case, keys)[0]
    assert got["evicted"] and got["losses"] == ddp["losses"] and got["norm"] == ddp["norm"]


@pytest.mark.each
@pytest.mark.parametrize("kind", KINDS, ids=["group", "chunk", "sharded"])
@pytest.mark.parametrize("prefetch", PREFETCH)
def test_a_slow_link_changes_no_bit(ranks, ddp, prefetch, kind):
    """Pieces of gathered groups take the link as well, in its worker."""
    got = ranks(2).run(case, kind | {"near_budget": "min", "prefetch": prefetch, "simulated_link": 1e8})[0]
    assert got["losses"] == ddp["losses"] and got["norm"] == ddp["norm"]
    assert all(torch.equal(value, got["weights"][name]) for name, value in ddp["weights"].items())


@pytest.mark.each
@pytest.mark.parametrize("kind", KINDS, ids=["group", "chunk", "sharded"])
@pytest.mark.parametrize("near", ["40%", "60%"])
def test_near_filled_with_states_changes_no_bit(ranks, ddp, near, kind):
    got = ranks(2).run(case, kind | {"near_budget": near, "near_states": "fill", "default_chunk_size": 5_000})[0]
    assert got["losses"] == ddp["losses"] and got["norm"] == ddp["norm"]
    assert all(torch.equal(value, got["weights"][name]) for name, value in ddp["weights"].items())
    assert got["near"][0] <= got["near"][1]


@pytest.mark.parametrize("num_ranks", quick_only([3, 4], 3))
def test_more_ranks_are_bitwise_while_the_layout_stays(ranks, num_ranks, tmp_path):
    """The order of additions follows the layout alone; against one process it is another order: 1e-6."""
    plain = {"default_chunk_size": 5_000}
    first = ranks(num_ranks).run(case, plain | {"near_budget": "100%", "prefetch": 0})[0]
    assert first["losses"] == pytest.approx(toy.oracle(STEPS)[0], rel=1e-6)
    for keys in ({"near_budget": "min", "prefetch": 3}, {"near_budget": "min", "far_states": "stream"},
                 {"near_budget": "min", "overlap_update": True, "far_budget": "20%", "disk_path": str(tmp_path)}):
        got = ranks(num_ranks).run(case, plain | keys)[0]
        assert got["losses"] == first["losses"]
        assert all(torch.equal(value, got["weights"][name]) for name, value in first["weights"].items())


def room_case(rank: int, num_ranks: int):
    model, optimizer = toy.build(near_memory="1500KiB", default_chunk_size=5_000)
    for step in range(4):
        optimizer.zero_grad()
        model.backward(model(*toy.batch(step, length=9 if rank == 0 else 5)))
        optimizer.step()
    return model.schedule.trace.peaks, [home == "near" for home in model._chunks.tiers.states_tier]


def test_room_is_that_of_the_rank_with_the_largest_activations(ranks):
    """Ranks that decided for themselves would gather different chunks, and hang."""
    first, second = ranks(2).run(room_case)
    assert first == second and max(first[0]) > 500_000


def small_far_case(rank: int, num_ranks: int):
    model, optimizer = toy.build(near_budget="100%", far_budget="30%", default_chunk_size=5_000)
    losses = toy.train(model, optimizer, STEPS, rank, num_ranks)
    return losses, model.far.peak_bytes, model.far.budget_bytes, model._chunks.tiers.states_tier.count("near")


def test_near_takes_states_where_far_is_too_small(ranks):
    for losses, peak, budget, homes in ranks(2).run(small_far_case):
        assert peak <= budget and homes > 0 and all(loss > 0 for loss in losses)


def test_a_disk_that_fills_up_on_one_rank_ends_all(ranks, tmp_path):
    with pytest.raises(AssertionError, match="disk"):
        ranks(2).run(full_case, str(tmp_path))


def full_case(rank: int, num_ranks: int, folder: str):
    model, optimizer = toy.build(near_budget="min", far_budget="26%", disk_path=folder, default_chunk_size=5_000)
    toy.train(model, optimizer, 1, rank, num_ranks)
    if rank == 1:
        model.disk.budget_bytes = model.disk.used_bytes // 2
    toy.train(model, optimizer, 2, rank, num_ranks, first=1)


def lengths_case(rank: int, num_ranks: int, keys: dict):
    """Batches whose lengths differ from rank to rank and from step to step, as after padding."""
    model, optimizer = toy.build(default_chunk_size=5_000, **keys)
    for step in range(6):
        optimizer.zero_grad()
        model.backward(model(*toy.batch(step, length=(9, 5, 7)[(step + rank) % 3])))
        optimizer.step()
    return model.schedule.num_traced, model.ledger.moves["gather"], optimizer.grad_norm


@pytest.mark.parametrize("keys, traced", [({"near_budget": "40%"}, 1), ({"near_memory": "1500KiB"}, 4)], ids=str)
def test_ranks_with_batches_of_different_lengths_go_the_same_way(ranks, keys, traced):
    """A rank that recorded by itself while the other looks ahead would gather in another order. Where room depends on the
    lengths there is a trace for each of the three pairs, and one more after states have moved near."""
    first, second = ranks(2).run(lengths_case, keys)
    assert first == second and first[0] == traced
