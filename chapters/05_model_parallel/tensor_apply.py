"""Tensor parallel applied to a GPT-2: replaces matrices by the layers of tensor.py, the loss by tensor_loss.py."""

from __future__ import annotations

from tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    SequenceParallelPositions,
    TensorGroup,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
)
from tensor_dropout import different_dropout
from tensor_loss import VocabularyParallelLoss
from torch import nn


def apply_tensor_parallel(model: nn.Module, ranks: TensorGroup) -> None:
    """Cuts a GPT2LMHeadModel in place; it must be whole and equal on all ranks. Call it before the optimizer is made.

    t must divide the number of heads, the hidden width and the vocabulary; with sequence parallel also T.
    """
    body = model.transformer
    for block in body.h:
        attention, mlp = block.attn, block.mlp
        attention.num_heads //= ranks.num_ranks
        attention.c_attn = ColumnParallelLinear(attention.c_attn, ranks, "attention", num_blocks=3)
        attention.c_proj = RowParallelLinear(attention.c_proj, ranks, "attention")
        mlp.c_fc = ColumnParallelLinear(mlp.c_fc, ranks, "mlp")
        mlp.c_proj = RowParallelLinear(mlp.c_proj, ranks, "mlp")
        different_dropout(attention.c_attn, attention.c_proj, attention.dropout, ranks)
    body.wte = VocabularyParallelEmbedding(body.wte, ranks)
    model.lm_head = VocabularyParallelHead(body.wte.weight, ranks)
    model.loss = VocabularyParallelLoss(ranks)
    if ranks.sequence:
        body.wpe = SequenceParallelPositions(body.wpe, ranks)
        for dropout in (module for module in model.modules() if isinstance(module, nn.Dropout)):
            different_dropout(dropout, dropout, dropout.p, ranks, around=True)
