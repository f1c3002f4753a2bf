"""Views of a parameter that read its bits in another way: a complex number of two elements, a conjugate, another dtype."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests import toy

WIDTH = 16
NEAR = [{}, {"near_budget": "60%"}, {"near_budget": "auto", "near_memory": "64MiB"}, {"near_budget": "100%"}]


class Filter(nn.Module):
    """As a layer in the frequency domain: its real parameters are pairs, real and imaginary part."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gain, self.rows = nn.Parameter(torch.randn(WIDTH // 2, 2)), nn.Parameter(torch.randn(3, WIDTH // 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(self.before(x).view(-1, WIDTH // 2, 2))
        gain, rows = torch.view_as_complex(self.gain), torch.view_as_complex(self.rows)
        z = z * gain.conj() * rows[1]
        z = z * rows[2].flip(0) + torch.complex(rows[0].conj().imag * z.real, z.imag * rows[1, 2:3].conj().imag)
        return self.after(torch.view_as_real(z).flatten(1))


class Filters(nn.Module):
    """Three filters, and one more use of the first one's gain outside of its module."""

    def __init__(self, recompute: bool = False):
        super().__init__()
        self.filters, self.recompute = nn.ModuleList(Filter() for _ in range(3)), recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.filters:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        gain = torch.view_as_complex(self.filters[0].gain).conj()
        return torch.fft.irfft(torch.fft.rfft(x)[:, 1:] * gain, n=WIDTH).square().mean()


def loss_of(model, step: int) -> torch.Tensor:
    return model(torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step)))


@pytest.mark.parametrize("keys", [*NEAR, {"offload_activations": True}], ids=str)
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_a_complex_view_of_a_parameter_gives_the_same_bits(recompute: bool, keys: dict) -> None:
    toy.compare(lambda: Filters(recompute), loss_of, 4, default_chunk_size=300, **keys)


class SignOfBits(torch.autograd.Function):
    """x times the sign of a weight, which it keeps as integers."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight.detach().view(torch.int32)[1:])
        return x * (1 - 2 * (weight.view(torch.int32)[1:] < 0).float())

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        bits, = ctx.saved_tensors
        assert bits.dtype is torch.int32
        return grad * (1 - 2 * (bits < 0).float()), None


class Signed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.pad(SignOfBits.apply(layer(x)[:, 1:], layer.bias), (1, 0))
        return x.square().mean()


@pytest.mark.parametrize("keys", NEAR, ids=str)
def test_a_view_of_a_parameter_as_integers_gives_the_same_bits(keys: dict) -> None:
    toy.compare(Signed, loss_of, 4, default_chunk_size=300, **keys)
