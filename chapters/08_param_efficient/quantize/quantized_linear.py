"""A Conv1D whose weight is stored in codes. It passes gradients to its input only.

    forward     y = x W + b, W is dequantised for the product, then freed
    backward    grad_x = grad_y W^T, W is dequantised again

Autograd would keep the dequantised weight from forward to backward, and all layers' weights would be in memory in 32 bit at
the same time. So the product is one autograd function that keeps a reference to the codes (QLoRA, section 3, equation 5).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantize.blockwise import BlockWeight
from quantize.int8 import Int8Weight


class _FrozenMatmul(torch.autograd.Function):
    """x (..., in) times a quantised weight; the gradient is the one of the dequantised weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Int8Weight | BlockWeight) -> Tensor:
        """(..., in) -> (..., out)"""
        ctx.weight, ctx.dtype = weight, x.dtype
        return weight.matmul(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """(..., out) -> (..., in). Rounding of x to int8 has gradient zero almost everywhere, and counts as the identity."""
        return (grad @ ctx.weight.dequantize().to(grad.dtype)).to(ctx.dtype), None


class QuantizedConv1D(nn.Module):
    """Takes the place of a block's Conv1D. Nothing in it requires a gradient; codes and scales are buffers.

    Attributes:
        num_in, num_out: as of the layer that it replaces.
        quantized: the weight, Int8Weight or BlockWeight, stored (out, in).
        bias: (out,), a frozen parameter: BitFit can thaw it.
    """

    def __init__(self, quantized: Int8Weight | BlockWeight, bias: Tensor) -> None:
        super().__init__()
        self.num_out, self.num_in = quantized.shape
        self.quantized = quantized
        self.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        y = _FrozenMatmul.apply(x, self.quantized)
        return y + self.bias.to(y.dtype)

    def dequantize(self) -> Tensor:
        """(in, out) float32: the weight in Conv1D's layout."""
        return self.quantized.dequantize().t()
