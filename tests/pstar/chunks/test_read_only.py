"""Models that change parameters in place: refused in one line where the change would be lost, else plain PyTorch's bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pstar
from pstar.chunks.read_only import ReadOnly
from tests import toy

STEPS = 4
AWAY = [{"near_budget": "min"}, {"near_budget": "min", "prefetch": 0}, {"near_budget": "min", "bf16": {"enabled": True}},
        {"near_budget": "60%", "near_states": "fill", "speculative_update": True}]


def x(step: int) -> torch.Tensor:
    """(6, 16), a function of the number alone."""
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(x(step)).float().square().mean()


class Changing(nn.Module):
    """Four layers; before they run, `change` writes into some weight."""

    def __init__(self, excluded: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        for number in excluded:
            pstar.exclude(self.layers[number])

    def change(self) -> None:
        raise NotImplementedError

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.change()
        for layer in self.layers:
            h = layer(h).tanh()
        return h


class Clamps(Changing):
    def change(self) -> None:
        self.layers[1].weight.clamp_(-0.1, 0.1)


class ClampsData(Changing):
    def change(self) -> None:
        self.layers[1].weight.data.clamp_(-0.1, 0.1)


class ReplacesData(Changing):
    def change(self) -> None:
        self.layers[1].weight.data = self.layers[1].weight.data.clamp(-0.1, 0.1)


class OwnForward(nn.Linear):
    """Normalises its own weight."""

    def __init__(self) -> None:
        super().__init__(16, 16)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.normalise()
        return super().forward(h)

    @torch.no_grad()
    def normalise(self) -> None:
        self.weight.div_(self.weight.norm(dim=1, keepdim=True))


class OwnData(OwnForward):
    def normalise(self) -> None:
        self.weight.data.div_(self.weight.data.norm(dim=1, keepdim=True))


class OwnNewData(OwnForward):
    def normalise(self) -> None:
        self.weight.data = nn.functional.normalize(self.weight.data)


class Layers(Changing):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers[1] = kind()

    def change(self) -> None:
        pass


class MaxNorm(Changing):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 16, max_norm=1.0)

    def change(self) -> None:
        pass

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return super().forward(h + self.table(torch.arange(len(h))))


MODELS = {"clamped": Clamps, "clamped data": ClampsData, "other data": ReplacesData, "max_norm": MaxNorm,
          "in its own forward": lambda: Layers(OwnForward), "data in its own forward": lambda: Layers(OwnData),
          "other data in its own forward": lambda: Layers(OwnNewData)}
CHANGED = r"(layers\.1|table)\.weight"


@pytest.mark.parametrize("keys", AWAY, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_change_that_would_be_lost_is_refused_in_the_first_steps(name, keys):
    with pytest.raises(pstar.StateError, match=rf"{CHANGED}( in place while|, which is in a chunk)"):
        train(MODELS[name], keys)


def train(model_func, keys: dict) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the engine."""
    model, optimizer = toy.build(model_func, **{"default_chunk_size": 400} | keys)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        model.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.gather_state()[0]


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("other")])
def test_with_everything_near_a_change_stays_as_in_plain_pytorch(name):
    toy.compare(MODELS[name], loss_of, STEPS, near_budget="100%")


@pytest.mark.parametrize("name, keys", [
    ("other data", {}), ("other data in its own forward", {}), ("clamped", {"fp16": {"enabled": True}}),
    ("max_norm", {"fp16": {"enabled": True}}), ("clamped data", {"fp16": {"enabled": True}})], ids=str)
def test_with_everything_near_it_is_refused_where_the_update_overwrites_it(name, keys):
    """fp16 computes with a rounded copy of the master. New data are not where the update writes."""
    with pytest.raises(pstar.StateError, match=CHANGED):
        train(MODELS[name], keys | {"near_budget": "100%"})


def test_evaluation_finds_it_too():
    model, _ = toy.build(MaxNorm, near_budget="min", default_chunk_size=400)
    with torch.no_grad(), pytest.raises(pstar.StateError, match=CHANGED):
        model.eval()(x(0))
        model(x(1))


@pytest.mark.parametrize("near", ["min", "100%"])
@pytest.mark.parametrize("kind", [Clamps, ClampsData, ReplacesData])
def test_a_parameter_that_stays_with_pytorch_may_be_changed(kind, near):
    model = toy.compare(lambda: kind(excluded=(1,)), loss_of, STEPS, near_budget=near, default_chunk_size=400)
    assert torch.equal(model.gather_state()[0]["layers.1.weight"], model.module.layers[1].weight.detach())


@pytest.mark.parametrize("kind", [Clamps, ClampsData, ReplacesData])
def test_in_fp16_the_master_of_such_a_parameter_takes_over_what_was_changed_and_nothing_else(kind):
    model, optimizer = toy.build(lambda: kind(excluded=(1,)), fp16={"enabled": True, "initial_scale_power": 4})
    for step in range(STEPS):
        model.backward(loss_of(model, step))
        before = model.gather_state()[0]["layers.1.weight"]
        optimizer.step()
    half = before.half().float()
    assert half.abs().max() == torch.tensor(0.1).half(), "clamped in forward"
    assert (before != half).any(), "the others keep the digits that fp16 does not have"


def test_a_gathered_copy_is_no_place_to_write_on_several_ranks(ranks):
    assert all("table.weight in place" in message for message in ranks(2).run(refused_case))


def refused_case(rank: int, num_ranks: int) -> str:
    with pytest.raises(pstar.StateError) as caught:
        train(MaxNorm, {"near_budget": "100%"})
    return str(caught.value)


def test_the_engine_may_write_itself():
    """Weights that are loaded while their chunk is near are no change by the model."""
    model, optimizer = toy.build(lambda: Layers(nn.Identity), near_budget="60%", default_chunk_size=400)
    weights, _ = model.gather_state()
    with torch.no_grad():
        model(x(0))
    model.load_state({name: value + 1 for name, value in weights.items()})
    for step in range(3):
        model.backward(loss_of(model, step))
        model.load_state(weights)
        optimizer.step()


@pytest.mark.parametrize("name", ["max_norm", "in its own forward", "data in its own forward"])
def test_mutation_without_the_comparison_the_numbers_are_wrong(name, monkeypatch):
    monkeypatch.setattr(ReadOnly, "check", lambda self, unit: None)
    losses, _ = train(MODELS[name], {"near_budget": "min"})
    assert losses != toy.plain_run(MODELS[name], loss_of, STEPS)[0]
