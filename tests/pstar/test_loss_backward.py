"""A program that calls loss.backward(), as in plain PyTorch, gets the bits of model.backward(loss)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import pstar
from pstar.numerics.grad_norm import clip_grad_norm_
from tests import toy

STEPS, MICROS, PARTS = 4, 2, 3


class Checkpointed(toy.Toy):
    """All gradients but the embedding's arrive in backwards inside of the backward."""

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def returned(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return model(inputs, targets)


def of_logits(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(inputs).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten().to(logits.device))


def with_penalty(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Calls torch.autograd.grad before the backward."""
    logits = model(inputs)
    (grad,) = torch.autograd.grad(logits.square().mean(), logits, create_graph=True)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten().to(logits.device)) + grad.square().sum()


def run(of_pytorch: bool, loss_of: Callable = returned, model_func: Callable = toy.Toy, rank: int = 0, num_ranks: int = 1,
        micros: Sequence[int] = (MICROS,) * STEPS, **keys) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(losses, final weights on rank 0); micros: the micro-steps of each step."""
    model, optimizer = toy.build(model_func, gradient_accumulation_steps=MICROS, default_chunk_size=8_000, **keys)
    losses = []
    for step, num_micros in enumerate(micros):
        optimizer.zero_grad()
        for micro in range(num_micros):
            loss = loss_of(model, *toy.share(step, rank, num_ranks, micro, PARTS))
            (loss / num_micros).backward() if of_pytorch else model.backward(loss)
            losses.append(loss.item())
        optimizer.step()
    return losses, model.gather_state()[0]


def plain_run(micros: Sequence[int], num_ranks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same in plain PyTorch, which plays all ranks."""
    torch.manual_seed(0)
    model = toy.Toy()
    params = list(model.parameters())
    optimizer, losses = toy.adamw(params, lr=toy.LR, weight_decay=toy.WEIGHT_DECAY), []
    for step, num_micros in enumerate(micros):
        optimizer.zero_grad()
        for micro in range(num_micros):
            for rank in range(num_ranks):
                loss = model(*toy.share(step, rank, num_ranks, micro, PARTS))
                (loss / num_micros / num_ranks).backward()
                losses.append(loss.item())
        clip_grad_norm_(params, toy.CLIP)
        optimizer.step()
    return losses, {name: param.detach() for name, param in model.named_parameters()}


def assert_equal(found: tuple, expected: tuple) -> None:
    assert found[0] == expected[0]
    for name, value in expected[1].items():
        assert torch.equal(found[1][name], value), name


@pytest.mark.parametrize("keys", [{"near_budget": "min"}, {"near_budget": "50%"}, {"near_budget": "100%"},
                                  {"near_budget": "min", "bf16": {"enabled": True}},
                                  {"near_budget": "50%", "speculative_update": True},
                                  {"near_budget": "50%", "offload_activations": True}], ids=str)  # fmt: skip
@pytest.mark.parametrize("loss_of", [returned, of_logits, with_penalty])
def test_it_gives_the_bits_of_the_engines_backward(keys: dict, loss_of: Callable) -> None:
    assert_equal(run(True, loss_of, **keys), run(False, loss_of, **keys))


@pytest.mark.parametrize("near", ["min", "50%", "100%"])
def test_the_numbers_of_micro_steps_are_the_programs(near: str) -> None:
    """gradient_accumulation_steps is 2. Trainers have fewer at the end of an epoch."""
    micros = [2, 1, 3, 2, 1]
    assert_equal(run(True, micros=micros, near_budget=near), plain_run(micros, 1))


@pytest.mark.parametrize("near", ["min", "100%"])
def test_loss_backward_gives_the_same_bits_where_checkpoints_run_a_backward_inside(near: str) -> None:
    assert_equal(run(True, model_func=Checkpointed, near_budget=near), run(False, model_func=Checkpointed, near_budget=near))


def test_gradients_that_go_elsewhere_are_no_micro_step() -> None:
    model, optimizer = toy.build(gradient_accumulation_steps=2)
    model.backward(with_penalty(model, *toy.batch(0)))
    with pytest.raises(pstar.StateError, match="after 1 of 2 micro-steps"):
        optimizer.step()


def ranks_case(rank: int, num_ranks: int, keys: dict) -> list[tuple]:
    return [run(of_pytorch, of_logits, rank=rank, num_ranks=num_ranks, **keys) for of_pytorch in (True, False)]


@pytest.mark.parametrize("keys", [{"ownership": "whole"}, {"ownership": "sharded", "near_budget": "100%"},
                                  {"communication": "chunk"}], ids=str)  # fmt: skip
def test_gradients_are_averaged_over_the_ranks(ranks, keys: dict) -> None:
    for found, expected in ranks(2).run(ranks_case, {"near_budget": "min"} | keys):
        assert_equal(found, expected)


def fewer_case(rank: int, num_ranks: int, micros: list[int], keys: dict) -> tuple:
    return run(True, rank=rank, num_ranks=num_ranks, micros=micros, **keys)


@pytest.mark.parametrize("keys", [{}, {"ownership": "sharded"}, {"communication": "chunk"},
                                  {"find_unused_parameters": True}], ids=str)  # fmt: skip
def test_ranks_reduce_what_fewer_micro_steps_have_summed(ranks, keys: dict) -> None:
    """Tolerance: as in test_engine_ranks.py."""
    micros = [2, 1, 2, 1, 1]
    losses, weights = plain_run(micros, 2)
    results = ranks(2).run(fewer_case, micros, {"near_budget": "min"} | keys)
    for rank, result in enumerate(results):
        assert result[0] == pytest.approx(losses[rank::2], rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(results[0][1][name], value, rtol=0, atol=1e-4)


def test_without_the_loss_scale_it_is_refused() -> None:
    model, optimizer = toy.build(fp16={"enabled": True})
    model(*toy.batch(0)).backward()
    with pytest.raises(pstar.StateError, match=r"lack fp16's loss scale: call model\.backward\(loss\)"):
        optimizer.step()
    optimizer.zero_grad()
    model.backward(model(*toy.batch(0)))
    optimizer.step()


@dataclass
class Result:
    """Hides its tensor from the engine."""

    loss: torch.Tensor


class Hidden(toy.Toy):
    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> Result:
        return Result(super().forward(inputs, targets))


def test_a_loss_that_the_engine_did_not_see_is_refused() -> None:
    model, optimizer = toy.build(Hidden, gradient_accumulation_steps=2)
    for _ in range(2):
        model(*toy.batch(0)).loss.backward()
    with pytest.raises(pstar.StateError, match="of a tensor that the model did not return"):
        optimizer.step()


class Product(torch.autograd.Function):
    """x * weight. Its backward fails while `fails` is set, with the weight in use."""

    fails = False

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        if Product.fails:
            raise RuntimeError("on purpose")
        return grad * weight, (grad * x).sum((0, 1))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(toy.WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.weight)


class Scaled(toy.Toy):
    """Its backward fails after the head's gradient and before the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, Scale())


@pytest.mark.parametrize("near", ["min", "100%"])
def test_after_one_that_failed_the_next_step_is_as_if_it_had_not_been(near: str) -> None:
    results = []
    for fails in (True, False):
        model, optimizer = toy.build(Scaled, near_budget=near, default_chunk_size=8_000)
        for step in range(STEPS):
            if fails and step in (0, 2):
                Product.fails = True
                with pytest.raises(RuntimeError, match="on purpose"):
                    model(*toy.batch(7)).backward()
                Product.fails = False
                optimizer.zero_grad()
            loss = model(*toy.batch(step))
            assert not any(model._chunks.parameters.uses.values())
            loss.backward()
            optimizer.step()
        results.append((loss.item(), model.gather_state()[0]))
    assert_equal(*results)
