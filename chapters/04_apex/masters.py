"""Master weights (O2): fp32 copies of the 16-bit weights. The optimizer updates the copies.

    backward: 16-bit gradients  ->  take_gradients: fp32 gradients of masters  ->  step  ->  write_back: rounded weights

A 16-bit weight ignores an update below about 1/256 (bf16) or 1/2048 (fp16) of its value; its fp32 master does not.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from casts import is_norm
from torch import nn


class Masters:
    """fp32 copies of 16-bit weights (O2). Updates too small for 16 bit add up in the copies until the weights change too.

    Has a module's parameters() and named_parameters(), which the optimizer, clipping and checkpoints call.
    """

    def __init__(self, model: nn.Module) -> None:
        # (name, weight of the model, master); a weight that stays in fp32 is also the master
        self._rows: list[tuple[str, nn.Parameter, nn.Parameter]] = []
        for name, weight in model.named_parameters():
            norm = is_norm(model.get_submodule(name.rpartition(".")[0]))
            self._rows.append((name, weight, weight if norm else nn.Parameter(weight.detach().clone())))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Pairs of a parameter's name in the model and its fp32 master."""
        return ((name, master) for name, _, master in self._rows)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The masters, fp32."""
        return (master for _, _, master in self._rows)

    def take_gradients(self) -> None:
        """Moves the model's gradients to the masters, cast to fp32."""
        for _, weight, master in self._rows:
            if master is not weight:
                master.grad = None if weight.grad is None else weight.grad.float()
                weight.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Copies the masters to the model's weights, rounded to 16 bit."""
        for _, weight, master in self._rows:
            if master is not weight:
                weight.copy_(master)
