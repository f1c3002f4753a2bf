"""Applies the technique: --zero-stage and --backend choose the class that shards the model."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from zero.loss_scaler import LossScaler
from zero.stage3 import Zero3
from zero.stages012 import Zero012
from zero.units import blocks_of


def shard(model: nn.Module, ranks: Any, settings: Any) -> tuple[Any, LossScaler]:
    """Shards a model in place and gives every rank the weights of rank 0.

    Args:
        model: whole, fp32, on its device, with the same architecture on all ranks.
        ranks: the processes of the run.
        settings: has zero_stage, offload, backend, precision, loss_scale, activation_checkpointing.

    Returns:
        sharded: Zero012, Zero3, or a class of torch_backend.py, which does the same with torch's classes.
        scaler: has the methods of torch's GradScaler that train.py calls.
    """
    if settings.activation_checkpointing:
        for block in blocks_of(model).values():
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    if settings.backend == "torch":
        from zero.torch_backend import of_torch

        sharded = of_torch(model, ranks, settings)
    elif settings.zero_stage == 3:
        sharded = Zero3(model, ranks, settings)
    else:
        sharded = Zero012(model, ranks, settings)
    scale = settings.loss_scale or ("dynamic" if settings.precision == "fp16" else "1")
    return sharded, LossScaler(scale, ranks.max, sharded.publish)
