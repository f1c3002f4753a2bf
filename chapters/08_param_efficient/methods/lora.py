"""LoRA (Hu et al. 2021, section 4.1): the change of a weight is a product of two small matrices.

        x (.., in) --+---- W (in, out), frozen ---------------------------+-- + --> y (.., out)
                     |                                                    |
                     +---- A (r, in) -> (.., r) ---- B (out, r) -- * s ---+        r much smaller than in and out

    y = x W + bias + s (x A^T) B^T          s = alpha / r, or alpha / sqrt(r) for rsLoRA (Kalajdzievski 2023)

B begins with zeros, so that the first step computes what the base computes. After training, W + s (B A)^T is one matrix
of the old shape: a merged model costs nothing more, and subtracting s (B A)^T gives the base back (section 4.1).
"""

from __future__ import annotations

from torch import Tensor, nn

from methods.spec import MethodSpec
from methods.wrap import MergeableWrapper, plain_weight, wrap_layers


class LoraLayer(MergeableWrapper):
    """A Conv1D and two small matrices, whose output is added to its own. Names and shapes of the matrices are PEFT's.

    Args:
        base_layer: plain or quantised, (num_in, num_out).
        spec: rank, scaling and dropout.
    """

    def __init__(self, base_layer: nn.Module, spec: MethodSpec) -> None:
        super().__init__(base_layer)
        self.scaling = spec.scaling
        # A is drawn by nn.Linear, uniform in +-1 / sqrt(num_in), as in Microsoft's loralib and in PEFT
        self.lora_A = nn.Linear(self.num_in, spec.rank, bias=False)
        self.lora_B = nn.Linear(spec.rank, self.num_out, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.dropout = nn.Dropout(spec.dropout) if spec.dropout else nn.Identity()

    def low_rank(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out): what the two matrices add, for r (in + out) products a row; W takes in * out."""
        return self.lora_B(self.lora_A(self.dropout(x))) * self.scaling

    def delta(self) -> Tensor:
        """(in, out), detached: the change of the weight."""
        return (self.lora_B.weight.detach() @ self.lora_A.weight.detach()).t() * self.scaling

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        y = self.base_layer(x)
        return y if self.merged else y + self.low_rank(x)

    def merged_tensors(self) -> tuple[Tensor, Tensor]:
        return plain_weight(self.base_layer) + self.delta(), self.base_layer.bias.detach().clone()

    def unmerged_tensors(self) -> tuple[Tensor, Tensor]:
        return plain_weight(self.base_layer) - self.delta(), self.base_layer.bias.detach()


def insert(model: nn.Module, spec: MethodSpec) -> None:
    """Wraps the layers that the spec names in each block."""
    wrap_layers(model, spec.targets, lambda layer, _: LoraLayer(layer, spec))
