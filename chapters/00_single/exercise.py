"""Exercise 00: what a step of training is made of. Three functions, about 15 lines in all.

    pytest tests/exercises -k 00                  # all of it
    pytest tests/exercises -k "00 and loss"       # one function: loss, rate, accumulate

The grader works out small cases by hand, compares the loss with one row in fp16 against fp32, and holds the gradients of
3 micro-batches against those of the whole batch.

When you have tried: `next_token_loss` in gpt2_chinese/model/gpt2.py, `learning_rate` in gpt2_chinese/run/optim.py, and the
loop of train.py beside this file.
"""

from __future__ import annotations

import math  # noqa: F401  (yours to use)
from typing import Any

import torch  # noqa: F401  (yours to use)
import torch.nn.functional as F  # noqa: F401  (yours to use)
from torch import Tensor, nn


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean of -log softmax(logits)[target] over the targets that count, in nats.

    The batch is shifted already: targets[b, t] is the id that comes after position t. A target of -100 does not count,
    neither in the sum nor in the number that divides it. Compute in float32 whatever the type of the logits: a sum of
    thousands of exponentials in 16 bit is wrong in the third digit.

    Args:
        logits: (B, T, V), any floating type.
        targets: (B, T), int64.

    Returns:
        a scalar, float32.

    Hint: F.cross_entropy wants (N, V) and (N,).
    """
    raise NotImplementedError("next_token_loss is yours to write: a mean over the targets that count, in float32")


def learning_rate(step: int, settings: Any) -> float:
    """The learning rate of a step: a straight line up to the peak, then half a cosine down to 1 % of it.

        peak          .-'''-.
                    .'       '.
                  .'            '-.
        0       .'                  '-----  1 % of the peak
                0   warmup_steps     max_steps

    Args:
        step: from 1 on; step `warmup_steps` runs at the peak, step `max_steps` and all after it at 1 % of the peak.
        settings: has lr (the peak), warmup_steps (may be 0) and max_steps (may be as small as warmup_steps).

    Hint: (1 + cos(pi x)) / 2 falls from 1 to 0 while x goes from 0 to 1. What do you divide by when both are equal?
    """
    raise NotImplementedError("learning_rate is yours to write: a line up, then half a cosine down to 1 %")


def accumulate(model: nn.Module, micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Forward and backward of one step whose batch comes in micro-batches, because the whole does not fit into memory.

    Afterwards every .grad is what ONE backward over the whole batch would have left, and the result is its loss.

    Args:
        model: model(inputs, targets) is the mean loss over the rows; its gradients are None.
        micro_batches: K pairs of inputs and targets with equally many rows.

    Returns:
        the mean loss of the whole batch, a scalar that holds no graph (or memory would grow with K after all).

    Hint: backward ADDS to .grad, and a mean of K equal parts is the sum of the parts' means divided by K.
    """
    raise NotImplementedError("accumulate is yours to write: K times forward and backward, each with its share of the loss")
