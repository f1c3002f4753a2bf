"""The start makes initial values in little memory, which it uses again, and with the bits of a plain start."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

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


class Seeded(Loss):
    """Four more layers; `seed` is called before each of them, with the number and the layer."""

    def __init__(self, seed) -> None:
        super().__init__()
        for number in range(4):
            seed(number, self)
            self.layers.append(nn.Linear(16, 16))


def two_seeds(number: int, model: nn.Module) -> None:
    torch.manual_seed(number % 2)


def same_seed(number: int, model: nn.Module) -> None:
    torch.random.manual_seed(7)


def fork(number: int, model: nn.Module) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(9)
        nn.init.normal_(model.layers[number].weight)


def back_and_forth(number: int, model: nn.Module) -> None:
    if number == 1:
        model.state = torch.get_rng_state()
    if number > 1:
        torch.set_rng_state(model.state)


def own_generator(number: int, model: nn.Module) -> None:
    generator = model.__dict__.setdefault("generator", torch.Generator())
    if number != 2:
        generator.manual_seed(3)
    initialise = nn.init.orthogonal_ if number == 3 else nn.init.normal_
    initialise(model.layers[number].weight, generator=generator)


def by_the_generator_itself(number: int, model: nn.Module) -> None:
    torch.default_generator.manual_seed(7)


def state_of_an_own_generator(number: int, model: nn.Module) -> None:
    own_generator(0 if number == 0 else 2, model)
    state = model.__dict__.setdefault("state", model.generator.get_state())
    model.generator.set_state(state)


def state_of_the_generator_itself(number: int, model: nn.Module) -> None:
    state = model.__dict__.setdefault("state", torch.default_generator.get_state())
    torch.default_generator.set_state(state)


@pytest.mark.parametrize("seed", [two_seeds, same_seed, fork, back_and_forth, own_generator, by_the_generator_itself])
@pytest.mark.filterwarnings("error:lazy start is not possible")
def test_a_model_that_sets_random_generators_starts_lazily_with_the_same_values(seed):
    compare(lambda: Seeded(seed))


@pytest.mark.parametrize("seed", [state_of_the_generator_itself, state_of_an_own_generator])
def test_where_that_cannot_be_recorded_the_model_is_built_as_it_is(seed):
    with pytest.warns(UserWarning, match="reads the state of a random generator, and sets it later"):
        compare(lambda: Seeded(seed))


@pytest.mark.filterwarnings("ignore:lazy start is not possible")
@pytest.mark.parametrize("seed", [two_seeds, fork, by_the_generator_itself, state_of_the_generator_itself])
def test_what_the_program_draws_after_the_start_is_what_it_draws_after_a_plain_one(seed):
    torch.manual_seed(5)
    Seeded(seed)
    expected = torch.rand(3)
    torch.manual_seed(5)
    pstar.initialize_engine(lambda: Seeded(seed), 0, toy.config(near_budget="min"))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.filterwarnings("ignore:lazy start is not possible")
def test_a_model_that_cannot_start_lazily_draws_from_python_and_numpy_once():
    class Draws(Loss):
        def __init__(self) -> None:
            super().__init__()
            nn.init.constant_(self.layers[0].bias, random.random() + numpy.random.rand())
            self.other = self.layers[0].weight + 1    # a tensor that is neither parameter nor buffer

    def draw() -> list[float]:
        random.seed(1)
        numpy.random.seed(1)
        return [Draws().layers[0].bias[0].item(), random.random(), numpy.random.rand()]

    expected = draw()
    random.seed(1)
    numpy.random.seed(1)
    model, _ = toy.build(Draws)
    assert [model.gather_state()[0]["layers.0.bias"][0].item(), random.random(), numpy.random.rand()] == expected


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


@pytest.mark.filterwarnings("error:lazy start is not possible")
def test_a_tensor_on_the_device_of_a_parameter_is_made_lazily():
    """Nystromformer makes a buffer so."""
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            device = self.first.weight.device
            self.second = nn.Linear(8, 8, device=device)
            self.register_buffer("shift", torch.arange(8.0, device=device) + torch.randn(8).to(device))
            self.register_buffer("ones", torch.ones_like(self.shift, device=device))
            self.first.weight = self.first.weight.to(device)    # the parameter itself

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x) + self.shift + self.ones).square().mean()

    toy.compare(Positions, lambda model, step: model(torch.ones(2, 8)), 3)


class FrozenNorm(nn.Module):
    """A norm in buffers. Like those of DETR in Transformers it takes the values of another norm, unless that one is on the
    meta device."""

    def __init__(self, norm: nn.LayerNorm, asks) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(16))
        if not asks(norm.weight):
            self.weight.copy_(norm.weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Frozen(Loss):
    def __init__(self, asks) -> None:
        super().__init__()
        norm = nn.LayerNorm(16)
        nn.init.normal_(norm.weight)
        self.norm = FrozenNorm(norm, asks)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(h))


ASKS = {
    "device": lambda weight: weight.device == torch.device("meta"),
    "device.type": lambda weight: weight.data.device.type == "meta",
    "is_meta": lambda weight: weight.is_meta,
    "is_cpu": lambda weight: not weight[:3].is_cpu,
    "cpu()": lambda weight: weight.cpu() is not weight,
}  # fmt: skip


@pytest.mark.filterwarnings("error:lazy start is not possible")
@pytest.mark.parametrize("question", ASKS)
def test_a_model_that_asks_for_the_meta_device_starts_lazily_with_the_same_values(question):
    compare(lambda: Frozen(ASKS[question]))


@pytest.mark.filterwarnings("error:lazy start is not possible")
def test_a_model_that_compares_addresses_starts_lazily_with_the_same_values():
    class Compares(Loss):
        def __init__(self) -> None:
            super().__init__()
            first, second = (self.layers[number].weight for number in (0, 1))
            if first.data_ptr() == second.data_ptr() or first.data_ptr() != first[:2].data_ptr():
                nn.init.zeros_(second)
            if first[0].data_ptr() == first[1].data_ptr() or first[3].data_ptr() != first.detach()[3:].data_ptr():
                nn.init.zeros_(first)

    compare(Compares)


@pytest.mark.parametrize("question", ["device", "is_meta"])
def test_mutation_without_the_answers_a_buffer_has_other_values(question, monkeypatch):
    monkeypatch.setattr(lazy_init, "ANSWERS", {})
    with pytest.raises(AssertionError, match="step 0"):
        compare(lambda: Frozen(ASKS[question]))


def test_a_tensor_that_a_function_keeps_is_real():
    with pytest.warns(UserWarning, match=r"keeps a tensor of shape \(16,\), in a function for example"):
        compare(Closed)


def test_the_handle_of_such_a_hook_removes_it():
    def remove(model: nn.Module, step: int) -> None:
        if step == 2:
            getattr(model, "module", model).handle.remove()

    compare(lambda: Masked(False), before=remove)


def test_an_engine_starts_under_a_profiler_that_keeps_its_tensors():
    warned = pytest.warns(UserWarning, match=r"a profiler with record_shapes .* \(start it after initialize_engine\)")
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True), warned:
        compare(Loss)


@pytest.mark.filterwarnings("error:lazy start is not possible")
def test_under_another_profiler_the_start_stays_lazy():
    with profile(activities=[ProfilerActivity.CPU], with_stack=True):
        compare(Loss)
