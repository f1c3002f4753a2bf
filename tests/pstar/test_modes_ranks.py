"""Transforms, dispatch modes and complex views on two ranks, where a forward inside them gathers chunks.

At every placement each rank's losses and the weights have the bits of plain PyTorch with gradients averaged by all-reduce.
"""

from __future__ import annotations

import pytest
import torch

from tests import toy
from tests.pstar.chunks.test_saved_views import Filters
from tests.pstar.test_selective_checkpointing import Model, save_all_but_gelu
from tests.pstar.test_transforms import Borrower

STEPS, ROWS = 4, 6
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


def case(rank: int, num_ranks: int, name: str) -> None:
    model_func, loss_of, width = CASES[name]

    def loss_of_step(model, step: int) -> torch.Tensor:
        return loss_of(model, torch.randn(ROWS, width, generator=torch.Generator().manual_seed(step)))

    for keys in PLACEMENTS:
        toy.compare(model_func, loss_of_step, STEPS, default_chunk_size=width * width + width, **keys)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_the_bits_of_plain_pytorch_with_averaged_gradients(ranks, name: str) -> None:
    ranks(2).run(case, name)
