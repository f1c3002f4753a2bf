"""Loss scaling for fp16 (Micikevicius et al. 2018), in its shortest form; chapter 04 explains it.

Each rank has only its shard of the gradients, so an overflow may occur on one rank alone. The ranks exchange the result and
skip the step together.

The project has three loss scalers. In all of them an overflow skips the step and halves a dynamic scale, and a window of
good steps doubles it. They differ in the rest:

    here                                 divides the gradients of a rank's shard; after a step it updates the model
    chapters/04_apex/loss_scaler.py      divides all gradients of a rank, in the masters if there are any; --scale-window
    pstar/numerics/loss_scaler.py        divides nothing; the caller reports each step's result. By DeepSpeed's rules some
                                         overflows keep the scale; it gives up only where a smaller scale cannot help
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpt2_chinese.errors import fail

FIRST_SCALE, LARGEST_SCALE = 2.0**16, 2.0**24
WINDOW = 2000  # good steps after which a dynamic scale doubles
PATIENCE = 20  # a run ends after this many skipped steps in a row


class LossScaler:
    """Scales the loss, unscales the gradients, and skips the step if any rank has a gradient that is not finite.

    Args:
        scale: "dynamic", or a number; 1 neither scales nor looks for overflows.
        largest_of_all: returns the largest of the numbers that all ranks pass.
        publish: called after each step that was not skipped.
    """

    def __init__(self, scale: str, largest_of_all: Callable[[float], float], publish: Callable[[], None]) -> None:
        self.dynamic = scale == "dynamic"
        self.value = FIRST_SCALE if self.dynamic else float(scale)
        self.largest_of_all, self.publish = largest_of_all, publish
        self.num_skipped = self._skipped_in_a_row = self._good_in_a_row = 0
        self._overflow = False

    def is_enabled(self) -> bool:
        """False if the scale is fixed at 1."""
        return self.dynamic or self.value != 1.0

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss * self.value if self.is_enabled() else loss

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale. All ranks must call it, after the reduction and before clipping."""
        if not self.is_enabled():
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for gradient in gradients:
            gradient.mul_(1.0 / self.value)
        finite = [torch.isfinite(gradient).all() for gradient in gradients]
        all_finite = bool(torch.stack(finite).all()) if finite else True  # one wait for the device, not one a gradient
        self._overflow = self.largest_of_all(float(not all_finite)) > 0

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes one step of the optimizer and updates the model, or does nothing after an overflow."""
        if not self._overflow:
            optimizer.step()
            self.publish()

    def update(self) -> None:
        """Sets the scale for the next step; ends a run that skips PATIENCE steps in a row."""
        if self._overflow:
            self.num_skipped += 1
            self._skipped_in_a_row, self._good_in_a_row = self._skipped_in_a_row + 1, 0
            self.value *= 0.5 if self.dynamic else 1.0
        else:
            self._skipped_in_a_row, self._good_in_a_row = 0, self._good_in_a_row + 1
            if self.dynamic and self._good_in_a_row % WINDOW == 0:
                self.value = min(2.0 * self.value, LARGEST_SCALE)
        if self._skipped_in_a_row == PATIENCE:
            fail(f"{PATIENCE} steps in a row were skipped, down to a loss scale of {self.value:g}: gradients overflow; try "
                 "a smaller --lr, --loss-scale dynamic or --precision bf16")  # fmt: skip
        self._overflow = False

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
