"""The engine on several ranks against one plain process at the same global batch.

Tolerance: a sum over ranks adds the same fp32 numbers in another order than one process does. Each gradient differs in
its last bits (2^-24 relative). Adam's division can magnify the difference where a gradient is near zero. Losses stay
within 1e-5 relative over these few steps (the law of the curve asks for 1e-4), weights within 1e-4 absolute.
"""

from __future__ import annotations

import platform
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import pstar
from pstar.chunks.unshard import Unsharding
from pstar.comm import shared_memory
from pstar.comm.collectives import Collectives
from pstar.layout.nodes import sent_in_two_levels
from pstar.numerics.grad_norm import clip_grad_norm_
from tests import toy

STEPS = 5


def global_losses(losses: list[float], num_ranks: int) -> list[float]:
    """Means over the ranks."""
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / num_ranks).tolist()


def case(rank: int, num_ranks: int, keys: dict, num_micros: int = 1, num_steps: int = STEPS):
    model, optimizer = toy.build(gradient_accumulation_steps=num_micros, **keys)
    losses = toy.train(model, optimizer, num_steps, rank, num_ranks, num_micros)
    weights, _ = model.gather_state()
    return {"losses": global_losses(losses, num_ranks), "weights": weights, "norm": optimizer.grad_norm,
            "near": (model.near.peak_bytes, model.near.budget_bytes), "moves": dict(model.ledger.moves),
            "step_bytes": dict(model.ledger.step_bytes), "total_elems": model.layout.total_elems,
            "traced": model.schedule.num_traced, "pins": pins(model)}


def pins(model: pstar.Engine) -> int:
    """Of parameters and gradients; between two steps nothing is in use. (States are pinned to their tier for good.)"""
    return sum(block.pins for (kind, _), block in model._store.blocks.items()
               if kind in ("param", "gathered", "grad", "grad_full"))


def assert_follows(results: list[dict], num_micros: int = 1) -> None:
    losses, weights, norms = toy.oracle(STEPS, num_micros)
    for result in results:
        assert result["losses"] == pytest.approx(losses, rel=1e-5)
        assert result["norm"] == pytest.approx(norms[-1], rel=1e-4)
        peak, budget = result["near"]
        assert 0 < peak <= budget
        assert result["traced"] == 1, "every step after the first follows the trace"
        assert result["pins"] == 0, "what was acquired is released"
    for name, value in weights.items():
        torch.testing.assert_close(results[0]["weights"][name], value, rtol=0, atol=1e-4)
    assert all(result["weights"] == {} for result in results[1:])


@pytest.mark.each
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("near", ["min", "50%", "100%"])
@pytest.mark.parametrize("chunk", ["auto", 5_000])
@pytest.mark.parametrize("ownership", ["whole", "sharded"])
def test_the_curve_at_every_number_of_ranks_and_budget(ranks, num_ranks, near, chunk, ownership):
    results = ranks(num_ranks).run(case, {"near_budget": near, "default_chunk_size": chunk, "ownership": ownership})
    assert_follows(results)
    assert results[0]["moves"]["far to near"] > 0 and results[0]["moves"]["gather"] > 0


@pytest.mark.each
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("near", ["min", "50%", "100%"])
@pytest.mark.parametrize("chunk", ["auto", 5_000])
def test_the_curve_with_one_chunk_at_a_time(ranks, num_ranks, near, chunk):
    keys = {"near_budget": near, "default_chunk_size": chunk, "communication": "chunk"}
    assert_follows(ranks(num_ranks).run(case, keys))


@pytest.mark.parametrize("num_ranks, num_micros", [(2, 3), (3, 2), (2, 6)])
def test_accumulation_is_reduced_once(ranks, num_ranks, num_micros):
    results = ranks(num_ranks).run(case, {"near_budget": "min", "default_chunk_size": 5_000}, num_micros)
    assert_follows(results, num_micros)
    once = ranks(num_ranks).run_once(case, {"near_budget": "min", "default_chunk_size": 5_000})
    assert results[0]["moves"]["reduce"] == once[0]["moves"]["reduce"]


@pytest.mark.parametrize("keys", [{"eviction_policy": "lru"}, {"near_budget": "100%"}, {"near_budget": "80%"},
                                  {"communication": "chunk", "near_budget": "50%"}, {"communication": "chunk"},
                                  {"near_budget": "80%", "prefetch": False}])
def test_placement_never_changes_a_number_while_the_layout_stays(ranks, keys):
    base = {"near_budget": "min", "default_chunk_size": 5_000}
    first = ranks(2).run_once(case, base)[0]
    second = ranks(2).run(case, base | keys)[0]
    assert first["losses"] == second["losses"]
    assert all(torch.equal(value, second["weights"][name]) for name, value in first["weights"].items())


ddp_cache: dict[int, list] = {}


def ddp_case(rank: int, num_ranks: int):
    """The oracle on several ranks: DDP of torch over gloo, Adam in torch operations, the norm for plain tensors."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(toy.Toy())
    optimizer = toy.adamw(model.parameters(), lr=toy.LR, weight_decay=toy.WEIGHT_DECAY)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*toy.share(step, rank, num_ranks))
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), toy.CLIP)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": global_losses(losses, num_ranks), "norm": norm.item(),
            "weights": {name: param.detach().clone() for name, param in model.module.named_parameters()}}


@pytest.mark.each
@pytest.mark.parametrize("near", ["min", "100%"])
@pytest.mark.parametrize("chunk", [100, 2_000, 5_000, 11_000, "auto"])
@pytest.mark.parametrize("keys", [{}, {"communication": "chunk"}, {"ownership": "sharded"}], ids=str)
def test_on_two_ranks_every_layout_gives_the_bits_of_ddp(ranks, keys, chunk, near):
    """A sum of two numbers has one order. Parameters larger than a chunk, on both ranks, are among these layouts."""
    if not ddp_cache:
        ddp_cache[2] = ranks(2).run(ddp_case)
    expected = ddp_cache[2][0]
    got = ranks(2).run(case, keys | {"default_chunk_size": chunk, "near_budget": near})[0]
    assert got["losses"] == expected["losses"] and got["norm"] == expected["norm"]
    assert all(torch.equal(value, got["weights"][name]) for name, value in expected["weights"].items())


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_in_shared_memory_sums_go_in_the_order_of_ranks_so_both_modes_agree(ranks, num_ranks):
    group, chunk, sharded = (ranks(num_ranks).run(case, keys | {"near_budget": "60%", "default_chunk_size": 5_000})[0]
                             for keys in ({}, {"communication": "chunk"}, {"ownership": "sharded"}))
    for other in (chunk, sharded):
        assert other["losses"] == group["losses"] and other["norm"] == group["norm"]
        assert all(torch.equal(value, other["weights"][name]) for name, value in group["weights"].items())


def two_nodes_case(rank: int, num_ranks: int, keys: dict):
    with mock.patch.object(platform, "node", lambda: "ab"[rank // 2]):
        return case(rank, num_ranks, keys)


def test_on_two_nodes_the_modes_agree_and_a_byte_crosses_the_network_once(ranks):
    """Not with the bits of one node: the sums have another order."""
    modes = [{}, {"communication": "chunk"}, {"ownership": "sharded"}]
    keys = {"near_budget": "60%", "default_chunk_size": 5_000}
    first, *others = [ranks(4).run(two_nodes_case, mode | keys) for mode in modes]
    for results in (first, *others):
        assert_follows(results)
        assert results[0]["losses"] == first[0]["losses"] and results[0]["norm"] == first[0]["norm"]
        assert all(torch.equal(value, results[0]["weights"][name]) for name, value in first[0]["weights"].items())
        units = [sum(result["step_bytes"][kind] for result in results) / 3 for kind in ("gather", "reduce")]
        between = sum(result["step_bytes"]["between nodes"] for result in results)
        assert between == pytest.approx(2 * sent_in_two_levels(2, *units, results[0]["step_bytes"]["sum"]), rel=1e-3)


def without_memory_case(rank: int, num_ranks: int, keys: dict):
    available, shared_memory.available = shared_memory.available, lambda: False
    try:
        return case(rank, num_ranks, keys)
    finally:
        shared_memory.available = available


@pytest.mark.parametrize("keys", [{}, {"communication": "chunk"}, {"ownership": "sharded"}], ids=str)
def test_over_the_process_group_it_is_the_same(ranks, keys):
    keys = keys | {"near_budget": "80%", "default_chunk_size": 5_000}
    ours, theirs = ranks(2).run(case, keys)[0], ranks(2).run(without_memory_case, keys)[0]
    assert ours["losses"] == theirs["losses"] and ours["step_bytes"] == theirs["step_bytes"]
    assert all(torch.equal(value, theirs["weights"][name]) for name, value in ours["weights"].items())
    assert_follows(ranks(3).run(without_memory_case, keys))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("keys", [{}, {"ownership": "sharded"}], ids=str)
def test_traffic_equals_the_formula_to_the_byte(ranks, num_ranks, keys):
    """With room for all gathered parameters each is gathered once a step and reduced once: 4 + 4 bytes in fp32."""
    for result in ranks(num_ranks).run(case, keys | {"near_budget": "100%", "default_chunk_size": 11_000}):
        received = 4 * result["total_elems"] * (num_ranks - 1) // num_ranks
        assert result["step_bytes"]["gather"] == received and result["step_bytes"]["reduce"] == received


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_traffic_one_chunk_at_a_time_is_that_of_the_chunks(ranks, num_ranks):
    """Everybody but its owner receives a chunk, its owner receives p - 1 gradients of it. Empty chunks do not travel."""
    plan = pstar.plan_engine(toy.Toy, {"near_budget": "100%", "default_chunk_size": 11_000}, num_ranks)
    units = plan.layout.units("chunk")
    keys = {"near_budget": "100%", "default_chunk_size": 11_000, "communication": "chunk"}
    for rank, result in enumerate(ranks(num_ranks).run(case, keys)):
        gathered = sum(4 * unit.elems for unit in units if unit.owner not in (None, rank))
        reduced = sum(4 * unit.elems * (num_ranks - 1) for unit in units if unit.owner == rank)
        cut = sum(4 * unit.elems * (num_ranks - 1) // num_ranks for unit in units if unit.owner is None)
        assert result["step_bytes"]["gather"] == gathered + cut and result["step_bytes"]["reduce"] == reduced + cut


def checkpointed_case(rank: int, num_ranks: int, keys: dict, reentrant: bool | None):
    """(bytes gathered and reduced in the second step; model data held after its backward, this rank's elements)."""
    model, optimizer = toy.build(lambda: Checkpointed(reentrant), **keys)
    losses = toy.train(model, optimizer, 1, rank, num_ranks)
    loss = model(*toy.share(1, rank, num_ranks))
    model.backward(loss)
    held = model.model_data_bytes
    optimizer.step()
    losses.append(loss.item())
    return global_losses(losses, num_ranks), dict(model.ledger.step_bytes), held, model.layout.elems_per_rank


class Checkpointed(toy.Toy):
    """Each block is computed again in backward; None: not."""

    def __init__(self, reentrant: bool | None):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, inputs, targets):
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        logits = self.head(self.norm(x)).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.each
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("communication", ["group", "chunk"])
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_bytes_with_and_without_activation_checkpointing(ranks, num_ranks, communication, reentrant):
    """With room for little each group is gathered once in forward and once in backward, recomputation included. Backward
    needs the recomputed modules' parameters anyway. 16 bytes a parameter are held, all gradients there."""
    keys = {"near_budget": "min", "default_chunk_size": 21_000, "communication": communication}
    expected, _, _ = toy.oracle(2)
    moved = {}
    for mode in (None, reentrant):
        results = ranks(num_ranks).run_once(checkpointed_case, keys, mode)
        for losses, _, held, elems in results:
            assert losses == pytest.approx(expected, rel=1e-5)
            assert held == 16 * elems
        moved[mode] = [(step_bytes.get("gather", 0), step_bytes.get("reduce", 0)) for _, step_bytes, _, _ in results]
        total = 4 * (num_ranks - 1) * elems
        assert sum(reduced for _, reduced in moved[mode]) == num_ranks * total or communication == "chunk"
        assert all(gathered <= 2 * total for gathered, _ in moved[mode]), "at most once in forward and once in backward"
    assert moved[None] == moved[reentrant]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_one_chunk_at_a_time_needs_less_near(num_ranks):
    group, chunk = (pstar.plan_engine(toy.Toy, {"near_budget": "min", "default_chunk_size": 11_000, "communication": mode},
                                      num_ranks).near_budget for mode in ("group", "chunk"))
    assert chunk < group


def prefetch_case(rank: int, num_ranks: int, keys: dict):
    ahead, original = [], Unsharding.unshard_async

    def counted(self, unit):
        ahead.append(unit)
        original(self, unit)

    Unsharding.unshard_async = counted
    try:
        result = case(rank, num_ranks, keys)
    finally:
        Unsharding.unshard_async = original
    return result | {"ahead": len(ahead)}


@pytest.mark.each
@pytest.mark.parametrize("near", ["min", "45%", "60%", "75%", "100%"])
@pytest.mark.parametrize("keys", [{}, {"communication": "chunk"}, {"ownership": "sharded"}], ids=str)
def test_gathering_ahead_gathers_nothing_more_and_changes_nothing(ranks, near, keys):
    keys = keys | {"near_budget": near, "default_chunk_size": 5_000}
    with_it, without = (ranks(2).run(prefetch_case, keys | {"prefetch": prefetch})[0] for prefetch in (True, False))
    assert without["ahead"] == 0 and (with_it["ahead"] > 0 or near == "min")
    assert with_it["losses"] == without["losses"]
    assert all(torch.equal(value, without["weights"][name]) for name, value in with_it["weights"].items())
    assert with_it["step_bytes"]["gather"] <= without["step_bytes"]["gather"]
    assert with_it["step_bytes"]["reduce"] == without["step_bytes"]["reduce"]


def bf16_case(rank: int, num_ranks: int, near: str):
    model, optimizer = toy.build(near_budget=near, bf16={"enabled": True}, default_chunk_size=5_000)
    model.backward(model(*toy.share(0, rank, num_ranks)))
    held = model.model_data_bytes
    optimizer.step()
    losses = toy.train(model, optimizer, 4, rank, num_ranks, first=1)
    return held, model.layout.elems_per_rank, global_losses(losses, num_ranks), model.gather_state()[0]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bf16_holds_fourteen_bytes_a_parameter_divided_by_the_ranks(ranks, num_ranks):
    small, large = (ranks(num_ranks).run(bf16_case, near) for near in ("min", "100%"))
    for held, elems, _, _ in small:
        assert held == 14 * elems
    assert small[0][2] == large[0][2]
    assert all(torch.equal(value, large[0][3][name]) for name, value in small[0][3].items())
    losses, _, _ = toy.oracle(5)
    assert small[0][2] == pytest.approx(losses[1:], rel=0.02)


def fp32_bytes_case(rank: int, num_ranks: int):
    model, _ = toy.build(near_budget="min", default_chunk_size=5_000)
    model.backward(model(*toy.share(0, rank, num_ranks)))
    return model.model_data_bytes, model.layout.elems_per_rank


def test_fp32_holds_sixteen_bytes_a_parameter_divided_by_the_ranks(ranks):
    for held, elems in ranks(2).run(fp32_bytes_case):
        assert held == 16 * elems


def continue_case(rank: int, num_ranks: int, weights: dict, moments: dict, keys: dict):
    model, optimizer = toy.build(**keys)
    model.load_state(weights, moments)
    return global_losses(toy.train(model, optimizer, 3, rank, num_ranks, first=3), num_ranks)


def test_state_goes_on_at_another_number_of_ranks_and_another_chunk_size(ranks):
    losses, _, _ = toy.oracle(6)
    model, optimizer = toy.build(near_budget="min")
    toy.train(model, optimizer, 3)
    weights, moments = model.gather_state()
    for num_ranks, keys in ((2, {"near_budget": "50%"}), (3, {"near_budget": "min", "default_chunk_size": 5_000})):
        for got in ranks(num_ranks).run(continue_case, weights, moments, keys):
            assert got == pytest.approx(losses[3:], rel=1e-5)


def evaluation_case(rank: int, num_ranks: int):
    model, optimizer = toy.build(near_budget="min", default_chunk_size=5_000)
    toy.train(model, optimizer, 2, rank, num_ranks)
    model.eval()
    with torch.no_grad():
        logits = model(toy.batch(50)[0])
    model.train()
    return logits, toy.train(model, optimizer, 1, rank, num_ranks, first=2), model.schedule.num_traced


def test_evaluation_gives_every_rank_the_same_logits(ranks):
    results = ranks(2).run(evaluation_case)
    assert torch.equal(results[0][0], results[1][0]) and [result[2] for result in results] == [1, 1]


def overflow_case(rank: int, num_ranks: int):
    flat = torch.full((4,), 3e38, dtype=torch.bfloat16)
    piece = torch.empty(4 // num_ranks, dtype=torch.bfloat16)
    Collectives(None, pstar.memory.tier.Ledger()).reduce_scatter_mean(piece, flat).wait()
    return piece


def test_fault_a_mean_overflows_where_it_is_summed_before_it_is_divided(ranks):
    for piece in ranks(2).run(overflow_case):
        assert piece.isfinite().all() and piece.float().allclose(torch.tensor(3e38), rtol=0.01)
