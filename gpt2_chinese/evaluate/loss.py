"""Evaluation on held-out text: loss, perplexity, next-token accuracy. Chapters call it between steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from gpt2_chinese.data.batches import Batches
    from gpt2_chinese.distributed.ranks import Ranks


def evaluate_model(
    model: Callable[[Tensor], Tensor] | Any, batches: Batches, ranks: Ranks, precision: str = "fp32"
) -> dict[str, float]:
    """Predicts every token of a corpus once; the ranks share the work.

    Args:
        model: returns logits (b, T, V) for inputs (b, T). Where no rank holds all logits, it has a method
            score(inputs, targets) instead: (3,) float64 on the CPU, summed loss, right guesses, counted tokens. A model
            with a tiled loss is called with (inputs, targets, True) and returns the same, so it makes no whole logits.
        batches: batches of the validation corpus.
        ranks: the ranks that share the work; all of them must call this together.
        precision: precision of the matrix products.

    Returns:
        valid_loss (nats per token), valid_ppl (its exponential), valid_acc (share of tokens guessed right, 0 to 1).
    """
    import torch

    with torch.no_grad():
        return _evaluate(model, batches, ranks, precision)


def _evaluate(model: Any, batches: Batches, ranks: Ranks, precision: str) -> dict[str, float]:
    import torch

    from gpt2_chinese.model.tiled_loss import scores_of
    from gpt2_chinese.run.optim import autocast

    training = getattr(model, "training", False)
    if isinstance(model, torch.nn.Module):
        model.eval()
    tiled = getattr(getattr(model, "module", model), "tiled", False)  # the model or, in an engine, its module
    totals = torch.zeros(3, dtype=torch.float64)  # loss, right guesses, tokens
    try:
        for inputs, targets in batches.eval_batches():
            if hasattr(model, "score"):
                totals += model.score(inputs, targets)
                continue
            with autocast(batches.device, precision):
                if tiled:
                    totals += model(inputs, targets, True).cpu()
                    continue
                logits = model(inputs)
            totals += scores_of(logits, targets).cpu()
    finally:
        if isinstance(model, torch.nn.Module):
            model.train(training)
    loss, right, count = ranks.sum(totals).tolist()
    mean = loss / count
    return {"valid_loss": mean, "valid_ppl": math.exp(min(mean, 700.0)), "valid_acc": right / count}
