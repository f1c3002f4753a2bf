"""Prompt tuning (Lester et al. 2021, section 2): embeddings before the text, trained like weights; the model is frozen.

    wte:    [p_0 ... p_v-1]  a  b  c        p: trained, (v, C), first the embeddings of random ids
    wpe:      0  ...  v-1    v  ...
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from methods.spec import MethodSpec
from methods.virtual import (
    KeysValues,
    VirtualTokens,
    keys_and_values,
    random_words,
    split_heads,
    use_virtual_tokens,
    virtual_mask,
    virtual_positions,
)


class PromptTuned(VirtualTokens):
    """A transformer whose input begins with trained embeddings."""

    def __init__(self, base_layer: nn.Module, num_virtual_tokens: int) -> None:
        super().__init__(base_layer, num_virtual_tokens)
        self.prompt_embeddings = nn.Parameter(random_words(base_layer, num_virtual_tokens))  # (v, C)

    def forward(self, input_ids: Tensor) -> Tensor:
        """(B, T) int64 -> (B, T, C)"""
        core, marks, v = self.base_layer, self.base_layer.marks, self.num_virtual_tokens
        prompt = self.prompt_embeddings.expand(len(input_ids), -1, -1)  # (B, v, C)
        x = torch.cat([prompt, core.wte(input_ids)], dim=1)  # (B, v + T, C)
        x = core.drop(x + core.wpe(virtual_positions(input_ids, marks, v)))
        mask = virtual_mask(input_ids, marks, v)
        for block in core.h:
            x = block(x, mask=mask)
        return core.ln_f(x)[:, v:]

    def virtual_keys_values(self) -> KeysValues:
        """Keys and values (1, heads, v, C / heads) in each block. They do not depend on the text: attention is causal."""
        heads = [block.attn.num_heads for block in self.h]
        found = keys_and_values(self.base_layer, self.prompt_embeddings)
        return [(split_heads(k, n), split_heads(v, n)) for (k, v), n in zip(found, heads, strict=True)]


def insert(model: nn.Module, spec: MethodSpec) -> None:
    """Puts the trained embeddings before every row."""
    use_virtual_tokens(model, PromptTuned(model.transformer, spec.num_virtual_tokens))
