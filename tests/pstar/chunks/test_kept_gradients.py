"""Where all model data stay near, autograd's gradients serve for the update: no chunk holds a copy of them."""

import pytest
import torch

import pstar
from pstar.chunks.kept_gradients import KeptGradients
from pstar.errors import BudgetError
from pstar.memory.tier import NEAR, Tier
from pstar.numerics import grad_norm
from tests import toy

CPU = torch.device("cpu")


def grad_bytes(model: pstar.Engine) -> int:
    return model.near.used_by_kind["grad"]


def test_no_gradient_is_copied_and_near_counts_them_until_their_update(monkeypatch):
    model, optimizer = toy.build(gradient_clipping=toy.CLIP)
    others, its = toy.build(gradient_clipping=toy.CLIP, near_budget="60%")
    numel = sum(param.numel() for param in toy.Toy().parameters())
    for number in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(grad_norm, "store_squared", None)    # a copy into a chunk would call it
            model.backward(model(*toy.batch(number)))
            assert grad_bytes(model) == 4 * numel
            optimizer.step()
        assert grad_bytes(model) == 0
        others.backward(others(*toy.batch(number)))
        its.step()
        assert optimizer.grad_norm == its.grad_norm
    assert grad_bytes(others) == 0
    for (name, one), (_, other) in zip(sorted(model.gather_state()[0].items()), sorted(others.gather_state()[0].items()),
                                       strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("keys, kept", [
    ({}, True),
    ({"bf16": {"enabled": True}}, True),
    ({"gradient_accumulation_steps": 2}, True),
    ({"gradient_accumulation_steps": 2, "bf16": {"enabled": True}}, False),    # bf16 gradients, fp32 sums
    ({"near_budget": "60%"}, False),
    ({"near_memory": "1GiB"}, False),
    ({"offload_activations": True}, False),
])  # fmt: skip
def test_gradients_are_kept_where_nothing_moves_and_their_dtype_is_the_parameters(keys, kept):
    model, _ = toy.build(**keys)
    assert isinstance(model._chunks.gradients, KeptGradients) is kept


class Strange(torch.nn.Module):
    """Gradients that share memory, are transposed, are expanded, or come from two uses."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (torch.nn.Parameter(torch.randn(4, 8)) for _ in range(2))
        self.turned, self.twice = torch.nn.Parameter(torch.randn(8, 8)), torch.nn.Parameter(torch.randn(8, 8))
        self.summed, self.unused = torch.nn.Parameter(torch.randn(8)), torch.nn.Parameter(torch.randn(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.left, self.right])
        hidden = torch.tanh(inputs @ both) @ self.turned.t() @ self.twice
        return (torch.tanh(hidden) @ self.twice).square().mean() + self.summed.sum()


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_gradients_of_any_layout_update_as_adamw_does(micro_steps):
    torch.manual_seed(0)
    expected = Strange()
    adam = torch.optim.AdamW(expected.parameters(), lr=1e-2, weight_decay=0.1)
    torch.manual_seed(0)
    model, optimizer = pstar.initialize_engine(Strange, 0, {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "gradient_accumulation_steps": micro_steps}, device="cpu")
    for number in range(3):
        adam.zero_grad()
        for micro_step in range(micro_steps):
            inputs = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * number + micro_step))
            (expected(inputs) / micro_steps).backward()
            model.backward(model(inputs))
        adam.step()
        optimizer.step()
    weights = model.gather_state()[0]
    for name, param in expected.named_parameters():
        torch.testing.assert_close(weights[name], param.data, rtol=1e-6, atol=1e-7)


def test_dropped_gradients_are_not_counted_and_not_used():
    model, optimizer = toy.build()
    model.backward(model(*toy.batch(0)))
    optimizer.zero_grad()
    assert grad_bytes(model) == 0
    before = model.gather_state()[0]
    optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in model.gather_state()[0].items())


def test_a_tier_counts_memory_that_others_allocate():
    tier = Tier(NEAR, CPU, 1000)
    buffer = tier.allocate(100, torch.float32, "param")
    tier.release(buffer)
    assert tier.idle_bytes == 400
    tier.charge(800, "grad")
    assert (tier.used_bytes, tier.peak_bytes, tier.used_by_kind["grad"]) == (800, 800, 800)
    assert tier.idle_bytes == 0    # idle buffers make room
    with pytest.raises(BudgetError, match="201 bytes for grad do not fit: 800 of 1000"):
        tier.charge(201, "grad")
    tier.discharge(800, "grad")
    assert (tier.used_bytes, tier.peak_bytes) == (0, 800)
