"""The loss if each rank has the logits of a part of the vocabulary: a token needs three numbers sent, not V logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tensor import TensorGroup
from torch import Tensor

from gpt2_chinese.data.batches import IGNORED


class _CrossEntropy(torch.autograd.Function):
    """-log softmax of the target over cut logits, from three numbers: maximum, sum of exponentials, the target's logit."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ranks: TensorGroup) -> Tensor:
        first, width = ranks.rank * logits.shape[-1], logits.shape[-1]
        largest = ranks.all_reduce(logits.max(-1).values, "loss", dist.ReduceOp.MAX)
        shifted = logits - largest.unsqueeze(-1)
        own = targets - first
        elsewhere = (own < 0) | (own >= width)
        own = own.masked_fill(elsewhere, 0)
        at_target = shifted.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        exp = shifted.exp_()
        both = ranks.all_reduce(torch.stack([exp.sum(-1), at_target]), "loss")
        ctx.save_for_backward(exp.div_(both[0].unsqueeze(-1)), own, elsewhere)
        return both[0].log() - both[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        softmax, own, elsewhere = ctx.saved_tensors
        hit = torch.ones_like(grad).masked_fill(elsewhere, 0.0).unsqueeze(-1)
        return softmax.scatter_add(-1, own.unsqueeze(-1), -hit) * grad.unsqueeze(-1), None, None


class VocabularyParallelLoss:
    """Replaces next_token_loss if each rank has the logits of a part of the vocabulary."""

    def __init__(self, ranks: TensorGroup) -> None:
        self.ranks = ranks

    def __call__(self, logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """(B, T, V/t) and (B, T) -> nats, mean or sum over targets that are not IGNORED, float32, equal on all ranks."""
        losses = _CrossEntropy.apply(logits.float().flatten(0, 1), targets.flatten(), self.ranks)
        counted = targets.flatten() != IGNORED
        total = losses.masked_fill(~counted, 0.0).sum()
        return total / counted.sum() if reduction == "mean" else total

    def guesses(self, logits: Tensor) -> Tensor:
        """(B, T, V/t) -> (B, T) int64, the most likely entry of the whole vocabulary, the same on all ranks."""
        best, place = logits.float().max(-1)
        highest = self.ranks.all_reduce(best, "loss", dist.ReduceOp.MAX)
        place = (place + self.ranks.rank * logits.shape[-1]).masked_fill(best < highest, torch.iinfo(torch.int64).max)
        return self.ranks.all_reduce(place, "loss", dist.ReduceOp.MIN)
