"""Exercise 04: dynamic loss scaling, and the order of a step that uses it. About 25 lines in all.

    pytest tests/exercises -k 04                  # all of it
    pytest tests/exercises -k "04 and overflow"   # one idea: scale, overflow, grow, order

The grader plays overflows to your scaler and watches scale, weights and AdamW's state; on 2 real processes one rank alone
overflows, and both must skip. The order is judged by the weights that come out.

When you have tried: `LossScaler` in loss_scaler.py, and the loop of train.py, beside this file.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class LossScaler:
    """Scales the loss, unscales the gradients, skips the step when one of them is not finite, and finds the right scale.

    In fp16 what is below 6e-8 is zero, and many gradients are. Multiplied by the scale they are not; but where one of them
    overflows the step is lost. So: try large, halve after an overflow, double after `window` good steps in a row.

    Args:
        window: good steps after which the scale is doubled.
        largest_of_all: the largest over all ranks of a number that each rank gives. All ranks call it, in every step.

    Attributes:
        value: the scale, 2^16 at first. The grader reads it.
    """

    def __init__(self, window: int, largest_of_all: Callable[[float], float]) -> None:
        self.value = 2.0**16
        self.window, self.largest_of_all = window, largest_of_all
        self.overflow = False  # in this step, on any rank
        self.good_in_a_row = 0

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        raise NotImplementedError("LossScaler.scale is yours to write: what does backward have to begin with?")

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale, in place, and finds out whether all of them, on all ranks, are finite.

        Hint: [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]. One rank that
        steps while the others skip has another model from then on: this is what largest_of_all is for.
        """
        raise NotImplementedError("LossScaler.unscale_ is yours to write: divide, look for inf and nan, ask the other ranks")

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One step of the optimizer; none after an overflow: not even AdamW's moments may change."""
        raise NotImplementedError("LossScaler.step is yours to write: a step, unless there was an overflow")

    def update(self) -> None:
        """Sets the scale for the next step: half after an overflow, twice after `window` good steps in a row.

        An overflow begins the count anew, and so does a doubling. The next step begins without an overflow.
        """
        raise NotImplementedError("LossScaler.update is yours to write: halve, double, or only count")


def finish_step(scaler: LossScaler, optimizer: torch.optim.Optimizer, model: nn.Module, max_norm: float) -> Tensor:
    """What comes after backward of the scaled loss: unscale, clip, step, update, in the only order that is right.

    Clipped before it is unscaled, a gradient is 65536 times too large for the limit, and hardly anything is learned.

    Args:
        scaler: any with the four methods above.
        optimizer: of the model's parameters.
        model: its gradients are scaled.
        max_norm: global norm to which the true gradients are clipped.

    Returns:
        the norm of the true gradients before clipping, a scalar.

    Hint: nn.utils.clip_grad_norm_ returns the norm.
    """
    raise NotImplementedError("finish_step is yours to write: unscale, clip, step and update, in the right order")
