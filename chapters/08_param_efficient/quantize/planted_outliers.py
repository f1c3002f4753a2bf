"""Gives a small model the outlier features of a large one, without changing what it computes.

Models above 6 billion parameters grow a few features that are up to 20 times as large as the rest (Dettmers et al. 2022,
section 4); those of this course do not. To imitate them, multiply a layer norm's gain in some
features, and divide the rows of the next weight that read them:

    (s * gain) * norm(x)  @  (W / s)   =   gain * norm(x)  @  W           for the chosen features

With s a power of two, each product is exact, so the model's function is the same bit for bit up to the order of sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpt2_chinese.model.gpt2 import GPT2LMHeadModel


@torch.no_grad()
def plant_outliers(model: GPT2LMHeadModel, num_features: int, scale: float = 32.0) -> Tensor:
    """Scales evenly spaced features behind both layer norms of each block; returns their indices (num_features,) int64."""
    features = torch.linspace(0, model.config.n_embd - 1, num_features).round().long()
    for block in model.transformer.h:
        for norm, layer in ((block.ln_1, block.attn.c_attn), (block.ln_2, block.mlp.c_fc)):
            norm.weight[features] *= scale
            norm.bias[features] *= scale
            layer.weight[features] /= scale
    return features
