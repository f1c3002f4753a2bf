"""Moves and casts of a model in chunks: nothing moves, no number changes, and another dtype is refused in one line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import pstar
from tests import toy

MOVES = {
    "to": lambda module: module.to("cpu"),
    "cpu": lambda module: module.cpu(),
    "to its dtype": lambda module: module.to(torch.float32),
    "float": lambda module: module.float(),
    "a module's": lambda module: module.get_submodule("module.norms.0").to("cpu"),
}
CASTS = {
    "to": lambda module: module.to(torch.float64),
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "double": lambda module: module.double(),
    "type": lambda module: module.type(torch.float16),
    "a module's": lambda module: module.get_submodule("module.norms.0").half(),
}


class Normed(nn.Module):
    """Layers with running statistics; moves itself in its forward, as some models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm.to(x.device)(layer(x))
        return (x - 1).square().mean()


def rows(step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


def losses(near: str, between: Callable[[nn.Module], nn.Module] | None = None) -> list[float]:
    """Of four steps; `between` is called with the engine after two of them."""
    model, optimizer = toy.build(Normed, near_budget=near, default_chunk_size=600)
    found = []
    for step in range(4):
        if step == 2 and between is not None:
            assert isinstance(between(model), nn.Module)
        loss = model(rows(step))
        model.backward(loss)
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("near", ["min", "100%"])
@pytest.mark.parametrize("move", MOVES)
def test_a_move_changes_nothing(near: str, move: str) -> None:
    assert losses(near, MOVES[move]) == losses(near)


@pytest.mark.parametrize("near", ["min", "100%"])
def test_a_move_to_another_device_says_that_it_has_no_effect(near: str) -> None:
    with pytest.warns(UserWarning, match="the engine keeps it on cpu: moving it to meta has no effect"):
        assert losses(near, lambda model: model.to("meta")) == losses(near)


@pytest.mark.parametrize("near", ["min", "100%"])
@pytest.mark.parametrize("cast", CASTS)
def test_a_cast_is_refused_in_one_line(near: str, cast: str) -> None:
    with pytest.raises(pstar.StateError, match="is in chunks and stays torch.float32, it does not become") as caught:
        losses(near, CASTS[cast])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("near", ["min", "100%"])
def test_sharing_with_other_processes_is_refused(near: str) -> None:
    with pytest.raises(pstar.StateError, match="is in chunks, which cannot be shared with other processes") as caught:
        losses(near, lambda model: model.share_memory())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("near", ["min", "100%"])
def test_statistics_of_a_norm_stay_wide_in_16_bits(near: str) -> None:
    """A cast to the dtype of the parameters would have taken them along."""
    model, _ = toy.build(Normed, near_budget=near, default_chunk_size=600, bf16={"enabled": True})
    with pytest.raises(pstar.StateError, match="stays torch.float32, it does not become torch.bfloat16"):
        model.bfloat16()
    assert model.module.norms[0].running_mean.dtype == torch.float32


def test_modules_outside_of_chunks_are_left_alone() -> None:
    class Partly(Normed):
        def __init__(self) -> None:
            super().__init__()
            self.outside = pstar.exclude(nn.Linear(2, 2))

    model, _ = toy.build(Partly)
    assert model.module.outside.double().weight.dtype == torch.float64


@pytest.mark.parametrize("near", ["min", "100%"])
def test_an_optimizer_calls_the_closure_of_its_step(near: str) -> None:
    model, optimizer = toy.build(Normed, near_budget=near, default_chunk_size=600)
    found = []
    for step in range(4):
        def closure() -> torch.Tensor:
            loss = model(rows(step))    # noqa: B023
            optimizer.zero_grad()
            model.backward(loss)
            return loss

        found.append(optimizer.step(closure).item())
    assert found == losses(near)
