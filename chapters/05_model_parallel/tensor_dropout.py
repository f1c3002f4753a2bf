"""Dropout of ranks that share a layer: the same random numbers where activations are the same, others elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from tensor import TensorGroup
from torch import Tensor, nn


def different_dropout(first: nn.Module, last: nn.Module, p: float, ranks: TensorGroup, around: bool = False) -> None:
    """Between `first` and `last` each rank draws random numbers of its own; before and after, all draw the same.

    Heads and sequence parts differ by rank, so their dropout must; what is the same on all ranks must stay the same. The
    own seed comes out of the common state, so that a recomputation, which starts from the same state, draws the same again.

    Args:
        first, last: enter after the one's forward and leave before the other's; with `around`, before and after one module.
        p: probability; nothing is done at 0.
        ranks: who shares the layer.
    """
    if not p:
        return
    kept: list[Tensor] = []

    def enter(module: nn.Module, *_: Any) -> None:
        if module.training:
            device = next((a.device for a in _[0] if isinstance(a, Tensor)), torch.device("cpu"))
            seed = int(torch.randint(2**62, (), device=device))
            kept.append(_state(device))
            kept.append(device)
            torch.manual_seed(seed + 1 + ranks.rank)

    def leave(module: nn.Module, *_: Any) -> None:
        if kept:
            device, state = kept.pop(), kept.pop()
            torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)

    if around:
        first.register_forward_pre_hook(enter)
        first.register_forward_hook(leave)
    else:
        first.register_forward_hook(enter)
        last.register_forward_pre_hook(leave)


def _state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
