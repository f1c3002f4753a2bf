"""What all methods share: freeze the base, find a layer by its path, replace it by a wrapper that holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from methods.spec import full_path


class Wrapper(nn.Module):
    """Replaces a Conv1D, plain or quantised, and holds it as `base_layer`, the name that PEFT gives it.

    A quantised layer has num_in, num_out and `dequantize() -> (num_in, num_out) float32` in place of a weight.
    """

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        quantized = hasattr(base_layer, "dequantize")
        self.num_in, self.num_out = (base_layer.num_in, base_layer.num_out) if quantized else base_layer.weight.shape


class MergeableWrapper(Wrapper):
    """A wrapper whose effect can be written into the weight of the layer that it wraps."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        self.merged = False

    def merged_tensors(self) -> tuple[Tensor, Tensor]:
        """(weight (num_in, num_out), bias (num_out,)) of the plain layer that computes the same, new tensors."""
        raise NotImplementedError

    def unmerged_tensors(self) -> tuple[Tensor, Tensor]:
        """(weight, bias) of the base, computed back from a base that holds the merged ones."""
        raise NotImplementedError

    @torch.no_grad()
    def merge(self) -> None:
        """Writes the effect into the base; from then on, forward calls the base alone."""
        if not self.merged:
            self._write(self.merged_tensors())
            self.merged = True

    @torch.no_grad()
    def unmerge(self) -> None:
        """Takes the effect out of the base again, up to rounding."""
        if self.merged:
            self._write(self.unmerged_tensors())
            self.merged = False

    def _write(self, tensors: tuple[Tensor, Tensor]) -> None:
        self.base_layer.weight.copy_(tensors[0])
        self.base_layer.bias.copy_(tensors[1])


def plain_weight(layer: nn.Module) -> Tensor:
    """(num_in, num_out), detached: the weight of a Conv1D, or the dequantised weight of a quantised layer."""
    return layer.dequantize() if hasattr(layer, "dequantize") else layer.weight.detach()


def plain_name(name: str) -> str:
    """The name that a module or parameter of the base had before layers were wrapped."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def freeze(model: nn.Module) -> None:
    """Freezes every parameter of the model. Those that a method inserts afterwards are trained."""
    for parameter in model.parameters():
        parameter.requires_grad = False


def wrap_layers(model: nn.Module, modules: tuple[str, ...], make: Callable[[nn.Module, str], nn.Module]) -> None:
    """In each block, replaces each layer that `modules` names by make(layer, name), on the layer's device."""
    for block in model.transformer.h:
        for name in modules:
            path = full_path(name)
            layer = block.get_submodule(path)
            block.set_submodule(path, make(layer, name).to(device_of(layer)))


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's first tensor; a quantised layer may have buffers alone."""
    return next(_tensors(module)).device


def _tensors(module: nn.Module) -> Iterator[Any]:
    yield from module.parameters()
    yield from module.buffers()
