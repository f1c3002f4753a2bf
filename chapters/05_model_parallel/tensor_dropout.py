"""Dropout on ranks that share a layer: equal activations get the same random numbers, different ones different numbers."""

from __future__ import annotations

from typing import Any

import torch
from tensor import TensorGroup
from torch import Tensor, nn


def different_dropout(first: nn.Module, last: nn.Module, p: float, ranks: TensorGroup, around: bool = False) -> None:
    """Between `first` and `last` each rank draws different random numbers; before and after, all draw the same.

    Heads and sequence parts differ by rank, so their dropout must differ; equal activations must stay equal. A rank's seed
    is drawn from the host's common state, which does not wait for a GPU. A recomputation starts from the same state, and so
    draws the same numbers again.

    Args:
        first, last: from after the forward of `first` to before that of `last`; with `around`, during one module's forward.
        p: dropout probability; 0 does nothing.
        ranks: the ranks that share the layer.
    """
    if not p:
        return
    kept: list[Tensor] = []

    def enter(module: nn.Module, *_: Any) -> None:
        if module.training:
            device = next((a.device for a in _[0] if isinstance(a, Tensor)), torch.device("cpu"))
            seed = int(torch.randint(2**62, ()))
            kept.append(_state(device))
            kept.append(device)
            _seed(seed + 1 + ranks.rank, device)

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


def _seed(seed: int, device: torch.device) -> None:
    """Seeds the generator of this device alone: with a GPU the host's state must stay common to all ranks."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    else:
        torch.manual_seed(seed)
