"""Master weights (O2): fp32 copies of the 16-bit weights, which the optimizer updates in their place.

    backward: gradients of the weights, 16 bit  ->  take_gradients: of the masters, fp32  ->  step  ->  write_back: rounded

A weight in 16 bit does not change at all by less than 1/256 (bf16) or 1/2048 (fp16) of itself; its master does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from casts import is_norm
from torch import nn


class Masters:
    """fp32 copies of 16-bit weights (O2). An update too small for 16 bit adds up here until it is large enough there.

    Looks like a module to what asks for parameters only: the optimizer, clipping, checkpoints.
    """

    def __init__(self, model: nn.Module) -> None:
        # (name, weight of the model, master); a weight that stays fp32 is its own master
        self._rows: list[tuple[str, nn.Parameter, nn.Parameter]] = []
        for name, weight in model.named_parameters():
            norm = is_norm(model.get_submodule(name.rpartition(".")[0]))
            self._rows.append((name, weight, weight if norm else nn.Parameter(weight.detach().clone())))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name in the model, master), fp32."""
        return ((name, master) for name, _, master in self._rows)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The masters, fp32."""
        return (master for _, _, master in self._rows)

    def take_gradients(self) -> None:
        """Moves the gradients of the model to the masters, as fp32."""
        for _, weight, master in self._rows:
            if master is not weight:
                master.grad = None if weight.grad is None else weight.grad.float()
                weight.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Rounds the masters into the model."""
        for _, weight, master in self._rows:
            if master is not weight:
                weight.copy_(master)
