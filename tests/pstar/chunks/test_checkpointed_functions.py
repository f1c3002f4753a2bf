"""Modules that call torch.utils.checkpoint with a function of their own, in which they read their own parameters.

In forward the module runs and has its parameters. In backward checkpoint repeats the function alone: no module runs that
owns them. torch checks that the function saves the same number of tensors both times.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests import toy

WIDTH = 16
SETTINGS = ({"near_budget": "min"}, {"near_budget": "50%"}, {"near_budget": "100%", "offload_activations": True},
            {"near_budget": "min", "offload_activations": True, "speculative_update": True})  # fmt: skip


class Block(nn.Module):
    """Subclasses override inner, the function that is checkpointed."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.other = [self]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.drop(torch.tanh(self.linear(x)))


class NoModule(Block):
    """The function calls no module."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) * self.scale


class View(Block):
    """The function reads views of parameters, before and after it calls a module."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        head = self.weight.T
        return torch.tanh(self.linear(x @ head)) @ self.weight[: WIDTH].view(WIDTH, WIDTH) * self.scale


class Borrows(Block):
    """Operations with parameters of another block alone, and together with those of this one."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        other = self.other[0]
        return F.linear(torch.tanh(self.linear(x)) * other.scale, self.weight, other.linear.bias) * self.scale


class InLists(Block):
    """Parameters inside of a list."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.scale, self.weight.mean(0)])
        return torch.tanh(self.linear(x)) * both.view(2, WIDTH).sum(0)


class Nested(Block):
    """A checkpoint inside of a checkpoint."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * checkpoint(self.innermost, x @ self.weight, use_reentrant=self.reentrant)

    def innermost(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) * self.scale)


class Model(nn.Module):
    def __init__(self, block: type[Block], reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([block(reentrant) for _ in range(4)])
        self.blocks[2].other = [self.blocks[0]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step)))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("block", [Block, NoModule, View, Borrows, InLists, Nested])
def test_a_checkpointed_function_with_own_parameters_has_the_same_bits(block: type[Block], reentrant: bool) -> None:
    for keys in SETTINGS:
        toy.compare(lambda: Model(block, reentrant), loss_of, 3, **keys)


def test_two_forwards_before_two_backwards_have_the_same_bits() -> None:
    def both(model: nn.Module, step: int) -> torch.Tensor:
        return loss_of(model, 2 * step) + loss_of(model, 2 * step + 1)

    for block in (Block, Borrows):
        toy.compare(lambda block=block: Model(block, False), both, 3)


def test_copies_are_made_only_where_forward_lent_nothing(monkeypatch) -> None:
    model, optimizer = toy.build(lambda: Model(Borrows, False), near_budget="min")
    names = {id(param): name for name, param in model.module.named_parameters()}
    copied, clone = [], torch.nn.Parameter.clone
    monkeypatch.setattr(torch.nn.Parameter, "clone", lambda param: copied.append(names[id(param)]) or clone(param))
    model.backward(loss_of(model, 0))
    optimizer.step()
    # F.linear borrows a bias in forward, and block 2 the first scale as well. All others are scales that their block owns.
    assert copied == [f"blocks.{number}.scale" for number in (3, 3, 2, 1, 1, 0, 0)]
