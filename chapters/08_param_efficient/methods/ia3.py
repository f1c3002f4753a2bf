"""(IA)^3 (Liu et al. 2022, section 3.3): trained factors that rescale activations; all begin as ones.

    c_attn       y = (x W + bias) * l      l (out,)     keys and values of the paper; on GPT-2, as in PEFT, queries as well
    mlp.c_proj   y = (x * l) W + bias      l (in,)      the hidden layer of the MLP

A factor on an activation is a factor on a row or a column of the weight, so the merged model is a plain GPT-2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from methods.spec import SCALES_INPUT, MethodSpec
from methods.wrap import MergeableWrapper, plain_weight, wrap_layers


class Ia3Layer(MergeableWrapper):
    """A Conv1D with a factor for each of its inputs, or for each of its outputs. The factors' shape is PEFT's."""

    def __init__(self, base_layer: nn.Module, scales_input: bool) -> None:
        super().__init__(base_layer)
        self.scales_input = scales_input
        self.ia3_l = nn.Parameter(torch.ones((1, self.num_in) if scales_input else (self.num_out, 1)))

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        if self.merged:
            return self.base_layer(x)
        factors = self.ia3_l.flatten()
        if self.scales_input:
            return self.base_layer(x * factors)
        y = self.base_layer(x)
        return (y * factors).to(y.dtype)  # autocast: y is bf16, the factors float32

    def _factors(self) -> tuple[Tensor, Tensor | float]:
        """What the weight (in, out) and the bias (out,) are multiplied by."""
        factors = self.ia3_l.detach().flatten()
        return (factors[:, None], 1.0) if self.scales_input else (factors, factors)

    def merged_tensors(self) -> tuple[Tensor, Tensor]:
        of_weight, of_bias = self._factors()
        return plain_weight(self.base_layer) * of_weight, self.base_layer.bias.detach() * of_bias

    def unmerged_tensors(self) -> tuple[Tensor, Tensor]:
        of_weight, of_bias = self._factors()
        if not bool((of_weight != 0).all()):
            raise ValueError("a factor of (IA)^3 is 0: the merged weight has lost the base's, so it cannot be unmerged")
        return plain_weight(self.base_layer) / of_weight, self.base_layer.bias.detach() / of_bias


def insert(model: nn.Module, spec: MethodSpec) -> None:
    """Wraps the layers that the spec names in each block."""
    wrap_layers(model, spec.targets, lambda layer, name: Ia3Layer(layer, name in SCALES_INPUT))
