"""GPT-2 in one file: names, layout and numbers of Hugging Face's `GPT2LMHeadModel`.

    ids (B, T) -> wte + wpe -> [x + attn(ln_1(x)) -> x + mlp(ln_2(x))] * n_layer -> ln_f -> lm_head -> logits (B, T, V)

No module here reads a rank, a group or an environment variable. No module uses another module's parameter outside that
module's forward. So techniques are applied to the model from outside, by hooks and wrappers on its modules. The tied
head is a separate module whose weight IS the embedding's.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2_chinese.model.config import ModelConfig
from gpt2_chinese.model.documents import document_mask, document_positions


class Conv1D(nn.Module):
    """A linear layer whose weight is stored (in, out), as OpenAI's GPT-2 and Hugging Face store it."""

    def __init__(self, num_in: int, num_out: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_in, num_out).normal_(0.0, std))
        self.bias = nn.Parameter(torch.zeros(num_out))

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        return F.linear(x, self.weight.t(), self.bias)


class Attention(nn.Module):
    """Causal self-attention with n_head heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.n_head
        self.dropout = config.attn_pdrop
        self.c_attn = Conv1D(config.n_embd, 3 * config.n_embd, config.initializer_range)
        self.c_proj = Conv1D(config.n_embd, config.n_embd, residual_std(config))
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, T, C) -> (B, T, C); a mask, (B, 1, T, T) bool, says where a position attends. It must be causal."""
        qkv = self.c_attn(x)  # (B, T, 3C)
        shape = (*qkv.shape[:2], self.num_heads, -1)
        q, k, v = (part.view(shape).transpose(1, 2) for part in qkv.chunk(3, dim=2))  # (B, heads, T, C/heads)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None)
        y = y.transpose(1, 2).flatten(2)  # (B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    """Two linear layers with the tanh form of GELU between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = Conv1D(config.n_embd, config.inner, config.initializer_range)
        self.c_proj = Conv1D(config.inner, config.n_embd, residual_std(config))
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))


class Block(nn.Module):
    """One layer: attention and MLP, each after a layer norm and with a residual connection around both."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, T, C) -> (B, T, C); the mask as in Attention."""
        x = x + self.attn(self.ln_1(x), mask=mask)
        return x + self.mlp(self.ln_2(x))


class GPT2Model(nn.Module):
    """The embeddings, the blocks and the last norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.vocab_size, "the vocabulary decides vocab_size before a model is built"
        self.wte = embedding(config.vocab_size, config)
        self.wpe = embedding(config.n_positions, config)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.marks = config.marks  # None: attention crosses documents

    def embed(self, input_ids: Tensor) -> Tensor:
        """(B, T) int64 -> (B, T, C), the input of the first block."""
        positions = document_positions(input_ids, self.marks)
        return self.drop(self.wte(input_ids) + self.wpe(positions))

    def forward(self, input_ids: Tensor) -> Tensor:
        """(B, T) int64 -> (B, T, C)"""
        x, mask = self.embed(input_ids), document_mask(input_ids, self.marks)
        for block in self.h:
            x = block(x, mask=mask)
        return self.ln_f(x)


class GPT2LMHeadModel(nn.Module):
    """GPT-2 with its language-model head.

    Weights are drawn while the modules are built, so `torch.manual_seed` before the call decides them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = GPT2Model(config)
        # made without storage, then tied: the head draws no random numbers and holds no second copy
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False, device="meta")
        self.loss = next_token_loss
        self.tiled = False  # True: the head computes the loss itself, by tiles (tiled_loss.py)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Makes the head's weight the same Parameter object as the embedding's."""
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, input_ids: Tensor, targets: Tensor | None = None, scores: bool = False) -> Tensor:
        """Logits, or the loss when there are targets.

        Args:
            input_ids: (B, T) int64, T at most n_positions.
            targets: (B, T) int64, the id that follows each input; -100 is ignored.
            scores: with a tiled head and targets, what an evaluation counts instead of the loss.

        Returns:
            logits (B, T, V), or the mean cross-entropy in nats per token, a float32 scalar, or the scores: (3,) float64,
            summed loss, right guesses, counted tokens.
        """
        x = self.transformer(input_ids)
        if self.tiled and targets is not None:
            return self.lm_head(x, targets, scores)
        logits = self.lm_head(x)
        return logits if targets is None else self.loss(logits, targets)


def next_token_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of logits (B, T, V) and targets (B, T), in float32 whatever the precision of the logits."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)


def embedding(num_rows: int, config: ModelConfig) -> nn.Embedding:
    """An embedding with GPT-2's initialisation."""
    return nn.Embedding(
        num_rows, config.n_embd, _weight=torch.empty(num_rows, config.n_embd).normal_(0.0, config.initializer_range)
    )


def residual_std(config: ModelConfig) -> float:
    """Standard deviation of weights whose outputs join the residual path: 2 * n_layer add up, so each is scaled down."""
    return config.initializer_range / math.sqrt(2 * config.n_layer)
