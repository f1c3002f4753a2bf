"""Positions before the text that no id fills: what prompt.py and prefix.py share.

    position   0 ... v-1   v   v+1  ...       of wpe: the text begins after the virtual tokens, as in Hugging Face PEFT
               virtual     a   b    c         each id attends to all virtual tokens and to earlier ids

With virtual tokens, a model of P positions reads at most P - v ids. Its `config.n_positions` is then P - v.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2_chinese.model.documents import Marks, document_mask, document_positions

KeysValues = list[tuple[Tensor, Tensor]]  # of each block


class VirtualTokens(nn.Module):
    """Replaces `model.transformer`, which it holds as `base_layer`, and shows its modules under their names.

    Decoding with a cache reads `num_virtual_tokens` and `virtual_keys_values` (gpt2_chinese/generate/kv_cache.py).
    """

    def __init__(self, base_layer: nn.Module, num_virtual_tokens: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.num_virtual_tokens = num_virtual_tokens

    @property
    def wte(self) -> nn.Embedding:
        return self.base_layer.wte

    @property
    def wpe(self) -> nn.Embedding:
        return self.base_layer.wpe

    @property
    def drop(self) -> nn.Dropout:
        return self.base_layer.drop

    @property
    def h(self) -> nn.ModuleList:
        return self.base_layer.h

    @property
    def ln_f(self) -> nn.LayerNorm:
        return self.base_layer.ln_f

    def virtual_keys_values(self) -> KeysValues:
        """Keys and values (1, heads, v, C / heads) of the virtual tokens in each block."""
        raise NotImplementedError

    def forward(self, input_ids: Tensor) -> Tensor:
        """(B, T) int64 -> (B, T, C), of the text's positions alone."""
        raise NotImplementedError


def use_virtual_tokens(model: nn.Module, wrapper: VirtualTokens) -> None:
    """Puts the wrapper in place of `model.transformer` and takes its positions from `model.config`."""
    wrapper.to(model.transformer.wte.weight.device)
    model.transformer = wrapper
    left = model.config.n_positions - wrapper.num_virtual_tokens
    model.config = dataclasses.replace(model.config, n_positions=left)


def virtual_positions(input_ids: Tensor, marks: Marks | None, number: int) -> Tensor:
    """Positions of virtual tokens and text, (v + T,) or (B, v + T): the text, or each of its documents, begins at v."""
    text = number + document_positions(input_ids, marks)
    virtual = torch.arange(number, device=input_ids.device)
    return torch.cat([virtual.expand(*text.shape[:-1], number), text], dim=-1)


def virtual_mask(input_ids: Tensor, marks: Marks | None, number: int) -> Tensor | None:
    """(B, 1, v + T, v + T) bool: every document attends to all virtual tokens; None where attention is only causal."""
    text = document_mask(input_ids, marks)
    if text is None:
        return None
    whole = F.pad(text, (number, 0, number, 0), value=True)
    return whole.tril()


def random_words(transformer: nn.Module, number: int) -> Tensor:
    """(number, C), detached: the embeddings of random ids. Lester et al. 2021, section 3.2, begin with words as well."""
    weight = transformer.wte.weight.detach()  # (V, C)
    return weight[torch.randint(len(weight), (number,), device="cpu").to(weight.device)].clone()


def keys_and_values(transformer: nn.Module, embeddings: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Runs virtual tokens (v, C) from position 0 through the blocks.

    Returns:
        keys and values of each block, each (v, C).
    """
    x = (embeddings + transformer.wpe.weight[: len(embeddings)])[None]
    found = []
    for block in transformer.h:
        _, keys, values = block.attn.c_attn(block.ln_1(x)).chunk(3, dim=2)
        found.append((keys[0], values[0]))
        x = block(x)
    return found


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(v, C) -> (1, heads, v, C / heads)"""
    return x.unflatten(1, (num_heads, -1)).transpose(0, 1)[None]
