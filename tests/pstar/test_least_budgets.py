"""The least budgets suffice for a whole run: with streamed states, 8-bit states, a large frozen group, partial gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pstar
from pstar.layout.budget import smallest_streaming_budget
from tests import toy

STEPS = 4


@pytest.mark.parametrize("near", ["min", "60%"])
def test_states_are_streamed_through_the_least_far_budget_with_a_disk(near, tmp_path):
    """All far copies of the group that is updated near can be in use there, when another group's states leave near."""
    losses, weights, _ = toy.oracle(STEPS)
    model, optimizer = toy.build(near_budget=near, far_budget="min", far_states="stream", disk_path=str(tmp_path),
                                 default_chunk_size=3_000)
    assert toy.train(model, optimizer, STEPS) == losses
    assert all(torch.equal(model.gather_state()[0][name], weight) for name, weight in weights.items())


def test_the_chosen_chunk_size_leaves_room_to_stream_a_group():
    keys = {"far_states": "stream", "near_budget": "25%"}
    plan = pstar.plan_engine(toy.Untied, keys)
    assert smallest_streaming_budget(plan.layout, plan.costs) == plan.least_near <= plan.near_budget
    with pytest.raises(pstar.BudgetError, match="near budget 15% .*far_states is stream, and the update of one group"):
        pstar.plan_engine(toy.Untied, keys | {"near_budget": "15%"})


class LargeFrozen(nn.Module):
    """A frozen matrix larger than everything that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.frozen = nn.Linear(16, 400, bias=False).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.frozen(x).square().mean()


def rows(step: int) -> torch.Tensor:
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(step))


def test_a_frozen_group_passes_through_far_beside_a_block_that_leaves_near_for_it(tmp_path):
    """With 8-bit states a trained group needs few bytes, so that the largest group alone is no bound."""
    keys = {"default_chunk_size": 300, "optimizer": {"params": {"state_bits": 8}}}
    runs = []
    for more in ({"near_budget": "100%"}, {"near_budget": "min", "far_budget": "min", "disk_path": str(tmp_path)}):
        model, optimizer = toy.build(LargeFrozen, **keys | more)
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            losses.append(model(rows(step)))
            model.backward(losses[-1])
            optimizer.step()
        runs.append([loss.item() for loss in losses])
    assert runs[0] == runs[1]


class HalfUsed(nn.Module):
    """Every second step uses the weights of its layers only, so a group gets a part of its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        for layer in self.layers:
            x = (layer(x) if whole else F.linear(x, layer.weight)).tanh()
        return x.square().mean()


@pytest.mark.parametrize("near", ["min", "60%"])
def test_gradients_of_incomplete_groups_fit_into_the_least_far_budget(near):
    """Near is too small to hold them until backward ends; far has room for those of one micro-step of one group."""
    runs = []
    for keys in ({"near_budget": "100%"}, {"near_budget": near, "far_budget": "min", "near_states": "margin"}):
        model, optimizer = toy.build(HalfUsed, gradient_accumulation_steps=3, default_chunk_size=300,
                                     **keys | {"optimizer": {"params": {"use_hybrid_adam": False}}})
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            for micro in range(3):
                losses.append(model(rows(3 * step + micro), step % 2 == 0))
                model.backward(losses[-1])
            optimizer.step()
        runs.append([loss.item() for loss in losses])
    assert runs[0] == runs[1]


def test_where_far_is_too_small_near_keeps_room_for_a_streamed_update():
    """States that are near only because far has no room for them never leave it."""
    losses, _, _ = toy.oracle(STEPS)
    for far in range(60, 101, 5):
        try:
            model, optimizer = toy.build(near_budget="45%", far_budget=f"{far}%", far_states="stream",
                                         default_chunk_size=3_000)
        except pstar.BudgetError as error:
            assert "far budget" in str(error), error
            continue
        assert toy.train(model, optimizer, STEPS) == losses, far
