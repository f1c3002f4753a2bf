"""Training loops as users and trainers write them: the engine follows plain PyTorch, or refuses in one line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import pstar
from tests import toy
from tests.borrowers import AcrossBlocks, Deep, TiedByLinear, rows

STEPS = 4


class Plain:
    """A model and its AdamW behind the calls of an engine."""

    def __init__(self, model_func: Callable[[], nn.Module]) -> None:
        torch.manual_seed(0)
        self.module = model_func()
        self.optimizer = toy.adamw(self.module.parameters(), lr=toy.LR, weight_decay=toy.WEIGHT_DECAY)
        self.backward = torch.Tensor.backward

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        return self.module(*args)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: param.detach().clone() for name, param in self.module.named_parameters()}


class Chunked(Plain):
    def __init__(self, model_func: Callable[[], nn.Module], **keys) -> None:
        self.model, self.optimizer = toy.build(model_func, **{"default_chunk_size": 300, "gradient_clipping": 0.0} | keys)
        self.module, self.backward = self.model.module, self.model.backward

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        return self.model(*args)

    def weights(self) -> dict[str, torch.Tensor]:
        return self.model.gather_state()[0]


Run = Plain | Chunked


def lightning(run: Run) -> list[float]:
    """zero_grad between forward and backward, all three in a closure's order."""
    losses = []
    for step in range(STEPS):
        loss = run(rows(step))
        run.optimizer.zero_grad()
        run.backward(loss)
        run.optimizer.step()
        losses.append(loss.item())
    return losses


def accelerate(run: Run) -> list[float]:
    """backward, step, the scheduler, zero_grad at the end."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1 / (1 + step))
    losses = []
    for step in range(STEPS):
        loss = run(rows(step))
        run.backward(loss)
        run.optimizer.step()
        scheduler.step()
        run.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def accumulated_by_hand(run: Run) -> list[float]:
    """Two backwards before a step, the losses halved by the user."""
    losses = []
    for step in range(STEPS):
        run.optimizer.zero_grad()
        for part in rows(step).chunk(2):
            loss = run(part) / 2
            run.backward(loss)
            losses.append(loss.item())
        run.optimizer.step()
    return losses


def changed_groups(run: Run) -> list[float]:
    """The learning rate and the weight decay change in mid-run."""
    losses = []
    for step in range(STEPS):
        run.optimizer.zero_grad()
        loss = run(rows(step))
        run.backward(loss)
        for group in run.optimizer.param_groups:
            group["lr"] = toy.LR / (step + 1)
            group["weight_decay"] = 0.1 * step
        run.optimizer.step()
        losses.append(loss.item())
    return losses


def frozen_and_thawed(run: Run) -> list[float]:
    """The borrowed table is frozen for two steps."""
    losses = []
    for step in range(STEPS + 1):
        next(run.module.parameters()).requires_grad_(step not in (1, 2))
        run.optimizer.zero_grad()
        loss = run(rows(step))
        run.backward(loss)
        run.optimizer.step()
        losses.append(loss.item())
    return losses


def evaluated_in_the_middle(run: Run) -> list[float]:
    """An evaluation between the forward and the backward of a step, and one between two steps."""
    losses = []

    def evaluate(step: int) -> None:
        run.module.eval()
        with torch.no_grad():
            losses.append(run(rows(100 + step)).item())
        run.module.train()

    for step in range(STEPS):
        run.optimizer.zero_grad()
        loss = run(rows(step))
        if step % 2:
            evaluate(step)
        run.backward(loss)
        run.optimizer.step()
        evaluate(step)
        losses.append(loss.item())
    return losses


def goes_on_after_errors(run: Run) -> list[float]:
    """A forward that fails in the middle, then one whose loss is dropped."""
    losses = []
    for step in range(STEPS):
        run.optimizer.zero_grad()
        if step == 1:
            handle = list(run.module.modules())[-1].register_forward_pre_hook(fail)
            with pytest.raises(ZeroDivisionError):
                run(rows(step))
            handle.remove()
        if step == 2:
            run(rows(step))
        loss = run(rows(step))
        run.backward(loss)
        run.optimizer.step()
        losses.append(loss.item())
    return losses


def fail(*_: object) -> None:
    raise ZeroDivisionError


LOOPS = (lightning, accelerate, accumulated_by_hand, changed_groups, frozen_and_thawed, evaluated_in_the_middle,
         goes_on_after_errors)


@pytest.mark.each
@pytest.mark.parametrize("near", ["min", "50%", "auto"])
@pytest.mark.parametrize("model_func", [TiedByLinear, AcrossBlocks, Deep], ids=lambda each: each.__name__)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_gives_the_bits_of_plain_pytorch(loop, model_func, near):
    plain, chunked = Plain(model_func), Chunked(model_func, near_budget=near)
    assert loop(chunked) == loop(plain)
    for name, value in plain.weights().items():
        assert torch.equal(chunked.weights()[name], value), name


@pytest.mark.parametrize("near", ["min", "auto"])
def test_two_engines_trained_in_turn(near):
    """As a generator and a critic: each one's loss needs both."""

    def train(first: Run, second: Run) -> list[float]:
        losses = []
        for step in range(STEPS):
            for run, other in ((first, second), (second, first)):
                run.optimizer.zero_grad()
                loss = run(rows(step)) * 2
                with torch.no_grad():
                    constant = other(rows(step + 50))
                loss = loss + constant
                run.backward(loss)
                run.optimizer.step()
                losses.append(loss.item())
        return losses

    plain = train(Plain(TiedByLinear), Plain(AcrossBlocks))
    assert train(Chunked(TiedByLinear, near_budget=near), Chunked(AcrossBlocks, near_budget=near)) == plain


class Misshapen(TiedByLinear):
    """Its first forward gives the borrowed weight half of the features."""

    failed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.failed:
            return super().forward(x)
        self.failed = True
        return nn.functional.linear(x[:, :8], self.head.weight).mean()


def test_an_error_inside_a_borrowing_operation_leaves_nothing_in_use():
    run, plain = Chunked(Misshapen, near_budget="min"), Plain(TiedByLinear)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run(rows(0))
    assert not any(run.model._chunks.parameters.uses.values()) and not run.model._hooks.lender.open
    with pytest.raises(pstar.StateError, match="between two steps"):
        run.module.head.weight.norm()
    assert lightning(run) == lightning(plain)
