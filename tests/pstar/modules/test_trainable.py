"""Models that the engine cannot train are refused in one line before anything starts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pstar
from tests import toy


class With(nn.Module):
    """A layer, and what `add` returns."""

    def __init__(self, add) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.other = add(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def of_dtype(dtype: torch.dtype):
    return lambda model: nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)


def slice_of_the_layer(trained: bool):
    return lambda model: nn.Parameter(model.layer.weight.data[2:5], requires_grad=trained)


def view_of_the_layer(how: str, trained: bool = True):
    """A tensor that shares the layer's memory and is kept as a buffer, in an attribute, in a list or by a function."""
    def add(model: nn.Module):
        model.layer.weight.requires_grad_(trained)
        view = model.layer.weight.detach()[2]
        if how == "buffer":
            return model.register_buffer("shift", view)
        return {"attribute": view, "list": [view], "function": lambda: view}[how]

    return add


@pytest.mark.parametrize("add, message", [
    (of_dtype(torch.int64), "parameter other is int64: the engine trains floating numbers only"),
    (of_dtype(torch.complex64), "parameter other is complex64: the engine trains floating numbers only"),
    (of_dtype(torch.float64), r"parameter other is float64, which the engine would round: .* call model\.float\(\)"),
    (of_dtype(torch.float8_e4m3fn), "parameter other is float8_e4m3fn, which the engine would round"),
    (lambda model: nn.LazyLinear(3), r"parameter other\.weight has no shape yet"),
    (lambda model: nn.Embedding(9, 8, sparse=True), "embedding other makes sparse gradients, which a chunk cannot hold"),
    (lambda model: nn.EmbeddingBag(9, 8, sparse=True), "embedding other makes sparse gradients"),
    (lambda model: nn.Linear(3, 3, device="meta"), r"other\.weight has no values, .* torch's meta"),
    (lambda model: nn.LSTM(3, 3, device="meta"), r"other\.weight_ih_l0 has no values"),
    (lambda model: model.register_buffer("shift", torch.ones(3, device="meta")), "shift has no values"),
    (view_of_the_layer("buffer"), r"shift shares the memory of parameter layer\.weight, .* would keep the initial values"),
    (view_of_the_layer("attribute"), r"other shares the memory of parameter layer\.weight"),
    (view_of_the_layer("list"), r"other shares the memory of parameter layer\.weight"),
    (view_of_the_layer("function"), "a tensor of shape .*, in a function for example, shares the memory"),
    (slice_of_the_layer(trained=True), r"parameters other and layer\.weight share their memory"),
    (slice_of_the_layer(trained=False), r"parameters other and layer\.weight share their memory"),
    (lambda model: nn.Parameter(model.layer.weight.data), r"parameters other and layer\.weight share their memory")])
@pytest.mark.filterwarnings("ignore:lazy start is not possible")
def test_a_model_that_the_engine_cannot_train_is_named(add, message):
    with pytest.raises(pstar.ConfigError, match=message):
        toy.build(lambda: With(add))


@pytest.mark.filterwarnings("ignore:lazy start is not possible")
@pytest.mark.parametrize("how", ["buffer", "attribute", "list", "function"])
def test_a_view_of_a_frozen_parameter_keeps_the_right_values(how):
    toy.compare(lambda: With(view_of_the_layer(how, trained=False)), lambda model, step: model(torch.ones(2, 8)), 2)


@pytest.mark.filterwarnings("ignore:lazy start is not possible")
def test_a_buffer_may_be_a_view_of_another():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("counts", torch.zeros(3, 8))
            self.register_buffer("last", self.counts[2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.counts.add_(1)
            return (self.layer(x) * self.last).square().mean()

    toy.compare(Counts, lambda model, step: model(torch.ones(2, 8)), 3)


@pytest.mark.filterwarnings("error:lazy start is not possible")
def test_a_model_that_gets_its_values_after_the_meta_device_trains():
    """As FSDP's users write it. The embedding and the head are tied no more."""
    def model_func() -> nn.Module:
        with torch.device("meta"):
            model = toy.Toy()
        model.to_empty(device="cpu")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        return model

    toy.compare(model_func, lambda model, step: model(*toy.batch(step)), 3)


def test_neighbours_in_one_memory_are_no_tie():
    """As in a flattened buffer, from which a library cuts its parameters."""
    memory = torch.randn(30)

    def two(model: nn.Module) -> nn.ParameterList:
        return nn.ParameterList([nn.Parameter(memory[:20].view(4, 5)), nn.Parameter(memory[20:]), nn.Parameter(memory[:0])])

    toy.compare(lambda: With(two), lambda model, step: model(torch.ones(2, 8)), 2)


def test_a_lazy_module_that_was_called_has_its_shape():
    def called(model: nn.Module) -> nn.LazyLinear:
        layer = nn.LazyLinear(3)
        with torch.no_grad():
            layer(torch.zeros(1, 8))
        return layer

    toy.compare(lambda: With(called), lambda model, step: model(torch.ones(2, 8)), 2)
