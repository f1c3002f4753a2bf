"""The model that chapter 07 gives to the engine: as it is, or with blocks that keep their input alone."""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.checkpoint import checkpoint

from gpt2_chinese.model.gpt2 import GPT2LMHeadModel


def build_model(settings: Any) -> GPT2LMHeadModel:
    """The model of `settings`: its model, and its activation_checkpointing.

    With that the rest of a block is computed again in backward (Chen et al. 2016).
    """
    model = GPT2LMHeadModel(settings.model)
    if settings.activation_checkpointing:
        for block in model.transformer.h:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model
