"""param.grad is None while the gradient is in a chunk: whoever asks for it gets one line in place of a silent None."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pstar
from pstar.chunks.borrowed import Idle, Lender
from tests import toy

PLACES = [{"near_budget": "min"}, {"near_budget": "100%"}, {"near_budget": "60%", "near_states": "fill"},
          {"near_budget": "min", "speculative_update": True},
          {"near_budget": "auto", "near_memory": "1GiB", "default_chunk_size": 5_000}]    # resident from the fourth step on
REFUSED = r"reads or writes embed\.weight\.grad, but the gradient is in a chunk: clip with the configuration's"


def clip_by_torch(model: nn.Module) -> object:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def clip_values(model: nn.Module) -> object:
    return torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)


def read_all(model: nn.Module) -> object:
    return [param.grad for param in model.parameters()]


def zero_by_module(model: nn.Module) -> object:
    return model.zero_grad()


def set_to_none(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


def another_optimizer(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def steps_in_which_it_is_refused(model_func, num_steps: int, use, of_pytorch: bool, keys: dict) -> None:
    """of_pytorch: the program calls loss.backward(), as one process may."""
    model, optimizer = toy.build(model_func, **keys)
    for number in range(num_steps):
        loss = model(*toy.batch(number))
        loss.backward() if of_pytorch else model.backward(loss)
        with pytest.raises(pstar.StateError, match=REFUSED):
            use(model)
        optimizer.step()
        assert read_all(model) == [None] * len(list(model.parameters()))


@pytest.mark.parametrize("of_pytorch", [False, True])
@pytest.mark.parametrize("keys", PLACES, ids=str)
@pytest.mark.parametrize("use", [clip_by_torch, clip_values, read_all, zero_by_module, set_to_none, another_optimizer])
def test_between_backward_and_update_grad_is_refused(use, keys, of_pytorch):
    steps_in_which_it_is_refused(toy.Toy, 4, use, of_pytorch, keys)


@pytest.mark.parametrize("keys", PLACES, ids=str)
def test_at_every_other_time_grad_is_none_as_in_pytorch(keys):
    def forget(model: nn.Module, step: int) -> None:
        model.zero_grad()
        set_to_none(model)
        assert not any(read_all(model))

    toy.compare(toy.Toy, lambda model, step: model(*toy.batch(step)), 5, before=forget, **keys)


class WithUnused(toy.Toy):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)


@pytest.mark.parametrize("keys", PLACES, ids=str)
def test_a_parameter_without_a_gradient_may_be_asked(keys):
    model, _ = toy.build(WithUnused, **keys)
    model.backward(model(*toy.batch(0)))
    assert model.module.unused.weight.grad is None


@pytest.mark.parametrize("keys", PLACES, ids=str)
def test_with_accumulation_a_hook_of_the_model_finds_its_gradient(keys):
    """In the second micro-step: the sum of the first one is in the chunk, this one's gradient is in .grad."""
    found = []

    class Looking(toy.Toy):
        def __init__(self) -> None:
            super().__init__()
            self.norm.weight.register_post_accumulate_grad_hook(lambda param: found.append(param.grad.norm().item()))

    model, optimizer = toy.build(Looking, gradient_accumulation_steps=2, **keys)
    toy.train(model, optimizer, 5, num_micros=2)
    assert len(found) == 10 and min(found) > 0


def test_with_everything_near_parameters_are_read_and_evaluated_between_backward_and_update():
    def also_reads(model: nn.Module, step: int) -> torch.Tensor:
        loss = model(*toy.batch(step))
        if step == 2:
            loss = loss + model(*toy.batch(7))    # a second forward, after a first backward
        return loss

    plain = toy.compare(toy.Toy, also_reads, 3, near_budget="100%")
    model, optimizer = toy.build(near_budget="100%")
    for step in range(3):
        model.backward(also_reads(model, step))
        norm = model.module.embed.weight.norm()
        with torch.no_grad():
            before = model.eval()(*toy.batch(9)).item()
        model.train()
        assert norm == model.module.embed.weight.norm() and before == model.module(*toy.batch(9)).item()
        optimizer.step()
        assert norm != model.module.embed.weight.norm()
    expected = plain.gather_state()[0]
    assert all(torch.equal(value, expected[name]) for name, value in model.gather_state()[0].items())


class Recomputed(toy.Toy):
    """Reentrant checkpoints: each runs a backward of its own inside the program's."""

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = checkpoint(self.run, block, x, use_reentrant=True)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    @staticmethod
    def run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        assert not isinstance(block.up.weight, Idle), "torch.compile would compile this forward anew"
        return block(x)


@pytest.mark.parametrize("of_pytorch", [False, True])
def test_with_everything_near_no_parameter_is_idle_while_backward_runs_modules(of_pytorch):
    steps_in_which_it_is_refused(Recomputed, 2, read_all, of_pytorch, {"near_budget": "100%"})


@pytest.mark.parametrize("keys", PLACES[:2], ids=str)
def test_mutation_without_the_check_clipping_does_nothing_in_silence(keys, monkeypatch):
    monkeypatch.setattr(Lender, "check_grad", lambda self, name: None)
    model, _ = toy.build(**keys)
    model.backward(model(*toy.batch(0)))
    assert clip_by_torch(model) == 0
