"""Prefix tuning (Li and Liang 2021, section 4.2): trained keys and values before those of the text, in each block.

    keys      [k_0 ... k_v-1]  a  b  c          only a, b, c have queries
    values    [v_0 ... v_v-1]  a  b  c

A prefix reaches every block directly; a prompt only through the blocks below. It begins as keys and values of random
words, because random numbers learn slowly and unsteadily (section 7.4). The paper's MLP that makes the prefix during
training is left out, as in PEFT by default (prefix_projection=False).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2_chinese.model.documents import document_mask, document_positions
from methods.spec import MethodSpec
from methods.virtual import KeysValues, VirtualTokens, keys_and_values, random_words, split_heads, use_virtual_tokens


class PrefixAttention(nn.Module):
    """Attention whose queries also see a trained prefix.

    Args:
        base_layer: the attention.
        prefix: (v, 2C), the keys and then the values of each virtual token.
    """

    def __init__(self, base_layer: nn.Module, prefix: Tensor) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.prefix = nn.Parameter(prefix)
        self.num_heads = base_layer.num_heads

    # decoding with a cache reads these two
    @property
    def c_attn(self) -> nn.Module:
        return self.base_layer.c_attn

    @property
    def c_proj(self) -> nn.Module:
        return self.base_layer.c_proj

    def keys_values(self) -> tuple[Tensor, Tensor]:
        """Keys and values (1, heads, v, C / heads) of the prefix."""
        keys, values = self.prefix.chunk(2, dim=1)
        return split_heads(keys, self.num_heads), split_heads(values, self.num_heads)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, T, C) -> (B, T, C); the mask of documents, (B, 1, T, T), is as in GPT-2's attention."""
        base = self.base_layer
        batch, length, _ = x.shape
        qkv = base.c_attn(x)
        q, k, v = (part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=2))
        keys, values = (part.to(k.dtype).expand(batch, -1, -1, -1) for part in self.keys_values())
        # a row sees the whole prefix, itself and what came before:      p p a . .
        #                                                                p p a b .
        #                                                                p p a b c
        if mask is None:
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        mask = F.pad(mask, (keys.shape[2], 0), value=True)
        dropout = base.dropout if self.training else 0.0
        k, v = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        return base.resid_dropout(base.c_proj(y.transpose(1, 2).flatten(2)))


class PrefixTuned(VirtualTokens):
    """A transformer whose text begins at position v and whose attentions have a prefix."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """(B, T) int64 -> (B, T, C)"""
        core = self.base_layer
        positions = self.num_virtual_tokens + document_positions(input_ids, core.marks)
        mask = document_mask(input_ids, core.marks)
        x = core.drop(core.wte(input_ids) + core.wpe(positions))
        for block in core.h:
            x = block(x, mask=mask)
        return core.ln_f(x)

    def virtual_keys_values(self) -> KeysValues:
        """Keys and values (1, heads, v, C / heads) in each block."""
        return [block.attn.keys_values() for block in self.h]


@torch.no_grad()
def first_prefix(transformer: nn.Module, number: int) -> list[Tensor]:
    """(number, 2C) for each block: the keys and values of random words."""
    training = transformer.training
    transformer.eval()  # without dropout
    found = keys_and_values(transformer, random_words(transformer, number))
    transformer.train(training)
    return [torch.cat(pair, dim=1).clone() for pair in found]


def insert(model: nn.Module, spec: MethodSpec) -> None:
    """Gives each attention a prefix; the text then begins at position v."""
    prefixes = first_prefix(model.transformer, spec.num_virtual_tokens)
    for block, prefix in zip(model.transformer.h, prefixes, strict=True):
        block.attn = PrefixAttention(block.attn, prefix)
    use_virtual_tokens(model, PrefixTuned(model.transformer, spec.num_virtual_tokens))
