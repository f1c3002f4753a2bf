"""The start makes initial values in little memory, which it uses again, and with the bits of a plain start."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pstar
from pstar.kernels import join_master, split_master
from pstar.kernels.adam import SPLIT_ELEMS
from pstar.modules import lazy_init
from pstar.modules.lazy_init import record, storage_key
from tests import toy
from tests.pstar.test_habits import Loss, compare

WIDTH = 24


class Equal(nn.Module):
    """Layers of one size, initialised twice; some parameters stay with PyTorch, and a buffer has the same size."""

    def __init__(self, layers: int = 6, with_torch: tuple[int, ...] = ()):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.register_buffer("shift", torch.randn(WIDTH, WIDTH))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.02)
        for number in with_torch:
            pstar.exclude(self.layers[number])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) @ self.shift
        return x.pow(2).sum()


def storages_made(layers: int, again: bool, monkeypatch) -> int:
    """How many new storages a replay asks for, if each value's memory may be used again or not."""
    sizes, real = [], torch.UntypedStorage

    class Counted(real):
        def __new__(cls, num_bytes):
            sizes.append(num_bytes)
            return real(num_bytes)

    module, recipe = record(lambda: Equal(layers))
    wanted = {storage_key(tensor): name for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    with monkeypatch.context() as patch:
        patch.setattr(lazy_init.torch, "UntypedStorage", Counted)
        recipe.replay(wanted, lambda name, memory: again)
    return len(sizes)


def test_values_that_are_handed_over_leave_their_memory_to_the_next_ones(monkeypatch):
    few, many = (storages_made(layers, True, monkeypatch) for layers in (3, 30))
    assert few == many, "it does not grow with the layers"
    assert storages_made(30, False, monkeypatch) > few + 25


@pytest.mark.parametrize("with_torch", [(), (0,), (2, 3), (5,)], ids=str)
def test_memory_that_is_kept_is_never_used_again(with_torch):
    torch.manual_seed(3)
    plain = Equal(with_torch=with_torch)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    model, _ = pstar.initialize_engine(lambda: Equal(with_torch=with_torch), 0, toy.config(near_budget="min"))
    assert torch.equal(torch.rand(1), drawn)
    weights, _ = model.gather_state()
    assert weights.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(weights[name], param) for name, param in plain.named_parameters())
    assert torch.equal(dict(model.module.named_buffers())["shift"], plain.shift)


@pytest.mark.parametrize("shape, stride", [((SPLIT_ELEMS + 5,), None), ((3 * SPLIT_ELEMS,), None), ((7, 11), (1, 7)),
                                           ((0,), None), ((), None)], ids=str)
def test_a_master_splits_into_the_same_halves_in_pieces_and_whole(shape, stride):
    """By the definition: the nearest bf16, ties away from zero, and the difference of the bit patterns."""
    numel = torch.Size(shape).numel()
    bits = torch.randint(-2**31, 2**31, (numel,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    bits[: min(3, numel)] = torch.tensor([0x7F800000, 0x3F808000, -0x407F8000][: numel], dtype=torch.int32)
    bits[3:4] = 0x7FFFFFFF
    master = bits.view(torch.float32).as_strided(shape, stride or torch.empty(shape).stride())
    high, low = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    split_master(master, high, low)
    wide = master.view(torch.int32).to(torch.int64)
    kept = (wide + 0x8000) >> 16
    numbers, joined = ~master.isnan(), join_master(high, low)
    assert torch.equal(high.view(torch.int16)[numbers].to(torch.int64), kept[numbers])
    assert torch.equal(low[numbers].to(torch.int64), (wide - (kept << 16))[numbers])
    assert torch.equal(joined[numbers].view(torch.int32), master[numbers].view(torch.int32))
    assert high[~numbers].isnan().all() and joined[~numbers].isnan().all()


def masked(grad: torch.Tensor) -> torch.Tensor:
    return grad * (torch.arange(16) % 2)


class Masked(Loss):
    """Registers hooks that mask gradients: every second element stays as it was initialised."""

    def __init__(self, after: bool) -> None:
        super().__init__()
        for layer in self.layers:
            if after:
                layer.weight.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", masked(param.grad)))
            else:
                self.handle = layer.weight.register_hook(masked)


@pytest.mark.filterwarnings("error:lazy start is not possible")
@pytest.mark.parametrize("near", ["min", "100%"])
@pytest.mark.parametrize("after", [False, True])
def test_gradient_hooks_of_the_model_survive_its_lazy_start(after, near):
    compare(lambda: Masked(after), near_budget=near)


class Closed(Loss):
    """A hook whose function keeps a tensor that __init__ made."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.arange(16) % 2
        self.layers[0].weight.register_hook(lambda grad: grad * mask)


def test_a_tensor_that_a_function_keeps_is_real():
    with pytest.warns(UserWarning, match=r"keeps a tensor of shape \(16,\), in a function for example"):
        compare(Closed)


def test_the_handle_of_such_a_hook_removes_it():
    def remove(model: nn.Module, step: int) -> None:
        if step == 2:
            getattr(model, "module", model).handle.remove()

    compare(lambda: Masked(False), before=remove)
