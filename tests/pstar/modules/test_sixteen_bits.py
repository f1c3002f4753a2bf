"""16 bits: norms with running statistics, which stay fp32, and the line where a model mixes dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pstar

BITS = [{"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}]
STEPS = 4


def rows(step: int) -> torch.Tensor:
    return torch.randn(12, 4, 8, generator=torch.Generator().manual_seed(step))


class Normed(nn.Module):
    """Batch norm, and an instance norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.batch_norm = nn.BatchNorm1d(4)
        self.instance_norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.second(self.batch_norm(self.first(x)).tanh())
        return self.out(self.instance_norm(h).tanh()).float().square().mean()


def trained(keys: dict) -> tuple[list[float], pstar.Engine]:
    torch.manual_seed(0)
    model, optimizer = pstar.initialize_engine(Normed, 0, keys)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(rows(step))
        model.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(model.eval()(rows(99)).item())
    return losses, model


@pytest.mark.parametrize("keys", BITS, ids=["bf16", "fp16"])
def test_running_statistics_stay_fp32_and_no_placement_changes_a_number(keys):
    exact, wide = trained({})
    runs = [trained(keys | {"near_budget": near}) for near in ("100%", "min")]
    assert runs[0][0] == runs[1][0]
    assert runs[0][0] == pytest.approx(exact, rel=0.05)    # bf16 has 8 bits
    for norm in ("batch_norm", "instance_norm"):
        mean, weight = (getattr(getattr(runs[1][1].module, norm), name) for name in ("running_mean", "weight"))
        assert mean.dtype == torch.float32 and weight.dtype != torch.float32 and isinstance(weight, nn.Parameter)
        torch.testing.assert_close(mean, getattr(wide.module, norm).running_mean, rtol=0, atol=0.02)


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("shift", torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) + self.shift).square().mean()


@pytest.mark.parametrize("near", ["100%", "min"])
@pytest.mark.parametrize("keys", BITS, ids=["bf16", "fp16"])
def test_a_model_that_mixes_dtypes_is_told_which_module_and_what_to_do(keys, near):
    model, _ = pstar.initialize_engine(Shifted, 0, keys | {"near_budget": near})
    with pytest.raises(pstar.ConfigError, match=r"^module 'last' mixes dtypes \(.*float16.* buffers .* keep their dtype"):
        model(rows(0))
    model.module.shift = model.module.shift.to(next(model.parameters()).dtype)
    model.backward(model(rows(0)))    # nothing of the failed forward is left


MIXES = {
    "a norm": lambda first, wide: nn.functional.layer_norm(wide, (8,), first.weight[0], first.bias),
    "scatter": lambda first, wide: torch.zeros(3, 8).scatter_add(0, torch.zeros(1, 8, dtype=torch.long), first.weight),
    "index_add": lambda first, wide: wide.index_add(0, torch.arange(2), first.weight[:2]),
    "an RNN": lambda first, wide: nn.GRU(8, 8, dtype=first.weight.dtype)(wide)[0],
    "attention": lambda first, wide: nn.functional.scaled_dot_product_attention(wide[None], *[first.weight[None]] * 2),
}  # fmt: skip


class Mixes(nn.Module):
    """Computes with its layer, and with one fp32 tensor that it makes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.how = nn.Linear(8, 8), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return MIXES[self.how](self.first, torch.ones(3, 8)).square().mean() + self.first(x).mean()


@pytest.mark.parametrize("how", MIXES)
def test_errors_of_torch_about_two_dtypes_get_the_same_line(how):
    model, _ = pstar.initialize_engine(lambda: Mixes(how), 0, BITS[0] | {"near_budget": "min"})
    with pytest.raises(pstar.ConfigError, match=r"^the model mixes dtypes \(.*\): parameters and inputs are bfloat16, but"):
        model(rows(0))


class CastsByItself(nn.Module):
    """As a model whose author had bf16 parameters in mind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.bfloat16()).square().mean()


def test_in_fp32_a_model_that_casts_to_16_bits_by_itself_is_told_that_the_configuration_names_none():
    model, _ = pstar.initialize_engine(CastsByItself, 0, {})
    with pytest.raises(pstar.ConfigError, match="^module 'layer' mixes dtypes .* float32 .no bf16 or fp16 in the config"):
        model(rows(0))
    model, _ = pstar.initialize_engine(CastsByItself, 0, BITS[0])
    model.backward(model(rows(0)))


def test_other_errors_stay_what_they_are():
    model, _ = pstar.initialize_engine(Shifted, 0, BITS[0])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(3, 5))
    model, _ = pstar.initialize_engine(lambda: nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4)), 0, BITS[0])
    with pytest.raises(RuntimeError, match="^Expected tensor for argument #1 'indices' .* scalar types: Long"):
        model(torch.ones(3))


def test_a_norm_may_give_up_its_statistics_later():
    model, _ = pstar.initialize_engine(Normed, 0, BITS[0])
    norm = model.module.batch_norm
    norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
    model.backward(model(rows(0)))
