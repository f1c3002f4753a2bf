"""Selective activation checkpointing (torch.utils.checkpoint, context_fn) gives the same bits as in plain PyTorch.

A dispatch mode counts the operations of a forward, keeps the results of some, and expects the same operations in the
recomputation. It must not see those that move chunks.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests import toy

WIDTH, ROWS = 128, 130    # weights and activations of 64 KiB and more, large enough for offload_activations
aten = torch.ops.aten


def save_products(_, operation, *args, **kwargs) -> CheckpointPolicy:
    saved = operation in (aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def save_all_but_gelu(_, operation, *args, **kwargs) -> CheckpointPolicy:
    """PyTorch refuses to save what a later operation changes in place, as dropout does."""
    recomputed = operation is aten.gelu.default or operation._schema.is_mutable or "empty" in str(operation)
    return CheckpointPolicy.PREFER_RECOMPUTE if recomputed else CheckpointPolicy.MUST_SAVE


class Model(nn.Module):
    """Recomputed blocks; the second half of each uses the weight of the first."""

    def __init__(self, policy) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(toy.Block(WIDTH) for _ in range(3))
        self.contexts = partial(create_selective_checkpoint_contexts, policy)

    def half(self, number: int, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.blocks[number](x), 0.1) + F.linear(x, self.blocks[number].up.weight[:WIDTH])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(3):
            x = checkpoint(self.half, number, x, use_reentrant=False, context_fn=self.contexts)
        return x.square().mean()


def loss_of(model, step: int) -> torch.Tensor:
    return model(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)))


@pytest.mark.parametrize("keys", [{}, {"prefetch": 0}, {"near_budget": "60%"}, {"near_budget": "100%"},
                                  {"near_budget": "auto", "near_memory": "64MiB"}, {"offload_activations": True},
                                  {"near_budget": "auto", "near_memory": "4MiB", "offload_activations": True}], ids=str)
@pytest.mark.parametrize("policy", [save_products, save_all_but_gelu, [aten.addmm.default]],
                         ids=["products", "all but GELU", "a list"])
def test_a_policy_that_saves_some_results_gives_the_same_bits(policy, keys: dict) -> None:
    toy.compare(lambda: Model(policy), loss_of, 4, default_chunk_size=70_000, **keys)


def test_a_dispatch_mode_of_the_program_sees_no_operation_that_moves_chunks() -> None:
    class Names(TorchDispatchMode):
        seen: list[list[str]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen[-1].append(str(func))
            return func(*args, **(kwargs or {}))

    def in_mode(model, step: int) -> torch.Tensor:
        Names.seen.append([])
        with Names():
            return model(*toy.batch(step))

    toy.compare(toy.Toy, in_mode, 4, default_chunk_size=5_000)
    plain, with_engine = Names.seen[::2], Names.seen[1::2]
    hooks = {"aten.detach.default"}    # a tensor that backward needs is kept without its graph
    for expected, seen in zip(plain, with_engine, strict=True):
        assert [name for name in seen if name not in hooks] == [name for name in expected if name not in hooks]
