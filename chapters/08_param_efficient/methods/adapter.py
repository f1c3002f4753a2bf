"""Adapters (Houlsby et al. 2019, section 2.1): two small layers after attention and after the MLP of each block.

    c_proj ---> h (.., C) --+-- down (C, m) -- GELU -- up (m, C) -- + --> to the residual connection
                            |                                       |
                            +---------------------------------------+

Unlike LoRA, they have a nonlinearity, so no weight of the old shape computes the same: they cannot be merged, and cost
time at each step of generation. All layer norms are trained as well, as in the paper.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from methods.spec import MethodSpec
from methods.wrap import Wrapper, wrap_layers

STD = 1e-2  # section 3.6: nearly the identity at first: normal, cut off at two standard deviations
AFTER = ("attn.c_proj", "mlp.c_proj")


class Bottleneck(nn.Module):
    """h + up(GELU(down(h))). GELU in the tanh form, as in the rest of the model."""

    def __init__(self, width: int, bottleneck: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, bottleneck), nn.Linear(bottleneck, width)
        for layer in (self.down, self.up):
            nn.init.trunc_normal_(layer.weight, std=STD, a=-2 * STD, b=2 * STD)
            nn.init.zeros_(layer.bias)

    def forward(self, h: Tensor) -> Tensor:
        """(..., C) -> (..., C)"""
        return h + self.up(F.gelu(self.down(h), approximate="tanh"))


class AdaptedLayer(Wrapper):
    """A Conv1D and the adapter of its output."""

    def __init__(self, base_layer: nn.Module, bottleneck: int) -> None:
        super().__init__(base_layer)
        self.adapter = Bottleneck(self.num_out, bottleneck)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., C)"""
        return self.adapter(self.base_layer(x))


def insert(model: nn.Module, spec: MethodSpec) -> None:
    """Wraps the last layer of attention and MLP in each block; the layer norms require grad again."""
    wrap_layers(model, AFTER, lambda layer, _: AdaptedLayer(layer, spec.bottleneck))
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(True)
