"""Parameters that stay with PyTorch: the same bits as without the scope, and ordinary tensors meanwhile."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import pstar
from pstar.memory.tier import format_bytes
from pstar.modules.scope import Outside, mode_of
from tests import toy


class Mixture(nn.Module):
    """Embedding, a gate and two experts of which each token takes one, tied head.

    scope: what is around the making of the experts.
    """

    def __init__(self, scope=nullcontext) -> None:
        super().__init__()
        self.embed = nn.Embedding(toy.VOCAB, toy.WIDTH)
        self.block = toy.Block(toy.WIDTH)
        self.gate = nn.Linear(toy.WIDTH, 2)
        with scope():
            self.experts = nn.ModuleList(nn.Linear(toy.WIDTH, toy.WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(toy.WIDTH)
        self.head = nn.Linear(toy.WIDTH, toy.VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.block(self.embed(inputs))
        weights = self.gate(x).softmax(-1)
        first = (inputs % 2 == 0).unsqueeze(-1)
        x = x + torch.where(first, self.experts[0](x) * weights[..., :1], self.experts[1](x) * weights[..., 1:])
        return nn.functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def scoped() -> Mixture:
    return Mixture(pstar.torch_scope)


PRECISIONS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}},
              "fp16": {"fp16": {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 3}}}


@pytest.mark.parametrize("num_micros", [1, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_same_bits_as_without_the_scope(precision, num_micros):
    runs = []
    for model_func in (Mixture, scoped):
        model, optimizer = toy.build(model_func, near_budget="min", default_chunk_size=5_000,
                                     gradient_accumulation_steps=num_micros, **PRECISIONS[precision])
        losses = toy.train(model, optimizer, 10, num_micros=num_micros)
        runs.append((losses, optimizer.grad_norm, optimizer.loss_scale, optimizer.skipped_steps, *model.gather_state()))
    assert runs[0][:4] == runs[1][:4]
    for plain, kept in zip(runs[0][4:], runs[1][4:], strict=True):
        assert list(plain) == list(kept) and all(torch.equal(plain[name], kept[name]) for name in plain)
    assert runs[0][3] > 0 or precision != "fp16", "skipped steps are among them"


def test_parameters_of_the_scope_are_ordinary_tensors_in_no_chunk():
    model, optimizer = toy.build(scoped, near_budget="min", bf16={"enabled": True})
    weight = model.module.experts[0].weight
    assert "experts.0.weight" not in model.layout.slots and mode_of(weight) == Outside.AVERAGED
    assert weight.dtype == torch.bfloat16 and weight.isfinite().all()
    with pytest.raises(pstar.StateError, match="reads parameter block.up.weight between two steps"):
        model.module.block.up.weight.isfinite()
    before = model.model_data_bytes
    toy.train(model, optimizer, 1)
    numel = sum(param.numel() for param in model.module.experts.parameters())
    assert model._outside.num_bytes == 12 * numel and model.model_data_bytes == before
    assert ("outside chunks", f"4 parameters, {format_bytes(12 * numel)} on each process") in model.memory_plan()
    assert weight.grad is None


def test_marks_are_made_where_the_scope_is():
    with pstar.torch_scope():
        outer = nn.Linear(2, 2)
        with pstar.torch_scope(do_allreduce=False):
            inner = nn.Linear(2, 2)
        copies = nn.ModuleList(copy.deepcopy(nn.Linear(2, 2)) for _ in range(2))
        both = nn.Sequential(outer, inner)
    after = nn.Linear(2, 2)
    assert [mode_of(layer.weight) for layer in (outer, inner, *copies, after)] == [
        Outside.AVERAGED, Outside.LOCAL, Outside.AVERAGED, Outside.AVERAGED, None]
    assert both[1] is inner and mode_of(pstar.exclude(after, do_allreduce=False).bias) == Outside.LOCAL


def test_state_of_the_scope_is_saved_and_loaded():
    def excluded() -> Mixture:
        model = Mixture()
        pstar.exclude(model.experts)
        return model

    model, optimizer = toy.build(scoped, bf16={"enabled": True})
    toy.train(model, optimizer, 3)
    weights, moments = model.gather_state()
    assert weights.keys() == dict(Mixture().named_parameters()).keys() and moments["step.experts.1.bias"] == 3
    other, second = toy.build(excluded, bf16={"enabled": True}, near_budget="min")
    other.load_state(weights, moments)
    assert toy.train(other, second, 3, first=3) == toy.train(model, optimizer, 3, first=3)
    plain, third = toy.build(Mixture, near_budget="min", bf16={"enabled": True})
    plain.load_state(weights, moments)
    assert not plain._outside.params
    del weights["experts.0.bias"]
    with pytest.raises(pstar.ConfigError, match="experts.0.bias: missing"):
        model.load_state(weights)


def test_a_model_without_parameters_in_chunks_is_refused():
    with pytest.raises(pstar.ConfigError, match="no parameters"):
        toy.build(lambda: pstar.exclude(nn.Linear(3, 3)))


class Preferences(nn.Module):
    """Trains one of two models. Its parameters() takes no `recurse` and leaves the other one out."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = toy.Toy(), toy.Toy().requires_grad_(False)

    def parameters(self):
        return self.policy.parameters()

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            least = self.reference(inputs, targets)
        return (self.policy(inputs, targets) - least).exp()


@pytest.mark.parametrize("near", ["min", "100%"])
def test_a_model_that_overrides_parameters_trains_what_the_method_gives(near):
    model = toy.compare(Preferences, lambda model, step: model(*toy.share(step, 0, 1)), 4, near_budget=near,
                        default_chunk_size=5_000)
    assert "reference.embed.weight" in model.layout.slots
    with pytest.raises(pstar.StateError, match="no state_dict"):
        model.module.state_dict()


class RunsAModule(torch.autograd.Function):
    """The module's output; saves its parameters, as the adjoint method of a differential equation does."""

    @staticmethod
    def forward(ctx, module: nn.Module, x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        ctx.module = module
        ctx.save_for_backward(x, *params)
        return module(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *params = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.module(x), (x, *params), grad)


class Adjoint(toy.Toy):
    def __init__(self, keep=lambda module: module) -> None:
        super().__init__()
        self.middle = keep(nn.Linear(toy.WIDTH, toy.WIDTH))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = RunsAModule.apply(self.middle, self.embed(inputs), *self.middle.parameters())
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def test_a_function_that_saves_parameters_of_a_module_is_told_to_exclude_the_module():
    model, _ = toy.build(Adjoint, near_budget="min", default_chunk_size=5_000)
    with pytest.raises(pstar.StateError, match="read parameter middle.weight without .*, or .* by pstar.exclude.module.$"):
        model(*toy.share(0, 0, 1))
    toy.compare(lambda: Adjoint(pstar.exclude), lambda model, step: model(*toy.share(step, 0, 1)), 4,
                default_chunk_size=5_000)
