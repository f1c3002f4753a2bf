"""torch.func and forward-mode AD around the engine: the same bits as in plain PyTorch, in training and in evaluation.

Each level of torch.func wraps the tensors that operations make, and would wrap the engine's buffers, too. A tangent that is
all zero has no memory.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import pstar
from tests import toy

WIDTH, ROWS = 128, 130    # weights and activations of 64 KiB and more, large enough for offload_activations


class Borrower(nn.Module):
    """Layers, and a head that uses the first layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.linear(x, self.layers[0].weight)


def rows(step: int, num_rows: int = ROWS) -> torch.Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(step))


def jvp(model, step: int) -> torch.Tensor:
    """A penalty on the derivative in one direction."""
    y, tangent = torch.func.jvp(model, (rows(step),), (rows(step + 100),))
    return y.square().mean() + tangent.square().mean()


def dual_numbers(model, step: int) -> torch.Tensor:
    with forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(rows(step), rows(step + 100))))
        return y.square().mean() + tangent.square().mean()


def jacfwd(model, step: int) -> torch.Tensor:
    return torch.func.jacfwd(model)(rows(step, 2)).square().mean()


def vmap(model, step: int) -> torch.Tensor:
    return torch.vmap(model)(rows(step)).square().mean()


@pytest.mark.parametrize("keys", [{}, {"prefetch": 0}, {"near_budget": "60%"}, {"near_budget": "100%"},
                                  {"near_budget": "auto", "near_memory": "64MiB"}, {"offload_activations": True}], ids=str)
@pytest.mark.parametrize("loss_of", [jvp, dual_numbers, jacfwd, vmap])
def test_a_training_forward_inside_a_transform_gives_the_same_bits(loss_of, keys: dict) -> None:
    toy.compare(Borrower, loss_of, 4, default_chunk_size=20_000, **keys)


EVALUATIONS = {
    "vmap": lambda model: torch.vmap(model)(rows(0, 3)),
    "jvp": lambda model: torch.func.jvp(model, (rows(0, 3),), (rows(1, 3),))[1],
    "jacfwd": lambda model: torch.func.jacfwd(model)(rows(0, 1)),
    "hvp": lambda model: torch.autograd.functional.hvp(lambda x: model(x).square().sum(), rows(0, 3), rows(1, 3))[1],
}


@pytest.mark.parametrize("near_budget", ["min", "100%"])
@pytest.mark.parametrize("evaluation", EVALUATIONS)
def test_an_evaluation_inside_a_transform_between_two_steps_changes_nothing(evaluation: str, near_budget: str) -> None:
    found: list[torch.Tensor] = []

    def evaluate(model, step: int) -> None:
        model.eval()
        found.append(EVALUATIONS[evaluation](model))
        model.train()

    toy.compare(Borrower, lambda model, step: model(rows(step)).square().mean(), 4, before=evaluate,
                default_chunk_size=20_000, near_budget=near_budget)
    assert all(torch.equal(expected, value) for expected, value in zip(found[::2], found[1::2], strict=True))


class Derivative(Borrower):
    """Its loss has the derivative of a function of the activations, made by torch.func or by torch.autograd."""

    def __init__(self, by_func: bool) -> None:
        super().__init__()
        self.by_func = by_func

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.by_func:
            slope = torch.func.grad(lambda y: y.sin().sum())(y)
        else:
            slope, = torch.autograd.grad(y.sin().sum(), y, create_graph=True)
        return y.square().mean() + slope.square().mean()


def test_torch_func_grad_in_the_model_is_refused_with_two_ways_out() -> None:
    model, _ = toy.build(lambda: Derivative(True), near_budget="min", default_chunk_size=20_000)
    line = r"^torch.func.* hooks, and the engine needs some where chunks move: take .* torch.autograd.grad.*budget 100%"
    with pytest.raises(pstar.StateError, match=line) as caught:
        model(rows(0))
    assert "\n" not in str(caught.value)
    for by_func, near in ((False, "min"), (True, "100%")):
        toy.compare(lambda by_func=by_func: Derivative(by_func), lambda model, step: model(rows(step)), 4,
                    default_chunk_size=20_000, near_budget=near)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev], ids=["grad", "jacrev"])
def test_torch_func_grad_works_where_all_parameters_are_near(transform) -> None:
    """Elsewhere torch refuses it: it supports no saved-tensor hooks there."""
    def loss_of(model, step: int) -> torch.Tensor:
        derivative = transform(lambda x: model(x).sum())(rows(step + 100, 3))
        return model(rows(step, 3)).square().mean() + derivative.square().mean()

    toy.compare(Borrower, loss_of, 4, default_chunk_size=20_000, near_budget="100%")
