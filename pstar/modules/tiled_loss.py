"""A linear head and its cross-entropy by tiles of tokens: the logits are never in memory whole.

    hidden = body(ids)                                             # (B, T, C)
    loss = pstar.tiled_loss(hidden, head.weight, targets)          # instead of cross_entropy(head(hidden), targets)

For a vocabulary of V, whole logits and the two tensors that cross-entropy makes of them take 12 V bytes a token. Here
forward makes the logits of some tokens, turns them into their own gradient in place, and multiplies that into the gradients
of hidden and weight, which it keeps for backward. So memory holds one tile, and no product is computed twice (Liger Kernel,
Hsu et al. 2024, arXiv:2410.10989; sequence tiling in ALST, Bekman et al. 2025, arXiv:2506.13996).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function

from pstar.errors import ArgumentError


def tiled_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None = None, *,
               tiles: int | str = "auto", ignore_index: int = -100, reduction: str = "mean") -> torch.Tensor:
    """Cross-entropy of the logits hidden @ weight.T + bias.

    The weight may be a parameter that another module owns, for example a tied embedding in a chunk: its bytes are acquired
    once. Products have the dtype that autocast gives them, sums are float32. Backward can run once.

    Args:
        hidden: (..., C).
        weight: (V, C), of the dtype of hidden except under autocast.
        targets: (...) int64, 0 to V - 1 or ignore_index.
        bias: (V,), or None.
        tiles: number of tiles, or "auto": tiles of about C tokens, whose logits take as much memory as weight's gradient.
        ignore_index: a target that counts for nothing.
        reduction: "mean" over the counted targets, or "sum".

    Returns:
        the loss in nats, a float32 scalar.

    Raises:
        ArgumentError: shapes that do not fit, or another value of tiles or reduction.
    """
    params = (weight,) if bias is None else (weight, bias)
    if has_torch_function(params):    # lent by the engine for the time of this call: chunks/borrowed.py
        return handle_torch_function(tiled_loss, params, hidden, weight, targets, bias, tiles=tiles,
                                     ignore_index=ignore_index, reduction=reduction)
    _check(hidden, weight, targets, bias, tiles, reduction)
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    count = -(-len(hidden) // hidden.shape[1]) if tiles == "auto" else int(tiles)
    parts = [len(part) for part in targets.tensor_split(max(1, min(count, len(targets))))]
    return _TiledLoss.apply(hidden, weight, bias, targets, targets != ignore_index, parts, reduction == "mean",
                            torch.is_grad_enabled())


def _check(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None,
           tiles: int | str, reduction: str) -> None:
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}"
    if hidden.dim() < 2 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or hidden.shape[:-1] != targets.shape:
        raise ArgumentError(f"{shapes} do not fit together: give (..., C), (V, C) and (...)")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ArgumentError(f"bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}: give ({len(weight)},)")
    if tiles != "auto" and (not isinstance(tiles, int) or tiles < 1):
        raise ArgumentError(f"tiles is {tiles!r}; give a number of at least 1, or 'auto'")
    if reduction not in ("mean", "sum"):
        raise ArgumentError(f"reduction is {reduction!r}; give 'mean' or 'sum'")


class _TiledLoss(torch.autograd.Function):
    """hidden (N, C), weight (V, C), bias (V,) or None, targets (N,), counted (N,) bool, parts: rows of each tile."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, counted, parts, mean, training):
        dtype = F.linear(hidden[:1], weight, bias).dtype    # autocast decides it
        wanted = [training and needed for needed in ctx.needs_input_grad[:3]]
        grads = [torch.empty_like(hidden) if wanted[0] else None,
                 torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None,
                 torch.zeros_like(bias, dtype=torch.float32) if wanted[2] else None]
        weight_of_products = weight.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        first = 0
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in parts:
                part = slice(first, first := first + rows)
                x = hidden[part].to(dtype)
                logits = F.linear(x, weight_of_products, None if bias is None else bias.to(dtype)).float()
                total += _loss_into_gradient(logits, targets[part], counted[part])
                _add_products(grads, part, logits, x, weight_of_products, dtype)
        grads = [grad if grad is None else grad.to(param.dtype)
                 for grad, param in zip(grads, (hidden, weight, bias), strict=True)]
        ctx.num_counted = counted.sum() if mean else None
        ctx.save_for_backward(*grads)
        return total / ctx.num_counted if mean else total

    @staticmethod
    def backward(ctx, gradient):
        # A mean is divided here: before the loss scale multiplies it, a 16-bit gradient of a mean would be rounded to zero.
        scale = gradient if ctx.num_counted is None else gradient / ctx.num_counted
        return *(None if grad is None else grad.mul_(scale) for grad in ctx.saved_tensors), *[None] * 5


def _loss_into_gradient(logits: torch.Tensor, targets: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """The summed loss of float32 logits (n, V); the logits become their gradient, softmax minus one at the target."""
    goal = targets.masked_fill(~counted, 0).unsqueeze(1)
    logits -= logits.amax(1, keepdim=True)
    picked = logits.gather(1, goal)
    sums = logits.exp_().sum(1, keepdim=True)
    loss = (sums.log() - picked)[counted].sum()
    logits /= sums
    logits.scatter_add_(1, goal, torch.full_like(picked, -1.0)).masked_fill_(~counted.unsqueeze(1), 0.0)
    return loss


def _add_products(grads: list[torch.Tensor | None], part: slice, d_logits: torch.Tensor, x: torch.Tensor,
                  weight: torch.Tensor, dtype: torch.dtype) -> None:
    """Adds a tile to the gradients of hidden, weight and bias, each None where nobody needs it."""
    if grads[2] is not None:
        grads[2] += d_logits.sum(0)
    d_logits = d_logits.to(dtype)
    if grads[0] is not None:
        grads[0][part] = d_logits @ weight
    if grads[1] is not None and dtype == torch.float32:
        grads[1].addmm_(d_logits.t(), x)
    elif grads[1] is not None:
        grads[1] += d_logits.t() @ x
