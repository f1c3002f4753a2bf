"""DoRA (Liu et al. 2024, section 4.1): a weight is a magnitude times a direction; LoRA changes the direction.

    W  (in, out)  =  magnitude (out,)  *  W / ||W||       ||W||: the length of each output's column, (out,)

    W' = magnitude * (W + s (B A)^T) / ||W + s (B A)^T||

The magnitude begins as ||W||, B as zeros, so that W' begins as W. In backward the length counts as a constant: only its
value follows the update, which saves the memory of its gradient and changes the result little (section 4.3).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from methods.lora import LoraLayer
from methods.spec import MethodSpec
from methods.wrap import plain_weight, wrap_layers


class DoraLayer(LoraLayer):
    """A LoraLayer with a trained length for each output."""

    def __init__(self, base_layer: nn.Module, spec: MethodSpec) -> None:
        super().__init__(base_layer, spec)
        weight = plain_weight(base_layer)
        self.lora_magnitude_vector = nn.Parameter(column_length(weight).float().clone())  # (out,)
        self._merged_length: Tensor | None = None  # (out,) of the merged direction; unmerge needs it

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out). Dropout acts on the input of the small matrices alone."""
        y = self.base_layer(x)
        if self.merged:
            return y
        bias = self.base_layer.bias
        scale = self.lora_magnitude_vector / column_length(plain_weight(self.base_layer) + self.delta())
        return ((y - bias + self.low_rank(x)) * scale + bias).to(y.dtype)  # autocast: y is bf16, scale float32

    def merged_tensors(self) -> tuple[Tensor, Tensor]:
        direction = plain_weight(self.base_layer) + self.delta()
        scale = self.lora_magnitude_vector.detach() / column_length(direction)
        return direction * scale, self.base_layer.bias.detach().clone()

    def merge(self) -> None:
        if not self.merged:
            self._merged_length = column_length(plain_weight(self.base_layer) + self.delta())
        super().merge()

    def unmerged_tensors(self) -> tuple[Tensor, Tensor]:
        scale = self.lora_magnitude_vector.detach() / self._merged_length
        return plain_weight(self.base_layer) / scale - self.delta(), self.base_layer.bias.detach()


def column_length(weight: Tensor) -> Tensor:
    """(in, out) -> (out,): the Euclidean length of each column."""
    return torch.linalg.vector_norm(weight, dim=0)


def insert(model: nn.Module, spec: MethodSpec) -> None:
    """Wraps the layers that the spec names in each block."""
    wrap_layers(model, spec.targets, lambda layer, _: DoraLayer(layer, spec))
