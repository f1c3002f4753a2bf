"""Casts: which operations compute in 16 bit (O1), and which weights are rounded to 16 bit (O2 and O3).

O1 keeps fp32 weights and casts the inputs of each torch call to the type that suits the operation. O2 and O3 round the
weights once; a product then computes in the type of its weights. In O2 the norms stay in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}

# O1: matrix products are faster in 16 bit and lose little precision; sums over many elements, exponentials and losses
# lose much. All other operations keep the types of their inputs; if types are mixed, torch uses the wider one.
TO_HALF = {
    F.linear, F.conv1d, F.bilinear, F.scaled_dot_product_attention, torch.matmul, torch.mm, torch.mv, torch.bmm,
    torch.addmm, torch.baddbmm, torch.einsum, Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm, Tensor.addmm,
}  # fmt: skip
TO_FLOAT = {
    F.layer_norm, torch.layer_norm, F.group_norm, F.softmax, torch.softmax, Tensor.softmax, F.log_softmax,
    torch.log_softmax, Tensor.log_softmax, F.cross_entropy, F.nll_loss, F.mse_loss, F.kl_div, torch.exp, Tensor.exp,
    torch.log, Tensor.log, torch.pow, Tensor.pow, torch.norm, Tensor.norm, torch.sum, Tensor.sum, torch.mean, Tensor.mean,
    torch.var, Tensor.var, torch.cumsum, Tensor.cumsum, torch.logsumexp, Tensor.logsumexp,
}  # fmt: skip


class CastByOperation(TorchFunctionMode):
    """Inside this context, each torch call gets its floating-point tensors in the type that suits the operation (O1).

    A weight is cast once even if several operations use it, so backward casts one summed gradient back to fp32.
    """

    def __init__(self, half: torch.dtype) -> None:
        super().__init__()
        self.half = half
        self._cast_weights: dict[Tensor, Tensor] = {}

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        dtype = self.half if func in TO_HALF else torch.float32 if func in TO_FLOAT else None
        if dtype is not None:
            args, kwargs = self._cast(args, dtype), self._cast(kwargs, dtype)
        return func(*args, **kwargs)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        """`value` with its floating-point tensors cast to `dtype`; float64 and integer tensors are not cast."""
        if isinstance(value, Tensor):
            if value.dtype == dtype or value.dtype not in (torch.float16, torch.bfloat16, torch.float32):
                return value
            if not value.is_leaf or not value.requires_grad:
                return value.to(dtype)
            if value not in self._cast_weights:
                self._cast_weights[value] = value.to(dtype)
            return self._cast_weights[value]
        if isinstance(value, list | tuple):
            return type(value)(self._cast(item, dtype) for item in value)
        if isinstance(value, dict):
            return {key: self._cast(item, dtype) for key, item in value.items()}
        return value


def within(context: Callable[[], Any], forward: Callable) -> Callable:
    """`forward`, with each call inside a new context."""

    @functools.wraps(forward)
    def casting(*args: Any, **kwargs: Any) -> Any:
        with context():
            return forward(*args, **kwargs)

    return casting


def is_norm(module: nn.Module) -> bool:
    """True for torch's LayerNorm and Apex's FusedLayerNorm, which is not a subclass of nn.LayerNorm."""
    return type(module).__name__.endswith("LayerNorm")


def round_weights(model: nn.Module, half: torch.dtype, keep_norms: bool) -> None:
    """Rounds the weights to 16 bit in place, so tied weights stay tied.

    With `keep_norms`, norms compute in fp32 and return 16 bit: mean and variance are sums over the model's whole width.
    """
    for module in model.modules():
        if keep_norms and is_norm(module):
            module.register_forward_pre_hook(lambda _, args: tuple(arg.float() for arg in args))
            module.register_forward_hook(lambda _, args, output: output.to(half))
        else:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(half)
