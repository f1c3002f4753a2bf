"""The model that chapter 07 gives to the engine, with or without activation checkpointing."""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.checkpoint import checkpoint

from gpt2_chinese.model.gpt2 import GPT2LMHeadModel


def build_model(settings: Any) -> GPT2LMHeadModel:
    """GPT-2 by settings.model; with settings.activation_checkpointing its blocks are checkpointed.

    A checkpointed block keeps only its input and computes the rest again in backward (Chen et al. 2016).
    """
    model = GPT2LMHeadModel(settings.model)
    if settings.activation_checkpointing:
        for block in model.transformer.h:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model
