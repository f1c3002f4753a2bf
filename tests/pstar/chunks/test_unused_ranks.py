"""Parameters that only some ranks use, and those that get two gradients in one backward: the oracle, or one line."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pstar
from pstar.comm import shared_memory
from tests import toy
from tests.harness import RankFailure

STEPS = 5


class Choosy(nn.Module):
    """Three layers between embedding and head. Which of them get gradients depends on the step and the rank.

    A layer that is left out is multiplied by nothing: its parameters get no gradient, but its group is gathered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(toy.VOCAB, toy.WIDTH)
        self.layers = nn.ModuleList(nn.Linear(toy.WIDTH, toy.WIDTH) for _ in range(3))
        self.head = nn.Linear(toy.WIDTH, toy.VOCAB)
        self.left_out: set[int] = set()

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for index, layer in enumerate(self.layers):
            y = torch.tanh(layer(x))
            x = x + (y.detach() if index in self.left_out else y)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def left_out(step: int, rank: int) -> set[int]:
    """Step 0 differs already; in step 3 rank 1 leaves all out; in step 4 nobody uses layer 2."""
    return [{rank}, {2} if rank == 0 else set(), set(), {0, 1, 2} if rank == 1 else set(), {2, rank}][step]


def case(rank: int, num_ranks: int, keys: dict):
    model, optimizer = toy.build(Choosy, **keys)
    losses = []
    for step in range(STEPS):
        model.module.left_out = left_out(step, rank)
        losses += toy.train(model, optimizer, 1, rank, num_ranks, first=step)
    return losses, optimizer.grad_norm, *model.gather_state(), model.schedule.num_traced


def plain(num_ranks: int):
    """One process plays all ranks: a missing gradient counts as zero in the mean; one missing on all ranks is None."""
    torch.manual_seed(0)
    model = Choosy()
    adamw, losses, norm = toy.adamw(model.parameters(), lr=toy.LR, weight_decay=toy.WEIGHT_DECAY), [], 0.0
    for step in range(STEPS):
        model.zero_grad()
        for rank in range(num_ranks):
            model.left_out = left_out(step, rank)
            loss = model(*toy.share(step, rank, num_ranks))
            losses.append(loss.item())
            (loss / num_ranks).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), toy.CLIP).item()
        adamw.step()
    return losses, norm, dict(model.named_parameters())


@pytest.mark.parametrize("ownership", ["whole", "sharded"])
def test_parameters_that_only_some_ranks_use(ranks, ownership):
    """With room near for all gathered parameters: then backward gathers nothing, and forward is the same on all ranks."""
    keys = {"near_budget": "100%", "ownership": ownership, "default_chunk_size": 2_500, "find_unused_parameters": True}
    results = ranks(2).run(case, keys)
    losses, norm, weights = plain(2)
    for rank, result in enumerate(results):
        assert result[0] == pytest.approx(losses[rank::2], rel=1e-5) and result[1] == pytest.approx(norm, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(results[0][2][name], value.detach(), rtol=0, atol=1e-4)
    assert results[0][3]["step.layers.2.weight"] == STEPS - 1 and results[0][3]["step.head.bias"] == STEPS


def two_backwards_case(rank: int, num_ranks: int):
    model, _ = toy.build()
    for number in range(2):
        model.backward(model(*toy.share(number, rank, num_ranks)))


def test_the_error_for_a_second_backward_before_the_update_names_accumulation(ranks):
    with pytest.raises(RankFailure, match="got a gradient in another backward of this step, .*gradient_accumulation_steps"):
        ranks(2).run(two_backwards_case)


def test_without_the_key_different_orders_end_in_one_line_with_rank_and_unit(ranks):
    keys = {"near_budget": "100%", "default_chunk_size": 2_500}
    with pytest.raises(RankFailure, match=r"rank 1 is in a reduction of unit \d+ .* where rank 0 is in a reduction of unit"):
        ranks(2).run(case, keys)


def over_gloo_case(rank: int, num_ranks: int):
    """One chunk for embedding, layers and head each: all collectives are of one size, so gloo notices no mismatch."""
    available, shared_memory.available = shared_memory.available, lambda: False
    try:
        model, optimizer = toy.build(Choosy, near_budget="100%", default_chunk_size=11_000, ownership="sharded")
        model.module.left_out = left_out(1, rank)
        toy.train(model, optimizer, 1, rank, num_ranks)
    finally:
        shared_memory.available = available


def test_different_parameters_on_ranks_are_found_over_a_process_group(ranks):
    with pytest.raises(RankFailure, match=r"the ranks use different parameters: collective \d+ of the step was a reduction "
                                          r"of unit \d+ on rank 0 and a reduction of unit \d+ on rank 1"):
        ranks(2).run(over_gloo_case)


def test_gathers_that_differ_never_update_anything(ranks):
    """A layer without a gradient is not needed in backward: with little room near, one rank alone gathers it again."""
    keys = {"near_budget": "min", "default_chunk_size": 2_500, "find_unused_parameters": True}
    with pytest.raises(RankFailure, match=r"rank \d is in a gather of unit \d+ .* where rank \d is in a"):
        ranks(2).run(case, keys)


def nobody_case(rank: int, num_ranks: int, keys: dict):
    model, optimizer = toy.build(Choosy, near_budget="100%", default_chunk_size=2_500, **keys)
    losses, norms = [], []
    for step in range(STEPS):
        model.module.left_out = set() if step == 0 else {0}
        losses += toy.train(model, optimizer, 1, rank, num_ranks, first=step)
        norms.append(optimizer.grad_norm)
    return losses, norms


@pytest.mark.parametrize("communication", ["group", "chunk"])
@pytest.mark.parametrize("late", [False, True])
def test_a_chunk_that_nobody_uses_beside_one_in_use(ranks, communication, late):
    """The two form a group. The unused one's place must hold no gradient, not even one of the step before."""
    results = ranks(2).run(nobody_case, {"communication": communication, "find_unused_parameters": late})
    torch.manual_seed(0)
    model = Choosy()
    adamw = toy.adamw(model.parameters(), lr=toy.LR, weight_decay=toy.WEIGHT_DECAY)
    for step in range(STEPS):
        model.left_out = set() if step == 0 else {0}
        model.zero_grad()
        model(*toy.batch(step)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), toy.CLIP).item()
        adamw.step()
        assert results[0][1][step] == results[1][1][step] == pytest.approx(norm, rel=1e-5), step


class Twice(nn.Module):
    """One layer in two reentrant checkpoints: each recomputation is a backward of its own, so it gets two gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(toy.VOCAB, toy.WIDTH)
        self.layer = nn.Linear(toy.WIDTH, toy.WIDTH)
        self.head = nn.Linear(toy.WIDTH, toy.VOCAB)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for _ in range(2):
            x = x + torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def twice_case(rank: int, num_ranks: int, late: bool):
    model, optimizer = toy.build(Twice, near_budget="min", default_chunk_size=2_500, find_unused_parameters=late)
    return toy.train(model, optimizer, 3, rank, num_ranks), model.gather_state()[0]


def test_two_gradients_in_one_backward(ranks):
    results = ranks(2).run(twice_case, True)
    losses, weights, _ = toy.oracle(3, model_func=Twice)
    means = [sum(pair) / 2 for pair in zip(*(result[0] for result in results), strict=True)]
    assert means == pytest.approx(losses, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(results[0][1][name], value, rtol=0, atol=1e-4)


def test_two_gradients_in_one_backward_are_refused_without_the_key(ranks):
    with pytest.raises(RankFailure, match='got a second gradient in one backward.*"find_unused_parameters": true'):
        ranks(2).run(twice_case, False)


def test_find_unused_parameters_changes_nothing_on_one_rank():
    losses, weights, _ = toy.oracle(3)
    model, optimizer = toy.build(near_budget="min", default_chunk_size=5_000, find_unused_parameters=True)
    assert toy.train(model, optimizer, 3) == losses
    assert all(torch.equal(model.gather_state()[0][name], value) for name, value in weights.items())
    assert pstar.plan_engine(toy.Toy, {"find_unused_parameters": True}, 2).layout
