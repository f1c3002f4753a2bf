"""Exercise 00: the parts of a training step. Three functions, about 15 lines in all.

    bash chapters/00_single/exercise.sh           # all of it
    bash chapters/00_single/exercise.sh -k loss   # one function: loss, rate, accumulate

The grader compares your results with small cases worked out by hand, and the loss of fp16 logits with its exact value.
It also compares the gradients of 3 micro-batches with those of the whole batch.

When you have tried: compare with `next_token_loss` in gpt2_chinese/model/gpt2.py, `learning_rate` in
gpt2_chinese/run/optim.py, and the loop of train.py in this folder.
"""

from __future__ import annotations

import math  # noqa: F401  (yours to use)
from typing import Any

import torch  # noqa: F401  (yours to use)
import torch.nn.functional as F  # noqa: F401  (yours to use)
from torch import Tensor, nn


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy: the mean of -log softmax(logits)[target] over all targets that are not -100, in nats.

    The batch is shifted already: targets[b, t] is the id that comes after position t. Ignore a target of -100 both in the
    sum and in the number that divides it. Compute in float32 whatever the type of the logits: in 16 bit a sum of
    thousands of exponentials is wrong in the third digit.

    Args:
        logits: (B, T, V), any floating type.
        targets: (B, T), int64.

    Returns:
        a scalar, float32.

    Hint: F.cross_entropy takes (N, V) and (N,).
    """
    raise NotImplementedError("next_token_loss is yours to write: a mean over the targets that are not -100, in float32")


def learning_rate(step: int, settings: Any) -> float:
    """The learning rate of a step: linear warm-up to the peak, then cosine decay to 1 % of it.

        peak          .-'''-.
                    .'       '.
                  .'            '-.
        0       .'                  '-----  1 % of the peak
                0   warmup_steps     max_steps

    Args:
        step: counted from 1; step `warmup_steps` has the peak rate, `max_steps` and all later steps 1 % of it.
        settings: has lr (the peak), warmup_steps (may be 0) and max_steps (may be as small as warmup_steps).

    Hint: (1 + cos(pi x)) / 2 falls from 1 to 0 as x goes from 0 to 1. Avoid a division by 0 if warmup_steps = max_steps.
    """
    raise NotImplementedError("learning_rate is yours to write: linear warm-up, then cosine decay to 1 %")


def accumulate(model: nn.Module, micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Runs forward and backward of one step in micro-batches, because the whole batch does not fit into memory.

    Afterwards every .grad equals the gradient of ONE backward over the whole batch.

    Args:
        model: model(inputs, targets) is the mean loss over the rows; its gradients are None.
        micro_batches: K pairs of inputs and targets with equally many rows.

    Returns:
        the mean loss of the whole batch, a scalar that holds no graph: with a graph, memory would grow with K.

    Hint: backward ADDS to .grad, and a mean of K equal parts is the sum of the parts' means divided by K.
    """
    raise NotImplementedError("accumulate is yours to write: K forward and backward passes, each with 1/K of the loss")
