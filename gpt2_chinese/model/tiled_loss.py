"""Head and loss by tiles of tokens, so that the logits (B, T, V) are never in memory whole.

For each tile of n tokens, forward computes

    logits (n, V)   = hidden (n, C) @ weight.T
    loss           += sum over the tile of log(sum(exp(logits))) - logits[target]
    d_logits (n, V) = softmax(logits) - one_hot(target)          written over the logits
    d_hidden (n, C) = d_logits @ weight
    d_weight (V, C) += d_logits.T @ hidden

and keeps the two gradients; backward multiplies them by the gradient of the loss. So no product is computed twice, and
memory holds the logits of one tile instead of three tensors as large as all logits. The method is the fused linear
cross-entropy of Liger Kernel (Hsu et al. 2024, arXiv:2410.10989); ALST (Bekman et al. 2025, arXiv:2506.13996) tiles the
loss for the same reason.

    tile_loss(model, "auto")      # before the first forward
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2_chinese.model.loss_tiles import num_tiles, read_tiles

if TYPE_CHECKING:
    from gpt2_chinese.model.gpt2 import GPT2LMHeadModel

IGNORED = -100  # the target that cross_entropy ignores


def tile_loss(model: GPT2LMHeadModel, tiles: str) -> None:
    """Lets the head of a model compute the loss itself, by tiles. The tied weight stays the same Parameter.

    Args:
        model: not yet wrapped by another technique.
        tiles: the flag --loss-tiles: "none" changes nothing; "auto"; or the number of tiles of a micro-batch.

    Raises:
        UserError: another value of `tiles`.
    """
    wanted = read_tiles(tiles)
    if wanted != "none":
        model.lm_head, model.tiled = TiledHead(model.lm_head.weight, wanted), True


class TiledHead(nn.Linear):
    """The language-model head of GPT-2, with the loss.

    Args:
        weight: (V, C), shared with the embedding.
        tiles: "auto" or the number of tiles.
    """

    def __init__(self, weight: nn.Parameter, tiles: int | str) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight, self.tiles = weight, tiles

    def forward(self, x: Tensor, targets: Tensor | None = None, scores: bool = False) -> Tensor:
        """(B, T, C) -> logits (B, T, V); with targets (B, T) the mean loss, a float32 scalar, or `scores` as in GPT-2."""
        if targets is None:
            return super().forward(x)
        x, targets = x.flatten(0, 1), targets.flatten()
        count = num_tiles(self.tiles, len(x), self.in_features)
        if scores:
            with torch.no_grad():
                parts = zip(x.tensor_split(count), targets.tensor_split(count), strict=True)
                return sum(scores_of(super(TiledHead, self).forward(rows), goal) for rows, goal in parts)
        return TiledLoss.apply(x, self.weight, targets, count, torch.is_grad_enabled())


def scores_of(logits: Tensor, targets: Tensor) -> Tensor:
    """(3,) float64 for logits (..., V) and targets (...): summed cross-entropy, right guesses, counted tokens."""
    loss = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="sum")
    counted = targets != IGNORED
    right = (logits.argmax(-1) == targets) & counted
    return torch.stack([loss.double(), right.sum().double(), counted.sum().double()])


class TiledLoss(torch.autograd.Function):
    """Mean cross-entropy of hidden (N, C) @ weight.T, weight (V, C), and targets (N,) int64; float32.

    Sums are float32, products have the type that autocast or a cast of O1 gives them. Backward can run once.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, count: int, training: bool) -> Tensor:
        kind = F.linear(hidden[:1], weight).dtype  # one token asks which type products have here
        needs_hidden, needs_weight = (training and needed for needed in ctx.needs_input_grad[:2])
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        table, total = weight.to(kind), torch.zeros((), device=hidden.device)
        counted = targets != IGNORED
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in torch.arange(len(hidden)).tensor_split(count):
                part = slice(int(rows[0]), int(rows[-1]) + 1)
                x = hidden[part].to(kind)
                loss, d_logits = loss_and_gradient((x @ table.t()).float(), targets[part], counted[part])
                total += loss
                d_logits = d_logits.to(kind)
                if needs_hidden:
                    d_hidden[part] = d_logits @ table
                if needs_weight and kind == torch.float32:
                    d_weight.addmm_(d_logits.t(), x)
                elif needs_weight:
                    d_weight += d_logits.t() @ x
        ctx.num_counted = counted.sum()
        ctx.save_for_backward(d_hidden, None if d_weight is None else d_weight.to(weight.dtype))
        return total / ctx.num_counted

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Divided here, not in forward: in fp16 the small gradients of a mean would be lost before the loss scale meets them.
        scale = gradient / ctx.num_counted
        return *(None if saved is None else saved.mul_(scale) for saved in ctx.saved_tensors), None, None, None


def loss_and_gradient(logits: Tensor, targets: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss of logits (n, V) float32 and its gradient (n, V), which is written over the logits.

    Args:
        targets: (n,) int64.
        counted: (n,) bool, False where the target is ignored.
    """
    goal = targets.clamp(min=0).unsqueeze(1)
    logits -= logits.amax(1, keepdim=True)
    picked = logits.gather(1, goal)
    sums = logits.exp_().sum(1, keepdim=True)
    loss = (sums.log() - picked).squeeze(1)[counted].sum()
    logits /= sums
    logits.scatter_add_(1, goal, torch.full_like(picked, -1.0))
    return loss, logits.masked_fill_(~counted.unsqueeze(1), 0.0)
