"""Uses of models that no chapter has: the engine gives plain PyTorch's numbers, or refuses in one line with the reason."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from torch import nn

import pstar
from pstar.memory.tier import Tier
from tests import toy

STEPS = 4


def x(step: int, rows: int = 6) -> torch.Tensor:
    """(rows, 16), a function of the number alone."""
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(step))


class Deep(nn.Module):
    """Five equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer(h).tanh()
        return h


class Loss(Deep):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return super().forward(h).square().mean()


def compare(model_func, loss_of=lambda model, step: model(x(step)), **options) -> pstar.Engine:
    return toy.compare(model_func, loss_of, STEPS, **options)


class Positions(nn.Module):
    """Returns a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(40, 16))

    def forward(self, length: int) -> torch.Tensor:
        return self.table[:length]


class AddedEverywhere(Deep):
    """Positions that every layer adds, long after their chunk has left near."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        positions = self.positions(len(h))
        for layer in self.layers:
            h = layer(h + positions).tanh()
        return h.square().mean()


def test_a_view_of_a_parameter_that_a_module_returned_outlives_its_chunk():
    compare(AddedEverywhere, default_chunk_size=700)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_where_nobody_keeps_a_view_every_near_buffer_is_used_again(prefetch, monkeypatch):
    """Also buffers that a copy read: with a slow link the worker releases a buffer before the next user takes it."""
    found, shared = [], Tier.shared
    monkeypatch.setattr(Tier, "shared", staticmethod(lambda buffer: found.append(shared(buffer)) or found[-1]))
    model, optimizer = toy.build(near_budget="min", default_chunk_size=5_000, prefetch=prefetch, simulated_link=3e7)
    toy.train(model, optimizer, STEPS)
    assert len(found) > 10 and not any(found)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_gradient_penalty_outside_the_model(prefetch):
    def penalised(model: nn.Module, step: int) -> torch.Tensor:
        inputs = x(step).requires_grad_()
        out = model(inputs).sum()
        grad, = torch.autograd.grad(out, inputs, create_graph=True)
        return (grad.norm(2, dim=1) - 1).square().mean() + out.square()

    compare(Deep, penalised, prefetch=prefetch)


@pytest.mark.parametrize("keys", [{}, {"prefetch": 0}, {"near_budget": "auto"},
                                  {"near_budget": "45%", "near_states": "fill"}])
def test_evaluation_in_inference_mode(keys):
    def evaluate(model: nn.Module, step: int) -> None:
        with torch.inference_mode():
            assert not model.eval()(x(99)).requires_grad
        model.train()

    model = compare(Loss, before=evaluate, **keys)
    assert not any(param.is_inference() for param in model.parameters())


class Normed(nn.Module):
    """Running statistics, and a mask with infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.register_buffer("mask", torch.full((16,), float("-inf")).masked_fill(torch.arange(16) < 12, 0.0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.layer(h)) + self.mask).softmax(-1).square().mean()


def test_running_statistics_are_in_a_checkpoint(tmp_path):
    model = compare(Normed)
    model.save_checkpoint(tmp_path / "saved")
    other, _ = toy.build(Normed)
    other.load_checkpoint(tmp_path / "saved")
    for name, buffer in model.module.named_buffers():
        assert torch.equal(dict(other.module.named_buffers())[name], buffer), name
    assert other.module.norm.num_batches_tracked == STEPS
    with torch.no_grad():
        assert model.eval()(x(9)).item() == other.eval()(x(9)).item()


class WithoutElements(Loss):
    def __init__(self) -> None:
        super().__init__()
        self.empty, self.outside = nn.Linear(0, 3, bias=False), pstar.exclude(nn.Linear(3, 0, bias=False))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return super().forward(h) + self.empty(h[:, :0]).sum() + self.outside(h[:, :3]).sum()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_checkpoint_of_a_model_with_parameters_without_elements(tmp_path):
    compare(WithoutElements).save_checkpoint(tmp_path / "saved")
    other, _ = toy.build(WithoutElements, near_budget="100%")
    other.load_checkpoint(tmp_path / "saved")
    assert other.gather_state()[0]["empty.weight"].shape == (3, 0)


def test_an_update_in_the_middle_of_its_micro_steps_is_refused_and_zero_grad_begins_anew():
    model, optimizer = toy.build(Loss, gradient_accumulation_steps=2)
    model.backward(model(x(0)))
    with pytest.raises(pstar.StateError, match=r"step\(\) after 1 of 2 micro-steps"):
        optimizer.step()
    optimizer.zero_grad()
    for step in (0, 1):
        model.backward(model(x(step)))
    optimizer.step()
    other, other_optimizer = toy.build(Loss, gradient_accumulation_steps=2)
    for step in (0, 1):
        other.backward(other(x(step)))
    other_optimizer.step()
    for name, value in other.gather_state()[0].items():
        assert torch.equal(model.gather_state()[0][name], value), name


class Fails(torch.autograd.Function):
    """A backward that fails once."""

    error: Exception | None = None

    @staticmethod
    def forward(ctx, h: torch.Tensor) -> torch.Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        error, Fails.error = Fails.error, None
        if error is not None:
            raise error
        return grad


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_a_backward_that_failed_is_no_micro_step(micro_steps):
    model, optimizer = toy.build(Loss, gradient_accumulation_steps=micro_steps)
    Fails.error = RuntimeError("on purpose")
    with pytest.raises(RuntimeError, match="on purpose"):
        model.backward(Fails.apply(model(x(0))))
    for step in range(micro_steps):
        model.backward(model(x(step)))
        assert model._hooks.last_micro_step == (step + 1 == micro_steps)
    optimizer.step()


@pytest.mark.parametrize("near", ["min", "auto"])
def test_a_state_dict_of_placeholders_is_refused(near):
    model, _ = toy.build(Loss, near_budget=near)
    for module in (model, model.module, model.module.layers[1]):
        with pytest.raises(pstar.StateError, match="have no state_dict"):
            module.state_dict()
    with pytest.raises(pstar.StateError, match="have no state_dict"):
        model.module.load_state_dict({name: torch.ones(param.shape) for name, param in model.module.named_parameters()})
    model, _ = toy.build(Excluding)
    assert list(model.module.outside.state_dict()) == ["weight", "bias"]


class Excluding(Loss):
    def __init__(self) -> None:
        super().__init__()
        self.outside = pstar.exclude(nn.Linear(16, 16))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_copy_of_an_engine_is_refused_in_one_line(copied):
    with pytest.raises(pstar.StateError, match="cannot be copied or pickled"):
        copied(toy.build(Loss)[0])


@pytest.mark.parametrize("near", ["min", "auto"])
def test_what_is_frozen_after_the_start_and_thawed_later_is_trained(near):
    """Its chunk has room for gradients. What was frozen before the start has none: chunks/test_frozen.py."""
    def thaw(model: nn.Module, step: int) -> None:
        layers = getattr(model, "module", model).layers
        if step == 0:
            layers[0].requires_grad_(False)
            layers[3].requires_grad_(False)
        elif step == 2:
            layers[0].requires_grad_(True)
            layers[1].requires_grad_(False)

    compare(Loss, before=thaw, near_budget=near)


class Plain(nn.Module):
    """A mask and a list of tensors that are not registered as buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.mask, self.places = torch.ones(16, 16).triu(), [torch.arange(16.0)]

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return (self.second(self.first(h) @ self.mask) + self.places[0]).square().mean()


def test_tensors_that_are_no_buffers():
    with pytest.warns(UserWarning, match=r"lazy start is not possible .*: its mask is a tensor, .* \(register_buffer"):
        compare(Plain)


class WeightNorm(nn.Module):
    """torch's old weight_norm: the weight is an attribute, made anew before each forward."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings(action="ignore"):
            self.first = nn.utils.weight_norm(nn.Linear(16, 24))
        self.second = nn.Linear(24, 4)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(h).tanh()).square().mean()


def test_weight_norm_of_old():
    with pytest.warns(UserWarning, match="its first.weight is a tensor"):
        compare(WeightNorm)


class Attending(nn.Module):
    """torch's own attention, whose forward never calls its output projection but computes with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = self.layers(h.view(2, 3, 16))
        return self.head(self.attention(h, h, h)[0]).square().mean()


@pytest.mark.parametrize("keys", [{}, {"prefetch": 0}, {"default_chunk_size": 300}, {"near_budget": "auto"}])
def test_attention_of_torch(keys):
    def evaluate(model: nn.Module, step: int) -> None:
        with torch.no_grad():
            values.append(model.eval()(x(99)).item())
        model.train()

    values: list[float] = []
    compare(Attending, before=evaluate, **keys)
    assert values[::2] == pytest.approx(values[1::2], rel=1e-6)    # plain PyTorch takes another kernel without gradients


def test_an_engine_that_nobody_has_is_freed():
    model, optimizer = toy.build(Loss)
    for step in range(2):
        model.backward(model(x(step)))
        optimizer.step()
    gone = [weakref.ref(each) for each in (model, model.module, model.far, model._links)]
    del model, optimizer
    gc.collect()
    assert [each() for each in gone] == [None] * 4


def swapped(layers: nn.ModuleList) -> None:
    layers[0], layers[1] = layers[1], layers[0]


@pytest.mark.filterwarnings("ignore:the engine does not train")
@pytest.mark.parametrize("change, name", [
    (lambda layers: layers.append(nn.Linear(16, 16)), "layers.5.weight"),
    (lambda layers: setattr(layers[3], "bias", nn.Parameter(torch.ones(16))), "layers.3.bias"),
    (lambda layers: setattr(layers[4], "weight", layers[2].weight), "layers.4.weight"),
    (swapped, "layers.0.weight"),
], ids=["a new layer", "another parameter", "a late tie", "two layers swapped"])
def test_a_model_that_changed_after_the_start_is_neither_saved_nor_loaded(change, name, tmp_path):
    """It trains as in plain PyTorch, but under some names the engine has other values, or none."""
    model, optimizer = toy.build(Loss, near_budget="min")
    weights = model.gather_state()[0]
    model.save_checkpoint(tmp_path / "checkpoint")
    change(model.module.layers)
    model.backward(model(x(0)))
    optimizer.step()
    for call in (model.gather_state, model.copy_checkpoint, lambda: model.load_state(weights),
                 lambda: model.save_checkpoint(tmp_path / "other"), lambda: model.load_checkpoint(tmp_path / "checkpoint"),
                 lambda: model.export_weights(tmp_path / "file"), lambda: model.import_weights(tmp_path / "file")):
        with pytest.raises(pstar.StateError, match=f"^{name} is not the parameter that the engine saves and loads"):
            call()
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("near", ["min", "100%"])
def test_a_warning_names_a_parameter_that_comes_after_the_start_and_is_not_trained(near):
    model, optimizer = toy.build(Loss, near_budget=near)
    model.module.layers.append(nn.Linear(16, 16))
    with pytest.warns(UserWarning, match=r"does not train layers\.5\.weight, layers\.5\.bias: the model was changed after"):
        model.backward(model(x(0)))
    optimizer.step()


def test_layers_may_be_dropped_after_the_start():
    def drop(model: nn.Module, step: int) -> None:
        if step == 2:
            module = getattr(model, "module", model)
            module.layers = module.layers[:3]

    compare(Loss, before=drop)


def test_a_checkpoint_replaces_nothing_but_a_checkpoint(tmp_path):
    model, _ = toy.build(Loss)
    (tmp_path / "runs").mkdir()
    notes = tmp_path / "runs" / "notes.txt"
    notes.write_text("mine")
    for path in (tmp_path / "runs", notes):
        with pytest.raises(pstar.CheckpointError, match="exists and is no checkpoint"):
            model.save_checkpoint(path)
    assert notes.read_text() == "mine" and [file.name for file in (tmp_path / "runs").iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    for _ in range(2):
        model.save_checkpoint(tmp_path / "empty")
    model.load_checkpoint(tmp_path / "empty")


class Pair(NamedTuple):
    h: torch.Tensor
    factor: float


class Nested(Deep):
    def forward(self, pair: Pair, more: dict) -> torch.Tensor:
        return (super().forward(pair.h) * pair.factor + more["h"][0]).float().square().mean()


@pytest.mark.parametrize("keys", [{}, {"bf16": {"enabled": True}}])
def test_inputs_in_named_tuples_lists_and_dicts(keys):
    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        return model(Pair(x(step), 2.0), more={"h": [x(step + 1)]})

    if not keys:
        compare(Nested, loss_of)
    model, _ = toy.build(Nested, **keys)
    model.backward(loss_of(model, 0))


@pytest.mark.parametrize("groups", [
    lambda module: [{"params": module.parameters()}],
    lambda module: list(module.parameters()),
    lambda module: [{"params": each, "lr": toy.LR} for each in module.parameters()],
])
def test_parameter_groups_in_all_forms_that_torch_takes(groups):
    torch.manual_seed(0)
    model, optimizer = pstar.initialize_engine(Loss, 0, toy.config(), param_groups=groups)
    other, other_optimizer = toy.build(Loss)
    for each, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        each.backward(each(x(0)))
        its_optimizer.step()
    assert model(x(1)).item() == other(x(1)).item()


@pytest.mark.parametrize("groups, message", [
    (lambda module: [{"params": [param for param in module.parameters() if param.dim() > 1]}],
     r"lacks 5 parameters \(layers.0.bias, layers.1.bias, layers.2.bias\): list all"),
    (lambda module: [{"params": [*module.parameters(), nn.Parameter(torch.ones(1))]}], "lists 1 parameters that"),
])
def test_parameter_groups_that_are_not_those_of_the_model(groups, message):
    with pytest.raises(pstar.ConfigError, match=message):
        pstar.initialize_engine(Loss, 0, toy.config(), param_groups=groups)


def test_a_parameter_group_that_comes_late_is_refused():
    _, optimizer = toy.build(Loss)
    with pytest.raises(pstar.StateError, match="give param_groups to initialize_engine"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@pytest.mark.parametrize("model_func", [Loss(), 3])
def test_a_model_in_place_of_a_function_is_named(model_func):
    with pytest.raises(pstar.ConfigError, match="model_func is a (Loss|int): give a function"):
        pstar.initialize_engine(model_func)


class WritesIntoADict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, seen: dict, *, more: dict) -> torch.Tensor:
        seen["dtype"] = more["dtype"] = x.dtype
        return self.layer(x).square().mean()


def test_a_model_may_write_into_an_argument_beside_one_that_is_cast():
    model, _ = toy.build(WritesIntoADict, bf16={"enabled": True})
    seen, more = {}, {}
    model(torch.ones(2, 4), seen, more=more)
    assert seen == more == {"dtype": torch.bfloat16}


class Threads(Deep):
    """Each layer in a thread of its own."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(2) as pool:
            return sum(pool.map(lambda layer: layer(h).tanh(), self.layers)).square().mean()


def test_modules_in_threads_of_their_own_are_refused_unless_everything_is_near():
    compare(Threads, near_budget="100%")
    with pytest.raises(pstar.StateError, match="Linear runs in another thread than the module around it"):
        compare(Threads)
