"""Exercise 04: dynamic loss scaling, and the order of a step that uses it. About 25 lines in all.

    bash chapters/04_apex/exercise.sh               # all of it
    bash chapters/04_apex/exercise.sh -k overflow   # one idea: scale, overflow, grow, order

The grader gives your scaler overflows and checks scale, weights and AdamW's state. On 2 real processes only one rank
overflows, and both must skip. The grader checks the order by the resulting weights.

When you have tried: compare with `LossScaler` in loss_scaler.py and the loop of train.py, in this folder.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class LossScaler:
    """Scales the loss, unscales the gradients, skips the step if a gradient is not finite, and adapts the scale.

    fp16 rounds numbers well below 6e-8 to zero, and many gradients are that small. The scale enlarges them, but an
    overflow costs a step. So start large, halve after an overflow, double after `window` good steps in a row.

    Args:
        window: good steps after which the scale is doubled.
        largest_of_all: each rank passes a number and gets the largest of all ranks. All ranks must call it in every step.

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
        raise NotImplementedError("LossScaler.scale is yours to write: which loss must backward start from?")

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale, in place, and checks that the gradients of all ranks are finite.

        Hint: [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]. If one rank
        steps while the others skip, its weights differ from then on. largest_of_all prevents this.
        """
        raise NotImplementedError("LossScaler.unscale_ is yours to write: divide, look for inf and nan, ask the other ranks")

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One step of the optimizer. After an overflow no step: not even AdamW's moments may change."""
        raise NotImplementedError("LossScaler.step is yours to write: a step, unless there was an overflow")

    def update(self) -> None:
        """Sets the scale for the next step: half after an overflow, twice after `window` good steps in a row.

        An overflow resets the count of good steps, and so does a doubling. update() also clears the overflow.
        """
        raise NotImplementedError("LossScaler.update is yours to write: halve, double, or only count")


def finish_step(scaler: LossScaler, optimizer: torch.optim.Optimizer, model: nn.Module, max_norm: float) -> Tensor:
    """Call after backward of the scaled loss. Does unscale, clip, step and update, in the only correct order.

    If you clip before you unscale, gradients are 65536 times too large for the limit, and the model hardly learns.

    Args:
        scaler: any object with the four methods above.
        optimizer: updates the model's parameters.
        model: its gradients are still scaled.
        max_norm: global norm to which the unscaled gradients are clipped.

    Returns:
        the norm of the unscaled gradients before clipping, a scalar.

    Hint: nn.utils.clip_grad_norm_ returns the norm.
    """
    raise NotImplementedError("finish_step is yours to write: unscale, clip, step and update, in the right order")
