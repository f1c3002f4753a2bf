"""The model that chapter 07 gives to the engine, with or without activation checkpointing and a tiled loss."""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.checkpoint import checkpoint

from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
from gpt2_chinese.model.tiled_loss import tile_loss


def build_model(settings: Any) -> GPT2LMHeadModel:
    """GPT-2 by settings.model; with settings.activation_checkpointing its blocks are checkpointed.

    A checkpointed block keeps only its input and computes the rest again in backward (Chen et al. 2016). With
    settings.loss_tiles the head computes the loss by tiles of tokens.
    """
    model = GPT2LMHeadModel(settings.model)
    tile_loss(model, settings.loss_tiles)
    if settings.activation_checkpointing:
        for block in model.transformer.h:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model
