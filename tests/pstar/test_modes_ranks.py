"""Transforms, dispatch modes and complex views on several ranks, where a forward inside them gathers chunks.

Between near budgets, prefetch and ownerships: the same bits. Without dropout, losses against one plain process within 1e-5
relative: the sum over ranks adds in another order than one process does, and Adam's division magnifies it.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests import toy
from tests.pstar.chunks.test_saved_views import Filters
from tests.pstar.test_selective_checkpointing import Model, save_all_but_gelu
from tests.pstar.test_transforms import Borrower

STEPS, ROWS = 4, 12
PLACEMENTS = [{"near_budget": "100%"}, {"near_budget": "min"}, {"near_budget": "60%", "prefetch": 0},
              {"near_budget": "min", "ownership": "sharded"}, {"near_budget": "min", "communication": "chunk"},
              {"near_memory": "64MiB"}, {"near_budget": "min", "offload_activations": True}]


def jvp(model, x: torch.Tensor) -> torch.Tensor:
    y, tangent = torch.func.jvp(model, (x,), (x.roll(1, 1),))
    return y.square().mean() + tangent.square().mean()


def forward(model, x: torch.Tensor) -> torch.Tensor:
    return model(x)


CASES = {"jvp": (Borrower, jvp, 128), "complex views": (Filters, forward, 16),
         "selective checkpointing": (lambda: Model(save_all_but_gelu), forward, 128)}


def rows(step: int, width: int, rank: int = 0, num_ranks: int = 1) -> torch.Tensor:
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(step)).chunk(num_ranks)[rank]


def train(rank: int, num_ranks: int, case: str, keys: dict) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(mean losses over the ranks, weights)."""
    model_func, loss_of, width = CASES[case]
    model, optimizer = toy.build(model_func, default_chunk_size=width * width + width, **keys)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)    # for dropout
        optimizer.zero_grad()
        loss = loss_of(model, rows(step, width, rank, num_ranks))
        model.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    return (mean / num_ranks).tolist(), model.gather_state()[0]


@pytest.mark.parametrize("case", CASES)
def test_placement_changes_no_bit_on_two_ranks(ranks, case: str) -> None:
    results = [ranks(2).run(train, case, keys)[0] for keys in PLACEMENTS]
    for losses, weights in results[1:]:
        assert losses == results[0][0]
        assert all(torch.equal(weights[name], value) for name, value in results[0][1].items())
    if case != "selective checkpointing":
        model_func, loss_of, width = CASES[case]
        expected, _ = toy.plain_run(model_func, lambda model, step: loss_of(model, rows(step, width)), STEPS)
        assert results[0][0] == pytest.approx(expected, rel=1e-5)
