"""Dynamic loss scaling (Micikevicius et al. 2018), as Apex did it.

fp16 cannot hold numbers much below 6e-8, and many gradients are smaller. So the loss is multiplied by a scale before
backward, and the gradients are divided by it after. If the scale is too large, a gradient overflows: the step is skipped
and the scale is halved. After a number of good steps the scale is doubled.

The project has three loss scalers. In all of them an overflow skips the step and halves a dynamic scale, and a window of
good steps doubles it. They differ in the rest:

    here                                 divides all gradients of a rank, in the masters if there are any; --scale-window
    chapters/06_zero/zero/loss_scaler.py divides the gradients of a rank's shard; after a step it updates the model
    pstar/numerics/loss_scaler.py        divides nothing; the caller reports each step's result. By DeepSpeed's rules some
                                         overflows keep the scale; it gives up only where a smaller scale cannot help
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from masters import Masters
from torch import Tensor

from gpt2_chinese.errors import fail

FIRST_SCALE = 2.0**16  # too large on purpose: a dynamic scale is halved in the first steps until it fits
LARGEST_SCALE = 2.0**24
BACKOFF, GROWTH = 0.5, 2.0
PATIENCE = 20  # a run ends after this many skipped steps in a row


class LossScaler:
    """Scales the loss, unscales the gradients, and skips the step on all ranks if a gradient is not finite.

    Args:
        scale: "dynamic", or a fixed number; 1 neither scales nor looks for overflows.
        window: good steps after which a dynamic scale is doubled.
        largest_of_all: returns the largest of the numbers that all ranks pass. After the reduction all ranks hold the same
            gradients. The check costs one number, and without it ranks that disagree would diverge unnoticed.
        masters: the model, or Masters.
    """

    def __init__(self, scale: str | float, window: int, largest_of_all: Callable[[float], float], masters: Any) -> None:
        self.dynamic = scale == "dynamic"
        self.value = FIRST_SCALE if self.dynamic else float(scale)
        self.window, self.largest_of_all, self.masters = window, largest_of_all, masters
        self.num_skipped = 0  # in the whole run
        self._skipped_in_a_row = self._good_in_a_row = 0
        self._overflow = False

    def is_enabled(self) -> bool:
        """False if the scale is fixed at 1."""
        return self.dynamic or self.value != 1.0

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss * self.value if self.is_enabled() else loss

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale, in fp32 with masters. Call after the reduction, before clipping."""
        if isinstance(self.masters, Masters):
            self.masters.take_gradients()
        if not self.is_enabled():
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_mul_(gradients, 1.0 / self.value)
        finite = torch.stack([torch.isfinite(gradient).all() for gradient in gradients]).all()
        self._overflow = self.largest_of_all(float(not finite)) > 0

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes one step of the optimizer, or none after an overflow."""
        if self._overflow:
            return
        optimizer.step()
        self.write_back()

    def update(self) -> None:
        """Sets the scale for the next step; ends a run that skips PATIENCE steps in a row."""
        if not self.is_enabled():
            return
        if self._overflow:
            self.num_skipped += 1
            self._skipped_in_a_row += 1
            self._good_in_a_row = 0
        else:
            self._skipped_in_a_row = 0
            self._good_in_a_row += 1
        if self._skipped_in_a_row == PATIENCE:
            self._give_up()
        if self.dynamic and self._overflow:
            self.value *= BACKOFF
        elif self.dynamic and self._good_in_a_row == self.window:
            self.value, self._good_in_a_row = min(self.value * GROWTH, LARGEST_SCALE), 0
        self._overflow = False

    def _give_up(self) -> None:
        if self.dynamic:
            fail(f"{PATIENCE} steps in a row were skipped, down to a loss scale of {self.value:g}: the loss itself is not "
                 "finite, try a smaller --lr or --half bf16")  # fmt: skip
        fail(f"--loss-scale {self.value:g} is too large: {PATIENCE} steps in a row were skipped because gradients "
             "overflowed, so nothing is learned; give a smaller one, or dynamic")  # fmt: skip

    def write_back(self) -> None:
        """Copies the masters to the model. Call it also after a checkpoint was loaded into the masters."""
        if isinstance(self.masters, Masters):
            self.masters.write_back()

    def metrics(self) -> dict[str, float]:
        """Values for a step's log row: the scale of the NEXT step, and the number of steps skipped so far."""
        return {"loss_scale": self.value, "skipped_steps": self.num_skipped}

    def state_dict(self) -> dict[str, float]:
        """The state for a checkpoint, ready for JSON."""
        return {"scale": self.value, "good_in_a_row": self._good_in_a_row, "num_skipped": self.num_skipped}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores a dynamic scale from a checkpoint; a fixed scale comes from the flag instead."""
        if self.dynamic and "good_in_a_row" in state:
            self.value, self._good_in_a_row = float(state["scale"]), int(state["good_in_a_row"])
            self.num_skipped = int(state["num_skipped"])
